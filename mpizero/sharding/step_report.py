"""Report training steps: describe results, raise an error after too many skipped steps, advise on the size of grains.

:class:`StepReport` describes a step, :class:`NonFinite` a value for which it was skipped. :class:`SkippedSteps` treats
skipped steps as the user's :class:`BadSteps` says. :class:`GrainNotices` prints how batches are cut into grains, where
ranks have none or each grain of a PyTorch or JAX model has a fixed cost, and which size would be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpizero._util.checks import flag, is_whole, require
from mpizero._util.text import notice
from mpizero.errors import ConfigError, NonFiniteError
from mpizero.layout import Grains
from mpizero.layout.batch import GrainRule


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
        Half-open range of the grain's samples in the global batch. If every grain is finite and only the sum of
        gradients overflows, the range has all samples.
    message : str
        Readable text that says what was found.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> config = mz.Config(micro_batch=1, bad_steps=mz.BadSteps(warn=False))
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
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
        clipping, with a loss scale and with ``gradient_compression="fp16"``).
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
        Size in MiB of a bucket, the partial sums that nodes exchange together; 0.0 if gradients are not sent.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> config = mz.Config(clip=1.0)
    >>> with mz.distribute(mz.nn.MLP(2, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
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

    @property
    def backing_off(self) -> bool:
        """Tell whether the step was skipped only because its loss scale was too large; the scale is then lowered.

        An excessive scale is assumed if every loss and weight was finite and only gradients overflowed, because the
        scale multiplies gradients only.
        """
        lost = any(bad.tensor in ("loss", "weight") for bad in self.non_finite)
        return bool(self.non_finite) and not lost and self.next_loss_scale < self.loss_scale


#: Result of an update: the norm of the gradient, if it was needed, and the non-finite values if it was skipped.
Outcome = tuple[float | None, tuple[NonFinite, ...]]


@dataclass(frozen=True, kw_only=True)
class BadSteps:
    """Describe what happens when a step is skipped because a loss or a gradient is not finite.

    Parameters
    ----------
    limit : int or None
        Number of steps skipped in a row at which :class:`~mpizero.errors.NonFiniteError` is raised on every rank.
        Steps that only lower the loss scale are not counted. None never raises.
    warn : bool
        Whether one rank writes a line about each skipped step to standard error.
    callback : callable or None
        Called with the :class:`StepReport` of each skipped step on every rank, after the line is written and before the
        error is raised. It may call the model's collective methods, since all ranks call it.

    Raises
    ------
    ConfigError
        If a value has another type, or ``limit`` is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> seen = []
    >>> bad_steps = mz.BadSteps(limit=None, warn=False, callback=lambda report: seen.append(report.skipped))
    >>> config = mz.Config(bad_steps=bad_steps)
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
    ...     _ = model.train(np.array([[np.nan]], np.float32), np.array([0]))  # changes no parameter
    >>> seen
    ['the loss is not finite on rank 0, samples 0 to 0']
    """

    limit: int | None = 5
    warn: bool = True
    callback: Callable[[StepReport], object] | None = None

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for an invalid value."""
        if self.limit is not None and not is_whole(self.limit, 1):
            raise ConfigError(f"BadSteps: limit={self.limit!r}: expected a whole number >= 1, or None for no limit")
        require("BadSteps: warn", self.warn, flag)
        if self.callback is not None and not callable(self.callback):
            raise ConfigError(f"BadSteps: callback={self.callback!r}: expected a function of a StepReport, or None")


_ADVICE = (
    "lower the learning rate, set ShardingConfig(clip=...), or look at the data: "
    "mpizero.sharding.dump_bad_step(model, (x, y), folder) keeps the samples"
)


class SkippedSteps:
    """Count the steps that a training skips in a row, report each, and raise an error if there are too many.

    Parameters
    ----------
    policy : BadSteps
        What to do about a skipped step, and how many in a row are too many.
    """

    def __init__(self, policy: BadSteps) -> None:
        self.policy, self.in_a_row = policy, 0

    def see(self, report: StepReport, *, speaks: bool) -> None:
        """Count a step; if it was skipped, write the warning, call the callback and raise as the user's BadSteps says.

        ``speaks`` says whether this rank is the one that writes the warning. Not collective, but all ranks have equal
        reports and so do the same.

        Raises
        ------
        NonFiniteError
            If ``policy.limit`` steps in a row have been skipped.
        """
        warning = self.count(report)
        if not warning:
            return
        if self.policy.warn and speaks:
            notice(warning)
        if self.policy.callback is not None:
            self.policy.callback(report)
        self.enforce(report, _ADVICE)

    def count(self, report: StepReport) -> str:
        """Count a step; return the warning about it if it was skipped, else "". Not collective."""
        if not report.skipped:
            self.in_a_row = 0
            return ""
        limit, warning = self.policy.limit, f"step {_number(report)} skipped, parameters unchanged: {report.skipped}"
        if report.backing_off:
            ends = "" if limit is None else f", which is not counted among the {limit} skipped steps that end a run"
            return f"{warning}; the loss scale falls from {report.loss_scale:g} to {report.next_loss_scale:g}{ends}"
        self.in_a_row += 1
        ends = "" if limit is None else f", {limit} end the run"
        return f"{warning} ({self.in_a_row} in a row{ends})"

    def enforce(self, report: StepReport, advice: str) -> None:
        """Raise :class:`NonFiniteError` if ``policy.limit`` steps in a row were skipped, up to the step of ``report``.

        Not collective. :meth:`count` must have counted that step. The error's message ends with ``advice``.
        """
        limit = self.policy.limit
        if limit is not None and self.in_a_row >= limit and report.skipped and not report.backing_off:
            raise NonFiniteError(
                f"step {_number(report)}: skipped {self.in_a_row} steps in a row: {report.skipped}; {advice}"
            )


def _number(report: StepReport) -> int:
    return report.non_finite[0].step


#: A notice advises another ``micro_batch`` only if a step takes less than this fraction of the present time with it.
_WORTH = 0.9
#: Number of steps after which no such notice is printed any more.
_MOST_STEPS = 20


class GrainNotices:
    """Print notices about grains in the first steps: their size, and a faster size.

    The size is printed where some ranks have no grain, and for a model of PyTorch or JAX. ``ranks`` is the number of
    ranks that share a global batch, ``stages`` that of the stages of a pipeline.
    """

    def __init__(self, ranks: int, stages: int = 1) -> None:
        self._ranks, self._stages, self._steps, self._advised = ranks, stages, 0, False

    def after_step(self, rule: GrainRule, samples: int, model: Any, step: int) -> None:
        """Print the notices that are due after step number ``step``, on a global batch of ``samples`` samples.

        Not collective.
        """
        self._steps += 1
        # A training that goes on from a checkpoint keeps its grains, and micro-batches fill a pipeline.
        may_change = step == self._steps == _MOST_STEPS and self._stages == 1
        if may_change and (text := larger_grains(rule, samples, self._ranks)):
            notice(text)
        if self._steps == 1:
            if rule.coarse or (rule.micro_batch is None and rule.grains(samples).count < self._ranks):
                notice(described_grains(rule, samples))
            if hasattr(model, "batch_norm_notice") and (text := model.batch_norm_notice(rule.micro_size(samples))):
                notice(text)
            return
        waits = rule.coarse and not self._advised and self._steps <= _MOST_STEPS
        if waits and (seconds := model.times.seconds) is not None:
            self._advised = True
            if text := faster_grain(rule, samples, self._ranks, *seconds):
                notice(text)


def described_grains(rule: GrainRule, samples: int) -> str:
    """Return a line about the grains of a global batch of ``samples`` samples that the default ``rule`` makes."""
    grains = rule.grains(samples)
    return (
        f"{samples} samples a step in {grains.described(rule.accumulate)} (by default; micro_batch sets it): work for "
        f"at most {_ranks(grains.count)}"
    )


#: A notice advises larger grains of a small model if they have less than this fraction of the samples of fast products.
_SMALL = 1 / 8


def larger_grains(rule: GrainRule, samples: int, ranks: int) -> str | None:
    """Return a line that advises larger grains of a small model, which few samples at a time make slow.

    Return None if the user has chosen ``micro_batch``, or a default grain has an eighth or more of the samples with
    which the model's products are fast, or is at least half as large as can be with ``ranks`` ranks.
    """
    now, enough = rule.micro_size(samples), rule.efficient
    if rule.coarse or rule.micro_batch is not None or enough is None or now >= _SMALL * enough:
        return None
    best = min(enough, -(-samples // (ranks * rule.accumulate)))
    if best < 2 * now:
        return None
    return (
        f"{samples} samples a step in {rule.grains(samples).described(rule.accumulate)} (by default): this model is "
        f"fast from {enough:,} at a time on; with micro_batch={best} a step takes less time on {_ranks(ranks)}; "
        f"{_changed(rule, samples, best)}"
    )


def faster_grain(rule: GrainRule, samples: int, ranks: int, passed: int, seconds: float, one: float) -> str | None:
    """Return a line about the fastest ``micro_batch``, or None if it does not save more than a tenth of the time.

    Parameters
    ----------
    rule : GrainRule
        The current grain rule.
    samples, ranks : int
        Number of samples of a global batch, and of ranks that share it.
    passed : int
        Number of samples of a timed pass, at least 2.
    seconds, one : float
        Seconds of a pass of ``passed`` samples, and of one sample.
    """
    each = (seconds - one) / (passed - 1)
    fixed = one - each
    if each <= 0 or fixed <= 0:
        return None

    def step(micro: int) -> float:
        rounds = -(-Grains(samples, micro * rule.accumulate).count // ranks)
        return rounds * rule.accumulate * (fixed + each * micro)

    now = rule.micro_size(samples)
    best = min((1 << power for power in range((samples // rule.accumulate).bit_length())), key=step, default=now)
    if step(best) >= _WORTH * step(now):
        return None
    return (
        f"a pass of {passed} samples took {seconds * 1e3:.3g} ms, one of a single sample {one * 1e3:.3g} ms: with "
        f"micro_batch={best} in place of {now} the passes of a step would take about {step(best) / step(now):.2f} of "
        f"the time on {_ranks(ranks)}; {_changed(rule, samples, best)}"
    )


def _changed(rule: GrainRule, samples: int, micro_batch: int) -> str:
    """Say what else another ``micro_batch`` changes for a global batch of ``samples`` samples."""
    count = Grains(samples, micro_batch * rule.accumulate).count
    return f"a batch is work for at most {_ranks(count)} then, with other (equally good) bits"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
