"""Is a user's model what training takes it for: sums over samples, a right gradient, the same every time."""

from mpizero.train.modelcheck.check import check_model
from mpizero.train.modelcheck.findings import ModelFinding, ModelReport

__all__ = ["ModelFinding", "ModelReport", "check_model"]
