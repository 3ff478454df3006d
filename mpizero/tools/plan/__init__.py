"""Predict memory, messages and work of every rank of a training by formula, without running the training."""

from mpizero.tools.plan.counts import Sent
from mpizero.tools.plan.plan import PARTS, MemoryBytes, RankPlan, TrainingPlan
from mpizero.tools.plan.traffic import PURPOSES

__all__ = ["PARTS", "PURPOSES", "MemoryBytes", "RankPlan", "Sent", "TrainingPlan"]
