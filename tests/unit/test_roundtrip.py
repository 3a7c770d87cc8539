"""A model survives packing, encoding, decoding and attaching, with all that torch has on a CPU."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from tests.fakes.models import (
    CPU,
    NO_HOOKS,
    Build,
    Packed,
    an_index,
    bytes_below,
    on_meta,
    random_bytes,
    without_leftovers,
)  # fmt: skip
from weightcached.errors import IndexFormatError, UnsupportedQuantForIPCError
from weightcached.index.tensors import TensorRecord, layout_difference
from weightcached.model import pack, proof
from weightcached.model.bind import (
    LOOKUP_ERRORS,
    Binder,
    Storages,
    copy_into,
    resolve_owner,
    skeleton_of,
    tensor_of,
)
from weightcached.segments.packing import SMALL_NBYTES

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTIZED = [torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4]
QUANTIZED_IS_DEPRECATED = "ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other"
PLAIN = [dtype for dtype in DTYPES if dtype not in QUANTIZED]


class Facts(NamedTuple):
    """All that must survive of a tensor. `memory` digests the storage below it."""

    cls: type
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    memory: str


def facts(tensor: torch.Tensor) -> Facts:
    memory = hashlib.sha256(bytes_below(tensor).numpy().tobytes()).hexdigest()
    return Facts(
        type(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        memory,
    )


def reach(model: nn.Module, path: str) -> Any:
    """The object that Python finds at the path."""
    return eval(f"model.{path}", {"model": model})  # the paths are this file's


def round_trip(
    build: Build,
    *paths: str,
    change: Callable[[Any], None] = lambda model: None,
    run_hooks: Callable[[Any], None] = lambda model: None,
    copy: bool = False,
) -> Any:
    """Pack and attach a model; tensors at these paths must be unchanged. Returns the new model."""
    before: dict[str, Facts] = {}

    def note(model: nn.Module) -> None:
        change(model)
        for seed, path in enumerate(paths):
            random_bytes(reach(model, path), seed)
        before.update({path: facts(reach(model, path)) for path in paths})

    with Packed.of(build, note) as packed:
        model = packed.attach(run_hooks, copy=copy)
        assert {path: facts(reach(model, path)) for path in paths} == before
        proven = packed.prove(run_hooks)
        assert without_leftovers(proven) == packed.index
        # The index tells an engine which tensors to remove; it does not look.
        model = packed.but(index=proven).attach(run_hooks, copy=copy)
        assert {path: facts(reach(model, path)) for path in paths} == before
    return model


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def module(**tensors: Any) -> Any:
    """A module with these attributes, set as a model's __init__ sets them."""
    owner = nn.Module()
    for name, tensor in tensors.items():
        setattr(owner, name, tensor)
    return owner


class Helper:
    """An object like vLLM's quantization methods and kernels: no module, but of a module of vLLM."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


Helper.__module__ = "vllm.fake"


# ---- dtypes and shapes


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_survives(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        model = module(weight=parameter(3, 5, dtype=dtype), plain=torch.empty(7, dtype=dtype))
        model.register_buffer("scale", torch.empty(2, 3, dtype=dtype).t())
        return model

    round_trip(build, "weight", "plain", "scale")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", QUANTIZED_IS_DEPRECATED)
def test_dtypes_of_torch_are_all_here() -> None:
    assert [dtype for dtype in DTYPES if torch.empty(4, dtype=dtype).is_quantized] == sorted(
        QUANTIZED, key=str
    )
    assert len(PLAIN) >= 20


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("look", [proof.slots_of, pack.describe])
@pytest.mark.filterwarnings(QUANTIZED_IS_DEPRECATED)
def test_quantized_dtypes_are_refused_by_name(
    look: Callable[[nn.Module], Any], dtype: torch.dtype
) -> None:
    model = module(layer=module())
    model.layer.register_buffer("zeros", torch.empty(4, 4, dtype=dtype))
    assert refusal(look, model) == (
        f"layer.zeros: torch.Tensor of layout torch.strided and dtype {dtype} is not a plain strided tensor"
    )


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UnsupportedQuantForIPCError) as e:
        function(*arguments)
    return str(e.value)


class Wrapper(torch.Tensor):
    """As torchao's: the data is in inner tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: torch.eye(2).to_sparse(),
            "torch.Tensor of layout torch.sparse_coo and dtype torch.float32 is not a plain",
        ),
        (
            lambda: torch.eye(2).to_sparse_csr(),
            "torch.Tensor of layout torch.sparse_csr and dtype torch.float32 is not a plain",
        ),
        (
            lambda: torch.ones(2, dtype=torch.complex64).conj(),
            "torch.Tensor of layout torch.strided and dtype torch.complex64",
        ),
        (
            lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
            "torch.Tensor of layout torch.strided and dtype",
        ),
        (
            lambda: torch.eye(2).as_subclass(Wrapper),
            f"{__name__}.Wrapper of layout torch.strided and dtype torch.float32",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "torch.Tensor of layout torch.strided and dtype",
        ),
        (lambda: torch.empty(2, device="meta"), "the loader left it on the meta device"),
    ],
    ids=["coo", "csr", "conj", "neg", "wrapper", "nested", "meta"],
)
@pytest.mark.filterwarnings(
    "ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested:UserWarning"
)
def test_tensors_without_plain_memory_are_refused_by_name(
    make: Callable[[], torch.Tensor], text: str
) -> None:
    model = module(layer=module(held=[make()]))
    for look in (proof.slots_of, pack.describe):
        assert refusal(look, model).startswith(f"layer.held[0]: {text}")


@pytest.mark.parametrize(
    "shape",
    [
        lambda: torch.empty(()),
        lambda: torch.empty(0),
        lambda: torch.empty(4, 0, 3),
        lambda: torch.empty(1),
        lambda: torch.empty(5, 3).t(),
        lambda: torch.empty(8, 6)[2:5, 1::2],
        lambda: torch.empty(1, 4).expand(3, 4),
        lambda: torch.empty(4).as_strided((3, 2), (1, 1)),
        lambda: torch.empty(10)[10:],
        lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.empty(SMALL_NBYTES + 4, dtype=torch.uint8),
    ],
    ids=[
        "scalar",
        "empty",
        "empty-3d",
        "one",
        "transposed",
        "sliced",
        "expanded",
        "overlapping",
        "end",
        "nhwc",
        "large",
    ],
)
def test_shape_stride_and_offset_survive(shape: Callable[[], torch.Tensor]) -> None:
    def build() -> nn.Module:
        model = module(weight=nn.Parameter(shape(), requires_grad=False), plain=shape())
        model.register_buffer("buffer", shape())
        return model

    round_trip(build, "weight", "plain", "buffer")


# ---- aliases


def test_overlapping_views_of_one_storage_stay_views_of_one_storage() -> None:
    def build() -> nn.Module:
        base = torch.empty(64)
        model = module(
            first=nn.Parameter(base[:40], requires_grad=False), transposed=base[8:20].view(3, 4).t()
        )
        model.register_buffer("second", base[20:])
        return model

    model = round_trip(build, "first", "second", "transposed")
    assert (
        len({model.get_parameter(n).untyped_storage()._cdata for n in ("first",)} | storages(model))
        == 1
    )
    model.first.data[25] = 7.5
    assert model.second[5] == 7.5


def storages(model: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in (model.second, model.transposed)}


def test_storage_is_packed_once_however_many_tensors_show_it() -> None:
    def build() -> nn.Module:
        base = torch.empty(1 << 20, dtype=torch.uint8)
        return module(views=[base[n:] for n in range(10)])

    with Packed.of(build) as packed:
        assert len(packed.index.tensors) == 10
        assert [storage.nbytes for storage in packed.index.storages] == [1 << 20]
        assert packed.index.nbytes == 1 << 20


def test_fine_tunes_of_one_architecture_are_packed_alike_and_mapped_one_over_the_other() -> None:
    """Places follow from names, shapes and dtypes alone, in the order of the layers."""

    def build() -> nn.Module:
        embed = module(weight=parameter(256, 256))
        layers = [
            module(weight=parameter(128, 300 + n), bias=parameter(128), scale=torch.empty(3))
            for n in range(4)
        ]
        return module(embed=embed, layers=nn.ModuleList(layers), head=module(weight=embed.weight))

    def tune(seed: int) -> Callable[[Any], None]:
        def fill(model: Any) -> None:
            for number, each in enumerate([*model.parameters(), *(x.scale for x in model.layers)]):
                random_bytes(each, 100 * seed + number)

        return fill

    with Packed.of(build, tune(1)) as first, Packed.of(build, tune(2)) as second:
        assert layout_difference(first.index, second.index) == ""
        digests = [{s.digest for s in packed.index.storages} for packed in (first, second)]
        assert len(first.index.storages) == 1 + 4 * 3
        assert digests[0].isdisjoint(digests[1])

        mapping = first.map()
        model: Any = on_meta(build)
        storages = Storages(first.index, mapping, CPU, copy=False)
        Binder(model, first.index, storages).attach(NO_HOOKS)
        addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
        expected: Any = second.attach()
        mapping.map_again([fd.dup() for fd in second.fds])
        storages.refresh()
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
        wanted = dict(expected.named_parameters())
        for name, parameter_ in model.named_parameters():
            assert torch.equal(bytes_below(parameter_), bytes_below(wanted[name])), name
        for ours, theirs in zip(model.layers, expected.layers, strict=True):
            assert torch.equal(bytes_below(ours.scale), bytes_below(theirs.scale))
        mapping.close()


def test_tied_parameter_stays_one_object_with_all_its_names() -> None:
    def build() -> nn.Module:
        embed = module(weight=parameter(8, 4))
        return module(embed=embed, head=module(weight=embed.weight), again=embed.weight)

    with Packed.of(build) as packed:
        assert [sorted(record.names) for record in packed.index.tensors] == [
            ["again", "embed.weight", "head.weight"]
        ]
    model = round_trip(build, "embed.weight")
    assert model.embed.weight is model.head.weight is model.again
    assert sorted(dict(model.named_parameters(remove_duplicate=False))) == [
        "again",
        "embed.weight",
        "head.weight",
    ]


def test_tensor_tied_by_the_loader_alone_is_tied_for_the_engine() -> None:
    def tie(model: Any) -> None:
        model.head.weight = model.embed.weight

    model = round_trip(
        lambda: module(embed=module(weight=parameter(8, 4)), head=module(weight=parameter(8, 4))),
        "embed.weight",
        change=tie,
    )
    assert model.embed.weight is model.head.weight


def test_module_under_two_names_stays_one_module() -> None:
    def build() -> nn.Module:
        layer = module(weight=parameter(4))
        return module(first=layer, second=layer)

    model = round_trip(build, "first.weight")
    assert model.first is model.second
    assert model.first.weight is model.second.weight


def test_equal_tensors_that_are_not_one_stay_two() -> None:
    model = round_trip(lambda: module(a=torch.empty(4), b=torch.empty(4)), change=fill_both)
    assert model.a.data_ptr() != model.b.data_ptr()


def fill_both(model: Any) -> None:
    model.a.fill_(1)
    model.b.fill_(1)


def test_buffer_may_hang_in_another_module_as_its_attribute() -> None:
    def build() -> nn.Module:
        rotary = nn.Module()
        rotary.register_buffer("cos", torch.empty(16), persistent=False)
        return module(rotary=rotary, attention=module(cos=rotary.cos, held=[rotary.cos]))

    model = round_trip(build, "rotary.cos")
    assert model.attention.cos is model.rotary.cos is model.attention.held[0]
    assert dict(model.attention.named_buffers()) == {}
    assert model.state_dict() == {}


def test_same_buffer_may_be_persistent_in_one_module_only() -> None:
    def build() -> nn.Module:
        kept, left = nn.Module(), nn.Module()
        kept.register_buffer("scale", torch.empty(4))
        left.register_buffer("scale", kept.scale, persistent=False)
        return module(left=left, kept=kept)

    model = on_meta(build)
    assert list(model.state_dict()) == ["kept.scale"]
    model = round_trip(build, "left.scale")
    assert list(model.state_dict()) == ["kept.scale"]


# ---- places of tensors


@pytest.mark.parametrize("persistent", [True, False])
def test_persistence_of_a_buffer_survives(persistent: bool) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.register_buffer("table", torch.empty(4), persistent=persistent)
        return model

    model = round_trip(build, "table")
    assert list(model.state_dict()) == ["table"] * persistent


def test_tensors_in_attributes_lists_and_dicts_survive() -> None:
    def build() -> nn.Module:
        return module(
            plain=torch.empty(3),
            listed=[torch.empty(1), [torch.empty(2), None, "x"]],
            mapped={"cos": torch.empty(3), 4: torch.empty(4), "deep": {"list": [torch.empty(5)]}},
        )

    round_trip(
        build,
        "plain",
        "listed[0]",
        "listed[1][0]",
        "mapped['cos']",
        "mapped[4]",
        "mapped['deep']['list'][0]",
    )


@pytest.mark.parametrize(
    "key",
    [
        "a.b",
        "it's",
        'a "quoted" one',
        "both ' and \"",
        "[0]",
        "é → 中",
        "line\nbreak",
        "back\\slash",
        "",
        -1,
    ],
)
def test_keys_of_dicts_survive_whatever_they_spell(key: str | int) -> None:
    def build() -> nn.Module:
        mapped = {key: Helper(scale=torch.empty(3)), "other": torch.empty(2)}
        return module(inner=module(mapped=mapped))

    round_trip(build, f"inner.mapped[{key!r}].scale", "inner.mapped['other']")


@pytest.mark.parametrize("key", [(1, 2), None, True, torch.float32, 1.5])
def test_keys_that_a_path_cannot_spell_are_refused_by_name(key: Any) -> None:
    model = module(inner=module(mapped={key: torch.ones(2)}))
    assert refusal(pack.describe, model) == (
        f"inner.mapped[{key!r}]: this path does not reach the tensor; dict keys must be text or integers"
    )


def test_tensor_in_a_tuple_is_refused_by_name() -> None:
    with Packed.of(lambda: module(inner=module(pair=(torch.ones(1), torch.ones(2))))) as packed:
        assert refusal(packed.attach) == "inner.pair[0]: a tensor inside a tuple cannot be replaced"


def test_tensors_in_helper_objects_survive() -> None:
    def build() -> nn.Module:
        shared = Helper(workspace=torch.empty(9))
        method = Helper(
            kernel=Helper(scales=[torch.empty(3)], shared=shared), weight=torch.empty(2)
        )
        return module(
            layer=module(quant_method=method), other=module(quant_method=Helper(shared=shared))
        )

    model = round_trip(
        build,
        "layer.quant_method.kernel.scales[0]",
        "layer.quant_method.kernel.shared.workspace",
        "layer.quant_method.weight",
    )
    assert model.layer.quant_method.kernel.shared is model.other.quant_method.shared


class OfAPlugIn:
    """A quantization method from outside vLLM and its objects: any class of no known library."""

    __slots__ = ("__dict__", "scale", "unset")

    def __init__(self, **attributes: Any) -> None:
        self.scale = torch.empty(2)
        self.__dict__.update(attributes)


def test_objects_of_a_plug_in_survive() -> None:
    def build() -> nn.Module:
        return module(
            layer=module(quant_method=OfAPlugIn(kernel=OfAPlugIn(workspace=torch.empty(3))))
        )

    round_trip(
        build,
        "layer.quant_method.scale",
        "layer.quant_method.kernel.scale",
        "layer.quant_method.kernel.workspace",
    )


def test_objects_that_are_not_the_models_are_passed_over() -> None:
    class Configuration(SimpleNamespace):
        """As a plug-in's that derives from another library's."""

    def build() -> nn.Module:
        return module(
            standard=SimpleNamespace(tensor=torch.empty(3)),
            derived=Configuration(tensor=torch.empty(3)),
            function=random_bytes,
        )

    with Packed.of(build) as packed:
        assert packed.index.tensors == []


def test_tensors_that_functions_hold_survive() -> None:
    def build() -> nn.Module:
        bias = torch.empty(4)
        helper = Helper(table=torch.empty(5))
        return module(
            route=functools.partial(torch.add, alpha=torch.empty(2)),
            close=lambda x: x + bias,
            method=MethodType(lambda self: self.table, helper),
        )

    model = round_trip(
        build,
        "route.keywords['alpha']",
        "close.__closure__[0].cell_contents",
        "method.__self__.table",
    )
    assert not model.close(torch.zeros(4)).is_meta


@pytest.mark.parametrize(
    ("make", "held"),
    [
        (lambda n: functools.partial(torch.add, alpha=n), "{\".keywords['alpha']\": 2}"),
        (lambda n: functools.partial(torch.add, n), "{'.args[0]': 2}"),
        (lambda n: lambda: n, "{'.__closure__[0].cell_contents': 2}"),
    ],
)
def test_function_that_holds_another_value_is_told_apart(
    make: Callable[[int], Any], held: str
) -> None:
    build = lambda: module(route=make(1))  # noqa: E731
    with Packed.of(build) as packed:
        assert without_leftovers(packed.prove()) == packed.index

    def change(model: Any) -> None:
        model.route = make(2)

    with Packed.of(build, change) as packed, pytest.raises(UnsupportedQuantForIPCError) as e:
        packed.prove()
    assert f"'$holds': {held}" in str(e.value)
    assert skeleton_of(on_meta(build)) == skeleton_of(on_meta(lambda: module(route=make(2)))), (
        "not for the skeleton"
    )


def test_argument_that_a_function_holds_in_a_tuple_is_refused_by_name() -> None:
    with Packed.of(lambda: module(route=functools.partial(torch.add, torch.ones(2)))) as packed:
        assert refusal(packed.attach) == "route.args[0]: a tensor inside a tuple cannot be replaced"


def test_tensors_that_hang_on_a_parameter_survive() -> None:
    def build() -> nn.Module:
        model = module(weight=parameter(4))
        model.weight.quant_state = {0: OfAPlugIn(absmax=torch.empty(3))}
        model.weight.weight_loader = lambda: model
        return model

    round_trip(build, "weight.quant_state[0].absmax", "weight.quant_state[0].scale")


def test_what_the_loader_alone_hung_on_a_parameter_is_refused_by_name() -> None:
    def change(model: Any) -> None:
        model.weight.quant_state = {0: OfAPlugIn()}

    with Packed.of(lambda: module(weight=parameter(4)), change) as packed:
        assert refusal(packed.attach) == (
            "weight.quant_state[0].scale: no object here for the tensor "
            "('Parameter' object has no attribute 'quant_state')"
        )


def test_module_outside_the_tree_is_walked_with_its_children() -> None:
    def build() -> nn.Module:
        outside = module(child=module(weight=parameter(3)))
        outside.child.register_buffer("scale", torch.empty(1))
        return module(layer=module(quant_method=Helper(fallback=outside)))

    model = round_trip(
        build, "layer.quant_method.fallback.child.weight", "layer.quant_method.fallback.child.scale"
    )
    assert isinstance(model.layer.quant_method.fallback.child.weight, nn.Parameter)


def test_modules_that_refer_to_their_parents_are_walked_once() -> None:
    def build() -> nn.Module:
        parent = module(child=module(weight=parameter(3)))
        parent.child.parent = parent
        parent.child.itself = parent.child
        return parent

    with Packed.of(build) as packed:
        assert [record.names for record in packed.index.tensors] == [["child.weight"]]
    round_trip(build, "child.weight")


def test_helper_objects_that_refer_to_each_other_are_walked_once() -> None:
    def build() -> nn.Module:
        one = Helper(scale=torch.empty(1))
        vars(one)["other"] = Helper(back=one, list=[one])
        return module(method=one, cycle=[one])

    round_trip(build, "method.scale")


# ---- parameters and buffers


class ScaleParameter(nn.Parameter):
    """As vLLM's: a Parameter class that carries how it is sharded."""


def test_parameter_subclass_and_its_attributes_survive() -> None:
    def build() -> nn.Module:
        scale = ScaleParameter(torch.empty(4), requires_grad=False)
        scale.output_dim = 1
        scale.weight_loader = round_trip
        return module(scale=scale, plain=parameter(2))

    model = round_trip(build, "scale", "plain")
    assert type(model.scale) is ScaleParameter
    assert type(model.plain) is nn.Parameter
    assert vars(model.scale) == {"output_dim": 1, "weight_loader": round_trip}


def test_parameter_that_post_processing_replaced_takes_the_new_class() -> None:
    def change(model: Any) -> None:
        model.weight = nn.Parameter(torch.empty(8, 2, dtype=torch.int8), requires_grad=False)

    build = lambda: module(weight=ScaleParameter(torch.empty(4, 4), requires_grad=False))  # noqa: E731
    assert type(round_trip(build, "weight", change=change).weight) is nn.Parameter


def test_parameter_subclass_that_only_the_loader_has_is_refused_by_name() -> None:
    def change(model: Any) -> None:
        model.weight = ScaleParameter(torch.empty(4), requires_grad=False)

    with Packed.of(lambda: module(weight=parameter(4)), change) as packed:
        assert refusal(packed.prove) == (
            f"weight: class is torch.nn.parameter.Parameter, loaded as {__name__}.ScaleParameter; this model cannot be "
            "attached, load it from disk"
        )


def test_none_parameters_and_buffers_stay_none() -> None:
    def build() -> nn.Module:
        model = module(weight=parameter(3))
        model.register_parameter("bias", None)
        model.register_buffer("mask", None)
        return model

    model = round_trip(build, "weight")
    assert list(model._parameters) == ["weight", "bias"]
    assert model.bias is model.mask is None
    assert list(model._buffers) == ["mask"]


def test_what_post_processing_made_removed_and_moved_is_there_gone_and_moved() -> None:
    """Without the hooks in the engine: the index alone says it."""

    def change(model: Any) -> None:
        layer = model.layer
        del layer.weight
        layer.register_parameter("packed", parameter(2, 8, dtype=torch.int32))
        layer.scale = parameter(3)
        layer.bias_as_attribute = torch.empty(4)
        layer.register_buffer("moved", torch.empty(5), persistent=False)

    def build() -> nn.Module:
        layer = module(weight=parameter(4, 4), moved=parameter(5))
        layer.register_buffer("old_table", torch.empty(1))
        layer.register_parameter("scale", None)
        return module(layer=layer)

    def change_and_drop(model: Any) -> None:
        del model.layer.old_table, model.layer.moved
        change(model)

    model = round_trip(
        build,
        "layer.packed",
        "layer.scale",
        "layer.bias_as_attribute",
        "layer.moved",
        change=change_and_drop,
    )
    assert sorted(model.layer._parameters) == ["packed", "scale"]
    assert list(model.layer._buffers) == ["moved"]
    assert model.state_dict().keys() == {"layer.packed", "layer.scale"}
    assert not hasattr(model.layer, "weight")


def test_proof_tells_what_post_processing_consumed() -> None:
    def consume(model: Any) -> None:
        del model.layer.packed
        model.layer.register_parameter("weight", parameter(16))

    build = lambda: module(layer=module(packed=parameter(4, 4), scales=[torch.empty(2)]))  # noqa: E731
    with Packed.of(build, consume) as packed:
        index = packed.prove()
        assert index.leftovers == ["layer.packed"]
        told = packed.but(
            index=msgspec.structs.replace(index, leftovers=["layer.packed", "layer.gone.packed"])
        )
        assert refusal(told.attach) == (
            "layer.gone.packed: no tensor here to remove ('Module' object has no attribute 'gone')"
        )


def test_list_that_post_processing_fills_is_filled_when_the_hooks_run_too() -> None:
    def hook(model: Any) -> None:
        model.scales.extend([torch.zeros(3), torch.zeros(4)])

    build = lambda: module(scales=[], mark="x")  # noqa: E731
    round_trip(build, "scales[0]", "scales[1]", change=hook, run_hooks=hook)
    with Packed.of(build, hook) as packed:
        text = refusal(packed.attach)
    assert text == "scales[0]: no object here for the tensor (list index out of range)"


def test_order_of_parameters_and_buffers_stays() -> None:
    def build() -> nn.Module:
        model = module(c=parameter(1), a=parameter(2), b=parameter(3))
        for name in "zxy":
            model.register_buffer(name, torch.empty(1))
        return model

    model = round_trip(build, *"cabzxy")
    assert list(model.state_dict()) == list("cabzxy")


def test_memory_that_is_not_torchs_is_packed_too() -> None:
    array = np.arange(8, dtype=np.float32)

    def change(model: Any) -> None:
        model.table = torch.from_numpy(array)

    with Packed.of(lambda: module(table=torch.empty(8)), change) as packed:
        assert packed.attach().table.tolist() == list(range(8))
    assert array.tolist() == list(range(8))


def test_sources_are_freed_while_packing() -> None:
    model = module(weight=parameter(1000), views=[torch.ones(100)])
    kept = [model.weight, model.views[0]]
    with Packed.of(lambda: model):
        assert [tensor.untyped_storage().nbytes() for tensor in kept] == [0, 0]


# ---- whose memory it is


def large_and_small() -> nn.Module:
    model = module(
        weight=parameter(SMALL_NBYTES), workspace=parameter(SMALL_NBYTES), small=parameter(4)
    )
    model.register_buffer("running_mean", torch.zeros(SMALL_NBYTES))
    return model


def test_small_and_mutable_tensors_are_private_others_shared() -> None:
    with Packed.of(large_and_small) as packed:
        private = {
            record.names[0]: packed.index.segments[
                packed.index.storages[record.storage or 0].segment
            ].private
            for record in packed.index.tensors
        }
    assert private == {"weight": False, "workspace": True, "small": True, "running_mean": True}


@pytest.mark.parametrize("copy", [True, False])
def test_what_one_engine_writes_no_other_sees(copy: bool) -> None:
    with Packed.of(
        large_and_small, lambda model: [p.data.zero_() for p in model.parameters()]
    ) as packed:
        first, second = packed.attach(copy=copy), packed.attach(copy=copy)
        for tensor in [*first.parameters(), *first.buffers()]:
            tensor.data.fill_(3)
        third = packed.attach(copy=copy)
        for model in (second, third):
            assert [tensor.any().item() for tensor in [*model.parameters(), *model.buffers()]] == [
                False
            ] * 4
        assert [tensor.all().item() for tensor in first.parameters()] == [True] * 3
        # The segments' bytes are unchanged.
        assert without_leftovers(packed.prove()) == packed.index


# ---- into a model that is built already


def test_copy_into_writes_in_place() -> None:
    def build() -> nn.Module:
        model = module(weight=parameter(6, 2), plain=torch.zeros(2))
        model.register_buffer("table", torch.empty(3))
        return model

    with Packed.of(
        build, lambda model: [random_bytes(model.weight, 1), model.table.fill_(2)]
    ) as packed:
        model = build()
        addresses = [model.weight.data_ptr(), model.table.data_ptr()]
        mapping = packed.map()
        assert copy_into(model, packed.index, Storages(packed.index, mapping, CPU, copy=False)) == 2
        assert facts(model.weight) == facts(packed.attach().weight)
        assert model.table.tolist() == [2, 2, 2]
        assert [model.weight.data_ptr(), model.table.data_ptr()] == addresses


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            lambda: module(weight=parameter(3, 2)),
            "tensor weight is torch.float32 (3, 2) in the model and torch.float32 (6, 2) in the cache",
        ),
        (
            lambda: module(weight=parameter(6, 2, dtype=torch.float16)),
            "tensor weight is torch.float16 (6, 2) in the model and torch.float32 (6, 2) in the cache",
        ),
        (
            lambda: module(other=parameter(6, 2)),
            "the model has no tensor weight: it was built or post-processed differently",
        ),
    ],
    ids=["shape", "dtype", "name"],
)
def test_copy_into_another_model_writes_nothing(other: Build, text: str) -> None:
    def build() -> nn.Module:
        return module(first=parameter(2), weight=parameter(6, 2))

    with Packed.of(build, lambda model: model.first.data.fill_(5)) as packed:
        model = other()
        model.first = parameter(2)
        model.first.data.zero_()
        with pytest.raises(IndexFormatError) as e:
            copy_into(model, packed.index, Storages(packed.index, packed.map(), CPU, copy=False))
        assert str(e.value) == text
        assert model.first.tolist() == [0, 0]


# ---- hostile and broken indexes


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dtype": "float77"}, "tensor w: this torch has no dtype 'float77'"),
        ({"dtype": "nn"}, "tensor w: this torch has no dtype 'nn'"),
        ({"dtype": "__class__"}, "tensor w: this torch has no dtype '__class__'"),
        ({"shape": [1025]}, "tensor w reaches to byte 4100 of a storage of 4096"),
        ({"stride": [2]}, "tensor w reaches to byte 8188 of a storage of 4096"),
        ({"storage_offset": 1}, "tensor w reaches to byte 4100 of a storage of 4096"),
        ({"storage": None}, "tensor w reaches to byte 4096 of a storage of 0"),
        (
            {"shape": [1 << 62], "stride": [1 << 62]},
            f"tensor w reaches to byte {((1 << 62) - 1 << 64) + 4} of a storage",
        ),
        (
            {"shape": [], "stride": [], "storage_offset": 1024},
            "tensor w reaches to byte 4100 of a storage of 4096",
        ),
        (
            {"shape": [0, 1 << 63], "stride": [1, 1]},
            "tensor w: torch cannot count shape [0, 9223372036854775808], stride [1, 1], offset 0",
        ),
        (
            {"shape": [0], "storage_offset": 1 << 63},
            "tensor w: torch cannot count shape [0], stride [1], offset 9223372036854775808",
        ),
    ],
    ids=str,
)
def test_tensor_outside_its_storage_is_never_formed(changed: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {"dtype": "float32", "shape": [1024], "stride": [1], "storage": 0}
    record = TensorRecord(names=["w"], kind="parameter", **(fields | changed))
    with Packed.of(lambda: module(w=torch.empty(1024))) as packed:
        storages = Storages(packed.index, packed.map(), CPU, copy=False)
        assert tensor_of(TensorRecord(names=["w"], kind="parameter", **fields), storages).shape == (
            1024,
        )
        with pytest.raises(IndexFormatError) as e:
            tensor_of(record, storages)
    assert str(e.value).startswith(text)


def test_tensor_that_the_index_lacks_is_never_left_on_the_meta_device() -> None:
    def forget(model: Any) -> None:
        del model.layer.held[1]

    with Packed.of(
        lambda: module(layer=module(held=[torch.ones(1), torch.ones(2)])), forget
    ) as packed:
        model = packed.attach()
        assert model.layer.held[1] is None
        assert refusal(packed.prove) == (
            "layer.held: is {'$type': 'builtins.list', '$len': 2}, loaded as {'$type': 'builtins.list', '$len': 1}; "
            "this model cannot be attached, load it from disk"
        )


@pytest.mark.parametrize(
    "path", ["a.b.c", "weight.x", "held[0].y", "nothing['x']", "held['x']", "weight[0][1]"]
)
def test_paths_that_lead_nowhere_raise_what_binding_expects(path: str) -> None:
    with pytest.raises(LOOKUP_ERRORS):
        resolve_owner(module(weight=None, held=[None]), path + ".leaf")


# ---- the skeleton


def test_skeleton_is_the_same_for_models_built_alike() -> None:
    assert skeleton_of(large_and_small()) == skeleton_of(on_meta(large_and_small))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "more", parameter(1)),
        lambda m: setattr(m, "weight", parameter(5)),
        lambda m: setattr(m, "weight", parameter(4, dtype=torch.float16)),
        lambda m: setattr(m, "weight", ScaleParameter(torch.empty(4))),
        lambda m: setattr(m, "inner", nn.Identity()),
        lambda m: setattr(m, "method", Helper(kernel=Helper())),
        lambda m: m.scales.append(torch.empty(1)),
        lambda m: m._non_persistent_buffers_set.add("table"),
    ],
    ids=[
        "name",
        "shape",
        "dtype",
        "parameter-class",
        "module-class",
        "kernel-class",
        "list",
        "persistence",
    ],
)
def test_skeleton_tells_models_apart(change: Callable[[Any], None]) -> None:
    def build() -> Any:
        model = module(
            weight=parameter(4),
            inner=nn.Module(),
            method=Helper(kernel=None),
            scales=[torch.empty(2)],
        )
        model.register_buffer("table", torch.empty(1))
        return model

    other = build()
    change(other)
    assert skeleton_of(other) != skeleton_of(build())


def test_skeleton_does_not_depend_on_plain_values() -> None:
    assert skeleton_of(module(eps=1e-5, weight=parameter(1))) == skeleton_of(
        module(eps=1e-6, weight=parameter(1))
    )


def test_index_of_the_helpers_is_valid() -> None:
    assert an_index().nbytes == 4096
