"""Moves adapters between train states and PEFT's files."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float32

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import peft_experts
from zerojax.interop.huggingface.exporting import EXPORT_DTYPES, new_folder
from zerojax.interop.huggingface.families import Family, describe_model, family_named, fitting, read_model
from zerojax.interop.huggingface.mapping import layers_of, place_at
from zerojax.interop.huggingface.peft_files import (
    KINDS,
    WEIGHTS,
    Factor,
    PeftAdapter,
    Place,
    Settings,
    Tensor,
    alpha_for,
    key_of,
    module_of,
    path_pattern,
    side_by_side,
    target_modules,
    tensors_of_model,
    weight_shapes,
    whole_keys,
    within,
)
from zerojax.interop.huggingface.safetensors_files import SafetensorWriter, TensorSpec
from zerojax.interop.huggingface.save import cast, gather_layer
from zerojax.interop.huggingface.source import CONFIG, is_model, read_config_json
from zerojax.matmul.lora import A, B, LoRA
from zerojax.models.config import GPTConfig
from zerojax.run.build import is_first
from zerojax.run.checkpoints import read_manifest
from zerojax.run.checkpoints.canonical import with_weights
from zerojax.run.checkpoints.conversion import abstract_part
from zerojax.run.run_dir import RunFolder
from zerojax.sharding import param_tree
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.train.gathering import gather_adapters
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, check_there
from zerojax.validation.spelling import dtype_name

Arrays = Mapping[param_tree.Path, Float32[np.ndarray, "..."]]


def export_adapter(
    state: TrainState,
    model: GPTConfig,
    out: Path,
    *,
    base: str | None = None,
    family: str | None = None,
    dtype: str = "float32",
) -> list[str]:
    """Write a state's adapters as PEFT's files. All processes must call it; the first one writes.

    Other trained weights are written as well: biases alone as PEFT's ``bias``, other modules whole, as its
    ``modules_to_save``.

    Args:
        state: the filled state of a ``zerojax.models.GPT``.
        model: its shape.
        out: the folder to create; it appears when it is complete.
        base: the model that the adapters belong to, if it is known, for ``base_model_name_or_path``.
        family: the ``model_type`` of that model. It can be left out if ``base`` is its folder, or if all
            families of this shape have the same modules.
        dtype: dtype of the tensors: float32, float16 or bfloat16.

    Returns:
        ``target_modules``: the ends of the names of the modules that have adapters.

    Raises:
        ConfigurationError: there are no adapters, a module with an adapter is trained as well, or ``out``
            exists. Or no Hugging Face family fits the model, several fit whose modules differ, or a value is
            out of the dtype's range.
    """
    kind = EXPORT_DTYPES[dtype_name(dtype, "dtype", tuple(EXPORT_DTYPES))]
    spec = state.spec
    if (lora := spec.lora) is None:
        raise ConfigurationError("there are no adapters to export: create the state with lora=")
    own = _family(spec, model, base, family)
    parts = tensors_of_model(own, model)
    adapted = [tensor for tensor in parts if _is_adapted(spec, parts[tensor])]
    trained = [tensor for tensor in parts if _is_trained(spec, parts[tensor])]
    modules, targets = list(map(module_of, parts)), list(map(module_of, adapted))
    whole = {module_of(tensor) for tensor in trained if not tensor.endswith(".bias")}
    if both := sorted(whole & {*targets}):
        raise ConfigurationError(
            f"{both[0]!r} holds a trained weight and a weight with an adapter, but PEFT supports only one of "
            "them. Freeze the first (ZeroConfig.frozen), or export the whole model with its adapters merged"
        )
    biases = {module_of(tensor) for tensor in trained} - whole
    check_there(state)
    values = from_tree(gather_adapters(state))
    ranks, alphas, tensors = dict[str, int](), dict[str, float](), dict[str, np.ndarray]()
    for tensor, module in zip(adapted, targets, strict=True):
        factors = [factor for part in parts[tensor] for factor in _factors_within(spec, part, values)]
        a, b = side_by_side(factors, parts[tensor][0].outputs, factors[0].scale)
        tensors |= {key_of(module, name): x.T for name, x in zip(KINDS, (a, b), strict=True)}
        ranks[module], alphas[module] = len(b), alpha_for(lora, len(b), factors[0].scale)
    of_experts = peft_experts.parameters(own, model)
    held = {
        one: [factor for part in of_experts[one] for factor in _factors_within(spec, part, values)]
        for one in of_experts
    }
    parameters = list[str]()
    for (module, parameter), factors in held.items():
        if not factors:
            continue
        a, b = side_by_side(factors, of_experts[module, parameter][0].outputs, factors[0].scale)
        parameters = [name for (other, name), found in held.items() if other == module and found]
        wrapper = peft_experts.wrapped(module, parameter, parameters)
        pair = peft_experts.to_files(a, b, interleaved=peft_experts.interleaves(parameter, own))
        tensors |= {key_of(wrapper, name): x for name, x in zip(KINDS, pair, strict=True)}
        name, rank = f"{module}.{parameter}", a.shape[-1]
        ranks[name], alphas[name] = rank, alpha_for(lora, rank, factors[0].scale)
    for tensor in parts:
        if tensor in trained or module_of(tensor) in whole:
            tensors[whole_keys(tensor)[module_of(tensor) in targets]] = _whole(state, parts[tensor])
    settings = Settings(
        lora,
        _by_ends(ranks, lora.rank),
        _by_ends(alphas, lora.alpha),
        "none" if not biases else "lora_only" if biases <= {*targets} else "all",
        sorted(whole) if own.composite else target_modules(whole, modules),
        parameters,
    )
    ends = target_modules(targets, modules)
    with new_folder(out) as draft:
        if is_first():
            specs = {name: TensorSpec(kind, x.shape) for name, x in tensors.items()}
            writer = SafetensorWriter(draft, specs, sys.maxsize, WEIGHTS)
            for name, x in tensors.items():
                writer.write(name, cast(name, x, kind))
            writer.close()
            settings.write(draft, ends, own, base)
    return ends


def adapter_base(base: Path | None, folder: RunFolder, model: GPTConfig) -> tuple[str | None, str]:
    """The Hugging Face folder of a run's frozen weights (or None), and the family of its names.

    ``base`` is that folder, or the checkpoint that holds the weights; None if neither is known.
    """
    source, owner = None, folder
    if base is not None and is_model(base):
        source = str(base)
    elif base is not None:
        owner = RunFolder(base.parents[1])
        if not read_manifest(base).record.position:  # not trained since its import
            source = owner.read_summary().get("source")
    if is_model(owner.huggingface):
        return source, _family_of_folder(owner.huggingface).model_type
    return source, describe_model(model)[0].model_type


def adapter_lora(folder: Path, model: GPTConfig) -> LoRA:
    """The settings of adapters that can hold PEFT's files: create the state with them.

    Each module's adapter keeps its rank and scale. zerojax holds query, key and value side by side. They get
    separate adapters (``LoRA.pieces``), unless the files' adapters have the same A.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.
        model: the shape of the model that they belong to.

    Raises:
        ConfigurationError: a file is missing or damaged, has an option that zerojax does not support, or
            belongs to another model; names the key or tensor.
    """
    return PeftAdapter(folder, model).lora


def adapter_frozen(folder: Path, model: GPTConfig) -> tuple[str, ...]:
    """The ``ZeroConfig.frozen`` of a state that can hold all of PEFT's files.

    The patterns freeze everything except biases and modules that the files hold whole, and embeddings and
    heads with an adapter, which is added to them. Arguments and errors are as for ``adapter_lora``.
    """
    return PeftAdapter(folder, model).frozen


def load_adapter(state: TrainState, folder: Path, model: GPTConfig) -> TrainState:
    """The state with the adapters of PEFT's files; all processes must call it.

    Where the state's adapters are larger, or the files have none, A keeps the state's values and B is zero.
    Where the scales differ, B compensates. The optimizer's state is unchanged. The result shares all other
    arrays with ``state``, so a step from either donates the arrays of both.

    Args:
        state: the filled state of a ``zerojax.models.GPT``, created with ``lora=adapter_lora(folder, model)``
            and ``frozen=adapter_frozen(folder, model)``. It may have more or larger adapters, and fewer
            frozen weights. Weights that the files hold whole must have the base model's values.
        folder: holds adapter_config.json and adapter_model.safetensors.
        model: the model's shape.

    Raises:
        ConfigurationError: as ``adapter_lora``, or the state cannot hold the files' adapters.
    """
    found = PeftAdapter(folder, model)
    _check_fits(state.spec, found)
    check_there(state)
    spec, values = state.spec, from_tree(gather_adapters(state))
    new: dict[param_tree.Path, np.ndarray] = {}
    for leaf in spec.weights:
        if pair := spec.adapters.get(leaf.path):
            a, b = (values[part.path].copy() for part in pair)
            new |= {part.path: x for part, x in zip(pair, (a, b), strict=True)}
            for layer in layers_of(leaf):
                at = () if layer is None else (layer,)
                factors = found.factors.get(place_at(leaf.path, layer, _order(spec)), [])
                _fill(spec, leaf, a[at], b[at], factors)
        if any(place_at(leaf.path, layer, _order(spec)) in found.given for layer in layers_of(leaf)):
            new[leaf.path] = _with_given(state, leaf, found)
    placed: dict[param_tree.Path, jax.Array] = {}
    for leaf in spec.leaves:
        if leaf.path in new:  # in canonical form, spread over the devices
            like = abstract_part(state.spec, leaf)
            placed[leaf.path] = jax.make_array_from_callback(
                like.shape, like.sharding, new[leaf.path].__getitem__
            )
    return with_weights(state, {"params": to_tree(placed)})


def _family(spec: TrainSpec, model: GPTConfig, base: str | None, named: str | None) -> Family:
    """The family whose names an export has."""
    if named is not None:
        family = family_named(named)
        if family is None or not all(map(family.parts(model).at, weight_shapes(model))):
            known = ", ".join(one.model_type for one in fitting(model))
            raise ConfigurationError(f"family={named!r} does not fit this model. Use one of {known}")
        return family
    if base is not None and is_model(Path(base)):
        return _family_of_folder(Path(base))
    first, _ = describe_model(model)

    def written(family: Family) -> set[str]:
        parts = tensors_of_model(family, model)
        return {x for x, own in parts.items() if _is_adapted(spec, own) or _is_trained(spec, own)}

    if others := [family for family in fitting(model) if written(family) != written(first)]:
        raise ConfigurationError(
            f"{first.architecture} and {others[0].architecture} have this shape but different modules, and "
            "PEFT would silently skip modules that it does not find. Pass the base's folder as base=, or "
            f"its model_type as family=, such as {first.model_type!r}"
        )
    return first


def _family_of_folder(folder: Path) -> Family:
    return read_model(read_config_json(folder), str(folder / CONFIG)).family


def _order(spec: TrainSpec) -> tuple[int, ...]:
    """The kinds of the model's layers; none if they are a list."""
    return spec.adapter.orders.get("blocks", ())


def _leaves(spec: TrainSpec) -> dict[Place, tuple[ParamLayout, int | None]]:
    """The layout and layer of each weight, by its place."""
    return spec.once(
        "weights by place",
        lambda: {
            place_at(leaf.path, layer, _order(spec)): (leaf, layer)
            for leaf in spec.weights
            for layer in layers_of(leaf)
        },
    )


def _is_adapted(spec: TrainSpec, parts: Iterable[Tensor]) -> bool:
    """Whether a tensor has columns with an adapter. ``_experts_of`` has the adapters of experts."""
    for part in parts:
        leaf, _ = _leaves(spec)[part.place]
        if spec.lora is None or leaf.path not in spec.adapters or leaf.of_experts:
            continue
        pieces, own = spec.lora.pieces_of(leaf.name, leaf.shape[-1]), part.columns
        if any(one.columns.start < own.stop and own.start < one.columns.stop for one in pieces):
            return True
    return False


def _is_trained(spec: TrainSpec, parts: Iterable[Tensor]) -> bool:
    return any(not _leaves(spec)[part.place][0].frozen for part in parts)


def _factors_within(spec: TrainSpec, part: Tensor, values: Arrays) -> list[Factor]:
    """A part's adapters, with columns of its tensor's module."""
    leaf, layer = _leaves(spec)[part.place]
    if spec.lora is None or leaf.path not in spec.adapters:
        return []
    a, b = (values[*leaf.path, name][() if layer is None else layer] for name in (A, B))
    factors = [
        Factor(a[..., one.ranks], b[..., : one.rank, one.columns], one.columns.start, one.scale)
        for one in spec.lora.pieces_of(leaf.name, leaf.shape[-1])
    ]
    return within(factors, part.columns, part.rows.start)


def _by_ends[T](values: Mapping[str, T], default: T) -> dict[str, T]:
    """The values that are not the default, by the ends of the modules' names."""
    found = {}
    for value in {x for x in values.values() if x != default}:
        own = [module for module, x in values.items() if x == value]
        found |= dict.fromkeys(target_modules(own, values), value)
    return dict(sorted(found.items()))


def _whole(state: TrainState, parts: Sequence[Tensor]) -> Float32[np.ndarray, "..."]:
    """A tensor of the model from the weights that it holds, decoded if they are frozen."""
    stored = from_tree(state.params) | from_tree(state.frozen)
    whole = np.empty(parts[0].shape, np.float32)
    for part in parts:
        leaf, layer = _leaves(state.spec)[part.place]
        whole[part.region()] = part.of(gather_layer(state.spec, leaf, stored[leaf.path], layer))
    return whole


def _check_fits(spec: TrainSpec, found: PeftAdapter) -> None:
    """Refuse a state that cannot hold everything in the files."""
    way_out = f"create the state with lora=huggingface.adapter_lora({str(found.folder)!r}, model)"
    if (lora := spec.lora) is None:
        raise ConfigurationError(f"the state has no adapters: {way_out}")
    leaves = {place: leaf for place, (leaf, _) in _leaves(spec).items()}
    for place, leaf in leaves.items():
        if found.shapes.get(place, leaf.shape) != leaf.shape:
            raise ConfigurationError(
                f"{leaf.name!r} has shape {leaf.shape} in the state, but {found.shapes[place]} in model=. "
                "Pass the shape of the state's model"
            )
    for place, factors in sorted(found.factors.items()):
        leaf = leaves.get(place)
        if leaf is None or leaf.path not in spec.adapters:
            raise ConfigurationError(
                f"{found.folder} has an adapter for {place[0]!r} of block {place[1]}, but the state has none"
                f": {way_out}"
            )
        held = 0
        for piece in lora.pieces_of(leaf.name, leaf.shape[-1]):
            own = within(factors, piece.columns)
            held += sum(one.b.shape[-1] for one in own)
            needed = side_by_side(own, leaf.shape[-1], 1.0)[0].shape[-1] if own else 0
            if needed > piece.rank:
                raise ConfigurationError(
                    f"the state's adapter of {place[0]!r} has rank {piece.rank}, but {found.folder} needs "
                    f"rank {needed}: {way_out}"
                )
        if held < sum(one.b.shape[-1] for one in factors):
            raise ConfigurationError(
                f"the state has adapters for fewer columns of {place[0]!r} than {found.folder}: {way_out}"
            )
    for place in sorted(found.given, key=str):
        leaf = leaves.get(place)
        if leaf is None or leaf.frozen:
            raise ConfigurationError(
                f"{found.folder} has values for {place[0]!r}, but the state freezes it. Train it with "
                f"ZeroConfig(frozen=(\"*\", '!{path_pattern(place[0])}')), or everything in the files with "
                f"frozen=huggingface.adapter_frozen({str(found.folder)!r}, model)"
            )


def _fill(spec: TrainSpec, leaf: ParamLayout, a: np.ndarray, b: np.ndarray, factors: list[Factor]) -> None:
    """Put the factors of one layer of a weight into its adapter."""
    assert spec.lora is not None
    b[...] = 0
    for piece in spec.lora.pieces_of(leaf.name, leaf.shape[-1]):
        if own := within(factors, piece.columns):
            width = piece.columns.stop - piece.columns.start
            first, second = side_by_side(own, width, piece.scale)
            a[..., piece.ranks.start :][..., : first.shape[-1]] = first
            b[..., : first.shape[-1], piece.columns] = second


def _with_given(state: TrainState, leaf: ParamLayout, found: PeftAdapter) -> Float32[np.ndarray, "..."]:
    """A trained weight of unsharded shape, with the values from the files."""
    stored = from_tree(state.params)[leaf.path]
    layers = []
    for layer in layers_of(leaf):
        values = np.array(gather_layer(state.spec, leaf, stored, layer))
        for part, own, added in found.given.get(place_at(leaf.path, layer, _order(state.spec)), []):
            columns = part.among(values)
            columns[...] = own + columns * added
        layers.append(values)
    return np.stack(layers) if leaf.stack else layers[0]
