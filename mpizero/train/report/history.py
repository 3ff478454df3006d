"""Read out of a run's records what a reader asks first: how it ended, what was skipped, where it was resumed."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mpizero._util.text import age
from mpizero.train.events import EVENTS, METRICS, RunRecords, SkippedStep, VisitRecords, VisitStart, is_number

#: Seconds without a new line, and measured steps of that length, after which a run is not said to be running.
SILENT, _LONG = 300.0, 10


class Skip(NamedTuple):
    """Hold a skipped step: its message ("" if the run ended before it was written), and its event if there is one."""

    step: int
    message: str
    event: SkippedStep | None

    @property
    def lowers_scale(self) -> bool:
        """Tell whether the step only lowered the loss scale, which is no fault."""
        return self.event is not None and self.event.next_loss_scale < self.event.loss_scale


class Resume(NamedTuple):
    """Hold a resume: its first step, the visits' descriptions, and which steps were repeated.

    ``repeated`` has the first and the last step that had been done before; None without any. ``again`` is how many of
    them have been done again so far, and ``same`` tells whether the losses of these were the same, bit for bit.
    """

    first: int
    before: VisitStart | None
    after: VisitStart
    repeated: tuple[int, int] | None
    again: int
    same: bool


@dataclass(frozen=True)
class RunHistory:
    """Hold the records of a run, and what follows from them.

    Attributes
    ----------
    name : str
        Name of the run in a report.
    records : RunRecords
        What the run has recorded.
    now : float
        The time, in seconds since 1970.
    """

    name: str
    records: RunRecords
    now: float

    @property
    def visits(self) -> tuple[VisitRecords, ...]:
        """The visits; empty for runs of earlier versions."""
        return self.records.visits

    @property
    def start(self) -> VisitStart | None:
        """The description of the training in its last visit."""
        return next((visit.start for visit in reversed(self.visits) if visit.start), None)

    @property
    def last(self) -> VisitRecords | None:
        """The last visit."""
        return self.visits[-1] if self.visits else None

    @property
    def done(self) -> int:
        """Number of steps done."""
        known = [line["step"] for line in self.records.steps[-1:]]
        return max([*known, *(visit.end.step for visit in self.visits[-1:] if visit.end)], default=0)

    @property
    def planned(self) -> int | None:
        """Number of the last step that was asked for; None if it is not recorded."""
        return None if self.start is None else self.start.steps

    @cached_property
    def state(self) -> str:
        """One of "complete", "stopped", "failed", "running", and "silent": neither ended nor writing."""
        if self.records.result is not None:
            return "complete"
        end = None if self.last is None else self.last.end
        if end is not None:
            return {"done": "complete", "stopped": "stopped"}.get(end.reason, "failed")
        return "running" if self.now - self.written < max(SILENT, _LONG * self._longest) else "silent"

    @property
    def _longest(self) -> float:
        """Seconds of the longest step that was measured."""
        measured = (phases for visit in self.visits for phases in visit.phases)
        return max((seconds for phases in measured for seconds in phases.seconds), default=0.0)

    @property
    def message(self) -> str:
        """The reason of an early end, or the error's message; "" if there is none."""
        if self.records.result is not None:
            return str(self.records.result.get("stopped") or "")
        end = None if self.last is None else self.last.end
        return "" if end is None else ": ".join(filter(None, (end.error, end.message)))

    @property
    def told(self) -> str:
        """Say how the run ended, in one or two sentences."""
        of = "" if self.planned is None or (self.planned <= self.done and self.state == "complete") else self.planned
        steps = f"{self.done:,} steps" if of == "" else f"{self.done:,} of {of:,} steps"
        why = f": {self.message}" if self.message else ""
        skipped = f"{counted(self.faults, 'step')} skipped" if self.faults else ""
        visits = f", in {len(self.visits)} visits" if len(self.visits) > 1 else ""
        return {
            "complete": f"Complete after {steps}{visits}{'; ' if skipped else ''}{skipped}."
            + (f" It ended early: {self.message}." if self.message else ""),
            "stopped": f"Stopped after {steps}{why}. It goes on with a resume.",
            "failed": f"Failed after {steps}{why}.",
            "running": f"Running: {steps} are done.",
            "silent": f"Not ended: {steps} are done, the last record was written {age(self.now - self.written)}. The "
            "job was killed, hangs, or does something that takes long.",
        }[self.state] + (f" {skipped.capitalize()}." if skipped and self.state != "complete" else "")

    @property
    def faults(self) -> int:
        """Number of steps that were skipped, but for those that only lowered the loss scale."""
        return sum(not skip.lowers_scale for skip in self.skips)

    @cached_property
    def written(self) -> float:
        """When the run has written its last line, in seconds since 1970."""
        found = [event.time for visit in self.visits[-1:] for event in visit.events[-1:]]
        for name in (METRICS, EVENTS):
            with contextlib.suppress(OSError):
                found.append((self.records.folder / name).stat().st_mtime)
        return max(found, default=0.0)

    @property
    def loss(self) -> float | None:
        """The last loss; None if there is none, or if it was not finite."""
        name = self.loss_name
        return next((line[name] for line in self.records.steps[-1:] if is_number(line.get(name))), None)

    @property
    def loss_name(self) -> str:
        """Name of the figure that is the loss of the parameters that the run keeps.

        Methods of whole vectors evaluate trial points, too, whose losses are "loss".
        """
        return "iterate_loss" if any("iterate_loss" in line for line in self.records.steps[-1:]) else "loss"

    @property
    def digest(self) -> str:
        """SHA-256 of the parameters at the end; "" if the run has not ended."""
        return str((self.records.result or {}).get("parameters_sha256") or "")

    @property
    def seconds(self) -> float | None:
        """Seconds of all visits together; None if they are not recorded."""
        if not self.visits:
            return None
        return sum(self._seconds(visit) for visit in self.visits)

    def last_step(self, visit: VisitRecords) -> int | None:
        """Return the last step of a visit, as far as it is known."""
        if visit is self.last:
            return self.done
        if visit.end is not None:
            return visit.end.step
        after = next((resume for resume in self.resumes if resume.before is visit.start), None)
        return None if after is None else after.repeated[1] if after.repeated else after.first - 1

    def _seconds(self, visit: VisitRecords) -> float:
        if visit.end is not None:
            return visit.end.seconds
        begun = visit.events[0].time
        return (self.written if visit is self.last else visit.events[-1].time) - begun

    @property
    def rate(self) -> str:
        """Name of the speed in the metrics; "" without steps."""
        found = self.records.steps[-1] if self.records.steps else {}
        return next((name for name in found if name.endswith("_per_second")), "")

    @cached_property
    def speed(self) -> float | None:
        """The speed of the median step, without the first three of the run; None without a later one."""
        rates = [rate for rate in self.series(self.rate)[1][3:] if rate == rate]
        return statistics.median(rates) if rates else None

    def speed_at(self, steps: Sequence[int]) -> float | None:
        """Return the mean speed of some steps; None if no line of metrics has it."""
        rates = [r for step, r in zip(*self.series(self.rate), strict=True) if step in set(steps) and r == r]
        return statistics.fmean(rates) if rates else None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps whose line has a figure, and its values; NaN where it was not finite."""
        lines = [line for line in self.records.steps if name in line]
        values = [line[name] if is_number(line[name]) else math.nan for line in lines]
        return [line["step"] for line in lines], values

    def figures(self) -> list[str]:
        """Return the names of all figures in the metrics, in the order in which they appear."""
        names: dict[str, None] = {}
        for line in self.records.steps:
            if not line.keys() <= names.keys():
                names |= {name: None for name, value in line.items() if is_number(value)}
        return list(names)

    def messages(self, name: str) -> list[tuple[int, str]]:
        """Return the steps whose line has a message of this name, such as "loss_spike", and the messages."""
        return [(line["step"], str(line[name])) for line in self.records.steps if line.get(name)]

    @cached_property
    def skips(self) -> list[Skip]:
        """The skipped steps, in order, each as in its last repetition."""
        events = {event.step: event for visit in self.visits for event in visit.skipped}
        texts = dict(self.messages("skipped"))
        last = max((line["step"] for line in self.records.steps[-1:]), default=0)
        seen = [step for step in sorted({*events, *texts}) if step in texts or step > last]
        return [Skip(step, texts.get(step, ""), events.get(step)) for step in seen]

    @cached_property
    def resumes(self) -> list[Resume]:
        """The resumes, in order."""
        return list(self._resumes())

    def _resumes(self) -> Iterator[Resume]:
        lines = self.records.superseded
        superseded = [(line["step"], line.get("loss")) for line in lines]
        before: VisitStart | None = None
        taken = 0
        for visit in self.visits:
            start = visit.start
            if start is None:
                continue
            block = dict(superseded[taken : taken + start.superseded])
            taken += start.superseded
            later = {line["step"]: line.get("loss") for line in self.records.steps}
            later |= dict(reversed(superseded[taken:]))  # what was done again first, if it was superseded, too
            again = [step for step in block if step in later]
            if start.step > 0:
                yield Resume(
                    start.step + 1,
                    before,
                    start,
                    (min(block), max(block)) if block else None,
                    len(again),
                    all(later[step] == block[step] for step in again),
                )
            before = start


def counted(count: int, name: str) -> str:
    """Return a number of things, such as "1 step" or "2,000 steps"."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def flattened(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings by their full names, such as "train.steps"."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found
