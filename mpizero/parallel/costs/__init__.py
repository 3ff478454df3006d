"""What a training takes before it runs: memory, messages, work and idleness of every rank, by formula."""

from mpizero.parallel.costs.calls import Sent
from mpizero.parallel.costs.memory import PARTS, Bytes
from mpizero.parallel.costs.plan import RankPlan, TrainingPlan
from mpizero.parallel.costs.traffic import PURPOSES

__all__ = ["PARTS", "PURPOSES", "Bytes", "RankPlan", "Sent", "TrainingPlan"]
