"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT holds A as ``[rank, inputs]`` and B as ``[outputs, rank]``, also for GPT-2, whose weights are (in, out),
and each module has an adapter of its own. A module may be some columns of a weight of zerojax (query, key and
value are one), or hold several weights (gate and up in Phi-3). Both are the same in terms of ``Factor``: an A
with a B for a range of columns. Factors of different A stand side by side in one adapter of the sum of their
ranks, each with its own columns of B and zeros elsewhere, which is exact.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Float32

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.families import Family, fitting
from zerojax.interop.huggingface.load import FLOATS
from zerojax.interop.huggingface.mapping import Shape, TensorPart, TensorParts
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.interop.huggingface.source import read_config_json
from zerojax.matmul.lora import LoRA
from zerojax.models import GPT, GPTConfig
from zerojax.validation.untrusted import short

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KINDS = ("lora_A.weight", "lora_B.weight")
EMBEDDING_KINDS = ("lora_embedding_A", "lora_embedding_B")

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",  # the tensors tell whether a tied matrix still is
        "exclude_modules",  # the names of the tensors tell which modules have adapters
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
    }
)
_FIRST_VALUES = (True, "gaussian", "orthogonal", "eva")
"""Ways to draw A and B that leave the base as it is; LoftQ, PiSSA and others change it."""
_MERGE = "merge the adapter into its model with PEFT (merge_and_unload), and import that"
_REFUSAL = f"{_MERGE}, as zerojax lacks these options"
_MAX_REPETITIONS = 4
"""In a pattern of a module's name: with more, a hostile one could match for hours."""

Place = tuple[str, int | None]
"""The name of a weight in ``TensorParts``, and the index of its block, if it is in one."""


def module_of(tensor: str) -> str:
    """The module of a weight or bias, by its name."""
    return tensor.rpartition(".")[0]


def key_of(module: str, kind: str) -> str:
    """The name of a tensor of a module's adapter; ``kind`` is one of ``KINDS``."""
    return f"{PREFIX}{module}.{kind}"


def whole_key(tensor: str, adapted: Collection[str]) -> str:
    """The name of a tensor of the model itself; ``adapted`` are the modules with adapters."""
    module, _, end = tensor.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{end}" if module in adapted else PREFIX + tensor


def target_modules(adapted: Collection[str], every: Collection[str]) -> list[str]:
    """The fewest ends of names by which PEFT finds the modules of a set, and no others.

    An end of a word counts as well: PEFT looks for dots before its targets, but not in ``modules_to_save``.
    """
    found = set[str]()
    for module in adapted:
        words = module.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        found.add(next(end for end in ends if all(one in adapted for one in every if one.endswith(end))))
    return sorted(found)


@dataclass(frozen=True)
class Factor:
    """An A with its B, for a range of a matrix's columns.

    Attributes:
        a: ``[inputs, rank]``.
        b: ``[rank, columns]``.
        start: the first of the columns.
        scale: what A B is multiplied by.
    """

    a: Float32[np.ndarray, "inputs rank"]
    b: Float32[np.ndarray, "rank columns"]
    start: int
    scale: float

    def within(self, start: int, stop: int, to: int = 0) -> "Factor | None":
        """What lies in a range of columns, the first of which becomes column ``to``; None if nothing does."""
        first, last = max(start, self.start), min(stop, self.start + self.b.shape[1])
        if first >= last:
            return None
        b = self.b[:, first - self.start : last - self.start]
        return replace(self, b=b, start=first - start + to)


def within(factors: Sequence[Factor], start: int, stop: int, to: int = 0) -> list[Factor]:
    """``Factor.within`` of those that have something there."""
    return [own for one in factors if (own := one.within(start, stop, to)) is not None]


def side_by_side(
    factors: Sequence[Factor], columns: int, scale: float
) -> tuple[Float32[np.ndarray, "inputs rank"], Float32[np.ndarray, "rank columns"]]:
    """One A and B of a scale that act as all factors do; those with the same A share its columns."""
    different: list[np.ndarray] = []
    numbers = []
    for one in factors:
        number = next((i for i, a in enumerate(different) if np.array_equal(a, one.a)), len(different))
        numbers.append(number)
        different += [one.a] if number == len(different) else []
    ends = np.cumsum([0, *(a.shape[1] for a in different)])
    b = np.zeros((ends[-1], columns), np.float32)
    for number, one in zip(numbers, factors, strict=True):
        rows = slice(ends[number], ends[number + 1])
        b[rows, one.start : one.start + one.b.shape[1]] = one.b * np.float32(one.scale / scale)
    return np.concatenate(different, axis=1), b


class Given(NamedTuple):
    """Values that the files have for columns of a weight that PEFT trains as a whole.

    Attributes:
        tensor: of the model, "{layer}" in it, that they are for.
        columns: of the weight.
        values: in the weight's layout.
        added: whether they are added to the weight, instead of replacing it.
    """

    tensor: str
    columns: slice
    values: Float32[np.ndarray, "..."]
    added: bool


class Settings(NamedTuple):
    """What adapter_config.json says.

    Attributes:
        lora: rank, alpha, dropout, rslora.
        ranks: other ranks, by patterns of modules.
        alphas: other alphas, likewise.
        bias: "none", "all" or "lora_only": which biases are in the files.
        saved: ends of the names of modules that are in the files as a whole.
    """

    lora: LoRA
    ranks: dict[str, int]
    alphas: dict[str, float]
    bias: str
    saved: tuple[str, ...]

    def of(self, module: str) -> tuple[int, float]:
        """The rank and scale of a module's adapter."""
        rank = _by_pattern(self.ranks, module, self.lora.rank)
        return rank, self.lora.scale_of(rank, _by_pattern(self.alphas, module, self.lora.alpha))

    def has(self, tensor: str, adapted: Collection[str]) -> bool:
        """Whether PEFT reads a tensor that belongs to no adapter."""
        module = module_of(tensor)
        biases = self.bias == "all" or (self.bias == "lora_only" and module in adapted)
        return (tensor.endswith(".bias") and biases) or module.endswith(self.saved)


def _by_pattern[T](values: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that PEFT finds to match a module."""
    return next((x for key, x in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@dataclass(frozen=True)
class PeftAdapter:
    """PEFT's files of an adapter for a model, checked.

    Attributes:
        origin: their folder.
        settings: of adapter_config.json.
        factors: of each weight that has an adapter.
        given: of each weight that is trained as a whole.
        shapes: of all weights, by name.
        parts: the tensors of each weight.
    """

    origin: Path
    settings: Settings
    factors: Mapping[Place, list[Factor]]
    given: Mapping[Place, list[Given]]
    shapes: Mapping[str, Shape]
    parts: TensorParts

    @classmethod
    def open(cls, folder: Path, model: GPTConfig) -> "PeftAdapter":
        """Read and check both files.

        Raises:
            ConfigurationError: a file is missing or damaged, has an option that zerojax does not support, or
                belongs to another model; names the key or tensor.
        """
        settings, files = _read_settings(folder), SafetensorFiles(folder, WEIGHTS)
        shapes, parts = weight_shapes(model), _family_parts(folder, files, model)
        reader = _Reader(settings, files, shapes, parts)
        reader.read(model.layers)
        if not reader.factors:
            raise ConfigurationError(
                f"{folder / WEIGHTS} has no adapter for a matrix of a block, and a state needs one: {_MERGE}"
            )
        return cls(folder, settings, reader.factors, reader.given, shapes, parts)

    @cached_property
    def lora(self) -> LoRA:
        """The settings of adapters that hold these, each of its own rank and scale."""
        own = self.settings.lora
        names = sorted({name for name, _ in self.factors})
        pieces = [piece for name in names for piece in self._pieces(name)]
        return replace(own, targets=tuple(map(path_pattern, names)), pieces=tuple(pieces))

    @property
    def frozen(self) -> tuple[str, ...]:
        """The patterns of ``ZeroConfig.frozen`` that train what the files have beside adapters."""
        return ("*", *(f"!{path_pattern(name)}" for name in sorted({name for name, _ in self.given})))

    def _pieces(self, name: str) -> Iterator[tuple[str, int, int, float]]:
        """The ``LoRA.pieces`` of a weight; none if its adapters are those of all."""
        layers = [factors for (own, _), factors in self.factors.items() if own == name]
        width = self.shapes[name][-1]
        ranges = [part.columns.indices(width)[:2] for part in self.parts[name]]
        if all(_are_one(factors, ranges) for factors in layers):
            ranges = [(0, width)]
        lora, found = self.settings.lora, []
        for start, stop in ranges:
            own = [part for factors in layers if (part := within(factors, start, stop))]
            scale = own[0][0].scale if own else lora.scale
            rank = max((side_by_side(part, stop - start, scale)[0].shape[1] for part in own), default=0)
            alpha = alpha_for(lora, rank, scale) if rank else lora.alpha
            found.append((path_pattern(name), stop - start if len(ranges) > 1 else 0, rank, alpha))
        if [piece[1:] for piece in found] != [(0, lora.rank, lora.alpha)]:
            yield from found


def _are_one(factors: Sequence[Factor], ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether the adapters of all of a weight's parts have the same A and scale, as if they were one."""
    first = factors[0]
    covered = sum(one.b.shape[1] for one in factors) == ranges[-1][1]
    return covered and all(one.scale == first.scale and np.array_equal(one.a, first.a) for one in factors)


def alpha_for(lora: LoRA, rank: int, scale: float) -> float:
    """``LoRA.alpha_of`` without the last digits, in which roots of ranks leave their errors."""
    alpha = lora.alpha_of(rank, scale)
    return lora.alpha if math.isclose(alpha, lora.alpha) else float(f"{alpha:.12g}")


def path_pattern(name: str) -> str:
    """The paths of a weight in all blocks, by its name in ``TensorParts``."""
    return re.sub("^block/", "blocks/*/", name)


def weight_shapes(model: GPTConfig) -> dict[str, Shape]:
    """The shapes of a model's weights (of one layer), by their names in ``TensorParts``."""
    abstract = nnx.eval_shape(lambda: GPT(replace(model, scan=True), rngs=nnx.Rngs(0)))
    found: dict[str, Shape] = {}
    for path, x in nnx.to_flat_state(nnx.state(abstract, nnx.Param)):
        if path[0] == "blocks":  # ("blocks", "block", ...), stacked
            found["/".join(map(str, path[1:]))] = x.shape[1:]
        else:
            found["/".join(map(str, path))] = x.shape
    return found


def parts_of(family: Family, model: GPTConfig) -> TensorParts:
    """The tensors of those of a model's weights for which a family has names."""
    parts = family.parts(model, family.prefix)
    return {name: parts[name] for name in weight_shapes(model) if name in parts}


def places_of(parts: TensorParts, layers: int) -> dict[str, list[tuple[Place, TensorPart]]]:
    """The places of each tensor of a model, by its name: several, if it holds several weights."""
    found: dict[str, list[tuple[Place, TensorPart]]] = {}
    for name, own in parts.items():
        for layer in range(layers) if name.startswith("block/") else (None,):
            for part in own:
                found.setdefault(part.name.format(layer=layer), []).append(((name, layer), part))
    return found


def _family_parts(folder: Path, files: SafetensorFiles, model: GPTConfig) -> TensorParts:
    """The tensors of the first family with this model that has all modules of the files."""
    first: tuple[Family, str] | None = None
    for family in fitting(model):
        parts = parts_of(family, model)
        places = places_of(parts, model.layers)
        unknown = [key for key in files.specs if _tensor_of(key) not in places]
        if not unknown:
            return parts
        first = first or (family, min(unknown))
    if first is None:
        raise ConfigurationError("no Hugging Face family fits this model")
    raise ConfigurationError(
        f"{folder / WEIGHTS} has {short(first[1])}, and no such module is in this {first[0].architecture} of "
        f"{model.layers} blocks: is the adapter for another model?"
    )


def _tensor_of(key: str) -> str:
    """The tensor of the model that a tensor of the files is for."""
    name = key.removeprefix(PREFIX)
    for kind in (*KINDS, *EMBEDDING_KINDS):
        if name.endswith(f".{kind}"):
            return f"{name.removesuffix(kind)}weight"
    return name.replace(".base_layer.", ".")


def _read_settings(folder: Path) -> Settings:
    values = read_config_json(folder, CONFIG, "a PEFT adapter")
    # PEFT writes all of its options: those that are off are null, false or empty.
    keys = ConfigKeys({name: x for name, x in values.items() if x}, str(folder / CONFIG), _HARMLESS)
    keys.only("peft_type", "LORA")
    keys.only("task_type", "CAUSAL_LM")
    keys.only("bias", "none", "all", "lora_only")
    keys.only("init_lora_weights", *_FIRST_VALUES)
    found = {
        "rank": keys.take("r", int),
        "alpha": keys.take("lora_alpha", float),
        "dropout": keys.take("lora_dropout", float, 0.0),
        "rslora": keys.take("use_rslora", bool, False),
    }
    ranks, alphas = (keys.take(f"{name}_pattern", dict, {}) for name in ("rank", "alpha"))
    saved = keys.take("modules_to_save", list, [])
    bias = keys.take("bias", str, "none")
    keys.finish(_REFUSAL)
    try:
        lora = LoRA(**found)
        for name, patterns, kinds in (("rank", ranks, (int,)), ("alpha", alphas, (int, float))):
            for pattern, value in patterns.items():
                _check_pattern(f"{name}_pattern", pattern)
                if type(value) not in kinds:
                    raise ConfigurationError(f"{name}_pattern has {short(value)} for {short(pattern)}")
                replace(lora, **{name: value})  # refuses what cannot be
        if not all(isinstance(name, str) and name for name in saved):
            raise ConfigurationError(f"modules_to_save = {short(saved)} should be names of modules")
        return Settings(lora, ranks, {key: float(x) for key, x in alphas.items()}, bias, tuple(saved))
    except ConfigurationError as error:
        raise ConfigurationError(f"{folder / CONFIG}: {error}") from error


def _check_pattern(setting: str, pattern: str) -> None:
    """Refuse a regular expression that is none, or might take for ever."""
    repetitions = len(re.findall(r"[*+?{]", pattern))
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ConfigurationError(f"{setting}: {short(pattern)} is no pattern: {error}") from error
    if repetitions > _MAX_REPETITIONS or re.search(r"\)[*+?{]", pattern):
        raise ConfigurationError(f"{setting}: {short(pattern)} repeats too much: name the modules instead")


class _Reader:
    """Reads the tensors of the files into the places of a model's weights; see ``PeftAdapter``."""

    def __init__(
        self, settings: Settings, files: SafetensorFiles, shapes: Mapping[str, Shape], parts: TensorParts
    ) -> None:
        self._settings, self._files, self._shapes, self._parts = settings, files, shapes, parts
        self.factors: dict[Place, list[Factor]] = {}
        self.given: dict[Place, list[Given]] = {}

    def read(self, layers: int) -> None:
        """Read every tensor; each has a place in a model of so many blocks, as ``_family_parts`` found."""
        keys = dict[str, list[str]]()
        for key in sorted(self._files.specs):
            keys.setdefault(_tensor_of(key), []).append(key)
        adapted = {module_of(tensor) for tensor, own in keys.items() if any(".lora_" in key for key in own)}
        for tensor, places in places_of(self._parts, layers).items():
            module, own = module_of(tensor), keys.get(tensor, [])
            for key in own:
                if ".lora_" not in key:
                    copies = [part.name for (name, _), _ in places for part in self._tied(name)]
                    named = any(self._settings.has(one, adapted) for one in (tensor, *copies))
                    if not (named or key.endswith(".base_layer.weight")):
                        raise ConfigurationError(
                            f"{key} is in the files, and neither bias nor modules_to_save of {CONFIG} has it"
                        )
                    self._take_whole(key, places)
            if tensor != f"{module}.weight" or module not in adapted:
                continue
            if all(name.startswith("block/") for (name, _), _ in places):
                self._take_factors(module, places)
            else:
                self._add_product(module, places)
        for end in self._settings.saved:
            if not any(module_of(tensor).endswith(end) for tensor in keys):
                raise ConfigurationError(f"the files lack {short(end)}, which modules_to_save has")
        for place, given in self.given.items():
            if place in self.factors:
                raise ConfigurationError(
                    f"the files have {given[0].tensor}, and an adapter of {place[0]!r}, which holds it: "
                    f"{_MERGE}"
                )
            if tied := self._tied(place[0]):
                self.given[place] = self._once(tied, given)

    def _tied(self, name: str) -> tuple[TensorPart, ...]:
        """The copies of a matrix that the model has once; none of any other weight."""
        parts = self._parts[name]
        return () if all(part.required for part in parts) else parts

    def _once(self, tied: Sequence[TensorPart], given: list[Given]) -> list[Given]:
        """The values of a matrix of which the files have copies.

        Raises:
            ConfigurationError: they differ.
        """
        first, *others = ([one for one in given if one.tensor == part.name] for part in tied)
        for other in others:
            if len(first) != len(other) or not all(
                one.added == two.added and np.array_equal(one.values, two.values)
                for one, two in zip(first, other, strict=True)
            ):
                raise ConfigurationError(
                    "the token embedding and the output projection of the files differ, and the model ties "
                    f"them: {_MERGE}"
                )
        return first

    def _take_whole(self, key: str, places: Sequence[tuple[Place, TensorPart]]) -> None:
        """A tensor that replaces the weights that it holds."""
        for (name, layer), part in places:
            shape = self._shapes[name]
            values = self._values(key, part.file_shape(shape))
            columns = slice(*part.columns.indices(shape[-1])[:2])
            if part.transposed:
                values = values[part.first_row : part.first_row + columns.stop - columns.start].T
            self._give((name, layer), Given(part.name, columns, values, False))

    def _give(self, place: Place, given: Given) -> None:
        self.given.setdefault(place, []).append(given)

    def _take_factors(self, module: str, places: Sequence[tuple[Place, TensorPart]]) -> None:
        """A module's adapter, for the weights that the module holds."""
        (name, _), part = places[0]
        if len(self._shapes[name]) != 2:
            raise ConfigurationError(
                f"the files have an adapter for {module}, and no such module is a matrix"
            )
        inputs, width = self._shapes[name]
        outputs = part.rows or len(range(width)[part.columns])
        rank, scale = self._settings.of(module)
        a, b = self._pair(module, KINDS, (rank, inputs), (outputs, rank))
        whole = Factor(a, b, 0, scale)
        for (name, layer), part in places:
            start, stop, _ = part.columns.indices(self._shapes[name][1])
            own = whole.within(part.first_row, part.first_row + stop - start, start)
            assert own is not None  # a part has columns
            if len(places) > 1:
                own = _without_others(own, b)
            if own.a.shape[1]:
                self.factors.setdefault((name, layer), []).append(own)

    def _add_product(self, module: str, places: Sequence[tuple[Place, TensorPart]]) -> None:
        """An adapter of an embedding or a head, which is added to the weight."""
        rank, scale = self._settings.of(module)
        for (name, layer), part in places:
            rows, width = part.file_shape(self._shapes[name])
            if key_of(module, KINDS[0]) in self._files.specs:
                a, b = self._pair(module, KINDS, (rank, width), (rows, rank))
                product = (a @ b).T
            else:
                a, b = self._pair(module, EMBEDDING_KINDS, (rank, rows), (width, rank))
                product = a @ b
            product *= np.float32(scale)
            self._give((name, layer), Given(part.name, slice(0, width), product, True))

    def _pair(
        self, module: str, kinds: tuple[str, str], *shapes: tuple[int, int]
    ) -> tuple[Float32[np.ndarray, "inputs rank"], Float32[np.ndarray, "rank outputs"]]:
        """A and B, transposed."""
        a, b = (self._values(key_of(module, kind), x).T for kind, x in zip(kinds, shapes, strict=True))
        return a, b

    def _values(self, name: str, shape: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
        if name not in self._files.specs:
            raise ConfigurationError(f"the files lack {name}")
        spec = self._files.specs[name]
        if spec.shape != shape:
            raise ConfigurationError(
                f"{name} has shape {spec.shape}, and {shape} would fit this model and {CONFIG}: is the "
                "adapter for another model?"
            )
        if spec.dtype not in FLOATS:
            raise ConfigurationError(
                f"{name} is of dtype {spec.dtype}: adapters are one of {', '.join(FLOATS)}"
            )
        return self._files.read(name).astype(np.float32)


def _without_others(own: Factor, b: Float32[np.ndarray, "rank outputs"]) -> Factor:
    """A weight's part of a module's adapter without the ranks that the module's other weights alone use."""
    used = own.b.any(axis=1) | ~b.any(axis=1)
    return replace(own, a=own.a[:, used], b=own.b[used])


def config_values(
    settings: Settings, family: Family, targets: Sequence[str], base: str | None
) -> dict[str, Any]:
    """The values of adapter_config.json.

    Args:
        settings: of the adapters, in which the ends of modules' names stand for patterns.
        family: of the model.
        targets: the ends of the names of the modules that have adapters.
        base: the folder or name of the model that the adapters belong to, if it is known.
    """
    lora = settings.lora
    return {
        "alpha_pattern": {re.escape(end): _number(x) for end, x in settings.alphas.items()},
        "base_model_name_or_path": base,
        "bias": settings.bias,
        "fan_in_fan_out": not family.linear,
        "inference_mode": True,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "modules_to_save": list(settings.saved) or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": {re.escape(end): x for end, x in settings.ranks.items()},
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }


def _number(x: float) -> float | int:
    return int(x) if x.is_integer() else x


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Write adapter_config.json in an existing folder."""
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
