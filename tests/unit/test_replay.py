"""The surroundings of hooks replayed on the meta device, and the guard of shared tensors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.models import CPU
from weightcached.vllm_compat.replay import NoMetaError, SharedWriteError, WriteGuard, on_meta


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Custom operators without an implementation for any device, as a GPU's are on this machine."""
    with torch.library._scoped_library("weightcached_test", "DEF") as library:
        library.define("quantize(Tensor(a!) out, Tensor x) -> ()")
        library.define("repack(Tensor x) -> Tensor")
        library.define("permute(Tensor x, Tensor[] indices) -> Tensor")
        torch.library.register_fake(
            "weightcached_test::permute", lambda x, indices: x.new_empty(3), lib=library
        )
        yield torch.ops.weightcached_test


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device="cuda"),
        lambda: torch.zeros(3, device="cuda:0"),
        lambda: torch.arange(3, device=torch.device("cuda", 1)),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.as_tensor([1.0], device="cuda"),
        lambda: torch.ones(3, device=0),
        lambda: torch.ones(3).cuda(),
        lambda: torch.ones(3).to("cuda"),
        lambda: torch.ones(3).to(device="cuda:0", dtype=torch.float16),
        lambda: meta(3).to("cuda"),
        lambda: torch.empty_like(torch.ones(3), device="cuda"),
        lambda: nn.Parameter(meta(3)).data.to(torch.device("cuda")),
    ],
)
def test_what_would_go_to_a_device_goes_to_meta(make: Callable[[], torch.Tensor]) -> None:
    with on_meta(CPU):
        assert make().is_meta


def test_what_is_made_on_the_host_is_real() -> None:
    with on_meta(CPU):
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.tensor([4], device="cpu").item() == 4
        assert torch.ones(2).to("cpu").sum() == 2
    with pytest.raises(AssertionError, match="not compiled with CUDA"):
        torch.ones(1, device="cuda")


def test_custom_operators_take_their_fakes_or_write_into_nothing(ops: Any) -> None:
    with on_meta(CPU):
        assert ops.permute(meta(4), [meta(1)]).shape == (3,)
        assert ops.quantize(meta(4), meta(4)) is None


def test_operator_without_a_fake_is_named(ops: Any) -> None:
    with on_meta(CPU), pytest.raises(NoMetaError) as e:
        ops.repack(meta(4))
    assert str(e.value) == "the operator weightcached_test.repack.default has no fake"


def test_operator_on_real_tensors_is_called_as_ever(ops: Any) -> None:
    with on_meta(CPU), pytest.raises(NotImplementedError, match="weightcached_test::repack"):
        ops.repack(torch.ones(4))


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.data_ptr(),
        lambda t: t.max().item(),
        lambda t: float(t.sum()),
        lambda t: int(t.max()),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: t.numpy(),
        lambda t: t[t > 0],
        lambda t: torch.unique(t, return_counts=True),
        lambda t: t.nonzero(),
    ],
)
def test_what_needs_values_raises_instead_of_making_them_up(
    ask: Callable[[torch.Tensor], Any],
) -> None:
    with on_meta(CPU), pytest.raises((NotImplementedError, RuntimeError, TypeError)):
        ask(meta(2, 2))


@pytest.mark.parametrize(
    "question",
    [
        lambda t: bool((t > 0).all()),
        lambda t: not (t > 0).any(),
        lambda t: 1 if t[0, 0] < 448 else 0,
        lambda t: all(x > 0 for x in t[0]),
        lambda t: torch.equal(t, t),
        lambda t: t.equal(t),
        lambda t: torch.allclose(t[0], t[1]),
        lambda t: torch.allclose(torch.ones(2), t[1]),
    ],
)
def test_question_about_values_is_answered_with_no(question: Callable[[torch.Tensor], Any]) -> None:
    with on_meta(CPU):
        answers = [question(meta(2, 2)) for _ in range(2)]
    assert answers in ([False, False], [True, True], [0, 0])
    with pytest.raises((NotImplementedError, RuntimeError)):
        question(meta(2, 2))


def test_question_about_tensors_on_the_host_has_its_answer() -> None:
    with on_meta(CPU):
        assert torch.equal(torch.ones(2), torch.ones(2))
        assert bool(torch.ones(1))


def test_values_without_memory_are_taken_for_one() -> None:
    with on_meta(CPU):
        assert torch.unique(meta(4, 2)).shape == meta(3).unique().shape == (1,)
        assert torch.unique(torch.tensor([2, 1, 2])).tolist() == [1, 2]
    with pytest.raises(NotImplementedError):
        torch.unique(meta(4, 2))


def test_vllm_does_not_warn_of_what_the_answers_lead_it_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("vllm.weightcached_test")
    with on_meta(CPU):
        logger.warning("the scales differ")
    logger.warning("said afterwards")
    assert [record.message for record in caplog.records] == ["said afterwards"]


def test_tensor_of_the_process_is_moved_in_earnest(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
    handle = SimpleNamespace(val=torch.tensor([0.5, 6.0]))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(kE2M1ToFloat_handle=handle))
    with on_meta(CPU):
        handle.val = handle.val.to(meta(1).device)
    assert handle.val.tolist() == [0.5, 6.0]


def test_triton_kernel_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    class JITFunction:
        fn = meta

        def run(self) -> str:
            return "launched"

    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(JITFunction=JITFunction))
    with (
        on_meta(CPU),
        pytest.raises(NoMetaError, match=r"^the Triton kernel meta cannot run on meta tensors$"),
    ):
        JITFunction().run()
    assert JITFunction().run() == "launched"


def test_parameter_keeps_its_class_when_its_data_is_replaced() -> None:
    class Special(nn.Parameter):
        pass

    parameter = Special(meta(4), requires_grad=False)
    with on_meta(CPU):
        parameter.data = torch.empty(2, dtype=torch.float16, device="cuda")
    assert (type(parameter), parameter.shape, parameter.dtype) == (Special, (2,), torch.float16)


# ---- the guard


@pytest.mark.parametrize(
    ("write", "operator"),
    [
        (lambda t: t.fill_(1), "aten.fill_.Scalar"),
        (lambda t: t.copy_(torch.ones(4)), "aten.copy_.default"),
        (lambda t: t.data.copy_(torch.ones(4)), "aten.copy_.default"),
        (lambda t: t[1:].mul_(2), "aten.mul_.Tensor"),
        (lambda t: torch.add(t, 1, out=t), "aten.add.out"),
        (lambda t: torch._foreach_add_([torch.ones(1), t], 1), "aten._foreach_add_.Scalar"),
        (lambda t: t.view(2, 2).t().zero_(), "aten.zero_.default"),
    ],
)
def test_write_into_a_shared_tensor_is_refused(
    write: Callable[[torch.Tensor], Any], operator: str
) -> None:
    shared = torch.zeros(4)
    with WriteGuard({shared.untyped_storage().data_ptr()}), pytest.raises(SharedWriteError) as e:
        write(shared)
    assert str(e.value) == f"the operator {operator} writes into a tensor that engines share"
    assert not shared.any()


def test_custom_operator_that_says_that_it_writes_is_refused(ops: Any) -> None:
    shared = torch.zeros(4)
    with WriteGuard({shared.untyped_storage().data_ptr()}), pytest.raises(SharedWriteError):
        ops.quantize(shared, torch.ones(4))


def test_reading_and_writing_elsewhere_are_free() -> None:
    shared, own = torch.zeros(4), torch.zeros(4)
    with WriteGuard({shared.untyped_storage().data_ptr()}):
        own.copy_(shared + 1)
        parameter = nn.Parameter(shared, requires_grad=False)
        parameter.data = own
    assert own.sum() == 4
