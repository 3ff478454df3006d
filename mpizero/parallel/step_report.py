"""Describe the result of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NonFinite:
    """Describe the first infinite or NaN loss or gradient that was found.

    Attributes
    ----------
    step : int
        Number of the training step, from 1; skipped ones count.
    rank : int
        The rank that found it.
    tensor : str
        "loss", "weight", or the name of the parameter whose gradient it is.
    start, stop : int
        Range of its grain's samples in the global batch; all samples, if only the sum over grains overflows.
    message : str
        What was found, as readable text.
    """

    step: int
    rank: int
    tensor: str
    start: int
    stop: int
    message: str

    def __str__(self) -> str:
        """Return a text: what was found, on which rank, in which samples."""
        return f"{self.message} on rank {self.rank}, samples {self.start} to {self.stop - 1}"


@dataclass(frozen=True)
class StepReport:
    """Hold the results of one training step.

    Attributes
    ----------
    step : int
        Optimizer steps done, this one included.
    loss : float
        Mean loss over the global batch.
    weight : float
        The total weight that the sum of losses was divided by.
    learning_rate : float
        Learning rate of this step.
    gradient_norm : float or None
        Global norm of the averaged gradient before clipping; None if nothing needed it.
    skipped : str or None
        Why the update was skipped: which rank, tensor and samples were not finite. None: it was not skipped.
    bytes_sent : int
        Bytes this rank sent to other ranks.
    non_finite : tuple of NonFinite
        The grains whose loss or gradient was not finite, the first one first, at most 16; empty unless skipped. The
        same on every rank.
    loss_scale, next_loss_scale : float
        The loss scale of this step, and that of the next step.
    bucket_mb : float
        MiB of partial sums of gradients that are in flight at once from now on; 0.0 if gradients are not sent.
    buckets_tried : tuple of float
        The bucket sizes, in MiB, that ``bucket_mb="auto"`` has tried, if this step was the last trial; else empty.
    """

    step: int
    loss: float
    weight: float
    learning_rate: float
    gradient_norm: float | None
    skipped: str | None
    bytes_sent: int
    non_finite: tuple[NonFinite, ...] = ()
    loss_scale: float = 1.0
    next_loss_scale: float = 1.0
    bucket_mb: float = 0.0
    buckets_tried: tuple[float, ...] = ()

    @property
    def backing_off(self) -> bool:
        """Tell whether the step was skipped only because its loss scale was too large, and the scale is lowered now.

        That is assumed if every loss was finite: the scale multiplies the gradients that start at the losses.
        """
        lost = any(bad.tensor in ("loss", "weight") for bad in self.non_finite)
        return bool(self.non_finite) and not lost and self.next_loss_scale < self.loss_scale


#: Result of an update: the norm of the gradient, if it was needed, and the non-finite values if it was skipped.
Outcome = tuple[float | None, tuple[NonFinite, ...]]
