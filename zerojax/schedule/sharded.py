"""A unit's parameter before it is gathered: a value in the model that only its unit can read."""

import contextlib
import dataclasses
import re
from collections.abc import Generator, Mapping
from typing import TypeGuard

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Num

from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA
from zerojax.schedule.layer_update import LayerState, LayerUpdate
from zerojax.schedule.user_code import is_library_error, line_of_error
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.sharding.wire_format import Seed
from zerojax.weights import Weight

READ_BY_UNIT = "zerojax: a weight read by its unit"
"""The ``checkpoint_name`` of a ``Sharded`` weight's arrays where its unit reads them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """One parameter as its unit receives it: a value in the model, which scans slice like any other.

    Attributes:
        weight: at the level where the unit receives it.
        sink: zeros at ``ShardingStrategy.grad_level``, whose cotangent is the gradient. None if it is frozen.
        seed: salts stochastic rounding; one per layer, if the parameter is stacked.
        strategy: how it travels.
        replica: delta's replica of a weight at "primary", if the unit refreshes it itself; ``updated`` takes
            the new one.
        adapter: A and B of its low-rank adapter, if it has one.
        lora: the adapter's settings.
        update: how the backward pass of its stack updates it, if its sink is a ``LayerState``.
        probe: the probe that a stack returned for ``with_facts``, in one weight of the stack.
    """

    weight: Weight
    sink: Num[Array, "..."] | LayerState | None
    seed: Seed
    strategy: ShardingStrategy = dataclasses.field(metadata={"static": True})
    replica: Num[Array, "..."] | None = None
    adapter: tuple["Sharded", ...] = ()
    lora: LoRA | None = dataclasses.field(default=None, metadata={"static": True})
    update: LayerUpdate | None = None
    probe: Array | None = None

    @property
    def leaf(self) -> ParamLayout:
        """The layout of the weight."""
        return self.weight.layout

    def updated(self, replicas: Mapping[Path, Weight]) -> "Sharded":
        """The parameter and its adapter with refreshed replicas as their weights."""
        adapter = tuple(part.updated(replicas) for part in self.adapter)
        if self.replica is None:
            return dataclasses.replace(self, adapter=adapter)
        return dataclasses.replace(self, weight=replicas[self.leaf.path], replica=None, adapter=adapter)

    def __jax_array__(self) -> Array:
        """Refuse use outside a unit's call, where the whole weight does not exist."""
        raise ConfigurationError(read_outside(self.leaf.name))

    def __repr__(self) -> str:
        """The parameter's name, which ``translated_errors`` looks for in messages."""
        return f"Sharded({self.leaf.name!r})"


# Flax applies the operators of a parameter to its value.
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_OTHERS = ["getitem", "setitem", "array", "neg", "pos", "abs", "lt", "le", "gt", "ge"]
for _operator in [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS]:
    setattr(Sharded, f"__{_operator}__", lambda self, *_: self.__jax_array__())


def read_outside(weight: str) -> str:
    """The error message for a weight that is read outside a call of its unit."""
    return (
        f"the weight {weight!r} is sharded and was read outside a call of its unit. For a norm or a penalty "
        "use zerojax.weight_sum. For its values call a method of the unit (in NNX one whose name does not "
        'begin with "_", in Linen one without nn.nowrap), or leave its class out of ZeroConfig.units.'
    )


def assigned(weight: str, by: str) -> str:
    """The error message for a weight to which ``by`` assigned."""
    return (
        f"{by} assigned to the weight {weight!r}, which only the optimizer changes. Compute with the new "
        "value without assigning it, or use an nnx.Variable that is not an nnx.Param. Between steps, "
        "zerojax.put_params changes weights."
    )


FORWARD_MODE = (
    "a loss cannot take forward-mode derivatives (jax.jvp, jax.jacfwd, jax.hessian) through a unit or a "
    "Stack: use reverse mode (jax.grad, jax.vjp, jax.jacrev), also for second derivatives (jax.grad of "
    "jax.grad)."
)

_NO_LAYERS = (
    "the loop or map over modules at {} met a value without an axis of layers. Modules that keep their rngs "
    "must keep a fork of them (rngs.fork()). A unit that nnx.vmap stacked must be created in model(rngs): "
    "elsewhere zerojax does not see that it has layers. Or leave its class out of ZeroConfig.units."
)

_COMBINED = (
    "a loss combined the sharded weights of units with other arrays (by jax.tree.map over nnx.state?). "
    "Leave the classes of these units out of ZeroConfig.units. Keep an average of weights in variables that "
    "are not nnx.Param, or take it in the optimizer."
)

# Fragments of JAX's messages about transformations that units do not support, with the messages to show.
_TRANSLATIONS = {
    "can't apply forward-mode": FORWARD_MODE,
    "does not support reverse-mode autodiff": (
        "a loss cannot contain a gradient through a unit or a Stack for micro-batches in breadth: set "
        'accumulate_order="depth".'
    ),
    "but got uint32": (
        "a loss took a gradient with respect to unsigned integers. If it was with respect to the model "
        "(nnx.grad, MAML), the sharded weights of units have none: leave their classes out of "
        "ZeroConfig.units."
    ),
    f"{Sharded.__module__}.{Sharded.__name__}": _COMBINED,
    f"{Weight.__module__}.{Weight.__name__}": _COMBINED,
}


class InOneBranch(Exception):
    """A ``Stack``, whose call changes its weights' fields, is called in only one of several branches."""


@contextlib.contextmanager
def translated_errors() -> Generator[None]:
    """Replace JAX's and Flax's errors about units by messages that say what to change; keep the user's
    errors.

    Raises:
        ConfigurationError: for such an IndexError, TypeError or ValueError.
        InOneBranch: for an error about branches.
    """
    try:
        yield
    except (IndexError, TypeError, ValueError) as error:
        if not is_library_error(error):
            raise
        if isinstance(error, IndexError):
            raise ConfigurationError(_NO_LAYERS.format(line_of_error(error))) from error
        if found := re.search(r"Sharded\('(.*?)'\)", str(error)):
            raise ConfigurationError(read_outside(found[1])) from error
        if "branch outputs must" in str(error) and re.search(r"\.value\.(probe|weight) is", str(error)):
            raise InOneBranch from error
        for text, message in _TRANSLATIONS.items():
            if text in str(error):
                raise ConfigurationError(message) from error
        raise


def is_sharded(value: object) -> TypeGuard[Sharded]:
    """Whether a value is a unit's parameter as its unit receives it."""
    return isinstance(value, Sharded)


def is_gathered(weight: object) -> bool:
    """Whether a unit's parameter has to be gathered; at stages 0 to 2 it is whole already."""
    return is_sharded(weight) and weight.weight.level != "full"


def read_by_unit[T](values: T) -> T:
    """Mark arrays of ``Sharded`` weights as read by their unit, for ``zerojax.train.loss_checks``."""
    return checkpoint_name(values, READ_BY_UNIT)
