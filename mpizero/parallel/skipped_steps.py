"""Report skipped steps, and end the training after too many in a row."""

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
    """Say what happens when steps are skipped because a loss or a gradient is not finite.

    Parameters
    ----------
    limit : int or None
        Skipped steps in a row after which :class:`~mpizero.errors.NonFiniteError` is raised on every rank; those that
        only lower the loss scale are not counted. None never raises.
    warn : bool
        Whether one rank writes a line about each of them to standard error.
    callback : callable or None
        Is given the :class:`StepReport` of each of them, on every rank, after the line and before the error. It may
        call the model's collective methods, since all ranks do the same.

    Raises
    ------
    ConfigError
        If a value is none of these.
    """

    limit: int | None = 5
    warn: bool = True
    callback: Callable[[StepReport], object] | None = None

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.limit is not None and not is_whole(self.limit, 1):
            raise ConfigError(f"BadSteps: limit={self.limit!r}: expected a whole number >= 1, or None for no limit")
        require("BadSteps: warn", self.warn, flag)
        if self.callback is not None and not callable(self.callback):
            raise ConfigError(f"BadSteps: callback={self.callback!r}: expected a function of a StepReport, or None")


class SkippedSteps:
    """Count the skipped steps of one training, and say what there is to say of each.

    Parameters
    ----------
    policy : BadSteps
        How many are too many.
    """

    def __init__(self, policy: BadSteps) -> None:
        self.policy, self.in_a_row = policy, 0

    def see(self, report: StepReport, *, speaks: bool) -> None:
        """Count a step and do what the policy says; ``speaks`` tells whether this rank writes.

        Not collective; the same on every rank whose report is.

        Raises
        ------
        NonFiniteError
            If that was one too many in a row.
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
        """Count a step and return what to say of it: nothing of a good one. Not collective."""
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
        """Raise :class:`NonFiniteError` if the step that was told of last was one too many. Not collective."""
        limit = self.policy.limit
        if limit is not None and self.in_a_row >= limit and report.skipped and not report.backing_off:
            raise NonFiniteError(
                f"step {_number(report)}: skipped {self.in_a_row} steps in a row: {report.skipped}; {advice}"
            )


def _number(report: StepReport) -> int:
    return report.non_finite[0].step
