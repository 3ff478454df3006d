"""Check that a user's model returns sums over samples, a correct gradient, and the same values every time."""

from mpizero.tools.check_model.checks import check_model
from mpizero.tools.check_model.model import ModelFinding, ModelReport

__all__ = ["ModelFinding", "ModelReport", "check_model"]
