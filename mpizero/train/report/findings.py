"""Tell in sentences what one would otherwise search for in the pictures of a report."""

from __future__ import annotations

from collections.abc import Iterator

from mpizero._util.text import amount, duration
from mpizero.train.events import VisitStart
from mpizero.train.report.history import Resume, RunHistory, Skip, counted
from mpizero.train.report.measures import (
    WAITING,
    MeanPhases,
    MemoryTable,
    idle_shares,
    last_timetable,
    last_with_memory,
    last_with_phases,
    mean_phases,
    memory_tables,
    timed_ranks,
)

#: Sentences of one kind that are told one by one.
MOST_TOLD = 3
#: Steps at most over whose losses the first and the last mean are taken.
_MEAN_STEPS = 10


def findings(history: RunHistory) -> list[str]:
    """Return what is worth knowing about a run, in sentences; what is wrong first."""
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


def percent(share: float) -> str:
    """Format a share in per cent, with digits enough for small ones; 0 for an exact zero."""
    value = 100 * share
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
    if len(others) > MOST_TOLD:
        ends = f"from step {others[0].step:,} to step {others[-1].step:,}"
        yield f"{len(others):,} of {history.done:,} steps were skipped, {ends}. The first ones:"
    for skip in others[:MOST_TOLD]:
        yield described_skip(skip)
    if lowering:
        steps = ", ".join(f"{skip.step:,}" for skip in lowering[:MOST_TOLD])
        more = " and others" if len(lowering) > MOST_TOLD else ""
        count = counted(len(lowering), "step")
        yield f"{count} ({steps}{more}) only lowered the loss scale: nothing is wrong with them."


def described_skip(skip: Skip) -> str:
    """Return a sentence about a skipped step: why it was skipped, and where."""
    return f"Step {skip.step:,} was skipped: {reason(skip)} of the global batch."


def reason(skip: Skip) -> str:
    """Return why a step was skipped, and the range of its samples in the global batch."""
    if skip.message or skip.event is None or not skip.event.found:
        return skip.message or "a value was not finite, in some samples"
    one = skip.event.found[0]
    name = str(one.get("tensor"))
    what = f"the {name}" if name in ("loss", "weight") else f"the gradient of {name!r}"
    return (
        f"{what} is not finite on rank {one.get('rank')}, samples {one.get('start')} to {int(one.get('stop', 1)) - 1}"
    )


def _spikes(history: RunHistory) -> Iterator[str]:
    told = history.messages("loss_spike")
    for step, message in told[:MOST_TOLD]:
        yield f"The loss leapt at step {step:,}: {message}."
    if rest := told[MOST_TOLD:]:
        yield f"It leapt in {len(rest):,} more steps."


def _resumes(history: RunHistory) -> Iterator[str]:
    for resume in history.resumes[:MOST_TOLD]:
        yield described_resume(resume)
    if rest := history.resumes[MOST_TOLD:]:
        yield f"It was resumed {len(rest)} more times, last at step {rest[-1].first:,}."


def described_resume(resume: Resume) -> str:
    """Return a sentence about a resume: where, on how many ranks, and what was repeated."""
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
    """Return how much larger the last value is than the least one, if that is a positive number."""
    if least <= 0:
        return ""
    return f", {last / least:.2g} times that," if last >= 2 * least else f", {percent(last / least - 1)} more,"


def _speed(history: RunHistory) -> Iterator[str]:
    if history.speed is not None:
        unit = history.rate.removesuffix("_per_second")
        yield f"{speed_text(history.speed)} {unit} a second in the median step (without the first three)."


def _crowded(history: RunHistory) -> Iterator[str]:
    """Tell if the first node has more ranks than rank 0 may use cores, unless a rank has just the cores it needs."""
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
    visit = last_with_phases(history.visits)
    found = mean_phases(visit.phases) if visit else None
    if visit is None or found is None or not any(found.seconds):
        return
    if len(found.seconds) > 1:
        waits = found.phases[WAITING]
        most, least = max(range(len(waits)), key=waits.__getitem__), min(range(len(waits)), key=waits.__getitem__)
        yield (
            f"In {found.told}{_of_earlier(history, visit.start)}, rank {most} waits most for other ranks: "
            f"{_waited(found, most)}; rank {least} waits least: {_waited(found, least)}."
            f"{_beside_median(history, found)}"
        )
    slowest = max(found.seconds)
    if max(found.reading) > 0.05 * slowest:
        rank = max(range(len(found.reading)), key=found.reading.__getitem__)
        yield (
            f"Rank {rank} reads or waits for samples {duration(found.reading[rank])} before a step: "
            f"{percent(found.reading[rank] / slowest)} of the step of the slowest rank, in {found.told}."
        )


def _of_earlier(history: RunHistory, start: VisitStart | None) -> str:
    """Return which visit a figure is of, if it is not the last one, in which no such figure was measured."""
    if start is None or start is history.start:
        return ""
    return f" (visit {start.visit}, on {counted(start.ranks, 'rank')})"


def _waited(found: MeanPhases, rank: int) -> str:
    seconds, waited = found.seconds[rank], found.phases[WAITING][rank]
    return f"{duration(waited)} of its {duration(seconds)} ({percent(found.waiting[rank])})"


def _beside_median(history: RunHistory, found: MeanPhases) -> str:
    """Return how fast the measured steps were beside the median step."""
    speed = history.speed_at(found.steps)
    if speed is None or history.speed is None:
        return ""
    unit = history.rate.removesuffix("_per_second")
    what = "This step" if len(found.steps) == 1 else "On average these steps"
    return f" {what} ran at {speed_text(speed)} {unit} a second, the median step at {speed_text(history.speed)}."


def _pipeline(history: RunHistory) -> Iterator[str]:
    found = last_timetable(history.visits)
    if found is not None and (measured := idle_shares(found[1].measured)):
        start, table = found
        planned = idle_shares(table.planned)
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
    visit = last_with_memory(history.visits)
    for name, found in memory_tables(visit.start, visit.memory).items() if visit else ():
        where = "" if name == "host" else " on the GPU"
        yield from _compared(found, where + _of_earlier(history, visit.start if visit else None))


def _compared(found: MemoryTable, where: str) -> Iterator[str]:
    """Tell how far the parts that are planned and counted are from their plan, and what is not in the plan."""
    totals = found.totals()
    whole = [(abs(counted - planned) / planned, rank) for rank, (planned, counted) in enumerate(totals) if planned]
    if not whole:
        return
    worst, rank = max(whole)
    *first, final = [part for part in found.compared if part in found.parts] or [""]
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
    for part in found.only_counted:
        most = max(range(len(totals)), key=found.counted[part].__getitem__)
        size, planned = found.counted[part][most], totals[most][0]
        text = f"{part}{where} are not in the plan, and take {amount(size)}B on rank {most}"
        yield text[:1].upper() + text[1:] + (f", {percent(size / planned)} more." if planned else ".")


def _checkpoints(history: RunHistory) -> Iterator[str]:
    written = [event for visit in history.visits for event in visit.checkpoints]
    if written:
        last = written[-1]
        beside = " beside the training" if last.beside else ""
        were = "was" if len(written) == 1 else "were"
        yield (
            f"{counted(len(written), 'checkpoint')} {were} written, the last after step {last.step:,} ({last.path}): "
            f"{amount(last.bytes)}B in {duration(last.seconds)}{beside}."
        )
