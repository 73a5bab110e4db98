"""Mixtures of experts: routers, the way of tokens to experts and back, and the module that has both."""

from zerojax.experts.exchange import apply_experts as apply_experts
from zerojax.experts.mixture import mix_experts as mix_experts
from zerojax.experts.mlp import Activation as Activation
from zerojax.experts.mlp import ExpertWeights as ExpertWeights
from zerojax.experts.module import Experts as Experts
from zerojax.experts.router import RouterConfig as RouterConfig
from zerojax.experts.router import RouterStats as RouterStats
from zerojax.experts.router import Routing as Routing
from zerojax.experts.router import balance_loss as balance_loss
from zerojax.experts.router import route as route
from zerojax.experts.router import z_loss as z_loss
