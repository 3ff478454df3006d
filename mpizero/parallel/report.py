"""What one training step tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What one training step did.

    Attributes
    ----------
    step : int
        Optimizer steps done, this one included.
    loss : float
        Mean loss over the global batch.
    weight : float
        What it was divided by.
    learning_rate : float
        Of this step.
    gradient_norm : float or None
        Global norm of the averaged gradient before clipping; None when nothing asked for it.
    skipped : str or None
        Why the update was skipped: which rank, tensor and samples were not finite.
    bytes_sent : int
        Bytes this rank sent to other ranks.
    """

    step: int
    loss: float
    weight: float
    learning_rate: float
    gradient_norm: float | None
    skipped: str | None
    bytes_sent: int
