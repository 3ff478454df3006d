"""What a report says is what the run has recorded; its file needs nothing else, and no name in it is code."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from mpizero.cli.main import main
from mpizero.errors import ConfigError, DataError
from mpizero.tools.report import page as pages
from mpizero.tools.report.figures import (
    MOST_POINTS,
    Curve,
    Markup,
    colours_of,
    envelope,
    is_uneven,
    long_table,
    lower_end,
    picture,
)
from mpizero.tools.report.history import SILENT, RunHistory, findings
from mpizero.tools.report.page import bytes_column, seconds_column
from mpizero.tools.report.watch import FollowedRun, screen
from mpizero.train.events import MemoryCount, SessionEnd, SkippedStep, read_run
from tests.train.report.conftest import BEGUN, EVIL, line, start, write_run

VOID = {"meta", "img", "br", "link", "input", "hr", "wbr"}


class Page(HTMLParser):
    """The elements of a page, its text, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text, self.source = "", text
        self.feed(text)
        assert not self.opened, f"not closed: {self.opened}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        self.text += data if not self.opened or self.opened[-1] != "style" else ""

    def values(self, name: str) -> list[str]:
        return [given[name] for _, given in self.elements if name in given]

    @property
    def sections(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self.source)


def history(folder, now: float | None = None) -> RunHistory:
    return RunHistory(folder.name, read_run(folder), time.time() if now is None else now)


def written(*runs) -> Page:
    pytest.importorskip("matplotlib")
    path = runs[0].parent / "page.html"
    assert main(["report", *map(str, runs), "-o", str(path)]) == 0
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(eventful) -> Page:
    return written(eventful)


def test_findings_name_steps_ranks_and_bytes(eventful):
    told = " ".join(findings(history(eventful)))
    for sentence in (
        f"Step 12 was skipped: the gradient of '{EVIL}' is not finite on rank 1, samples 2 to 3 of the global batch.",
        "Resumed after step 50 on 2 ranks instead of 4; steps 51 to 60 were repeated, and their losses are the same",
        "The training loss went from 0.2929 (mean of the first 10 steps) to 0.01048 (of the last ones).",
        "The validation loss was least after step 100, 0.5, the last validation.",
        "In the one step that was measured (step 4) (session 0, on 4 ranks), rank 3 waits most for other ranks: 410 ms "
        "of its 1 s (41 %); rank 0 waits least: 100 ms of its 1 s (10 %). This step ran at 50 samples a second, the "
        "median step at 50.",
        "idle for 25 % of the time from the first pass to the last, measured in step 4 (session 0, on 4 ranks) on the "
        "clocks of ranks 0, 2; in the plan for 50 %. A pass lasts from its start to its end: messages inside it,",
        "Parameters (session 0, on 4 ranks) took memory that differs from the plan by at most 1.0 %: on rank 3, 1.01 "
        "kB",
        "1 checkpoint was written, the last after step 50 (checkpoints/step_00000050): 4 kB in 500 ms.",
        "50 samples a second",
    ):
        assert sentence in told


@pytest.mark.parametrize(
    ("superseded", "told"),
    [
        ([line(5, loss=7.0)], "step 5 was repeated, and their losses are not all the same"),
        ([line(5), line(6)], "steps 5 to 6 were repeated, and their losses are the same, bit for bit"),
        ([line(step) for step in (5, 6, 7, 8)], "2 of steps 5 to 8 had been done before and were repeated, and"),
        ([line(7), line(8)], "steps 7 to 8 had been done before, and not been repeated yet."),
        ([], "no step was repeated."),
    ],
)
def test_what_was_repeated_is_told_as_far_as_it_was(superseded, told, tmp_path):
    events = [start(), start(visit=1, step=4, superseded=len(superseded))]
    run = write_run(tmp_path / "run", [line(step) for step in range(1, 7)], events, superseded)
    assert told in " ".join(findings(history(run)))


def test_each_resume_tells_its_own_repeated_steps(tmp_path):
    """Killed twice, each time further on: what was superseded ascends through both resumes."""
    events = [start(), start(visit=1, step=4, superseded=3), start(visit=2, step=8, superseded=3)]
    superseded = [line(step) for step in (5, 6, 7, 9, 10, 11)]
    found = history(write_run(tmp_path / "run", [line(step) for step in range(1, 15)], events, superseded))
    assert [resume.repeated for resume in found.resumes] == [(5, 7), (9, 11)]
    assert [found.last_step(visit) for visit in found.sessions] == [7, 11, 14]


def test_the_loss_of_a_method_of_whole_vectors_is_that_of_its_iterate(tmp_path):
    lines = [line(step, loss=9.0, iterate_loss=1.0 / step) for step in (1, 2)]
    found = history(write_run(tmp_path / "run", lines, [start()]))
    assert found.loss == 0.5
    assert "The training loss went from 1 (first step) to 0.5 (last step)." in findings(found)


def test_what_is_not_in_the_plan_is_told_beside_what_is_as_planned(tmp_path):
    """Or bars that end beyond the plan would contradict the sentence."""
    counted = {"parameters": [1000] * 4, "group buffers": [20, 80, 20, 20]}
    memory = MemoryCount(step=1, counted=counted, peak=[1000] * 4, resident=[9] * 4)
    told = findings(history(write_run(tmp_path / "run", [line(1)], [start(), memory])))
    assert "Parameters took the memory that was planned, to the byte, on every rank." in told
    assert "Group buffers are not in the plan, and take 80 B on rank 1, 8.0 % more." in told


@pytest.mark.parametrize(("cores", "crowded"), [(1, False), (2, True), (4, False)])
def test_more_ranks_than_cores_are_told_but_for_ranks_that_are_bound(tmp_path, cores, crowded):
    """Rank 0 may use 2 cores for its one thread: it is not bound, and 3 ranks are on its host."""
    events = [start(nodes=[0, 0, 0, 1], machine={"cores": cores, "threads": 1})]
    told = " ".join(findings(history(write_run(tmp_path / "run", [line(1)], events))))
    assert ("3 ranks on host host0, of whose cores rank 0 may use 2: unless" in told) == crowded


def test_a_validation_loss_that_has_risen_is_called_so(tmp_path):
    run = write_run(tmp_path / "run", [line(1, validation_loss=0.1), line(2, validation_loss=1.1)])
    assert "0.1; it has risen since: it was 1.1, 11 times that, in the last" in " ".join(findings(history(run)))


def test_a_complete_run_tells_its_visits_and_skipped_steps_at_once(eventful):
    assert history(eventful).outcome == "Complete after 100 steps, in 2 sessions; 1 step skipped."


def test_steps_that_lower_the_loss_scale_are_no_fault(tmp_path):
    events = [start(), *(SkippedStep(step=s, found=[], loss_scale=8.0, next_loss_scale=4.0) for s in (1, 2))]
    run = write_run(tmp_path / "run", [line(1, skipped="too large"), line(2, skipped="too large"), line(3)], events)
    assert findings(history(run))[0] == "2 steps (1, 2) only lowered the loss scale: nothing is wrong with them."


def test_the_step_that_ended_a_run_is_told_from_its_event(tmp_path):
    """Its line of metrics was not written any more."""
    found = [{"rank": 1, "tensor": "w", "start": 2, "stop": 4}]
    run = write_run(tmp_path / "run", [line(1, loss=None)], [start(), SkippedStep(step=2, found=found)])
    told = "Step 2 was skipped: the gradient of 'w' is not finite on rank 1, samples 2 to 3 of the global batch."
    assert findings(history(run))[0] == told


@pytest.mark.parametrize(
    ("end", "age", "state", "told"),
    [
        ({}, 0.0, "running", "Running: 3 of 100 steps are done."),
        ({}, SILENT + 3600, "silent", "The job was killed, hangs,"),
        ({"reason": "stopped", "message": "SIGTERM"}, 0.0, "stopped", "Stopped after 3 of 100 steps: SIGTERM."),
        ({"reason": "failed", "error": "OSError", "message": "full"}, 0.0, "failed", "steps: OSError: full."),
    ],
)
def test_the_state_of_a_run_is_that_of_its_last_visit(tmp_path, end, age, state, told):
    events = [start(), SessionEnd(reason="stopped", step=2), start(visit=1, step=2)]
    events += [SessionEnd(visit=1, step=3, **end)] if end else []
    run = write_run(tmp_path / "run", [line(step) for step in (1, 2, 3)], events)
    found = history(run, time.time() + age)
    assert found.state == state
    assert told in found.outcome


def test_a_report_has_everything_inside_and_no_name_is_code(page):
    assert not {"script", "img", "link", "iframe", "object", "use:script"} & {tag for tag, _ in page.elements}
    assert all(target.startswith("#") for name in ("src", "href", "xlink:href") for target in page.values(name))
    assert not re.search(r"url\((?!#)|@import|https?:", page.source)
    assert page.text.count("alert(1)") >= 4  # of the setting, the metric, and the message, twice
    assert "\x1b" not in page.source
    names = page.values("id")
    assert len(names) == len(set(names))
    pictures = [given for tag, given in page.elements if tag == "svg"]
    assert len(pictures) >= 6
    assert all(given.get("aria-label") for given in pictures)


def test_a_report_has_a_section_for_each_kind_of_record(page):
    assert page.sections == [
        "Findings", "Summary", "Curves", "Skipped steps", "Sessions and resumes", "Where the time goes", "Memory",
        "Layout", "Pipeline", "Checkpoints", "Environment", "Configuration", "Words",
    ]  # fmt: skip
    assert {target for target in page.values("href") if target[1:] not in page.values("id")} == set()
    assert "cafe" * 16 in page.text
    assert "Results are bit for bit those of a single process." in page.text
    assert not re.search(r"7(,771|771|[.]77)", page.text)  # one median speed: that of the metrics, not the last one
    assert "removed since" in page.text


def test_a_run_without_events_has_curves_and_says_what_is_missing(tmp_path):
    page = written(write_run(tmp_path / "old", [line(1), line(2)]))
    assert page.sections == ["Findings", "Summary", "Curves", "Where the time goes", "Environment", "Words"]
    assert "a version without events" in page.text


def test_a_line_in_the_writing_is_left_out_and_a_damaged_one_is_named(tmp_path):
    run = write_run(tmp_path / "run", [line(1), line(2)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert history(run).done == 2
    (run / "metrics.jsonl").write_text('{"step": 1\n{}\n')
    with pytest.raises(DataError, match="line 1"):
        main(["report", str(run)])


@pytest.mark.slow
def test_several_runs_tell_only_what_differs(eventful, tmp_path):
    config = {"train": {"steps": 100, "seed": 1}, "model": {"name": EVIL}}
    other = write_run(tmp_path / "other", [line(1)], [start(config=config)])
    page = written(eventful, other)
    assert "The runs differ in [train]" not in page.text
    assert "The settings of the last sessions that differ; the other 2 are the same" in page.text
    assert "train.seed" in page.text
    assert "train.steps" not in page.text
    assert page.text.count("eventful") > 1
    with pytest.raises(ConfigError, match="twice"):
        main(["report", str(other), str(other)])


def test_a_file_that_is_no_report_is_not_replaced(tmp_path):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", [line(1)])
    target = tmp_path / "thesis.html"
    target.write_text("ten years of work")
    with pytest.raises(ConfigError, match="--force"):
        main(["report", str(run), "-o", str(target)])
    assert target.read_text() == "ten years of work"
    assert main(["report", str(run)]) == main(["report", str(run)]) == 0  # its own report.html
    assert main(["report", str(run), "-o", str(target), "--force"]) == 0
    assert Page(target.read_text()).sections
    assert sorted(os.listdir(tmp_path)) == ["run", "thesis.html"]


def test_a_long_run_is_a_small_file_that_keeps_the_extremes(tmp_path):
    run = write_run(tmp_path / "run", (line(step, gradient_norm=step % 7) for step in range(1, 5001)))
    page = written(run)
    assert len(page.source) < 500_000
    assert f"more than {MOST_POINTS:,} steps" in page.text
    values = np.random.default_rng(0).normal(size=5000)
    values[1234], values[99] = 50.0, np.nan
    found = envelope(np.arange(5000), values)
    assert found.high.max() == 50.0
    assert found.low.min() == np.nanmin(values)
    assert len(found.steps) == 500
    assert (found.low <= found.mean).all()
    assert (found.mean <= found.high).all()


def test_a_phase_has_the_same_colour_beside_whatever_other_phases():
    assert colours_of(["optimizer"]).items() <= colours_of(["forward", "reduction", "optimizer"]).items()


def test_tiny_values_do_not_stretch_an_axis_and_long_runs_do_not_hide_short_ones():
    values = [1.0] * 500 + [0.001] * 500
    assert lower_end([Curve(range(1000), values)], wide=True) is None
    assert lower_end([Curve(range(1000), [*values[:-1], 1e-8])], wide=True) == 0.0005
    assert is_uneven([Curve([1, 40], [1.0, 1.0]), Curve([1, 401], [1.0, 1.0])])
    assert not is_uneven([Curve([1, 40], [1.0, 1.0]), Curve([1, 400], [1.0, 1.0])])


def test_numbers_of_a_column_have_one_unit_and_long_tables_fold_their_middle():
    assert seconds_column([0.5, 0.0012, 1e-6]) == ("ms", ["500.0", "1.2", "< 0.1"])
    assert bytes_column([2_500_000, 1000]) == ("MB", ["2.500", "0.001"])
    page = Page(long_table("Rows", ("step", "path"), [(f"{n:,}", "a/b_c") for n in range(900)]))
    assert [tag for tag, _ in page.elements].count("tr") == 2 + 6 + 1 + 6 + 500
    assert "The 888 between them, but for the last 388" in page.text
    assert "a/<wbr>b_<wbr>c" in page.source


def test_text_in_pictures_is_shown_as_it_is():
    """Neither mathematics nor markup, which a message of an error would end up as."""
    pytest.importorskip("matplotlib")
    page = Page(picture("name", f"of {EVIL}", lambda figure: figure.text(0, 0, "$x_{$ <b>")))
    assert page.text.strip() == "$x_{$ <b>"
    assert {tag for tag, _ in page.elements} <= {"svg", "defs", "g", "path", "text"}
    assert page.elements[0][1]["aria-label"].startswith("of <script>")


def test_the_record_of_the_example_is_as_events_are_written(eventful):
    """The other tests stand on it: a name that no event has would be ignored by the reader."""
    first = json.loads((eventful / "events.jsonl").read_text().splitlines()[0])
    assert first["kind"] == "start"
    assert first["time"] == BEGUN
    assert [len(visit.events) for visit in read_run(eventful).sessions] == [6, 2]


# ---------------------------------------------------------------------- records that a run never writes

#: Values that JSON can hold; a user's metric may be as large.
STRANGE = (None, "x", -1, 1.7e308, 10**400, [], True, [[1, 2]], {"a": 1}, float("inf"))


def changed(value, strange):
    """Yield copies of a value, each with ``strange`` in place of one part, or as one part more."""
    yield strange
    if isinstance(value, dict):
        for name in value:
            yield from ({**value, name: part} for part in changed(value[name], strange))
        yield {**value, "overrides": strange}
    elif value and isinstance(value, list):
        yield [*value, strange]
        yield from ([part, *value[1:]] for part in changed(value[0], strange))


@pytest.fixture
def without_pictures(monkeypatch):
    """Leave the drawing out, which takes most of the time; what is drawn is computed."""
    for module in ("figures", "page"):
        found = importlib.import_module(f"mpizero.tools.report.{module}")
        if hasattr(found, "picture"):
            monkeypatch.setattr(found, "picture", lambda name, label, draw, *size, **more: Markup(""))


@pytest.mark.slow
@pytest.mark.parametrize("strange", STRANGE, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "metrics.superseded.jsonl", "run_complete"])
def test_strange_records_are_shown_or_named_as_damaged(name, strange, eventful, tmp_path, without_pictures):
    folder = shutil.copytree(eventful, tmp_path / "strange")
    few = (eventful / "metrics.jsonl").read_text().splitlines(keepends=True)[11::8]
    (folder / "metrics.jsonl").write_text("".join(few))
    lines = [json.loads(one) for one in (folder / name).read_text().splitlines()]
    told, numbers = 0, {0, len(lines) - 1}
    if name == "events.jsonl":  # of the two sessions one's start, which has most of the values
        starts = [number for number, one in enumerate(lines) if one["kind"] == "start"]
        numbers = set(range(len(lines))) - {starts[STRANGE.index(strange) % 2]}
    for number in numbers:
        for found in (one for one in changed(lines[number], strange) if isinstance(one, dict)):
            text = [json.dumps(one) for one in [*lines[:number], found, *lines[number + 1 :]]]
            (folder / name).write_text("\n".join(text) + "\n")
            followed = FollowedRun(folder)
            followed.look()
            assert screen(followed, 80, 24)
            try:
                records = read_run(folder)
            except DataError as error:
                told += f"{folder / name}, line {number + 1}: damaged" in str(error)
                continue
            assert "</html>" in pages.page([RunHistory("strange", records, time.time())])
    assert told or name in ("metrics.superseded.jsonl", "run_complete") or strange == -1
