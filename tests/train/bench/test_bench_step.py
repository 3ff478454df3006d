"""``mpizero bench step``: phases add up to the step, waiting is told apart, and watching changes nothing."""

from __future__ import annotations

import itertools
import json
import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm.communicator import MESSAGE, CommunicatorCall, Timeline, TimeSpan
from mpizero.sharding import diagnostics
from mpizero.sharding.diagnostics import (
    ALL_PHASES,
    PHASES,
    StepSpans,
    clock_offset,
    phases_of,
    spans_of,
    traced,
    waited,
    waits,
)
from mpizero.testing import run_in_threads
from mpizero.tools.bench import step as bench
from mpizero.tools.bench.step import write_trace
from mpizero.tools.plan.time import write_machine
from mpizero.train.config.toml import ConfigDocument, parse_config

CONFIG = """
model = {name = "mlp", hidden = [8, 8]}
data = {arrays = {x = "x.npy", y = "y.npy"}, validation = 0.0}
[train]
global_batch = 8
micro_batch = 1
"""
GATHER = CommunicatorCall("data", "allgather", "losses", 7)


def marks(*spans, first=None):
    return spans_of([TimeSpan(*span) for span in spans], 0.0, first or {"data": 0})


def nonzero(phases):
    return {phase: taken for phase, taken in phases.items() if taken}


def test_time_belongs_to_the_innermost_phase_and_adds_up():
    step = StepSpans(
        0.0, 10.0, marks(("reduction", "unit", 6.0, 7.0), ("local sums", "unit", 5.0, 8.0), ("forward", "a", 1.0, 3.0))
    )
    assert nonzero(phases_of(step, {})) == {"forward": 2.0, "local sums": 2.0, "reduction": 1.0, "other": 5.0}


def test_a_rank_waits_in_a_collective_until_the_last_one_enters():
    early = StepSpans(0.0, 9.0, marks(("agreement", "losses", 1.0, 8.0), (MESSAGE, GATHER, 2.0, 8.0)))
    late = StepSpans(0.0, 9.0, marks(("agreement", "losses", 4.0, 8.0), (MESSAGE, GATHER, 5.0, 8.0)))
    latest = waits([[early], [late]])
    assert nonzero(phases_of(early, latest)) == {"waiting": 3.0, "agreement": 1.0 + 3.0, "other": 2.0}
    assert nonzero(phases_of(late, latest)) == {"agreement": 4.0, "other": 5.0}
    assert [waited(mark, latest) for mark in early.spans] == [0.0, 3.0]


def test_nobody_waits_for_a_message_that_all_have_begun():
    """Of a collective that does not block, the beginning counts; the wait for it is the collective's own time."""
    early = StepSpans(0.0, 9.0, marks((MESSAGE, GATHER, 1.0, 1.5), (MESSAGE, GATHER, 4.0, 6.0)))
    late = StepSpans(0.0, 9.0, marks((MESSAGE, GATHER, 5.0, 5.5), (MESSAGE, GATHER, 7.0, 8.0)))
    latest = waits([[early], [late]])
    assert [waited(mark, latest) for mark in (*early.spans, *late.spans)] == [0.5, 1.0, 0.0, 0.0]


def test_calls_of_other_groups_and_numbers_are_not_waited_for():
    one = StepSpans(0.0, 9.0, marks((MESSAGE, GATHER, 2.0, 3.0)))
    other = StepSpans(0.0, 9.0, marks((MESSAGE, GATHER, 5.0, 6.0), first={"data": 4}))
    later = StepSpans(0.0, 9.0, marks((MESSAGE, GATHER._replace(sequence=8), 5.0, 6.0)))
    assert phases_of(one, waits([[one], [other], [later]]))["waiting"] == 0.0


def test_a_receive_is_waiting_and_messages_inside_layers_are_theirs():
    receive, send = CommunicatorCall("pipeline", "irecv", "2", 1), CommunicatorCall("pipeline", "isend", "2", 1)
    step = StepSpans(
        0.0,
        9.0,
        marks(
            ("schedule", "forward of chunk 1", 0.0, 6.0),
            (MESSAGE, receive, 1.0, 3.0),
            ("forward", "a", 3.0, 5.0),
            (MESSAGE, GATHER, 4.0, 5.0),
            (MESSAGE, send, 5.0, 5.5),
        ),
    )
    found = nonzero(phases_of(step, waits([[step]])))
    assert found == {"waiting": 2.0, "forward": 1.0, "layers' messages": 1.5, "other": 4.5}


def test_a_call_inside_of_a_call_counts_once():
    inner = (MESSAGE, GATHER, 2.0, 3.0)
    assert len(marks((MESSAGE, GATHER, 1.0, 4.0), inner, inner)) == 1


def test_a_timeline_notes_nothing_until_it_is_on():
    timeline = Timeline()
    with timeline.span("forward"):
        pass
    assert timeline.take() == []
    timeline.on = True
    with pytest.raises(ValueError), timeline.span("forward", "a"):
        raise ValueError
    (span,) = timeline.take()
    assert (span.phase, span.detail) == ("forward", "a")
    assert span.start <= span.stop
    assert timeline.take() == []


@pytest.mark.parametrize(("strategy", "share"), [("ddp", True), ("zero2", False), ("zero3", True)])
def test_watching_changes_no_bit_and_ends(strategy, share):
    x, y = np.random.default_rng(0).random((6, 4), np.float32), np.arange(6) % 3

    def train(comm, *, watched):
        config = mz.ShardingConfig(comm=comm, micro_batch=1, share_node_memory=share, clip=0.1)
        model = mz.distribute(mz.nn.MLP(4, [5], 3), mz.AdamW(), strategy=strategy, config=config)
        with model:
            spans = []
            for _ in range(2):
                if watched:
                    with traced(model._engine) as timeline:
                        model.train(x[comm.rank :: 2], y[comm.rank :: 2])
                    spans += timeline.take()
                else:
                    model.train(x[comm.rank :: 2], y[comm.rank :: 2])
            model.train(x[comm.rank :: 2], y[comm.rank :: 2])
            assert model._engine.timeline.take() == []
            return model.parameters_sha256(), {span.phase for span in spans}

    plain, watched = (run_in_threads(2, lambda comm, w=w: train(comm, watched=w)) for w in (False, True))
    assert {sha for sha, _ in plain} == {sha for sha, _ in watched}
    assert watched[0][1] == {
        MESSAGE, "forward", "backward", "local sums", "reduction", "optimizer", "publication", "agreement",
    }  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return a configuration of a small network with so many ranks and settings."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    np.save("x.npy", random.random((32, 4), np.float32))
    np.save("y.npy", random.integers(0, 3, 32))
    return lambda *settings: parse_config(ConfigDocument("c.toml", CONFIG, settings))


LAYOUTS = [
    (1, ()),
    (3, ("parallel.strategy=zero3", "parallel.ranks_per_node=1")),
    (4, ("parallel.pipeline=2", "parallel.strategy=zero1", "parallel.schedule=zero_bubble")),
]


@pytest.mark.parametrize(("ranks", "settings"), LAYOUTS)
def test_phases_of_real_steps_add_up_and_spans_lie_inside_each_other(config, round_machine, ranks, settings):
    given, lines = config(*settings), []
    request = bench.StepRequest(2, 1, round_machine, "trace.json")
    figures = run_in_threads(ranks, lambda comm: bench.measure_step(request, given, comm, lines.append))[0]
    assert len(lines) == 1
    assert len(figures.ranks) == ranks
    assert (max(phases["waiting"].median for phases in figures.ranks) > 0) == (ranks > 1)  # some rank is last
    for phases in figures.ranks:
        assert tuple(phases) == ALL_PHASES
        for name in ("forward", "backward", "local sums", "optimizer", "agreement"):
            assert phases[name].median > 0, name
        assert phases["forward"].floor > 0
        assert phases["optimizer"].floor > 0
    text = bench.report(figures)
    assert all(f"\n{name} " in text for name in ("forward", "backward", "optimizer", "all"))
    assert [rank["rank"] for rank in json.loads(bench.as_json(figures))["ranks"]] == list(range(ranks))
    check_trace(ranks, steps=2)


def check_trace(ranks, steps):
    with open("trace.json", encoding="utf-8") as file:
        document = json.load(file)
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert [name.partition(" (")[0] for name in names] == [f"rank {rank}" for rank in range(ranks)]
    for rank in range(ranks):
        mine = [(event["ts"], event["ts"] + event["dur"], event) for event in spans if event["tid"] == rank]
        assert sum(event["cat"] == "step" for *_, event in mine) == steps
        assert {"forward", "backward"} <= {event["cat"] for *_, event in mine}
        inside: list[float] = []
        for start, stop, event in sorted(mine, key=lambda item: (item[0], -item[1])):
            while inside and inside[-1] <= start + 1e-3:  # a nanosecond
                inside.pop()
            assert not inside or stop <= inside[-1] + 1e-3, event
            inside.append(stop)


def test_phases_fill_no_more_than_a_step_and_have_no_floors_without_a_machine(config):
    given = config("parallel.strategy=zero2")
    for figures in run_in_threads(2, lambda comm: bench.measure_step(bench.StepRequest(1, 0), given, comm)):
        for phases in figures.ranks:
            assert 0 < sum(phase.median for phase in phases.values()) <= figures.watched.median * (1 + 1e-9)
            assert not any(phase.floor for phase in phases.values())
        assert "floor" not in bench.report(figures)


def test_ranks_of_one_host_have_one_clock_and_others_ask_rank_0_for_its_time(monkeypatch):
    """Rank 0 asks for the time once a round trip, whose start and end the other host sees 100 seconds earlier."""
    assert run_in_threads(3, clock_offset) == [0.0, 0.0, 0.0]
    hosts, ticks, late = iter(["a", "b"]), itertools.count(), {"rank 0": 100.0, "rank 1": 0.0}
    monkeypatch.setattr(diagnostics, "_host", lambda: next(hosts))

    def monotonic():
        return next(ticks) + late[threading.current_thread().name]

    monkeypatch.setattr(diagnostics, "time", SimpleNamespace(monotonic=monotonic))
    assert run_in_threads(2, clock_offset) == [0.0, 100.0]


def test_a_trace_has_collectives_with_how_long_they_waited(tmp_path):
    steps = [[StepSpans(0.0, 3.0, marks((MESSAGE, GATHER, start, 3.0)))] for start in (1.0, 2.0)]
    write_trace(str(tmp_path / "t.json"), steps, [{"data": 0, "pipeline": 0}, {"data": 1, "pipeline": 0}])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["rank 0 (data 0)", "rank 1 (data 1)"]
    calls = [e for e in events if e.get("cat") == MESSAGE]
    assert [(e["ts"], e["dur"], e["args"]) for e in calls] == [
        (1e6, 2e6, {"waited_us": 1e6}),
        (2e6, 1e6, {"waited_us": 0.0}),
    ]
    assert all(a["tid"] <= b["tid"] for a, b in pairwise(calls))


def test_the_command_prints_tables_and_draws_a_trace(on_threads, round_machine):
    write_machine(str(on_threads.folder / "machine.json"), round_machine)
    options = ("--steps", "1", "--warm-up", "1", "--machine", "machine.json", "--trace", "trace.json", "--json")
    outcome = on_threads(2, "bench", "step", "tiny.toml", *options)
    assert outcome.result["benchmark"] == "step"
    assert {*PHASES} <= {*outcome.result["ranks"][1]["phases"]}
    assert (on_threads.folder / "trace.json").exists()
    assert not (on_threads.folder / "run").exists()
    wrong = on_threads(2, "bench", "step", "tiny.toml", "--machine", "text.txt", status=65)
    assert any("text.txt: no machine file" in line for line in wrong.told)
