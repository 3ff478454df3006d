"""Report skipped steps, and raise an error after too many in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpizero.errors import ConfigError, NonFiniteError
from mpizero.parallel.step_report import StepReport
from mpizero.text import notice
from mpizero.validation import flag, is_whole, require

_ADVICE = (
    "lower the learning rate, set ShardingConfig(clip=...), or look at the data: "
    "mpizero.dump_bad_step(model, (x, y), folder) keeps the samples"
)


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
    >>> config = mz.ShardingConfig(comm="self", bad_steps=bad_steps)
    >>> with mz.DDPModel(mz.nn.MLP(1, [], 2), config, optimizer=mz.SGD(0.1)) as model:
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
        """Count a step; if it was skipped, write the warning, call the callback and raise as the policy says.

        ``speaks`` says whether this rank is the one that writes the warning. Not collective, but all ranks have equal
        reports and so do the same.

        Raises
        ------
        NonFiniteError
            If ``policy.limit`` steps in a row have been skipped.
        """
        told = self.told(report)
        if not told:
            return
        if self.policy.warn and speaks:
            notice(told)
        if self.policy.callback is not None:
            self.policy.callback(report)
        self.enforce(report, _ADVICE)

    def told(self, report: StepReport) -> str:
        """Count a step; return the warning about it if it was skipped, else "". Not collective."""
        if not report.skipped:
            self.in_a_row = 0
            return ""
        limit, told = self.policy.limit, f"step {_number(report)} skipped, parameters unchanged: {report.skipped}"
        if report.backing_off:
            ends = "" if limit is None else f", which is not counted among the {limit} skipped steps that end a run"
            return f"{told}; the loss scale falls from {report.loss_scale:g} to {report.next_loss_scale:g}{ends}"
        self.in_a_row += 1
        ends = "" if limit is None else f", {limit} end the run"
        return f"{told} ({self.in_a_row} in a row{ends})"

    def enforce(self, report: StepReport, advice: str) -> None:
        """Raise :class:`NonFiniteError` if ``policy.limit`` steps in a row were skipped, up to the step of ``report``.

        Not collective. :meth:`told` must have counted that step. The error's message ends with ``advice``.
        """
        limit = self.policy.limit
        if limit is not None and self.in_a_row >= limit and report.skipped and not report.backing_off:
            raise NonFiniteError(
                f"step {_number(report)}: skipped {self.in_a_row} steps in a row: {report.skipped}; {advice}"
            )


def _number(report: StepReport) -> int:
    return report.non_finite[0].step
