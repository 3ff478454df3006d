"""Predict memory, messages and work of every rank of a training by formula, without running the training."""

from mpizero.planning.byte_counts import Sent
from mpizero.planning.rank_memory import PARTS, MemoryBytes
from mpizero.planning.traffic import PURPOSES
from mpizero.planning.training_plan import RankPlan, TrainingPlan

__all__ = ["PARTS", "PURPOSES", "MemoryBytes", "RankPlan", "Sent", "TrainingPlan"]
