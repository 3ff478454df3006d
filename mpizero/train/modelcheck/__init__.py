"""Check that a user's model returns sums over samples, a right gradient, and the same values every time."""

from mpizero.train.modelcheck.check import check_model
from mpizero.train.modelcheck.model_report import ModelFinding, ModelReport

__all__ = ["ModelFinding", "ModelReport", "check_model"]
