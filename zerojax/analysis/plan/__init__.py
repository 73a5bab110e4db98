"""Plans: the memory, communication and time of a run from formulas, for a state or for another cluster."""

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
