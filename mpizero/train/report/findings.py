"""Tell in sentences what one would otherwise search for in the pictures of a report."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from mpizero.train.number_format import amount, duration
from mpizero.train.report.measures import (
    idle_shares,
    last_with_memory,
    last_with_phases,
    mean_phases,
    memory_tables,
)
from mpizero.train.report.story import Resume, RunStory, Skip

#: Sentences of one kind that are told one by one.
MOST_TOLD = 3


def findings(story: RunStory) -> list[str]:
    """Return what is worth knowing about a run, in sentences; what is wrong first."""
    return [
        *(_skipped(story) if story.skips else _nothing(story)),
        *_spikes(story),
        *_resumes(story),
        *_overrides(story),
        *_losses(story),
        *_speed(story),
        *_waiting(story),
        *_pipeline(story),
        *_memory(story),
        *_checkpoints(story),
    ]


def percent(share: float) -> str:
    """Format a share in per cent, with digits enough for small ones; 0 for an exact zero."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 or value == 0 else f"{value:.1f} %" if abs(value) >= 0.1 else "< 0.1 %"


def _nothing(story: RunStory) -> Iterator[str]:
    if story.records.steps:
        yield "No step was skipped." if story.resumes else "No step was skipped, and the run was never resumed."


def speed_text(rate: float) -> str:
    """Format a speed with three digits or more, such as "12.3" or "2,107"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _skipped(story: RunStory) -> Iterator[str]:
    lowering = [skip for skip in story.skips if _lowers_scale(skip)]
    others = [skip for skip in story.skips if skip not in lowering]
    if len(others) > MOST_TOLD:
        ends = f"from step {others[0].step:,} to step {others[-1].step:,}"
        yield f"{len(others):,} of {story.done:,} steps were skipped, {ends}. The first ones:"
    for skip in others[:MOST_TOLD]:
        yield described_skip(skip)
    if lowering:
        steps = ", ".join(f"{skip.step:,}" for skip in lowering[:MOST_TOLD])
        more = " and others" if len(lowering) > MOST_TOLD else ""
        count = counted(len(lowering), "step")
        yield f"{count} ({steps}{more}) only lowered the loss scale: nothing is wrong with them."


def _lowers_scale(skip: Skip) -> bool:
    return skip.event is not None and skip.event.next_loss_scale < skip.event.loss_scale


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


def _spikes(story: RunStory) -> Iterator[str]:
    told = story.messages("loss_spike")
    for step, message in told[:MOST_TOLD]:
        yield f"The loss leapt at step {step:,}: {message}."
    if rest := told[MOST_TOLD:]:
        yield f"It leapt in {len(rest):,} more steps."


def _resumes(story: RunStory) -> Iterator[str]:
    for resume in story.resumes[:MOST_TOLD]:
        yield described_resume(resume)
    if rest := story.resumes[MOST_TOLD:]:
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
    steps = f"step {low:,} was" if low == high else f"steps {low:,} to {high:,} were"
    same = "their losses are the same, bit for bit" if resume.same else "their losses are not all the same as before"
    return f"{text}; {steps} repeated, and {same}."


def _overrides(story: RunStory) -> Iterator[str]:
    for line in story.records.steps:
        for one in line.get("overrides") or ():
            if isinstance(one, dict):
                yield f"After step {one.get('step')}: {one.get('key')} = {one.get('now')}, it was {one.get('was')}."


def _losses(story: RunStory) -> Iterator[str]:
    _, losses = story.series("loss")
    finite = [loss for loss in losses if loss == loss]
    text = f"The training loss went from {finite[0]:.4g} to {finite[-1]:.4g}" if finite else ""
    steps, values = story.series("validation_loss")
    checked = [(value, step) for step, value in zip(steps, values, strict=True) if value == value]
    if checked:
        best, step = min(checked)
        last, when = checked[-1]
        text += f"; the validation loss was least after step {step:,}, {best:.4g}"
        text += "" if step == when else f", and was {last:.4g} in the last validation, after step {when:,}"
    if text:
        yield f"{text.removeprefix('; ')}."


def _speed(story: RunStory) -> Iterator[str]:
    rates = [rate for rate in story.series(story.rate)[1][3:] if rate == rate]
    if rates:
        unit = story.rate.removesuffix("_per_second")
        yield f"{speed_text(statistics.median(rates))} {unit} a second in the median step (without the first three)."


def _waiting(story: RunStory) -> Iterator[str]:
    visit = last_with_phases(story.visits)
    found = mean_phases(visit.phases) if visit else None
    if found is None or not any(found.seconds):
        return
    slowest = max(found.seconds)
    if len(found.seconds) > 1:
        waits = found.waiting
        most, least = max(range(len(waits)), key=waits.__getitem__), min(range(len(waits)), key=waits.__getitem__)
        yield (
            f"Rank {most} waits most for other ranks: {percent(waits[most])} of a step of {duration(slowest)}; rank "
            f"{least} waits least: {percent(waits[least])}."
        )
    if max(found.reading) > 0.05 * slowest:
        rank = max(range(len(found.reading)), key=found.reading.__getitem__)
        yield (
            f"Rank {rank} reads or waits for samples {duration(found.reading[rank])} before a step: "
            f"{percent(found.reading[rank] / slowest)} of the step."
        )


def _pipeline(story: RunStory) -> Iterator[str]:
    timetables = [table for visit in story.visits for table in visit.timetables]
    if timetables and (measured := idle_shares(timetables[-1].measured)):
        planned = idle_shares(timetables[-1].planned)
        bubble = f"; the plan has {percent(sum(planned) / len(planned))}" if planned else ""
        yield (
            f"The pipeline's stages are idle for {percent(sum(measured) / len(measured))} of the measured step "
            f"{timetables[-1].step:,}{bubble}."
        )


def _memory(story: RunStory) -> Iterator[str]:
    visit = last_with_memory(story.visits)
    for name, found in memory_tables(visit.start, visit.memory).items() if visit else ():
        whole = [
            (abs(counted - planned) / planned, rank)
            for rank, (planned, counted) in enumerate(found.totals())
            if planned
        ]
        if whole:
            worst, rank = max(whole)
            planned, counted = found.totals()[rank]
            where = "" if name == "host" else " on the GPU"
            rest = [part for part in found.parts if part in found.counted and part not in found.planned]
            beside = f" ({', '.join(rest)} were counted beside it, and not planned)" if rest else ""
            if worst == 0:
                yield f"Counted memory{where} is what was planned, to the byte, on every rank{beside}."
            else:
                yield (
                    f"Counted memory{where} differs from the plan by at most {percent(worst)}: on rank {rank}, "
                    f"{amount(counted)}B instead of {amount(planned)}B{beside}."
                )


def _checkpoints(story: RunStory) -> Iterator[str]:
    written = [event for visit in story.visits for event in visit.checkpoints]
    if written:
        last = written[-1]
        beside = " beside the training" if last.beside else ""
        were = "was" if len(written) == 1 else "were"
        yield (
            f"{counted(len(written), 'checkpoint')} {were} written, the last after step {last.step:,} ({last.path}): "
            f"{amount(last.bytes)}B in {duration(last.seconds)}{beside}."
        )


def counted(count: int, name: str) -> str:
    """Return a number of things, such as "1 step" or "2,000 steps"."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"
