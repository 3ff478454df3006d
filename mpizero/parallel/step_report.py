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
        Its grain's samples, as places in the global batch; of a sum that overflows, all samples.
    message : str
        What it is, for people.
    """

    step: int
    rank: int
    tensor: str
    start: int
    stop: int
    message: str

    def __str__(self) -> str:
        """Return what, on which rank, of which samples."""
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
        What it was divided by.
    learning_rate : float
        Of this step.
    gradient_norm : float or None
        Global norm of the averaged gradient before clipping; None when nothing asked for it.
    skipped : str or None
        Why the update was skipped: which rank, tensor and samples were not finite.
    bytes_sent : int
        Bytes this rank sent to other ranks.
    non_finite : tuple of NonFinite
        The grains whose loss or gradient was not finite, the first one first, at most 16; empty unless skipped. The
        same on every rank.
    loss_scale, next_loss_scale : float
        What the loss was multiplied by, and what the next one will be.
    bucket_mb : float
        MiB of sums of gradients that travel at once from now on; 0.0 where none travel.
    buckets_tried : tuple of float
        The sizes that were tried, in MiB, where this step was the last trial; else empty.
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
        """Tell whether a lower loss scale may be all that a skipped step needed, and the next one has it.

        So it is where every loss was finite: the scale multiplies what goes backward from there.
        """
        lost = any(bad.tensor in ("loss", "weight") for bad in self.non_finite)
        return bool(self.non_finite) and not lost and self.next_loss_scale < self.loss_scale


#: The norm of a gradient, where something asked for it, and what is not finite in a step that is skipped.
Outcome = tuple[float | None, tuple[NonFinite, ...]]
