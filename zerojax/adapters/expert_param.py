"""The weights of experts, told from others by their class."""

from flax import nnx


class ExpertParam(nnx.Param):
    """A weight whose leading axis is the expert's: ``[experts, ...]``.

    In a step, ``ZeroConfig(experts=)`` may spread the experts over the devices of a node. The module then
    finds ``[experts / devices, ...]``, its device's own, and has to bring them the tokens of the whole node,
    as ``zerojax.Experts`` does.
    """
