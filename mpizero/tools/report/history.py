"""Compute the facts that a report shows from the records of a run, and state the most important ones in sentences.

:class:`RunHistory` computes how a run ended, which steps were skipped and where it was resumed; a session is one start
or resume of a run. Other classes and functions compute the facts about ranks: seconds by phase, counted and planned
memory, idle time of pipelines. :func:`findings` states in sentences what is most important in the pictures of a report.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpizero._util.text import age, amount, duration
from mpizero.train.events import (
    EVENTS,
    METRICS,
    MemoryCount,
    PhaseSeconds,
    PipelineCell,
    PipelineTimetable,
    RunRecords,
    SessionRecords,
    SessionStart,
    SkippedStep,
    is_number,
)

#: A run counts as silent after this many seconds, or this many times its longest measured step, without a new record.
SILENT, _LONG = 300.0, 10


class Skip(NamedTuple):
    """Hold a skipped step: its message ("" if the run ended before writing one), and its recorded event, or None."""

    step: int
    message: str
    event: SkippedStep | None

    @property
    def lowers_scale(self) -> bool:
        """Tell whether the skipped step only lowered the loss scale, which is not a fault."""
        return self.event is not None and self.event.next_loss_scale < self.event.loss_scale


class Resume(NamedTuple):
    """Hold a resume: its first step, the sessions before and after, and which steps were repeated.

    ``repeated`` has the first and the last of the steps that had been done after the checkpoint, and that the run
    therefore does again; None if there are none. ``again`` is the number of these steps that have been repeated so far,
    and ``same`` tells whether their losses are the same, bit for bit.
    """

    first: int
    before: SessionStart | None
    after: SessionStart
    repeated: tuple[int, int] | None
    again: int
    same: bool


@dataclass(frozen=True)
class RunHistory:
    """Hold the records of a run, and compute the facts that follow from them.

    Attributes
    ----------
    name : str
        Name of the run in a report.
    records : RunRecords
        The records that the run has written.
    now : float
        The current time, in seconds since 1970.
    """

    name: str
    records: RunRecords
    now: float

    @property
    def sessions(self) -> tuple[SessionRecords, ...]:
        """The records of each session; empty for runs of earlier versions of mpizero."""
        return self.records.sessions

    @property
    def start(self) -> SessionStart | None:
        """The record of how the last session was started; None if there is none."""
        return next((session.start for session in reversed(self.sessions) if session.start), None)

    @property
    def last(self) -> SessionRecords | None:
        """The records of the last session; None if there are none."""
        return self.sessions[-1] if self.sessions else None

    @property
    def done(self) -> int:
        """Number of training steps that are done."""
        known = [line["step"] for line in self.records.steps[-1:]]
        return max([*known, *(session.end.step for session in self.sessions[-1:] if session.end)], default=0)

    @property
    def planned(self) -> int | None:
        """Number of steps that the run is configured to do; None if it is not recorded."""
        return None if self.start is None else self.start.steps

    @cached_property
    def state(self) -> str:
        """One of "complete", "stopped", "failed", "running", and "silent" (not ended, but no new records)."""
        if self.records.result is not None:
            return "complete"
        end = None if self.last is None else self.last.end
        if end is not None:
            return {"done": "complete", "stopped": "stopped"}.get(end.reason, "failed")
        return "running" if self.now - self.written < max(SILENT, _LONG * self._longest) else "silent"

    @property
    def _longest(self) -> float:
        """Seconds of the longest step that was measured."""
        measured = (phases for session in self.sessions for phases in session.phases)
        return max((seconds for phases in measured for seconds in phases.seconds), default=0.0)

    @property
    def message(self) -> str:
        """The reason why the run ended early, or the error message; "" if there is none."""
        if self.records.result is not None:
            return str(self.records.result.get("stopped") or "")
        end = None if self.last is None else self.last.end
        return "" if end is None else ": ".join(filter(None, (end.error, end.message)))

    @property
    def outcome(self) -> str:
        """Say how the run ended, in one or two sentences."""
        of = "" if self.planned is None or (self.planned <= self.done and self.state == "complete") else self.planned
        steps = f"{self.done:,} steps" if of == "" else f"{self.done:,} of {of:,} steps"
        why = f": {self.message}" if self.message else ""
        skipped = f"{counted(self.faults, 'step')} skipped" if self.faults else ""
        sessions = f", in {len(self.sessions)} sessions" if len(self.sessions) > 1 else ""
        return {
            "complete": f"Complete after {steps}{sessions}{'; ' if skipped else ''}{skipped}."
            + (f" It ended early: {self.message}." if self.message else ""),
            "stopped": f"Stopped after {steps}{why}. It goes on with a resume.",
            "failed": f"Failed after {steps}{why}.",
            "running": f"Running: {steps} are done.",
            "silent": f"Not ended: {steps} are done, the last record was written {age(self.now - self.written)}. The "
            "job was killed, hangs, or does something that takes long.",
        }[self.state] + (f" {skipped.capitalize()}." if skipped and self.state != "complete" else "")

    @property
    def faults(self) -> int:
        """Number of skipped steps, without those that only lowered the loss scale."""
        return sum(not skip.lowers_scale for skip in self.skips)

    @cached_property
    def written(self) -> float:
        """The time at which the run wrote its last record, in seconds since 1970."""
        times = [event.time for session in self.sessions[-1:] for event in session.events[-1:]]
        for name in (METRICS, EVENTS):
            with contextlib.suppress(OSError):
                times.append((self.records.folder / name).stat().st_mtime)
        return max(times, default=0.0)

    @property
    def loss(self) -> float | None:
        """The loss of the last step; None if there is none, or if it was not finite."""
        name = self.loss_name
        return next((line[name] for line in self.records.steps[-1:] if is_number(line.get(name))), None)

    @property
    def loss_name(self) -> str:
        """Name of the metric with the loss of the parameters that each step has ended with.

        It is "iterate_loss" for full-batch methods, whose "loss" includes trial points, and "loss" otherwise.
        """
        return "iterate_loss" if any("iterate_loss" in line for line in self.records.steps[-1:]) else "loss"

    @property
    def digest(self) -> str:
        """SHA-256 of the parameters at the end; "" if the run has not ended."""
        return str((self.records.result or {}).get("parameters_sha256") or "")

    @property
    def seconds(self) -> float | None:
        """Seconds of all sessions together; None if they are not recorded."""
        if not self.sessions:
            return None
        return sum(self._seconds(session) for session in self.sessions)

    def last_step(self, session: SessionRecords) -> int | None:
        """Return the last step of a session; None if it is not known."""
        if session is self.last:
            return self.done
        if session.end is not None:
            return session.end.step
        after = next((resume for resume in self.resumes if resume.before is session.start), None)
        return None if after is None else after.repeated[1] if after.repeated else after.first - 1

    def _seconds(self, session: SessionRecords) -> float:
        if session.end is not None:
            return session.end.seconds
        begun = session.events[0].time
        return (self.written if session is self.last else session.events[-1].time) - begun

    @property
    def rate(self) -> str:
        """Name of the metric that is the speed, such as "samples_per_second"; "" if there is none."""
        last_line = self.records.steps[-1] if self.records.steps else {}
        return next((name for name in last_line if name.endswith("_per_second")), "")

    @cached_property
    def speed(self) -> float | None:
        """The median speed of all steps but the run's first three; None if there are no later steps."""
        rates = [rate for rate in self.series(self.rate)[1][3:] if rate == rate]
        return statistics.median(rates) if rates else None

    def speed_at(self, steps: Sequence[int]) -> float | None:
        """Return the mean speed of ``steps``; None if it is not recorded for any of them."""
        rates = [r for step, r in zip(*self.series(self.rate), strict=True) if step in set(steps) and r == r]
        return statistics.fmean(rates) if rates else None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have the metric ``name``, and its values; NaN for values that are not finite."""
        lines = [line for line in self.records.steps if name in line]
        values = [line[name] if is_number(line[name]) else math.nan for line in lines]
        return [line["step"] for line in lines], values

    def metric_names(self) -> list[str]:
        """Return the names of all numbers in the metrics, in the order in which they appear."""
        names: dict[str, None] = {}
        for line in self.records.steps:
            if not line.keys() <= names.keys():
                names |= {name: None for name, value in line.items() if is_number(value)}
        return list(names)

    def messages(self, name: str) -> list[tuple[int, str]]:
        """Return pairs of step and message for all messages called ``name``, such as "loss_spike"."""
        return [(line["step"], str(line[name])) for line in self.records.steps if line.get(name)]

    @cached_property
    def skips(self) -> list[Skip]:
        """The skipped steps, in order; of a repeated step only the last repetition counts."""
        events = {event.step: event for session in self.sessions for event in session.skipped}
        texts = dict(self.messages("skipped"))
        last = max((line["step"] for line in self.records.steps[-1:]), default=0)
        steps = [step for step in sorted({*events, *texts}) if step in texts or step > last]
        return [Skip(step, texts.get(step, ""), events.get(step)) for step in steps]

    @cached_property
    def resumes(self) -> list[Resume]:
        """The resumes of the run, in order."""
        return list(self._resumes())

    def _resumes(self) -> Iterator[Resume]:
        lines = self.records.superseded
        superseded = [(line["step"], line.get("loss")) for line in lines]
        before: SessionStart | None = None
        taken = 0
        for session in self.sessions:
            start = session.start
            if start is None:
                continue
            block = dict(superseded[taken : taken + start.superseded])
            taken += start.superseded
            later = {line["step"]: line.get("loss") for line in self.records.steps}
            later |= dict(reversed(superseded[taken:]))  # the first repetition, if it was superseded, too
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
    """Format a number with its noun, such as "1 step" or "2,000 steps"."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


#: Name of the phase in which a rank waits for others.
WAITING = "waiting"

#: Description of each phase of a step.
MEANINGS = {
    "forward": "forward passes",
    "backward": "backward passes",
    "layers' messages": "messages of tensor and context groups, and between pipeline stages",
    "local sums": "checks and sums of gradients inside a rank",
    "reduction": "sums of gradients over ranks",
    "optimizer": "update of parameters",
    "publication": "updated parameters to all ranks",
    "agreement": "samples to their ranks; losses and norms",
    "other": "none of the others",
    WAITING: "for other ranks, in any phase",
}


class MeanPhases(NamedTuple):
    """Hold mean seconds of the measured steps of a session.

    Attributes
    ----------
    steps : tuple of int
        The measured steps.
    seconds, reading : list of float
        For each rank, seconds of a step, and seconds of reading samples before it.
    phases : dict of str to list of float
        For each phase, its seconds on each rank; the phase "waiting" is last.
    """

    steps: tuple[int, ...]
    seconds: list[float]
    reading: list[float]
    phases: dict[str, list[float]]

    @property
    def description(self) -> str:
        """Say which steps were measured."""
        if len(self.steps) == 1:
            return f"the one step that was measured (step {self.steps[0]:,})"
        return f"the mean of {len(self.steps)} measured steps ({self.steps[0]:,} to {self.steps[-1]:,})"

    @property
    def waiting(self) -> list[float]:
        """For each rank, the fraction of the step in which it waited for other ranks."""
        pairs = zip(self.phases[WAITING], self.seconds, strict=True)
        return [waited / total if total else 0.0 for waited, total in pairs]


def mean_phases(measured: Sequence[PhaseSeconds]) -> MeanPhases | None:
    """Return the means over the measured steps of one session; None if there are none."""
    if not measured:
        return None
    names = dict.fromkeys(name for event in measured for name in event.phases if name != WAITING)
    nothing = [0.0] * len(measured[0].seconds)
    return MeanPhases(
        tuple(event.step for event in measured),
        _mean([event.seconds for event in measured]),
        _mean([event.reading for event in measured]),
        {name: _mean([event.phases.get(name, nothing) for event in measured]) for name in (*names, WAITING)},
    )


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


class MemoryTable(NamedTuple):
    """Hold planned and counted bytes of memory, of the host or of GPUs, by part and rank.

    Attributes
    ----------
    planned, counted : dict of str to list of int
        For each part of memory, such as "parameters", the bytes on each rank.
    """

    planned: Mapping[str, list[int]]
    counted: Mapping[str, list[int]]

    @property
    def compared(self) -> list[str]:
        """The parts of memory that were both planned and counted."""
        return [part for part in self.planned if part in self.counted]

    @property
    def only_counted(self) -> list[str]:
        """The parts of memory that were counted but not planned."""
        return [part for part in self.parts if part in self.counted and part not in self.planned]

    @property
    def only_planned(self) -> list[str]:
        """The parts of memory that were planned but not counted; empty if nothing was counted."""
        return [part for part in self.parts if self.counted and part not in self.counted]

    def totals(self) -> list[tuple[int, int]]:
        """Return, for each rank, planned and counted bytes, each summed over the parts that have both."""
        pairs = [(self.planned[part], self.counted[part]) for part in self.compared]
        ranks = len(pairs[0][0]) if pairs else 0
        return [(sum(p[rank] for p, _ in pairs), sum(c[rank] for _, c in pairs)) for rank in range(ranks)]

    @property
    def parts(self) -> list[str]:
        """All parts of memory that take more than 0 bytes on some rank."""
        names = dict.fromkeys((*self.planned, *self.counted))
        return [part for part in names if any(self.planned.get(part, ())) or any(self.counted.get(part, ()))]


def memory_tables(start: SessionStart | None, memory: MemoryCount | None) -> dict[str, MemoryTable]:
    """Return the tables of "host" and "GPU" memory, without a table about which nothing is recorded."""
    planned = ({}, {}) if start is None else (start.planned, start.planned_device)
    counted = ({}, {}) if memory is None else (memory.counted, memory.device)
    tables = {name: MemoryTable(*both) for name, *both in zip(("host", "GPU"), planned, counted, strict=True)}
    return {name: table for name, table in tables.items() if table.parts}


def idle_fractions(cells: Sequence[PipelineCell]) -> list[float]:
    """Return, for each stage, the fraction of the timetable's duration in which it is idle; empty without cells."""
    if not cells:
        return []
    begin, end = min(cell.start for cell in cells), max(cell.end for cell in cells)
    busy = [0.0] * (1 + max(cell.stage for cell in cells))
    for cell in cells:
        busy[cell.stage] += cell.end - cell.start
    return [1.0 - seconds / (end - begin) if end > begin else 0.0 for seconds in busy]


def timed_ranks(start: SessionStart | None) -> list[int]:
    """Return the ranks whose passes a measured timetable shows: the first rank of every stage."""
    others = [ranks for axis, ranks in start.coordinates.items() if axis != "pipeline"] if start else []
    ranks = range(start.ranks if start else 0)
    return [rank for rank in ranks if not any(any(axis[rank : rank + 1]) for axis in others)]


def last_timetable(sessions: Sequence[SessionRecords]) -> tuple[SessionStart | None, PipelineTimetable] | None:
    """Return the last measured timetable, and the start of its session; None if there is no timetable."""
    return next(((session.start, session.timetables[-1]) for session in reversed(sessions) if session.timetables), None)


def last_with_memory(sessions: Sequence[SessionRecords]) -> SessionRecords | None:
    """Return the last session whose memory was counted, or else the last one whose memory was planned, or None."""
    known = [session for session in reversed(sessions) if memory_tables(session.start, session.memory)]
    return next((session for session in known if session.memory), known[0] if known else None)


def last_with_phases(sessions: Sequence[SessionRecords]) -> SessionRecords | None:
    """Return the last session in which the phases of a step were measured; None if there is none."""
    return next((v for v in reversed(sessions) if v.phases), None)


#: The most events of one kind that get a sentence each.
MOST_LISTED = 3
#: The most steps at each end of a run over which losses are averaged.
_MEAN_STEPS = 10


def findings(history: RunHistory) -> list[str]:
    """Return sentences with the most important facts about a run; faults come first."""
    return [
        *(_skipped(history) if history.skips else _nothing(history)),
        *_spikes(history),
        *_resumes(history),
        *_overrides(history),
        *_losses(history),
        *_speed(history),
        *_crowded(history),
        *_waiting(history),
        *_pipeline(history),
        *_memory(history),
        *_checkpoints(history),
    ]


def percent(fraction: float) -> str:
    """Format a fraction in per cent, such as "12 %", "3.4 %" or "< 0.1 %"; an exact zero is "0 %"."""
    value = 100 * fraction
    return f"{value:.0f} %" if abs(value) >= 10 or value == 0 else f"{value:.1f} %" if abs(value) >= 0.1 else "< 0.1 %"


def _nothing(history: RunHistory) -> Iterator[str]:
    if history.records.steps:
        yield "No step was skipped." if history.resumes else "No step was skipped, and the run was never resumed."


def speed_text(rate: float) -> str:
    """Format a speed with three digits or more, such as "12.3" or "2,107"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _skipped(history: RunHistory) -> Iterator[str]:
    lowering = [skip for skip in history.skips if skip.lowers_scale]
    others = [skip for skip in history.skips if skip not in lowering]
    if len(others) > MOST_LISTED:
        ends = f"from step {others[0].step:,} to step {others[-1].step:,}"
        yield f"{len(others):,} of {history.done:,} steps were skipped, {ends}. The first ones:"
    for skip in others[:MOST_LISTED]:
        yield described_skip(skip)
    if lowering:
        steps = ", ".join(f"{skip.step:,}" for skip in lowering[:MOST_LISTED])
        more = " and others" if len(lowering) > MOST_LISTED else ""
        count = counted(len(lowering), "step")
        yield f"{count} ({steps}{more}) only lowered the loss scale: nothing is wrong with them."


def described_skip(skip: Skip) -> str:
    """Return a sentence about a skipped step: the reason, and the rank and samples concerned."""
    return f"Step {skip.step:,} was skipped: {reason(skip)} of the global batch."


def reason(skip: Skip) -> str:
    """Return why a step was skipped, and for which range of samples in the global batch."""
    if skip.message or skip.event is None or not skip.event.found:
        return skip.message or "a value was not finite, in some samples"
    one = skip.event.found[0]
    name = str(one.get("tensor"))
    what = f"the {name}" if name in ("loss", "weight") else f"the gradient of {name!r}"
    return (
        f"{what} is not finite on rank {one.get('rank')}, samples {one.get('start')} to {int(one.get('stop', 1)) - 1}"
    )


def _spikes(history: RunHistory) -> Iterator[str]:
    messages = history.messages("loss_spike")
    for step, message in messages[:MOST_LISTED]:
        yield f"The loss leapt at step {step:,}: {message}."
    if rest := messages[MOST_LISTED:]:
        yield f"It leapt in {len(rest):,} more steps."


def _resumes(history: RunHistory) -> Iterator[str]:
    for resume in history.resumes[:MOST_LISTED]:
        yield described_resume(resume)
    if rest := history.resumes[MOST_LISTED:]:
        yield f"It was resumed {len(rest)} more times, last at step {rest[-1].first:,}."


def described_resume(resume: Resume) -> str:
    """Return a sentence about a resume: after which step, on how many ranks, and which steps were repeated."""
    before, after = resume.before, resume.after
    where = f"on {counted(after.ranks, 'rank')}"
    if before is not None and before.ranks != after.ranks:
        where += f" instead of {before.ranks}"
    if before is not None and before.strategy != after.strategy:
        where += f", as {after.strategy} instead of {before.strategy}"
    text = f"Resumed after step {resume.first - 1:,} {where}"
    if resume.repeated is None:
        return f"{text}; no step was repeated."
    low, high = resume.repeated
    steps, count = (f"step {low:,}", 1) if low == high else (f"steps {low:,} to {high:,}", high - low + 1)
    if resume.again == 0:
        return f"{text}; {steps} had been done before, and not been repeated yet."
    if resume.again < count:
        steps = f"{resume.again:,} of {steps} had been done before and"
    steps += " was" if resume.again == 1 else " were"
    same = "their losses are the same, bit for bit" if resume.same else "their losses are not all the same as before"
    return f"{text}; {steps} repeated, and {same}."


def _overrides(history: RunHistory) -> Iterator[str]:
    for line in history.records.steps:
        changed = line.get("overrides")
        for one in changed if isinstance(changed, list) else ():
            if isinstance(one, dict):
                yield f"After step {one.get('step')}: {one.get('key')} = {one.get('now')}, it was {one.get('was')}."


def _losses(history: RunHistory) -> Iterator[str]:
    _, losses = history.series(history.loss_name)
    finite = [loss for loss in losses if loss == loss]
    if finite:
        count = max(1, min(_MEAN_STEPS, len(finite) // 4)) if history.loss_name == "loss" else 1
        first, last = sum(finite[:count]) / count, sum(finite[-count:]) / count
        ends = ("first step", "last step") if count == 1 else (f"mean of the first {count} steps", "of the last ones")
        yield f"The training loss went from {first:.4g} ({ends[0]}) to {last:.4g} ({ends[1]})."
    steps, values = history.series("validation_loss")
    checked = [(value, step) for step, value in zip(steps, values, strict=True) if value == value]
    if checked:
        least, step = min(checked)
        last, when = checked[-1]
        text = f"The validation loss was least after step {step:,}, {least:.4g}"
        if last <= least:
            yield f"{text}." if step < when else f"{text}, the last validation."
        else:
            rise = _rise(least, last)
            yield f"{text}; it has risen since: it was {last:.4g}{rise} in the last validation, after step {when:,}."


def _rise(least: float, last: float) -> str:
    """Describe how much larger ``last`` is than ``least``; return "" if ``least`` is not positive."""
    if least <= 0:
        return ""
    return f", {last / least:.2g} times that," if last >= 2 * least else f", {percent(last / least - 1)} more,"


def _speed(history: RunHistory) -> Iterator[str]:
    if history.speed is not None:
        unit = history.rate.removesuffix("_per_second")
        yield f"{speed_text(history.speed)} {unit} a second in the median step (without the first three)."


def _crowded(history: RunHistory) -> Iterator[str]:
    """Warn if the first node's ranks need more cores than rank 0 may use, unless rank 0 is bound to its own cores."""
    start = history.start
    if start is None or not start.nodes:
        return
    cores, threads = start.machine.get("cores"), start.machine.get("threads")
    ranks = start.nodes.count(start.nodes[0])
    if isinstance(cores, int) and isinstance(threads, int) and threads < cores < ranks * threads:
        each = "" if threads == 1 else f" with {threads} threads each"
        yield (
            f"{ranks} ranks{each} on host {start.hosts[0]}, of whose cores rank 0 may use {cores}: unless other ranks "
            "are bound to other cores, they take turns, and wait for one another the longer."
        )


def _waiting(history: RunHistory) -> Iterator[str]:
    session = last_with_phases(history.sessions)
    means = mean_phases(session.phases) if session else None
    if session is None or means is None or not any(means.seconds):
        return
    if len(means.seconds) > 1:
        waits = means.phases[WAITING]
        most, least = max(range(len(waits)), key=waits.__getitem__), min(range(len(waits)), key=waits.__getitem__)
        yield (
            f"In {means.description}{_of_earlier(history, session.start)}, rank {most} waits most for other ranks: "
            f"{_waited(means, most)}; rank {least} waits least: {_waited(means, least)}."
            f"{_beside_median(history, means)}"
        )
    slowest = max(means.seconds)
    if max(means.reading) > 0.05 * slowest:
        rank = max(range(len(means.reading)), key=means.reading.__getitem__)
        yield (
            f"Rank {rank} reads or waits for samples {duration(means.reading[rank])} before a step: "
            f"{percent(means.reading[rank] / slowest)} of the step of the slowest rank, in {means.description}."
        )


def _of_earlier(history: RunHistory, start: SessionStart | None) -> str:
    """Return a text that names the session with the start event ``start``; "" for the last session of the run."""
    if start is None or start is history.start:
        return ""
    return f" (session {start.visit}, on {counted(start.ranks, 'rank')})"


def _waited(means: MeanPhases, rank: int) -> str:
    seconds, waited = means.seconds[rank], means.phases[WAITING][rank]
    return f"{duration(waited)} of its {duration(seconds)} ({percent(means.waiting[rank])})"


def _beside_median(history: RunHistory, means: MeanPhases) -> str:
    """Return a sentence that compares the speed of the measured steps with the median speed; "" if it is not known."""
    speed = history.speed_at(means.steps)
    if speed is None or history.speed is None:
        return ""
    unit = history.rate.removesuffix("_per_second")
    what = "This step" if len(means.steps) == 1 else "On average these steps"
    return f" {what} ran at {speed_text(speed)} {unit} a second, the median step at {speed_text(history.speed)}."


def _pipeline(history: RunHistory) -> Iterator[str]:
    timetable = last_timetable(history.sessions)
    if timetable is not None and (measured := idle_fractions(timetable[1].measured)):
        start, table = timetable
        planned = idle_fractions(table.planned)
        bubble = f"; in the plan for {percent(sum(planned) / len(planned))}" if planned else ""
        ranks = ", ".join(map(str, timed_ranks(start)))
        clocks = f" on the clocks of ranks {ranks}" if ranks else ""
        yield (
            f"Between its passes a pipeline stage is idle for {percent(sum(measured) / len(measured))} of the time "
            f"from the first pass to the last, measured in step {table.step:,}{_of_earlier(history, start)}{clocks}"
            f"{bubble}. A pass lasts from its "
            "start to its end: messages inside it, and waiting for ranks of the same stage, are not counted as idle "
            "here, but are in the waiting of ranks."
        )


def _memory(history: RunHistory) -> Iterator[str]:
    session = last_with_memory(history.sessions)
    for name, table in memory_tables(session.start, session.memory).items() if session else ():
        where = "" if name == "host" else " on the GPU"
        yield from _compared(table, where + _of_earlier(history, session.start if session else None))


def _compared(table: MemoryTable, where: str) -> Iterator[str]:
    """Yield sentences about the kinds of memory ("parameters", "gradients", ...) that were both planned and counted.

    The sentences say by how much counted bytes differ from the plan, and which kinds were counted but not planned.
    """
    totals = table.totals()
    relative = [(abs(counted - planned) / planned, rank) for rank, (planned, counted) in enumerate(totals) if planned]
    if not relative:
        return
    worst, rank = max(relative)
    *first, final = [part for part in table.compared if part in table.parts] or [""]
    parts = f"{', '.join(first)} and {final}" if first else final
    if worst == 0:
        text = f"{parts}{where} took the memory that was planned, to the byte, on every rank."
    else:
        planned, counted = totals[rank]
        text = (
            f"{parts}{where} took memory that differs from the plan by at most {percent(worst)}: on rank {rank}, "
            f"{amount(counted)}B instead of {amount(planned)}B."
        )
    yield text[:1].upper() + text[1:]
    for part in table.only_counted:
        most = max(range(len(totals)), key=table.counted[part].__getitem__)
        size, planned = table.counted[part][most], totals[most][0]
        text = f"{part}{where} are not in the plan, and take {amount(size)}B on rank {most}"
        yield text[:1].upper() + text[1:] + (f", {percent(size / planned)} more." if planned else ".")


def _checkpoints(history: RunHistory) -> Iterator[str]:
    written = [event for session in history.sessions for event in session.checkpoints]
    if written:
        last = written[-1]
        beside = " beside the training" if last.beside else ""
        were = "was" if len(written) == 1 else "were"
        yield (
            f"{counted(len(written), 'checkpoint')} {were} written, the last after step {last.step:,} ({last.path}): "
            f"{amount(last.bytes)}B in {duration(last.seconds)}{beside}."
        )
