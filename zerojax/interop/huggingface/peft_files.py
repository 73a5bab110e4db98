"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

PEFT stores A as ``[rank, inputs]`` and B as ``[outputs, rank]``, even for GPT-2, whose weights are (in, out).
Each module has a separate adapter. A module may be some columns of a zerojax weight (query, key and value are
one weight), or hold several weights (gate and up in Phi-3). ``tensors_of_model`` maps modules to weights for
reading and writing.

Both sides use ``Factor``: an A with a B for a range of columns. Factors with different A share one adapter
whose rank is the sum of their ranks. Each has its columns of B, with zeros elsewhere, so this is exact.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32

from zerojax.errors import ConfigurationError, errors_at
from zerojax.interop.huggingface import peft_experts
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.interop.huggingface.families import Family, fitting
from zerojax.interop.huggingface.load import FLOATS
from zerojax.interop.huggingface.mapping import Place, Shape, Tensor, place_at, tensors_at
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.interop.huggingface.source import read_config_json
from zerojax.matmul.lora import LoRA
from zerojax.models import GPTConfig
from zerojax.models.size import abstract_weights
from zerojax.validation.untrusted import short

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KINDS = ("lora_A.weight", "lora_B.weight")
_EMBEDDING_KINDS = ("lora_embedding_A", "lora_embedding_B")

_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "megatron_core"),
        *("peft_version", "qalora_group_size", "revision"),
        "ensure_weight_tying",  # the tensors show whether a tied matrix is still tied
        # the names of the tensors show which modules have adapters
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
    }
)
_FIRST_VALUES = (True, "gaussian", "orthogonal", "eva")
"""Ways to draw A and B that leave the base unchanged; LoftQ, PiSSA and others change it."""
_OPTIONS: dict[str, tuple[str, type, Any]] = {
    "rank": ("r", int, REQUIRED),
    "alpha": ("lora_alpha", float, REQUIRED),
    "dropout": ("lora_dropout", float, 0.0),
    "rslora": ("use_rslora", bool, False),
}
"""Fields of ``LoRA`` -> their key in adapter_config.json, its type and its default."""
_MERGE = "merge the adapter into its model with PEFT (merge_and_unload), and import that"
_MAX_REPETITIONS = 4
"""Most repetitions in a pattern of a module's name. With more, a hostile pattern could match for hours."""

_EMBEDDING: Place = ("embed/embedding", None)


def weight_shapes(model: GPTConfig) -> dict[Place, Shape]:
    """The shapes of a model's weights (of one layer)."""
    found: dict[Place, Shape] = {}
    for path, x in abstract_weights(model).items():
        stacked = path[0] == "blocks"
        for layer in range(x.shape[0]) if stacked else (None,):
            found[place_at(path, layer, model.order)] = x.shape[stacked:]
    return found


def tensors_of_model(family: Family, model: GPTConfig) -> dict[str, list[Tensor]]:
    """The weights in each tensor of a model, by the tensor's name in a family; fused tensors hold several.

    Weights without a name in the family are skipped.
    """
    parts = family.parts(model)
    found: dict[str, list[Tensor]] = {}
    for place, shape in weight_shapes(model).items():
        for tensor in tensors_at(place, shape, parts):
            found.setdefault(tensor.name, []).append(tensor)
    return found


def module_of(tensor: str) -> str:
    """The module of a weight or bias, from its name."""
    return tensor.rpartition(".")[0]


def key_of(module: str, kind: str) -> str:
    """The name of a tensor of a module's adapter; ``kind`` is one of ``KINDS``."""
    return f"{PREFIX}{module}.{kind}"


def _adapter_keys(module: str) -> set[str]:
    """The names of all tensors that a module's adapter may have."""
    return {key_of(module, kind) for kind in (*KINDS, *_EMBEDDING_KINDS)}


def whole_keys(tensor: str) -> tuple[str, str]:
    """The names in PEFT's files of a model's tensor: for a module without an adapter, and with one."""
    module, _, end = tensor.rpartition(".")
    return PREFIX + tensor, f"{PREFIX}{module}.base_layer.{end}"


def target_modules(adapted: Collection[str], every: Collection[str]) -> list[str]:
    """The fewest ends of names by which PEFT finds a set of modules, and no others.

    An end may begin within a word: PEFT requires a dot before its targets, but not in ``modules_to_save``.
    """
    found = set[str]()
    for module in adapted:
        words = module.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        found.add(next(end for end in ends if all(one in adapted for one in every if one.endswith(end))))
    return sorted(found)


@dataclass(frozen=True)
class Factor:
    """An A with its B, for a range of a matrix's columns, or of the columns of all experts' matrices.

    Attributes:
        a: ``[inputs, rank]``; of experts ``[experts, inputs, rank]``.
        b: ``[rank, columns]``; of experts ``[experts, rank, columns]``.
        start: the first of the columns.
        scale: factor of A B.
    """

    a: Float32[np.ndarray, "*experts inputs rank"]
    b: Float32[np.ndarray, "*experts rank columns"]
    start: int
    scale: float

    @property
    def stop(self) -> int:
        """The column after the last."""
        return self.start + self.b.shape[-1]


def within(factors: Sequence[Factor], columns: slice, to: int = 0) -> list[Factor]:
    """The factors' parts in a range of columns, shifted so that the range begins at column ``to``."""
    return [
        replace(one, b=one.b[..., first - one.start : last - one.start], start=first - columns.start + to)
        for one in factors
        if (first := max(columns.start, one.start)) < (last := min(columns.stop, one.stop))
    ]


def side_by_side(
    factors: Sequence[Factor], columns: int, scale: float
) -> tuple[Float32[np.ndarray, "*experts inputs rank"], Float32[np.ndarray, "*experts rank columns"]]:
    """Combine LoRA factors into one A and one B of this scale, whose product is the sum of theirs.

    Factors with the same A share its ranks.
    """
    different: list[np.ndarray] = []
    numbers = []
    for one in factors:
        number = next((i for i, a in enumerate(different) if np.array_equal(a, one.a)), len(different))
        numbers.append(number)
        different += [one.a] if number == len(different) else []
    ends = np.cumsum([0, *(a.shape[-1] for a in different)])
    b = np.zeros((*different[0].shape[:-2], ends[-1], columns), np.float32)
    for number, one in zip(numbers, factors, strict=True):
        ranks = slice(ends[number], ends[number + 1])
        b[..., ranks, one.start : one.stop] = one.b * np.float32(one.scale / scale)
    return np.concatenate(different, axis=-1), b


def alpha_for(lora: LoRA, rank: int, scale: float) -> float:
    """``LoRA.alpha_of``, rounded to hide the errors of square roots of ranks."""
    alpha = lora.alpha_of(rank, scale)
    return lora.alpha if math.isclose(alpha, lora.alpha) else float(f"{alpha:.12g}")


def path_pattern(name: str) -> str:
    """The pattern of a weight's paths in all blocks, from its name in ``TensorParts``."""
    return re.sub("^block/", "blocks/*/", name)


class Settings(NamedTuple):
    """The settings of adapter_config.json.

    Attributes:
        lora: rank, alpha, dropout, rslora.
        ranks: other ranks, by patterns of modules.
        alphas: other alphas, by patterns of modules.
        bias: "none", "all" or "lora_only": which biases are in the files.
        saved: ends of the names of modules that the files hold whole.
        parameters: the parameters of experts that have adapters, from ``peft_experts.PARAMETERS``.
    """

    lora: LoRA
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    bias: str
    saved: Sequence[str]
    parameters: Sequence[str] = ()

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """Read adapter_config.json. Refuse options and values that zerojax lacks."""
        values = read_config_json(folder, CONFIG, "a PEFT adapter")
        # PEFT writes all of its options. Options that are off are null, false or empty.
        keys = ConfigKeys({name: x for name, x in values.items() if x}, str(folder / CONFIG), _HARMLESS)
        keys.only("peft_type", "LORA")
        keys.only("task_type", "CAUSAL_LM")
        keys.only("bias", "none", "all", "lora_only")
        keys.only("init_lora_weights", *_FIRST_VALUES)
        own = {field: keys.take(*option) for field, option in _OPTIONS.items()}
        ranks, alphas = (keys.take(f"{name}_pattern", dict, {}) for name in ("rank", "alpha"))
        saved, bias = keys.take("modules_to_save", list, []), keys.take("bias", str, "none")
        named = keys.take("target_parameters", list, [])
        parameters = [name for name in peft_experts.PARAMETERS if any(_ends(x, name) for x in named)]
        if len(parameters) < len(named):
            keys.only("target_parameters", *(f"{peft_experts.MODULE}.{x}" for x in peft_experts.PARAMETERS))
        keys.finish(f"{_MERGE}, as zerojax lacks these options")
        with errors_at(folder / CONFIG):
            lora = LoRA(**own)
            _check_patterns("rank", ranks, lora, int)
            _check_patterns("alpha", alphas, lora, int, float)
            if not all(isinstance(name, str) and name for name in saved):
                raise ConfigurationError(f"modules_to_save = {short(saved)} should be names of modules")
        factors = {pattern: float(x) for pattern, x in alphas.items()}
        return cls(lora, ranks, factors, bias, tuple(saved), parameters)

    def write(self, folder: Path, targets: Sequence[str], family: Family, base: str | None) -> None:
        """Write adapter_config.json.

        ``targets`` are the ends of the names of the modules that have adapters. ``base`` is the folder or
        name of the model that they belong to, if it is known.
        """
        values = {key: getattr(self.lora, field) for field, (key, *_) in _OPTIONS.items()} | {
            "alpha_pattern": {re.escape(end): _number(x) for end, x in self.alphas.items()},
            "base_model_name_or_path": base,
            "bias": self.bias,
            "fan_in_fan_out": not family.linear,
            "inference_mode": True,
            "lora_alpha": _number(self.lora.alpha),
            "modules_to_save": list(self.saved) or None,
            "peft_type": "LORA",
            "rank_pattern": {re.escape(end): x for end, x in self.ranks.items()},
            "target_modules": _targets(targets, family),
            "target_parameters": [f"{family.names.experts}.{name}" for name in self.parameters] or None,
            "task_type": "CAUSAL_LM",
        }
        text = json.dumps(values, indent=2, sort_keys=True)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")

    def of(self, module: str) -> tuple[int, float]:
        """The rank and scale of a module's adapter."""
        rank = _by_pattern(self.ranks, module, self.lora.rank)
        return rank, self.lora.scale_of(rank, _by_pattern(self.alphas, module, self.lora.alpha))

    def has(self, tensor: str, adapted: Collection[str]) -> bool:
        """Whether PEFT reads a tensor that belongs to no adapter."""
        module = module_of(tensor)
        biases = self.bias == "all" or (self.bias == "lora_only" and module in adapted)
        return (tensor.endswith(".bias") and biases) or module.endswith(tuple(self.saved))


def _targets(ends: Sequence[str], family: Family) -> list[str] | str:
    """The value of target_modules; in a larger model a pattern of its text part's modules."""
    if not (ends and family.composite):
        return list(ends)
    return rf"{re.escape(family.prefix)}(.*\.)?({'|'.join(map(re.escape, ends))})"


def _ends(name: object, parameter: str) -> bool:
    """Whether a name in ``target_parameters`` means a parameter of experts."""
    whole = f".{peft_experts.MODULE}.{parameter}"
    return (isinstance(name, str) and whole.endswith(f".{name}")) or str(name).endswith(whole)


def _by_pattern[T](values: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that matches a module, as PEFT matches."""
    return next((x for key, x in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _number(x: float) -> float | int:
    return int(x) if x.is_integer() else x


def _check_patterns(field: str, patterns: Mapping[str, Any], lora: LoRA, *kinds: type) -> None:
    """Refuse values that a field cannot have, and regular expressions that might take forever."""
    setting = f"{field}_pattern"
    for pattern, value in patterns.items():
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise ConfigurationError(f"{setting}: {short(pattern)} is not a pattern: {error}") from error
        if len(re.findall(r"[*+?{]", pattern)) > _MAX_REPETITIONS or re.search(r"\)[*+?{]", pattern):
            raise ConfigurationError(
                f"{setting}: {short(pattern)} repeats too much: name the modules instead"
            )
        if type(value) not in kinds:
            raise ConfigurationError(f"{setting} has {short(value)} for {short(pattern)}")
        replace(lora, **{field: value})  # refuses invalid values


class Given(NamedTuple):
    """The files' values for columns of a weight that PEFT trains as a whole.

    Attributes:
        part: the columns, and their tensor.
        values: in the weight's layout.
        added: whether they are added to the weight instead of replacing it.
    """

    part: Tensor
    values: Float32[np.ndarray, "..."]
    added: bool


class PeftAdapter:
    """PEFT's files of an adapter, checked for a model.

    Attributes:
        folder: the folder of the files.
        settings: the settings of adapter_config.json.
        shapes: shapes of all weights of the model.
        factors: the adapter of each weight that has one.
        given: the values of each weight that is trained as a whole.
    """

    def __init__(self, folder: Path, model: GPTConfig) -> None:
        self.folder, self.settings, self.shapes = folder, Settings.read(folder), weight_shapes(model)
        every = range(model.layers)  # a scanned kind has its first layer's number in its path
        self._in_paths = [model.order.index(kind) for kind in {*model.order}] if model.scan else every
        self.factors: dict[Place, list[Factor]] = {}
        self.given: dict[Place, list[Given]] = {}
        self._files = SafetensorFiles(folder, WEIGHTS)
        family, self._tensors = self._tensors_of_files(model)
        self._adapted = {
            module_of(x) for x in self._tensors if self._files.specs.keys() & _adapter_keys(module_of(x))
        }
        # The token embedding, and a tied output projection.
        self._copies = [tensor for tensor, (part, *_) in self._tensors.items() if part.place == _EMBEDDING]
        for tensor, parts in self._tensors.items():
            for key in whole_keys(tensor):
                if key in self._files.specs:
                    self._take_whole(key, tensor, parts)
            if tensor.endswith(".weight") and module_of(tensor) in self._adapted:
                table = all(part.place[0].endswith("/embedding") for part in parts)
                take = self._add_product if table else self._take_factors
                take(module_of(tensor), parts)
        of_experts = peft_experts.parameters(family, model)
        if of_experts and (lacking := {*self.settings.parameters} - {name for _, name in of_experts}):
            raise ConfigurationError(
                f"target_parameters names {min(lacking)!r}, but the experts of this model have none. Use an "
                "adapter for this model"
            )
        for (module, parameter), parts in of_experts.items():
            if parameter in self.settings.parameters:
                self._take_experts(module, parameter, parts, family)
        self._check()

    @property
    def lora(self) -> LoRA:
        """The settings of adapters that can hold these, each with its rank and scale."""
        names = sorted({name for name, _ in self.factors})
        pieces = tuple(piece for name in names for piece in self._pieces(name))
        return replace(self.settings.lora, targets=tuple(map(path_pattern, names)), pieces=pieces)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The patterns of ``ZeroConfig.frozen`` with which all weights in the files are trained."""
        return ("*", *(f"!{path_pattern(name)}" for name in sorted({name for name, _ in self.given})))

    def _pieces(self, name: str) -> Iterator[tuple[str, int, int, float]]:
        """The ``LoRA.pieces`` of a weight; none if its adapters have the default rank and scale."""
        ranges: dict[int | None, set[tuple[int, int]]] = {}
        for part in (part for parts in self._tensors.values() for part in parts if part.place[0] == name):
            ranges.setdefault(part.place[1], set()).add((part.columns.start, part.columns.stop))
        alike: dict[tuple[tuple[int, int], ...], list[int | None]] = {}
        for layer, own in ranges.items():
            alike.setdefault(tuple(sorted(own)), []).append(layer)
        for own, layers in alike.items():
            pattern = path_pattern(name)
            kinds = [pattern.replace("*/", f"{number}/*", 1) for number in self._in_paths if number in layers]
            factors = [self.factors[name, layer] for layer in layers if (name, layer) in self.factors]
            for each in [pattern] if len(alike) == 1 else kinds:
                yield from self._pieces_of(each, own, factors)

    def _pieces_of(
        self, pattern: str, every: Sequence[tuple[int, int]], layers: Sequence[list[Factor]]
    ) -> Iterator[tuple[str, int, int, float]]:
        """The ``LoRA.pieces`` of layers whose modules have the same ranges of columns."""
        ranges = list(every)
        if all(_are_one(factors, ranges[-1][1]) for factors in layers):
            ranges = [(0, ranges[-1][1])]
        lora, found = self.settings.lora, []
        for start, stop in ranges:
            own = [part for factors in layers if (part := within(factors, slice(start, stop)))]
            scale = own[0][0].scale if own else lora.scale
            rank = max((side_by_side(part, stop - start, scale)[0].shape[-1] for part in own), default=0)
            alpha = alpha_for(lora, rank, scale) if rank else lora.alpha
            found.append((pattern, stop - start if len(ranges) > 1 else 0, rank, alpha))
        if [piece[1:] for piece in found] != [(0, lora.rank, lora.alpha)]:
            yield from found

    def _tensors_of_files(self, model: GPTConfig) -> tuple[Family, dict[str, list[Tensor]]]:
        """The first family that fits the model and has all modules of the files, and its tensors."""
        first: tuple[Family, str] | None = None
        for family in fitting(model, composites=True):
            parts = tensors_of_model(family, model)
            known = {key for tensor in parts for key in whole_keys(tensor)}
            known |= {key for tensor in parts for key in _adapter_keys(module_of(tensor))}
            adapted = self.settings.parameters
            for module, parameter in peft_experts.parameters(family, model):
                if parameter in adapted:
                    wrapper = peft_experts.wrapped(module, parameter, adapted)
                    known |= {key_of(wrapper, kind) for kind in KINDS}
            if not (unknown := self._files.specs.keys() - known):
                return family, parts
            first = first or (family, min(unknown))
        if first is None:
            raise ConfigurationError(
                "no Hugging Face family fits this model, and PEFT's files are for their models alone: "
                "see docs/huggingface.md"
            )
        raise ConfigurationError(
            f"{self.folder / WEIGHTS} has {short(first[1])}, but a {first[0].architecture} of {model.layers} "
            "blocks has no such module. Use an adapter for this model"
        )

    def _take_whole(self, key: str, tensor: str, parts: Sequence[Tensor]) -> None:
        """Take a tensor that replaces the weights that it holds."""
        copies = self._copies if tensor in self._copies else [tensor]
        named = any(self.settings.has(one, self._adapted) for one in copies)
        if not (named or key.endswith(".base_layer.weight")):
            raise ConfigurationError(
                f"{key} is in the files, but {CONFIG} names it neither in bias nor in modules_to_save: "
                "correct that file"
            )
        for part in parts:
            values = self._values(key, part.shape)
            self.given.setdefault(part.place, []).append(Given(part, part.within(values), False))

    def _take_factors(self, module: str, parts: Sequence[Tensor]) -> None:
        """Take a module's adapter, for the weights that the module holds."""
        shape = parts[0].weight
        if len(shape) != 2:
            raise ConfigurationError(
                f"the files have an adapter for {module}, which is not a matrix. Remove it from {WEIGHTS}"
            )
        rank, scale = self.settings.of(module)
        a, b = self._pair(module, KINDS, (rank, shape[0]), (parts[0].outputs, rank))
        for part in parts:
            self._take(part.place, Factor(a, b, 0, scale), part.rows, part.columns.start)

    def _take_experts(self, module: str, parameter: str, parts: Sequence[Tensor], family: Family) -> None:
        """Take the adapters of a parameter of a layer's experts."""
        rank, scale = self.settings.of(f"{module}.{parameter}")
        wrapper = peft_experts.wrapped(module, parameter, self.settings.parameters)
        experts, inputs, _ = parts[0].weight
        stacked = rank * experts
        pair = self._pair(wrapper, KINDS, (stacked, inputs), (parts[0].outputs, stacked))
        interleaved = peft_experts.interleaves(parameter, family)
        a, b = peft_experts.from_files(*pair, experts, interleaved=interleaved)
        for part in parts:
            self._take(part.place, Factor(a, b, 0, scale), part.rows)

    def _take(self, place: Place, module: Factor, outputs: slice, to: int = 0) -> None:
        """Add the columns of a module's adapter that belong to a weight, without ranks of others only."""
        (own,) = within([module], outputs, to)
        used = _used_ranks(own.b) | ~_used_ranks(module.b)
        if used.any():
            own = replace(own, a=own.a[..., used], b=own.b[..., used, :])
            self.factors.setdefault(place, []).append(own)

    def _add_product(self, module: str, parts: Sequence[Tensor]) -> None:
        """Take an adapter of an embedding or a head, which is added to the weight."""
        rank, scale = self.settings.of(module)
        for part in parts:
            rows, width = part.shape
            if key_of(module, KINDS[0]) in self._files.specs:
                a, b = self._pair(module, KINDS, (rank, width), (rows, rank))
                product = (a @ b).T
            else:
                a, b = self._pair(module, _EMBEDDING_KINDS, (rank, rows), (width, rank))
                product = a @ b
            added = Given(part, product * np.float32(scale), True)
            self.given.setdefault(part.place, []).append(added)

    def _check(self) -> None:
        """Refuse files that lack a named module, and weights with two kinds of values."""
        if not self.factors:
            raise ConfigurationError(
                f"{self.folder / WEIGHTS} has no adapter for a matrix of a block, but a state needs one: "
                f"{_MERGE}"
            )
        whole = {module_of(x) for x in self._tensors if {*whole_keys(x)} & self._files.specs.keys()}
        for end in self.settings.saved:
            if not any(module.endswith(end) for module in whole | self._adapted):
                raise ConfigurationError(f"the files lack {short(end)}, which modules_to_save names")
        for place, given in self.given.items():
            if place in self.factors:
                raise ConfigurationError(
                    f"the files have {given[0].part.name}, and also an adapter of {place[0]!r}, which holds "
                    f"it: {_MERGE}"
                )
        if len(self._copies) > 1 and (given := self.given.get(_EMBEDDING)):
            first, second = ([one for one in given if one.part.name == name] for name in self._copies)
            if len(first) != len(second) or not all(
                one.added == two.added and np.array_equal(one.values, two.values)
                for one, two in zip(first, second, strict=True)
            ):
                raise ConfigurationError(
                    "the token embedding and the output projection of the files differ, but the model ties "
                    f"them: {_MERGE}"
                )
            self.given[_EMBEDDING] = first

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
                f"{name} has shape {spec.shape}, but this model and {CONFIG} need {shape}. Use an adapter "
                "for this model"
            )
        if spec.dtype not in FLOATS:
            raise ConfigurationError(
                f"{name} is of dtype {spec.dtype}: adapters are one of {', '.join(FLOATS)}"
            )
        return self._files.read(name).astype(np.float32)


def _are_one(factors: Sequence[Factor], columns: int) -> bool:
    """Whether the adapters of all of a weight's parts have the same A and scale, as a single adapter has."""
    first = factors[0]
    covered = sum(one.b.shape[-1] for one in factors) == columns
    return covered and all(one.scale == first.scale and np.array_equal(one.a, first.a) for one in factors)


def _used_ranks(b: Float32[np.ndarray, "*experts rank columns"]) -> Bool[np.ndarray, " rank"]:
    """The ranks for which B is not zero everywhere."""
    return b.any(axis=(*range(b.ndim - 2), -1))
