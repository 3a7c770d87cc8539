"""Post-processing hooks by plan, with real vLLM layers and a plug-in's quantization method."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

from bench.checkpoints import llama_config, write_checkpoint
from tests.fakes.models import CPU, Packed, on_meta
from weightcached.errors import UnsupportedQuantForIPCError
from weightcached.index.tensors import ModulePlan, PlanName, TensorIndex
from weightcached.model.plans import HookFailure, HooksFailedError
from weightcached.vllm_compat import build, hooks, replay
from weightcached.vllm_compat.hooks import PostProcessing
from weightcached.wire.loader_job import LoaderJob

REFUSED = "; this model cannot be attached, load it from disk"
PLUG_IN = "tests.fakes.plug_in"
NOT_OFFERED = "rerun: not offered"
NO_ITEM = f"{NOT_OFFERED}; replay: RuntimeError: Tensor.item() cannot be called on meta tensors"
WRITES = "rerun: SharedWriteError: the operator aten.copy_.default writes into a tensor that engines share"
SUITED = {
    "qkv_proj": "Turning",
    "o_proj": "Measuring",
    "gate_up_proj": "InPlace",
    "down_proj": "Turning",
}


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    # Ignore vLLM's warnings while it is imported and configured, and remove its variables: its
    # LD_PRELOAD of torch's libraries would be in every process that later tests start.
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        # As in vLLM's CPU worker: there is no accelerator.
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        import tests.fakes.plug_in  # noqa: F401

        yield


class Model(NamedTuple):
    """A model of a checkpoint whose layers are post-processed as `methods` says."""

    packed: Packed
    hooks: PostProcessing
    plans: list[ModulePlan]
    outputs: dict[str, torch.Tensor]

    def prove(self, **changed: Any) -> TensorIndex:
        packed = self.packed.but(index=msgspec.structs.replace(self.packed.index, **changed))
        return packed.prove(self.hooks, self.plans)

    def attach(self, index: TensorIndex) -> Any:
        return self.packed.but(index=index).attach(self.hooks)


Load = Callable[..., Model]


@pytest.fixture(scope="module")
def configured(vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Write a checkpoint's configuration, or all of it, and have vLLM read it."""
    from weightcached.vllm_compat import solo_rank

    def configured(config: dict[str, Any], **arguments: Any) -> Any:
        path = tmp_path_factory.mktemp("model")
        if "load_format" not in arguments:
            write_checkpoint(path, config, shards=1, seed=3)
        config["quantization_config"] = {"quant_method": "weightcached-test", "methods": SUITED}
        (path / "config.json").write_text(json.dumps(config))
        job = LoaderJob(
            device="cpu0", cache="t/target", role="target", generation=1, spec_digest="", rank=0, boot_id="",
            socket_fd=0, engine={"model": str(path), "max_model_len": 256, **arguments},
        )  # fmt: skip
        return solo_rank.create_vllm_config(job)

    return configured


@pytest.fixture(scope="module")
def llama(configured: Callable[..., Any]) -> Any:
    return configured(
        llama_config(
            hidden=256,
            intermediate=512,
            layers=2,
            heads=8,
            kv_heads=4,
            vocab=512,
            dtype="bfloat16",
            tied=False,
        )
    )


@pytest.fixture(scope="module")
def load(llama: Any) -> Iterator[Load]:
    """Load a tiny model as the processed stage does, on the CPU."""
    from vllm.config import set_current_vllm_config

    from weightcached.vllm_compat import solo_rank

    made: list[Packed] = []

    def load(config: Any = llama, **changed: str) -> Model:
        methods = SUITED | changed

        def bare_model() -> nn.Module:
            config.quant_config.methods = methods
            with set_current_vllm_config(config), build.isolated_build(config, keep=False):
                built: nn.Module = build.build_on_meta(config, config.model_config)
                return built

        config.quant_config.methods = methods
        with set_current_vllm_config(config), build.isolated_build(config, keep=False):
            model = solo_rank.load_for_stage(
                config, config.model_config, "processed", lambda nbytes: None
            )
        post = PostProcessing(config.model_config, CPU, stage="processed")
        outputs = outputs_of(model)
        made.append(Packed.of_loaded(model, bare_model))
        return Model(made[-1], post, post.first_plans(bare_model()), outputs)

    with solo_rank.solo_rank(llama, 0):
        yield load
    for packed in made:
        packed.close()


def outputs_of(model: Any) -> dict[str, torch.Tensor]:
    """The output of each linear layer for one input."""
    outputs = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in SUITED:
            x = torch.linspace(-1, 1, 2 * module.input_size, dtype=torch.bfloat16).reshape(2, -1)
            outputs[name] = module.quant_method.apply(module, x)
    return outputs


@pytest.fixture(scope="module")
def suited(load: Load) -> Model:
    return load()


@pytest.fixture(scope="module")
def proven(suited: Model) -> TensorIndex:
    return suited.prove()


def plan_of(index: TensorIndex, module: str) -> tuple[str, str, list[str], str]:
    (plan,) = [plan for plan in index.modules if plan.module == module]
    return plan.plan, plan.method, list(plan.values), plan.reason


# ---- which plan


def test_each_hook_gets_the_first_plan_that_passes(proven: TensorIndex) -> None:
    layer = "model.layers.1"
    assert plan_of(proven, "lm_head") == ("rerun", f"{PLUG_IN}.Embedding", [], "")
    assert plan_of(proven, f"{layer}.self_attn.qkv_proj") == (
        "replay",
        f"{PLUG_IN}.Turning",
        [],
        NOT_OFFERED,
    )
    assert plan_of(proven, f"{layer}.mlp.gate_up_proj") == (
        "replay",
        f"{PLUG_IN}.InPlace",
        [],
        WRITES,
    )
    o_proj = f"{layer}.self_attn.o_proj"
    assert plan_of(proven, o_proj) == (
        "restore",
        f"{PLUG_IN}.Measuring",
        [f"{o_proj}.largest"],
        NO_ITEM,
    )


def test_hooks_of_attention_layers_have_plans_too(proven: TensorIndex) -> None:
    attention = "vllm.model_executor.layers.attention.attention.Attention"
    assert plan_of(proven, "model.layers.0.self_attn.attn") == ("rerun", attention, [], "")
    assert len(proven.modules) == 2 * 4 + 2 + 2


def test_attached_layers_compute_what_loaded_ones_did(suited: Model, proven: TensorIndex) -> None:
    outputs = outputs_of(suited.attach(proven))
    assert list(outputs) == list(suited.outputs)
    for name, output in suited.outputs.items():
        assert torch.equal(outputs[name], output), name


def test_engine_runs_the_hooks_to_replay_and_no_others(
    suited: Model, proven: TensorIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fakes import plug_in

    ran = []
    for cls in (plug_in.Turning, plug_in.Measuring, plug_in.InPlace, plug_in.Embedding):
        hook = cls.__dict__["process_weights_after_loading"]

        @functools.wraps(hook)
        def noting(self: Any, layer: Any, hook: Any = hook) -> None:
            ran.append((type(self).__name__, layer.weight.is_meta))
            hook(self, layer)

        monkeypatch.setattr(cls, "process_weights_after_loading", noting)
    suited.attach(proven)
    assert (
        ran
        == [("Turning", True), ("InPlace", True), ("Turning", True)] * 2
        + [("Embedding", False)] * 2
    )


def test_methods_are_as_they_were_afterwards(suited: Model, proven: TensorIndex) -> None:
    from tests.fakes import plug_in

    layer = suited.attach(proven).model.layers[0]
    assert type(layer.self_attn.o_proj.quant_method) is plug_in.Measuring
    assert not layer.self_attn.o_proj.quant_method.supports_pre_processed_weights
    assert "process_weights_after_loading" not in vars(layer.self_attn.attn)


# ---- shared tensors


MLA = "vllm.model_executor.layers.attention.mla_attention.MLAAttention"
LATENT = "model.layers.1.self_attn.mla_attn.mla_attn"


@pytest.fixture(scope="module")
def latent(configured: Callable[..., Any], load: Load) -> Callable[..., Model]:
    """Load a model with multi-head latent attention, with the named attention back end.

    Without a name: vLLM's own choice for this processor.
    """

    def latent(**arguments: Any) -> Model:
        config = llama_config(
            hidden=128, intermediate=256, layers=2, heads=4, kv_heads=4, vocab=512, dtype="bfloat16", tied=False
        ) | {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 2,
            "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
        }  # fmt: skip
        del config["head_dim"]
        absorbed = dict.fromkeys(("kv_a_proj_with_mqa", "q_proj", "kv_b_proj", "o_proj"), "Method")
        return load(configured(config, load_format="dummy", **arguments), **absorbed)

    return latent


def test_absorption_of_mla_writes_into_nothing_that_is_shared(
    latent: Callable[..., Model],
) -> None:
    """The hook of the attention layer copies into its results if they exist already."""
    # With AMX vLLM would take another back end, which does not absorb.
    model = latent(attention_backend="CPU_MLA")
    index = model.prove()
    assert plan_of(index, LATENT) == ("replay", MLA, [], WRITES)
    attached = model.attach(index)
    layer = attached.get_submodule(LATENT)
    shared = {
        index.storages[record.storage or 0].segment
        for record in index.tensors
        if "W_U" in record.names[0]
    }
    assert [index.segments[number].private for number in shared] == [False]
    weight = attached.model.layers[1].self_attn.kv_b_proj.weight
    # By head: the rows of the keys, then those of the values.
    assert torch.equal(layer.W_UV, weight.view(4, 64 + 64, 64)[:, 64:].transpose(1, 2))
    assert model.packed.but(index=index).prove(model.hooks, index.modules) == index, (
        "the bytes are as they were"
    )


def test_mla_that_packs_its_weights_for_amx_is_restored(latent: Callable[..., Model]) -> None:
    """The operator that packs them has no fake, so that the hook cannot be replayed."""
    model = latent()
    backend = on_meta(model.packed.build).get_submodule(LATENT).attn_backend.get_name()
    if backend != "AMX_MLA":
        pytest.skip(f"vLLM runs MLA with {backend} on this processor, AMX_MLA needs AMX")
    index = model.prove()
    plan, method, _, reason = plan_of(index, LATENT)
    assert (plan, method) == ("restore", MLA)
    assert reason.endswith("the operator _C.convert_weight_packed.default has no fake")
    assert model.packed.but(index=index).prove(model.hooks, index.modules) == index, (
        "the bytes are as they were"
    )
    attached = model.attach(index)
    assert attached.get_submodule(LATENT).impl._w_uk_packed.shape == (4, 64, 64)
    assert attached.model.layers[1].self_attn.kv_b_proj.weight.numel() == 0


def test_model_of_an_isolated_build_is_freed_though_it_would_be_compiled(
    llama: Any, load: Load
) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(llama), build.isolated_build(llama, keep=False):
        # vLLM compiles the model without its head.
        compiled = weakref.ref(build.build_on_meta(llama, llama.model_config).model)
    gc.collect()
    assert compiled() is None


# ---- models that no plan brings to an engine


def test_method_that_no_plan_serves_is_refused_by_name(load: Load) -> None:
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        load(o_proj="MeasuringKernel").prove()
    assert str(e.value) == (
        "model.layers.0.self_attn.o_proj.kernel.weight: no object here for the tensor ('RowParallelLinear' object "
        f"has no attribute 'kernel') ({PLUG_IN}.MeasuringKernel of model.layers.0.self_attn.o_proj: {NO_ITEM}){REFUSED}"
    )


def test_replayed_hook_that_leaves_another_object_is_refused_by_name(load: Load) -> None:
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        load(qkv_proj="Branching").prove()
    where = "model.layers.0.self_attn.qkv_proj"
    lead = f"{where}.kernel: is {{'$type': '{PLUG_IN}.OtherKernel'}}, loaded as {{'$type': '{PLUG_IN}.Kernel'}}"
    assert str(e.value) == (
        f"{lead} ({PLUG_IN}.Branching of {where}: {NOT_OFFERED}; replay: {lead}; restore: {where}.kernel.weight: "
        f"no object here for the tensor ('QKVParallelLinear' object has no attribute 'kernel')){REFUSED}"
    )


def test_value_that_a_replayed_hook_leaves_otherwise_is_restored(load: Load) -> None:
    model = load(down_proj="Counting")
    index = model.prove()
    where = "model.layers.1.mlp.down_proj"
    assert plan_of(index, where) == (
        "replay",
        f"{PLUG_IN}.Counting",
        [f"{where}.counted"],
        NOT_OFFERED,
    )
    counted = [layer.mlp.down_proj.counted for layer in model.attach(index).model.layers]
    assert all(0 < n <= 256 * 512 for n in counted)


def test_engine_without_a_plan_for_a_hook_does_not_attach(
    suited: Model, proven: TensorIndex
) -> None:
    without = [plan for plan in proven.modules if plan.module != "model.layers.1.self_attn.attn"]
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        suited.attach(msgspec.structs.replace(proven, modules=without))
    assert str(e.value) == (
        "model.layers.1.self_attn.attn: the index has no plan for the hook of "
        "vllm.model_executor.layers.attention.attention.Attention"
    )


def test_engine_whose_hook_fails_does_not_attach(suited: Model, proven: TensorIndex) -> None:
    other = [
        msgspec.structs.replace(plan, plan="replay", values={})
        if plan.method.endswith("Measuring")
        else plan
        for plan in proven.modules
    ]
    with pytest.raises(HooksFailedError) as e:
        suited.attach(msgspec.structs.replace(proven, modules=other))
    assert str(e.value) == (
        f"model.layers.0.self_attn.o_proj: the hook of {PLUG_IN}.Measuring failed: "
        "RuntimeError: Tensor.item() cannot be called on meta tensors"
    )
    assert [failure.key[0] for failure in e.value.failures] == [
        f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)
    ]


# ---- broken plans: an attribute, an alias and a stride, of a layer of each plan

LAYERS = {
    "rerun": ("lm_head", "weight"),
    "replay": ("model.layers.1.self_attn.qkv_proj", "kernel.workspace"),
    "restore": ("model.layers.1.self_attn.o_proj", "packed"),
}


@pytest.mark.parametrize("plan", LAYERS)
def test_missing_attribute_is_caught(suited: Model, plan: str) -> None:
    module, leaf = LAYERS[plan]
    left = [
        record for record in suited.packed.index.tensors if record.names[0] != f"{module}.{leaf}"
    ]
    assert len(left) == len(suited.packed.index.tensors) - 1
    with pytest.raises(
        UnsupportedQuantForIPCError, match="^" + f"{module}.{leaf}: missing".replace(".", r"\.")
    ) as e:
        suited.prove(tensors=left)
    assert str(e.value).endswith(REFUSED)


@pytest.mark.parametrize("plan", LAYERS)
def test_broken_alias_is_caught(suited: Model, plan: str) -> None:
    """The two names of one tensor become two tensors; a single name becomes one with another
    tensor.
    """
    module, leaf = LAYERS[plan]
    records = list(suited.packed.index.tensors)
    (at,) = [n for n, record in enumerate(records) if f"{module}.{leaf}" in record.names]
    records[at] = msgspec.structs.replace(
        records[at], names=[*records[at].names, f"{module}.again"]
    )
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        suited.prove(tensors=records)
    assert str(e.value).startswith(f"{module}.again: not in the loaded model")


def test_broken_alias_of_what_a_replayed_hook_made_is_caught(suited: Model) -> None:
    module = "model.layers.1.self_attn.qkv_proj"
    records = list(suited.packed.index.tensors)
    (at,) = [n for n, record in enumerate(records) if f"{module}.weight" in record.names]
    assert records[at].names == [f"{module}.weight", f"{module}.kernel.weight"]
    records[at : at + 1] = [
        msgspec.structs.replace(records[at], names=[name]) for name in records[at].names
    ]
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        suited.prove(tensors=records)
    assert str(e.value).startswith(
        f"{module}.kernel.weight: object shared with is {module}.kernel.weight, loaded as {module}.weight"
    )


@pytest.mark.parametrize("plan", LAYERS)
def test_changed_stride_is_caught(suited: Model, plan: str) -> None:
    module, leaf = LAYERS[plan]
    records = list(suited.packed.index.tensors)
    (at,) = [n for n, record in enumerate(records) if f"{module}.{leaf}" in record.names]
    records[at] = msgspec.structs.replace(records[at], stride=[0] * len(records[at].stride))
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        suited.prove(tensors=records)
    assert str(e.value).startswith(f"{module}.{leaf}: stride is (0")


# ---- standing in for methods


class Method:
    supports_pre_processed_weights = False

    def __init__(self) -> None:
        self.ran = 0

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.ran += 1


class SaysByInstance(Method):
    def __init__(self) -> None:
        super().__init__()
        self.supports_pre_processed_weights = False


class SaysByProperty(Method):
    @property
    def supports_pre_processed_weights(self) -> bool:  # type: ignore[override]
        return False


def as_vllm_does(method: Any, layer: nn.Module) -> None:
    assert method.supports_pre_processed_weights
    method.process_weights_after_loading(layer)


@pytest.mark.parametrize("kind", [Method, SaysByInstance, SaysByProperty])
@pytest.mark.parametrize(("plan", "times"), [("rerun", 1), ("replay", 0), ("restore", 0)])
def test_hook_runs_again_only_by_its_plan(kind: type[Method], plan: Any, times: int) -> None:
    method, layer = kind(), nn.Module()
    before = dict(vars(method))
    failures: list[HookFailure] = []
    with hooks.by_plan(
        [(hooks.Hook("layer", method, layer, supports_rerun=False), plan)], failures
    ):
        as_vllm_does(method, layer)
    assert (method.ran, failures) == (times, [])
    assert vars(method) == before | {"ran": times}
    assert type(method) is kind
    assert not method.supports_pre_processed_weights


def test_layers_that_share_a_method_have_their_own_plans() -> None:
    method, first, second, other = Method(), nn.Module(), nn.Module(), nn.Module()
    plans: list[tuple[hooks.Hook, PlanName]] = [
        (hooks.Hook("first", method, first, supports_rerun=False), "rerun"),
        (hooks.Hook("second", method, second, supports_rerun=False), "replay"),
    ]
    with hooks.by_plan(plans, []):
        as_vllm_does(method, second)
        assert method.ran == 0
        as_vllm_does(method, first)
        assert method.ran == 1
        as_vllm_does(method, other)
        assert method.ran == 2, "another hook calls one that has no plan"


def test_hook_that_raises_is_noted_and_put_back() -> None:
    class Failing(Method):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            raise KeyError("missing")

    method, layer = Failing(), nn.Module()
    failures: list[HookFailure] = []
    hook = hooks.Hook("layer", method, layer, supports_rerun=True)
    with hooks.by_plan([(hook, "rerun")], failures):
        as_vllm_does(method, layer)
    assert failures == [HookFailure(hook.key, "KeyError: 'missing'")]
    with pytest.raises(ZeroDivisionError), hooks.by_plan([(hook, "rerun")], failures):
        raise ZeroDivisionError
    assert type(method) is Failing


# ---- hooks of vLLM's kernels for GPUs, on the meta device


def hook_on_meta(owner: Any, layer: nn.Module) -> None:
    with replay.on_meta(CPU):
        owner.process_weights_after_loading(layer)


def test_online_fp8_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerTensorOnlineLinearMethod

    def quantize(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As a GPU's operator does: into a tensor that is made before, and without a fake.
        quantized = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        torch.ops.weightcached_hooks.quantize(quantized, weight, scale)
        return quantized, scale

    monkeypatch.setattr(fp8.ops, "scaled_fp8_quant", quantize)

    class Kernel:
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.seen = layer.weight.shape

    method = object.__new__(Fp8PerTensorOnlineLinearMethod)
    vars(method).update(fp8_linear=Kernel(), use_marlin=False, requantization_source=None)
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(
        torch.empty(64, 32, device="meta", dtype=torch.bfloat16), requires_grad=False
    )
    layer.tp_size = 1
    with torch.library._scoped_library("weightcached_hooks", "DEF") as library:
        library.define("quantize(Tensor(a!) out, Tensor x, Tensor scale) -> ()")
        hook_on_meta(method, layer)
    assert (layer.weight.dtype, layer.weight.shape, layer.weight.stride()) == (
        torch.float8_e4m3fn,
        (32, 64),
        (1, 32),
    )
    assert (layer.weight_scale.is_meta, layer.input_scale, layer.seen) == (True, None, (32, 64))


def test_marlin_is_replayed_with_the_fakes_of_its_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearLayerConfig,
    )
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
    from vllm.scalar_type import scalar_types

    monkeypatch.setattr(
        MarlinLinearKernel, "can_implement", classmethod(lambda cls, config: (True, None))
    )
    config = MPLinearLayerConfig(
        full_weight_shape=(256, 128), partition_weight_shape=(256, 128), weight_type=scalar_types.uint4b8,
        act_type=torch.bfloat16, group_size=128, zero_points=False,
    )  # fmt: skip
    kernel = MarlinLinearKernel(config, w_q_param_name="qweight", w_s_param_name="scales")
    layer: Any = nn.Module()
    layer.register_parameter(
        "qweight",
        PackedvLLMParameter(
            data=torch.empty(32, 128, dtype=torch.int32, device="meta"), input_dim=0, output_dim=1, packed_dim=0,
            packed_factor=8, weight_loader=lambda *args: None,
        ),
    )  # fmt: skip
    layer.register_parameter(
        "scales",
        GroupQuantScaleParameter(
            data=torch.empty(2, 128, dtype=torch.bfloat16, device="meta"), input_dim=0, output_dim=1,
            weight_loader=lambda *args: None,
        ),
    )  # fmt: skip
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        if not hasattr(torch.ops._C, "gptq_marlin_repack"):
            library.define(
                "gptq_marlin_repack(Tensor q, SymInt k, SymInt n, int bits, bool is_a_8bit) -> Tensor"
            )
            torch.library.register_fake(
                "_C::gptq_marlin_repack",
                lambda q, k, n, *rest: q.new_empty(k // 16, n * 16 // 8),
                lib=library,
            )
        hook_on_meta(kernel, layer)
    assert layer.qweight.shape == (16, 256)
    assert kernel.w_zp_name == "w_zp"
    assert all(t.is_meta for t in (layer.qweight, layer.scales, layer.w_zp))


def test_a_module_imported_while_a_model_is_built_keeps_the_values_of_its_tables(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's nvfp4_emulation_utils, which the GPU's build imports."""
    from vllm.model_executor.model_loader import utils

    (tmp_path / "kernel_with_a_table.py").write_text("import torch\nTABLE = torch.tensor([0.5])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importing = lambda **_: importlib.import_module("kernel_with_a_table").TABLE  # noqa: E731
    monkeypatch.setattr(utils, "initialize_model", importing)
    assert build.build_on_meta(llama, llama.model_config).tolist() == [0.5]
