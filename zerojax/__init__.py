"""ZeRO and ZeRO++ for JAX: sharded training of Flax models over slow networks."""

from zerojax.errors import ZeroError
from zerojax.mesh import make_mesh
from zerojax.stack import Stack
from zerojax.state import TrainState, gather_model, gather_params, put_params
from zerojax.step import eval_step, lower_train_step, train_step
from zerojax.wire import CommReport, comm_report
from zerojax.zero import ZeroConfig

__all__ = [
    "CommReport",
    "Stack",
    "TrainState",
    "ZeroConfig",
    "ZeroError",
    "comm_report",
    "eval_step",
    "gather_model",
    "gather_params",
    "lower_train_step",
    "make_mesh",
    "put_params",
    "train_step",
]
