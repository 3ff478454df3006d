"""What a training takes before it runs: memory, messages, work and idleness of every rank, by formula."""

from mpizero.planning.byte_counts import Sent
from mpizero.planning.rank_memory import PARTS, MemoryBytes
from mpizero.planning.traffic import PURPOSES
from mpizero.planning.training_plan import RankPlan, TrainingPlan

__all__ = ["PARTS", "PURPOSES", "MemoryBytes", "RankPlan", "Sent", "TrainingPlan"]
