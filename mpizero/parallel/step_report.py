"""Describe the result of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NonFinite:
    """Describe the first infinite or NaN value (loss, weight or gradient) of a grain.

    Attributes
    ----------
    step : int
        Number of the training step, from 1; skipped steps count.
    rank : int
        The rank that found the value.
    tensor : str
        "loss", "weight", or the name of the parameter whose gradient is infinite or NaN.
    start, stop : int
        Half-open range of samples of the global batch: the grain of the value. If every grain is finite and only their
        sum overflows, the range has all samples.
    message : str
        Readable text that says what was found.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> config = mz.ShardingConfig(comm="self", micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.DDPModel(mz.nn.MLP(1, [], 2), config, optimizer=mz.SGD(0.1)) as model:
    ...     _ = model.train(np.array([[0.0], [np.inf]], np.float32), np.array([0, 1]))
    ...     found = model.last_step.non_finite[0]
    >>> found.step, found.rank, found.tensor, found.start, found.stop
    (1, 0, 'loss', 1, 2)
    """

    step: int
    rank: int
    tensor: str
    start: int
    stop: int
    message: str

    def __str__(self) -> str:
        """Return a text that says what was found, on which rank, in which samples."""
        return f"{self.message} on rank {self.rank}, samples {self.start} to {self.stop - 1}"


@dataclass(frozen=True)
class StepReport:
    """Hold the results of one training step.

    Attributes
    ----------
    step : int
        Number of updates that the optimizer has done so far, including this step's; skipped steps do not count.
    loss : float
        Mean loss over the global batch.
    weight : float
        The total weight of the samples, by which the sum of losses was divided.
    learning_rate : float
        Learning rate of this step.
    gradient_norm : float or None
        Global norm of the averaged gradient before clipping; None if it was not computed (it is only needed for
        clipping, with a loss scale and with 16-bit compression).
    skipped : str or None
        Why the update was skipped: which rank found an infinite or NaN value, in which tensor and for which samples.
        None if the update was done.
    bytes_sent : int
        Bytes that this rank sent to other ranks in this step.
    non_finite : tuple of NonFinite
        For each grain whose loss or gradient was not finite, its first such value; at most 16, in order of grains.
        Empty if the update was done. The same on every rank.
    loss_scale, next_loss_scale : float
        The loss scale of this step, and the one of the next step.
    bucket_mb : float
        MiB of partial sums of gradients that are in flight at once from now on; 0.0 if gradients are not sent.
    buckets_tried : tuple of float
        The bucket sizes, in MiB, that ``bucket_mb="auto"`` has tried, if this step was the last trial; else empty.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> config = mz.ShardingConfig(comm="self", clip=1.0)
    >>> with mz.DDPModel(mz.nn.MLP(2, [], 2), config, optimizer=mz.SGD(0.1)) as model:
    ...     loss, report = model.train(x, y), model.last_step
    >>> report.step, report.weight, report.learning_rate, report.skipped, report.loss == loss
    (1, 2.0, 0.1, None, True)
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
        """Tell whether the step was skipped only because its loss scale was too large, so that it is lowered now.

        That is assumed if every loss and weight was finite and only gradients overflowed, because the scale multiplies
        gradients only.
        """
        lost = any(bad.tensor in ("loss", "weight") for bad in self.non_finite)
        return bool(self.non_finite) and not lost and self.next_loss_scale < self.loss_scale


#: Result of an update: the norm of the gradient, if it was needed, and the non-finite values if it was skipped.
Outcome = tuple[float | None, tuple[NonFinite, ...]]
