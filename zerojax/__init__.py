"""ZeRO and ZeRO++ for JAX: sharded training of Flax models over slow networks."""

from zerojax.average import average_weights, averaged
from zerojax.errors import ZeroError
from zerojax.mesh import make_mesh
from zerojax.muon import scale_by_muon
from zerojax.shardable import chain
from zerojax.spikes import SpikeRule
from zerojax.stack import Stack
from zerojax.state import TrainState, gather_model, gather_params, put_params
from zerojax.step import eval_step, lower_train_step, train_step
from zerojax.weight_sum import weight_sum
from zerojax.wire import CommReport, comm_report
from zerojax.zero import ZeroConfig

__all__ = [
    "CommReport",
    "SpikeRule",
    "Stack",
    "TrainState",
    "ZeroConfig",
    "ZeroError",
    "average_weights",
    "averaged",
    "chain",
    "comm_report",
    "eval_step",
    "gather_model",
    "gather_params",
    "lower_train_step",
    "make_mesh",
    "put_params",
    "scale_by_muon",
    "train_step",
    "weight_sum",
]
