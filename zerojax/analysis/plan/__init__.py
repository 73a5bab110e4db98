"""Plans: formulas for the memory, communication and time of a run, on this mesh or on another cluster."""

from zerojax.analysis.plan.cluster import Cluster as Cluster
from zerojax.analysis.plan.hops import HopPlan as HopPlan
from zerojax.analysis.plan.memory import PredictedMemory as PredictedMemory
from zerojax.analysis.plan.memory import predict_memory as predict_memory
from zerojax.analysis.plan.outlook import Forecast as Forecast
from zerojax.analysis.plan.outlook import Outlook as Outlook
from zerojax.analysis.plan.outlook import foresee as foresee
from zerojax.analysis.plan.step import Plan as Plan
from zerojax.analysis.plan.step import describe_plan as describe_plan
from zerojax.analysis.plan.step import plan_state as plan_state
from zerojax.analysis.plan.units import LeafPlan as LeafPlan
from zerojax.analysis.plan.units import UnitPlan as UnitPlan
