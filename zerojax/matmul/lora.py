"""Low-rank adapters: trained matrices A and B for a frozen weight W, which acts as ``W + scale A B``.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), section 4.1. Products with
both are in ``zerojax.matmul.low_rank``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from zerojax.errors import ConfigurationError
from zerojax.validation.bounds import check_scalars
from zerojax.validation.patterns import as_patterns, matches, why_not
from zerojax.validation.spelling import suggests
from zerojax.zero_config.options import MATMUL_WEIGHTS

A, B = "lora_a", "lora_b"
"""Names of an adapter's two parameters, below the path of their weight."""
ATTENTION_INPUTS = {"query/kernel": 1, "key/kernel": 1, "value/kernel": 1, "out/kernel": 2}
"""How many axes are inputs, by the end of the path of Flax's three-dimensional attention kernels."""


@suggests
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The frozen weights that get adapters, and the adapters' settings.

    Attributes:
        rank: the columns of A and rows of B; in a config 0, the default, means no adapters.
        alpha: A B is multiplied by alpha / rank.
        targets: shell patterns of paths ("blocks/attn/kernel"). Two-dimensional weights of units can have
            adapters, Flax's three-dimensional attention weights ("query", "key", "value", "out"), and weights
            of experts (``zerojax.Experts``: "*/gate", "*/up", "*/down"), which the default excludes. The
            last pattern that matches decides; one that begins with "!" excludes the weight.
        dropout: probability of zeroing an element of the input of A in training. Each read drops other
            elements, except in a loop (``jax.lax.scan``) of the model around a unit: its iterations drop the
            same ones.
        rslora: multiply by alpha / sqrt(rank) instead (Kalajdzievski, arXiv:2312.03732).
        pieces: ``(pattern, columns, rank, alpha)``, for other ranks and alphas. The tuples whose pattern
            matches a weight's path divide its columns (outputs) in order. Each gives an adapter to that many
            columns; 0 means all that are left, and rank 0 no adapter. So query, key and value, which are one
            weight, get separate adapters, as in PEFT.

    Examples:
        >>> lora = zerojax.LoRA(rank=8, alpha=16, targets=("*kernel", "!*router*"))
        >>> zero = zerojax.ZeroConfig(frozen=("*",), frozen_weights="nf4")  # QLoRA, with ``lora=lora``
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = MATMUL_WEIGHTS
    dropout: float = 0.0
    rslora: bool = False
    pieces: tuple[tuple[str, int, int, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        object.__setattr__(self, "targets", as_patterns("LoRA.targets", self.targets))
        check_scalars(self, "LoRA.{}".format)
        if self.rank < 1:
            raise ConfigurationError(f"LoRA.rank={self.rank} must be at least 1.")
        for alpha in (self.alpha, *(alpha for *_, alpha in self.pieces)):
            if not (math.isfinite(alpha) and alpha > 0):
                raise ConfigurationError(f"LoRA.alpha={alpha} must be a positive number.")
        if bad := [piece for piece in self.pieces if min(piece[1:3]) < 0]:
            raise ConfigurationError(f"LoRA.pieces has {bad[0]}: columns and rank must be 0 or more.")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"LoRA.dropout={self.dropout} must be from 0 to below 1.")
        if not self.targets:
            raise ConfigurationError("LoRA.targets is empty: name the weights that get adapters.")

    @property
    def scale(self) -> float:
        """The factor of A B, if ``pieces`` has no other."""
        return self.scale_of(self.rank, self.alpha)

    def scale_of(self, rank: int, alpha: float) -> float:
        """The factor of A B for this rank and alpha: alpha / rank, or alpha / sqrt(rank) with ``rslora``."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def alpha_of(self, rank: int, scale: float) -> float:
        """The inverse of ``scale_of``."""
        return scale * (math.sqrt(rank) if self.rslora else rank)

    def pieces_of(self, path: str, columns: int) -> "tuple[Piece, ...]":
        """The adapters of a weight's ranges of columns, in order, without ranges of rank 0.

        Args:
            path: the weight's path, joined by "/".
            columns: how many columns the weight has.

        Raises:
            ConfigurationError: ``pieces`` has too few columns or too many.
        """
        own = [piece[1:] for piece in self.pieces if matches(piece[0], path)] or [(0, self.rank, self.alpha)]
        found: list[Piece] = []
        start = first = 0
        for width, rank, alpha in own:
            stop = start + (width or columns - start)
            if not start < stop <= columns:
                break
            if rank:
                scale = self.scale_of(rank, alpha)
                found.append(Piece(slice(start, stop), slice(first, first + rank), scale))
            start = stop
            first += rank
        else:
            if start == columns:
                return tuple(found)
        widths = " + ".join(str(width) for width, *_ in own)
        raise ConfigurationError(
            f"LoRA.pieces has {widths} columns for {path!r}, which has {columns}: let 0 be the last, "
            "for the rest."
        )

    def without(
        self, path: str, shape: Sequence[int], unit: str | None, *, of_experts: bool = False
    ) -> str | None:
        """Why a weight has no adapter; None if it has one.

        Args:
            path: the weight's path, joined by "/".
            shape: the shape of one layer's weight.
            unit: the name of its unit, if it has one.
            of_experts: whether its leading axis counts experts.

        Raises:
            ConfigurationError: experts with dropout.
        """
        if reason := why_not(self.targets, path, "targets"):
            return reason
        if unit is None:
            return "in no unit"
        if of_experts:
            if len(shape) != 3:
                return "no matrix of experts"
            if self.dropout:
                raise ConfigurationError(
                    f"LoRA.dropout={self.dropout} cannot be applied to {path!r}: adapters of experts are "
                    "added to their weights. Set it to 0, or leave the weight out by "
                    f"targets=(..., '!{path}')."
                )
            shape = shape[1:]
        if not (inputs := input_axes(path, shape)):
            return "neither two-dimensional nor a kernel of attention"
        return None if self.pieces_of(path, math.prod(shape[inputs:])) else "of rank 0 in LoRA.pieces"

    def shapes(self, path: str, shape: Sequence[int]) -> Mapping[str, tuple[int, ...]]:
        """The shapes of A and B for a weight that is ``[inputs, outputs]``, or is reshaped to that.

        For experts, ``[experts, inputs, outputs]``, both have a leading axis of experts. A has the columns
        of all pieces side by side. B stores each piece's rows in the first rows of the piece's columns; its
        other elements are zero.
        """
        if not input_axes(path, shape):
            own = self.shapes(path, shape[1:])
            return {name: (shape[0], *each) for name, each in own.items()}
        inputs = math.prod(shape[: input_axes(path, shape)])
        columns = math.prod(shape) // inputs
        ranks = [piece.rank for piece in self.pieces_of(path, columns)]
        return {A: (inputs, sum(ranks)), B: (max(ranks, default=0), columns)}

    def init(
        self, key: Array, path: str, shape: Sequence[int], stack: Sequence[int] = ()
    ) -> dict[str, Array]:
        """First values, fp32: A uniform within 1/sqrt(inputs), as in PEFT, and B zero.

        ``path`` and ``shape`` are the weight's, ``stack`` is its ``ParamShape.stack``.
        """
        shapes = self.shapes(path, shape)
        bound = 1 / math.sqrt(shapes[A][-2])
        return {
            A: jax.random.uniform(key, (*stack, *shapes[A]), jnp.float32, -bound, bound),
            B: jnp.zeros((*stack, *shapes[B]), jnp.float32),
        }


class Piece(NamedTuple):
    """The adapter of some of a weight's columns.

    Attributes:
        columns: the columns of the weight, and of B.
        ranks: the columns of A.
        scale: the factor of A B.
    """

    columns: slice
    ranks: slice
    scale: float

    @property
    def rank(self) -> int:
        """The number of columns of A, and of rows of B."""
        return self.ranks.stop - self.ranks.start


def input_axes(path: str, shape: Sequence[int]) -> int:
    """How many of one layer's axes, from the first on, are inputs of the weight's products; 0 if unknown."""
    if len(shape) == 3:
        return next((axes for end, axes in ATTENTION_INPUTS.items() if f"/{path}".endswith(f"/{end}")), 0)
    return int(len(shape) == 2)


def merged(
    weight: Array | np.ndarray, a: Array | np.ndarray, b: Array | np.ndarray, lora: LoRA, path: str
) -> np.ndarray:
    """``weight + scale a b``, computed in fp32 on the host and rounded to the weight's dtype.

    Args:
        weight: ``[.., inputs, outputs]``, or with more axes for inputs or outputs.
        a: ``[.., inputs, rank]``.
        b: ``[.., rank, outputs]``.
        lora: the adapter's settings.
        path: the weight's path, joined by "/".
    """
    a = np.asarray(a, np.float32)
    b = np.asarray(b, np.float32)
    product = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for piece in lora.pieces_of(path, b.shape[-1]):
        part = a[..., piece.ranks] @ b[..., : piece.rank, piece.columns]
        product[..., piece.columns] = np.float32(piece.scale) * part
    return (np.asarray(weight, np.float32) + product.reshape(weight.shape)).astype(weight.dtype)
