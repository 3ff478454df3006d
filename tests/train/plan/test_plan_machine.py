"""``mpizero plan --machine``: seconds from work over rate and bytes over bandwidth."""

from __future__ import annotations

import json

import pytest

from mpizero.tools.plan.counts import GroupCall
from mpizero.tools.plan.time import write_machine


@pytest.fixture
def expected(on_threads, round_machine):
    """Plan the tiny model on the machine of round figures; return its parts by rank, and the whole plan."""
    write_machine(str(on_threads.folder / "machine.json"), round_machine)

    def run(ranks, *settings, flags=()):
        options = ("--ranks", str(ranks), "--machine", "machine.json", *flags)
        return on_threads.run(1, "plan", "tiny.toml", *settings, flags=options)

    return run


def nonzero(parts):
    return {phase: taken for phase, taken in parts.items() if taken}


def test_parts_of_one_rank_are_work_over_rate_and_bytes_over_bandwidth(expected):
    plan = expected(1, "parallel.strategy=ddp", flags=["--json"]).result
    (parts,), parameters = plan["expected"]["ranks"], plan["parameter_count"]
    # 6 grains; each gradient is looked at, 5 sums leave one row, which is read with parameters and two moments.
    gradients = 4 * (parameters + 256 * 16)  # the tied table has one for each use
    assert sum(parts[phase] for phase in ("forward", "backward")) == pytest.approx(plan["ranks"][0]["operations"] / 1e9)
    assert parts["backward"] == pytest.approx(2 * parts["forward"], rel=0.2)
    assert nonzero(parts) == pytest.approx(
        {
            "forward": parts["forward"],
            "backward": parts["backward"],
            "local sums": (6 + 5 * 3) * gradients / 1e9,
            "optimizer": (gradients + 6 * 4 * parameters) / 1e9,
        }
    )
    assert plan["expected"]["seconds"] == pytest.approx(sum(parts.values()))
    assert plan["expected"]["samples_per_second"] == pytest.approx(6 / sum(parts.values()))


def test_two_ranks_wait_for_messages_and_barriers(expected):
    shared = expected(2, "parallel.strategy=zero1", flags=["--json"]).result["expected"]["ranks"][0]
    assert (shared["reduction"], shared["publication"], shared["agreement"]) == (1.0, 1.0, 2.0)
    clipped = expected(2, "parallel.strategy=zero1", "train.clip=1.0", flags=["--json"]).result["expected"]["ranks"][0]
    assert clipped["reduction"] > 1.0  # the sum is written before the norm
    assert clipped["agreement"] == 3.0


def test_private_memory_sends_what_shared_memory_reads(expected):
    private = expected(2, "parallel.strategy=zero1", "parallel.share_node_memory=false", flags=["--json"]).result
    parts = private["expected"]["ranks"][0]
    assert int(parts["reduction"]) == int(parts["publication"]) == 2  # a message for each of two units
    rings = expected(2, "parallel.strategy=zero3", flags=["--json"]).result["expected"]["ranks"][0]
    assert int(rings["reduction"]) == 2 * 3  # a barrier for each of two units in each of three waves


def test_stages_wait_as_the_simulated_pipeline_does(expected):
    plan = expected(2, "parallel.pipeline=2", "model.layers=2", flags=["--json"]).result
    idle = [round(rank["waiting"] / plan["pipeline"]["seconds"], 6) for rank in plan["expected"]["ranks"]]
    assert idle == pytest.approx(plan["pipeline"]["idle"], abs=1e-6)
    table = expected(2, "parallel.pipeline=2", "model.layers=2").out
    assert "expected step on round as measured 2000-01-01T00:00:00+00:00 by 2 ranks" in table
    assert "\nwaiting " in table
    assert "GFLOP/s a rank (--machine)" in table


def test_tensor_groups_copy_and_wait_in_their_window(expected):
    shared = expected(2, "parallel.tensor=2", flags=["--json"]).result
    private = expected(2, "parallel.tensor=2", "parallel.share_node_memory=false", flags=["--json"]).result
    calls = private["ranks"][0]["sent"]["tensor"]["messages"]  # of two ranks, each call sends one message
    taken = shared["expected"]["ranks"][0]["layers' messages"]
    assert "tensor" not in shared["ranks"][0]["sent"]
    assert int(taken) == calls  # a barrier each takes a second, the copies of this model some milliseconds
    assert 0 < taken - calls < 0.1


def test_what_a_call_copies_is_what_the_window_does():
    large = 4 << 18
    for call, elements, parts, rank, ranks, copies, barriers in (
        ("reduce", 10, (), 0, 4, ((40, 40), (160, 40)), 1),  # small: everybody sums everything
        ("reduce", 1 << 18, (), 1, 4, ((large, large), (large, large // 4), (large, large)), 2),
        ("gather", 10, (1, 2), 1, 2, ((80, 80), (120, 120)), 1),
        ("scatter", 10, (1, 2), 1, 2, ((40, 40), (160, 80)), 1),
        ("shift", 10, (), 1, 2, (), 0),
    ):
        assert GroupCall(call, elements, parts, 1, 4, "tensor").copies(rank, ranks) == (copies, barriers)


def test_what_the_machine_file_does_not_fit_is_said(expected):
    plan = expected(4, "model.dtype=float64", "model.dim=32", flags=["--json", "--ranks-per-node", "2"]).result
    said = "\n".join(plan["warnings"])
    assert "measured on one node" in said
    assert "measured with 1 threads a rank in float32, this training has 1 and float64" in said
    assert "products have 16 rows and 16 features, this training's 16 and 32" in said


def test_no_seconds_are_expected_without_a_machine_or_with_a_file_that_is_none(on_threads):
    assert on_threads(1, "plan", "tiny.toml", "--ranks", "2", "--json").result["expected"] is None
    (on_threads.folder / "other.json").write_text(json.dumps({"format": "other"}))
    for name, said in (("none.json", "cannot be read"), ("other.json", "no machine file"), ("text.txt", "damaged")):
        (line,) = on_threads(1, "plan", "tiny.toml", "--ranks", "2", "--machine", name, status=65).told
        assert line.startswith(f"DataError: {name}: ")
        assert said in line
    both = ("--machine", "machine.json", "--gflops", "3")
    on_threads(1, "plan", "tiny.toml", "--ranks", "2", *both, status=78)
