"""The loader's proof catches every broken plan and names the first difference; whole texts."""

from __future__ import annotations

import enum
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.fakes.models import Packed, random_bytes, without_leftovers
from tests.fakes.values import encode_value
from weightcached.errors import (
    IndexFormatError,
    SegmentError,
    UnsupportedQuantForIPCError,
    WeightcachedError,
)
from weightcached.index.tensors import ModulePlan, StorageRecord, TensorIndex, TensorRecord
from weightcached.segments.packing import SMALL_NBYTES
from weightcached.system.fds import OwnedFd, read_sealed, sealed_memfd

REFUSED = "; this model cannot be attached, load it from disk"
ALPHA = "layer.alpha"


class Backend(enum.Enum):
    MARLIN = 1
    CUTLASS = 2


class Kernel:
    def __init__(self) -> None:
        self.workspace = torch.zeros(8)
        self.backend = Backend.MARLIN


class OtherKernel(Kernel):
    pass


Kernel.__module__ = OtherKernel.__module__ = "vllm.fake"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4), requires_grad=False)
        self.weight_t = self.weight.data.t()
        self.tied = self.weight
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.plain = torch.empty(3, dtype=torch.float16)
        self.kernel = Kernel()
        self.alpha: Any = 1.0
        self.held: Any = ("a", Kernel())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()


def fill(model: Any) -> None:
    layer = model.layer
    for seed, tensor in enumerate([layer.weight, layer.table, layer.plain]):
        random_bytes(tensor, seed)


@pytest.fixture
def packed() -> Any:
    with Packed.of(Model, fill) as packed:
        yield packed


def with_index(packed: Packed, **changed: Any) -> Packed:
    return packed.but(index=msgspec.structs.replace(packed.index, **changed))


def with_record(packed: Packed, name: str, **changed: Any) -> Packed:
    """The record with this canonical name changed."""
    assert name in [record.names[0] for record in packed.index.tensors]
    tensors = [
        msgspec.structs.replace(record, **changed) if record.names[0] == name else record
        for record in packed.index.tensors
    ]
    return with_index(packed, tensors=tensors)


def error(
    packed: Packed, run_hooks: Callable[[Any], None] = lambda model: None
) -> tuple[type, str]:
    with pytest.raises(WeightcachedError) as e:
        packed.prove(run_hooks)
    return type(e.value), str(e.value)


def test_plan_that_is_right_passes_unchanged(packed: Packed) -> None:
    assert without_leftovers(packed.prove()) == packed.index


# ---- broken records


def test_missing_tensor_is_named(packed: Packed) -> None:
    tensors = [record for record in packed.index.tensors if record.names[0] != "layer.table"]
    assert error(with_index(packed, tensors=tensors)) == (
        UnsupportedQuantForIPCError,
        f"layer.table: missing{REFUSED}",
    )


def test_missing_attribute_is_named(packed: Packed) -> None:
    tensors = [
        record for record in packed.index.tensors if record.names[0] != "layer.kernel.workspace"
    ]
    assert (
        error(with_index(packed, tensors=tensors))[1] == f"layer.kernel.workspace: missing{REFUSED}"
    )


def test_missing_alias_is_named(packed: Packed) -> None:
    (names,) = [
        record.names for record in packed.index.tensors if record.names[0] == "layer.weight"
    ]
    assert names == ["layer.weight", "layer.tied"]
    assert (
        error(with_record(packed, "layer.weight", names=names[:1]))[1]
        == f"layer.tied: missing{REFUSED}"
    )


def test_alias_that_became_a_tensor_of_its_own_is_named(packed: Packed) -> None:
    (record,) = [record for record in packed.index.tensors if record.names[0] == "layer.weight"]
    apart = [msgspec.structs.replace(record, names=[name]) for name in record.names]
    others = [other for other in packed.index.tensors if other is not record]
    assert error(with_index(packed, tensors=[*apart, *others]))[1] == (
        f"layer.tied: object shared with is layer.tied, loaded as layer.weight{REFUSED}"
    )


def test_storage_that_became_two_is_named(packed: Packed) -> None:
    number = next(
        record.storage for record in packed.index.tensors if record.names[0] == "layer.weight_t"
    )
    assert number is not None
    storages = [*packed.index.storages, packed.index.storages[number]]
    apart = with_index(
        with_record(packed, "layer.weight_t", storage=len(storages) - 1), storages=storages
    )
    assert error(apart)[1] == (
        f"layer.weight_t: storage shared with is layer.weight_t, loaded as layer.weight{REFUSED}"
    )


@pytest.mark.parametrize(
    ("name", "changed", "text"),
    [
        (
            "layer.weight_t",
            {"stride": [6, 1]},
            "layer.weight_t: stride is (6, 1), loaded as (1, 4)",
        ),
        ("layer.weight_t", {"shape": [4, 5]}, "layer.weight_t: shape is (4, 5), loaded as (4, 6)"),
        (
            "layer.plain",
            {"dtype": "bfloat16"},
            "layer.plain: dtype is torch.bfloat16, loaded as torch.float16",
        ),
        (
            "layer.plain",
            {"shape": [2], "storage_offset": 1},
            "layer.plain: shape is (2,), loaded as (3,)",
        ),
        ("layer.table", {"persistent": True}, "layer.table: persistence is True, loaded as False"),
        ("layer.table", {"kind": "attribute"}, "layer.table: kind is attribute, loaded as buffer"),
        ("layer.plain", {"kind": "buffer"}, "layer.plain: kind is buffer, loaded as attribute"),
        (
            "layer.plain",
            {"kind": "parameter"},
            "layer.plain: kind is parameter, loaded as attribute",
        ),
    ],
    ids=str,
)
def test_changed_record_is_named(
    packed: Packed, name: str, changed: dict[str, Any], text: str
) -> None:
    assert error(with_record(packed, name, **changed)) == (
        UnsupportedQuantForIPCError,
        text + REFUSED,
    )


def test_storage_offset_is_compared() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.view = torch.empty(8)[2:4]
        return model

    with Packed.of(build) as packed:
        text = error(with_record(packed, "view", storage_offset=3))[1]
    assert text == f"view: storage offset is 3, loaded as 2{REFUSED}"


def test_tensor_that_the_loaded_model_lacks_is_named(packed: Packed) -> None:
    extra = TensorRecord(
        names=["layer.zeros"],
        kind="buffer",
        dtype="float32",
        shape=[1],
        stride=[1],
        storage=0,
        persistent=False,
    )
    more = with_index(packed, tensors=[*packed.index.tensors, extra])
    assert error(more)[1] == f"layer.zeros: not in the loaded model{REFUSED}"


def test_tensor_that_hooks_make_alone_is_named(packed: Packed) -> None:
    def hook(model: Any) -> None:
        model.layer.workspace = torch.zeros(4)

    assert error(packed, hook)[1] == f"layer.workspace: not in the loaded model{REFUSED}"


def test_tensor_that_hooks_move_is_bound_again(packed: Packed) -> None:
    def hook(model: Any) -> None:
        model.layer.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        model.layer.kernel.workspace = torch.full((8,), 7.0)

    assert without_leftovers(packed.prove(hook)) == packed.index


def test_what_hooks_make_of_loaded_weights_stays(packed: Packed) -> None:
    made = torch.full((3,), 5.0)

    def hook(model: Any) -> None:
        assert not model.layer.weight.is_meta, "the hook sees the loaded weights"
        model.layer.weight = nn.Parameter(made, requires_grad=False)

    loaded = packed.but(index=msgspec.structs.replace(packed.index, stage="loaded"))
    assert torch.equal(loaded.attach(hook).layer.weight, made)


def test_hang_on_nothing_is_named(packed: Packed) -> None:
    lost = with_record(packed, "layer.plain", names=["layer.kernel.inner.plain"])
    assert error(lost)[1] == (
        "layer.kernel.inner.plain: no object here for the tensor ('Kernel' object has no attribute 'inner')"
    )


# ---- bytes


@pytest.mark.parametrize("at", [0, 95])
def test_changed_byte_in_a_segment_is_named(packed: Packed, at: int) -> None:
    number = next(
        record.storage for record in packed.index.tensors if record.names[0] == "layer.weight"
    )
    assert number is not None
    place = packed.index.storages[number]
    held = bytearray(read_sealed(packed.fds[place.segment].fileno(), max_nbytes=1 << 20))
    held[place.offset_bytes + at] ^= 1
    fds: list[OwnedFd] = list(packed.fds)
    with sealed_memfd("changed", bytes(held)) as fds[place.segment]:
        assert error(packed.but(fds=fds)) == (
            SegmentError,
            "layer.weight: the bytes in its segment do not have the digest that was made while packing",
        )


def test_byte_between_storages_does_not_matter(packed: Packed) -> None:
    held = bytearray(read_sealed(packed.fds[0].fileno(), max_nbytes=1 << 20))
    held[-1] ^= 1
    with sealed_memfd("changed", bytes(held)) as fd:
        assert without_leftovers(packed.but(fds=[fd]).prove()) == packed.index


def test_storage_elsewhere_is_named(packed: Packed) -> None:
    first, second, *rest = packed.index.storages
    swapped = [
        StorageRecord(second.segment, second.offset_bytes, first.nbytes, first.digest),
        second,
        *rest,
    ]
    assert error(with_index(packed, storages=swapped))[0] is SegmentError


# ---- values


def post_processed(**values: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        fill(model)
        for name, value in values.items():
            setattr(model.layer, name, value)

    return change


def proven(
    change: Callable[[Any], None], run_hooks: Callable[[Any], None] = lambda model: None
) -> tuple[Any, Any]:
    """(index that the proof recorded, model that an engine attaches with it)."""
    with Packed.of(Model, change) as packed:
        index: TensorIndex = packed.prove(run_hooks)
        return index, packed.but(index=index).attach(run_hooks)


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        True,
        1,
        None,
        "marlin",
        float("inf"),
        Backend.CUTLASS,
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        (1, (2.0, "x")),
        [None, [1]],
        {"a": 1, 2: ("b",)},
        {1, 2},
        frozenset({"x"}),
        -0.0,
    ],
    ids=repr,
)
def test_value_that_post_processing_changed_is_recorded_and_restored(value: Any) -> None:
    index, model = proven(post_processed(alpha=value))
    assert index.modules == [
        ModulePlan(module="layer", plan="restore", values={ALPHA: encode_value(value)})
    ]
    assert (type(model.layer.alpha), repr(model.layer.alpha)) == (type(value), repr(value))


def test_value_that_is_not_a_number_is_restored_too() -> None:
    _, model = proven(post_processed(alpha=float("nan")))
    assert model.layer.alpha != model.layer.alpha


def test_value_that_stays_not_a_number_is_no_difference() -> None:
    def hook(model: Any) -> None:
        model.layer.alpha = float("nan")

    with Packed.of(Model, hook) as packed:
        assert without_leftovers(packed.prove(hook)) == packed.index


@pytest.mark.parametrize(("loaded", "built"), [(True, 1), (1, 1.0), (0.0, -0.0), ((1,), [1])])
def test_values_that_python_takes_for_equal_are_told_apart(loaded: Any, built: Any) -> None:
    def hook(model: Any) -> None:
        model.layer.alpha = built

    index, model = proven(post_processed(alpha=loaded), hook)
    assert list(index.modules[0].values) == [ALPHA]
    assert (type(model.layer.alpha), repr(model.layer.alpha)) == (type(loaded), repr(loaded))


def test_values_of_objects_lists_and_dicts_are_restored() -> None:
    def change(model: Any) -> None:
        fill(model)
        model.layer.kernel.backend = Backend.CUTLASS
        model.layer.extra["b's"][1] = "new"
        model.layer.held[1].backend = None

    def build() -> Model:
        model = Model()
        model.layer.extra = {"b's": ["x", "old", Kernel()]}
        return model

    with Packed.of(build, change) as packed:
        index = packed.prove()
        model = packed.but(index=index).attach()
    assert {path: plan.plan for plan in index.modules for path in plan.values} == {
        "layer.kernel.backend": "restore",
        "layer.held[1].backend": "restore",
        'layer.extra["b\'s"][1]': "restore",
    }
    assert model.layer.kernel.backend is Backend.CUTLASS
    assert model.layer.held[1].backend is None
    assert model.layer.extra["b's"][1] == "new"


def test_new_value_is_restored() -> None:
    _, model = proven(post_processed(brand_new=[1, 2]))
    assert model.layer.brand_new == [1, 2]


def test_parameter_that_became_none_is_none() -> None:
    def change(model: Any) -> None:
        fill(model)
        model.layer.tied = None

    _, model = proven(change)
    assert model.layer.tied is None
    assert "tied" in model.layer._parameters


def test_value_that_the_loaded_model_lacks_is_named() -> None:
    def hook(model: Any) -> None:
        model.layer.extra = 5

    with Packed.of(Model, fill) as packed:
        assert error(packed, hook)[1] == f"layer.extra: 5 is not in the loaded model{REFUSED}"


def test_object_of_another_class_is_refused_by_name() -> None:
    with Packed.of(Model, post_processed(kernel=OtherKernel())) as packed:
        assert error(packed) == (
            UnsupportedQuantForIPCError,
            "layer.kernel: is {'$type': 'vllm.fake.Kernel'}, loaded as {'$type': 'vllm.fake.OtherKernel'}"
            + REFUSED,
        )


def test_parameter_that_a_hook_renamed_keeps_its_content_and_not_its_loading_class() -> None:
    class ModelWeightParameter(nn.Parameter):
        pass

    ModelWeightParameter.__module__ = "vllm.model_executor.parameter"

    def rename(model: Model) -> None:
        model.layer.renamed = ModelWeightParameter(model.layer.weight.data, requires_grad=False)

    with Packed.of(Model, rename) as packed:
        assert "layer.renamed" in {
            name for record in packed.prove().tensors for name in record.names
        }


def test_object_that_post_processing_made_is_refused_by_name() -> None:
    with Packed.of(Model, post_processed(runner=object())) as packed:
        assert (
            error(packed)[1]
            == f"layer.runner: is missing, loaded as {{'$type': 'builtins.object'}}{REFUSED}"
        )


def test_function_that_post_processing_chose_is_refused_by_name() -> None:
    with Packed.of(Model, post_processed(apply=fill)) as packed:
        assert (
            error(packed)[1]
            == f"layer.apply: is missing, loaded as {{'$callable': 'fill'}}{REFUSED}"
        )


def test_value_in_a_tuple_is_refused_by_name() -> None:
    with Packed.of(Model, post_processed(held=("b", Kernel()))) as packed:
        assert error(packed)[1] == "layer.held[0]: a value inside a tuple cannot be replaced"


def test_value_that_does_not_stay_is_refused_by_name() -> None:
    class Stubborn(Kernel):
        @property
        def gain(self) -> float:
            return 1.0

        @gain.setter
        def gain(self, value: float) -> None:
            """A setter that ignores its value."""

    Stubborn.__module__ = "vllm.fake"

    def change(model: Any) -> None:
        fill(model)
        model.layer.kernel.__dict__["gain"] = 2.0

    def build() -> Model:
        model = Model()
        model.layer.kernel = Stubborn()
        return model

    with Packed.of(build, change) as packed:
        assert error(packed)[1] == f"layer.kernel.gain: cannot be restored{REFUSED}"


def test_restored_enum_of_a_module_that_is_not_imported_is_refused() -> None:
    with Packed.of(Model, post_processed(alpha=Backend.CUTLASS)) as packed:
        index = packed.prove()
        saved = sys.modules.pop(__name__)
        try:
            with pytest.raises(IndexFormatError) as e:
                packed.but(index=index).attach()
        finally:
            sys.modules[__name__] = saved
    assert str(e.value) == (
        f"typed value $enum ['{__name__}', 'Backend', 'CUTLASS']: module {__name__} is not imported"
    )


def test_value_on_nothing_is_named(packed: Packed) -> None:
    plan = ModulePlan(module="layer", plan="restore", values={"layer.gone.alpha": encode_value(1)})
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        with_index(packed, modules=[plan]).attach()
    assert str(e.value) == (
        "layer.gone.alpha: no object here for the value ('Layer' object has no attribute 'gone')"
    )


def test_parameter_that_became_a_number_is_one() -> None:
    def change(model: Any) -> None:
        fill(model)
        del model.layer.table, model.layer.weight_t
        model.layer.table, model.layer.weight_t = 5, None

    _, model = proven(change)
    assert (model.layer.table, model.layer.weight_t) == (5, None)
    assert "table" not in model.layer._buffers


def test_proof_leaves_nothing_mapped() -> None:
    def build() -> Model:
        model = Model()
        model.layer.large_weight = torch.empty(SMALL_NBYTES)
        return model

    gc.collect()
    before = mapped_segments()
    with Packed.of(build) as packed:
        packed.prove()
        with pytest.raises(UnsupportedQuantForIPCError):
            with_record(packed, "layer.table", persistent=True).prove()
        gc.collect()
        assert mapped_segments() == before
        model = packed.attach()
        assert mapped_segments() == before + 1
        assert model.layer.large_weight.shape == (SMALL_NBYTES,)


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("weightcached-segment")
