"""What a run will hold, send and take, from formulas: of a state at hand, or on a cluster that is not."""

from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.hops import HopPlan
from zerojax.analysis.plan.memory import PredictedMemory, predict_memory
from zerojax.analysis.plan.outlook import Forecast, Outlook, foresee
from zerojax.analysis.plan.step import Plan, describe_plan, plan_state
from zerojax.analysis.plan.units import LeafPlan, UnitPlan

__all__ = [
    "Cluster",
    "Forecast",
    "HopPlan",
    "LeafPlan",
    "Outlook",
    "Plan",
    "PredictedMemory",
    "UnitPlan",
    "describe_plan",
    "foresee",
    "plan_state",
    "predict_memory",
]
