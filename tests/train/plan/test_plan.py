"""``mpizero plan`` tells what ``mpizero train`` then does, and what does not fit."""

from __future__ import annotations

import json

import pytest

from mpizero.train.machine import peak_growth

#: Every setting once; what layouts hold and send is in ``tests/planning``.
LAYOUTS = [
    (2, ("parallel.strategy=ddp", "parallel.ranks_per_node=1", "train.gradient_compression=topk:0.05")),
    (4, ("parallel.tensor=2", "parallel.context=2", "parallel.share_node_memory=false", "optimizer.name=lamb")),
    (4, ("parallel.pipeline=2", "parallel.tensor=2", "parallel.ranks_per_node=2", "parallel.schedule=zero_bubble")),
]

INTERLEAVED = ("model.layers=3", "parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2")


def planned(commands, ranks, *settings, flags=(), status=0):
    return commands.run(1, "plan", "tiny.toml", *settings, flags=["--ranks", str(ranks), *flags], status=status)


@pytest.mark.parametrize(("ranks", "settings"), LAYOUTS)
def test_a_run_sends_what_was_planned(on_threads, ranks, settings):
    plan = planned(on_threads, ranks, *settings, flags=["--json"])
    run = on_threads.train(ranks, "train.steps=3", "train.validate_every=0", *settings)
    figures = plan.result
    sent = [line["bytes_sent"] for line in on_threads.metrics()]
    assert sent[1:] == [figures["ranks"][0]["bytes_sent"]] * 2
    assert figures["parameter_count"] == run.result["parameter_count"]
    assert figures["axes"] == {axis: run.result["layout"][axis] for axis in figures["axes"]}
    assert sum(rank["samples"] for rank in figures["ranks"]) == 6 * figures["axes"]["pipeline"] * (
        figures["axes"]["tensor"] * figures["axes"]["context"]
    )


def test_memory_is_told_by_part_and_node(on_threads):
    plan = planned(on_threads, 4, "parallel.strategy=zero1", flags=["--json", "--ranks-per-node", "2"]).result
    parameters = plan["parameter_count"]
    for rank in plan["ranks"]:
        memory = rank["memory"]
        assert memory["parameters"]["shared"] - 4 * parameters in range(4096)
        assert memory["parameters"]["sharers"] == 2
        assert memory["optimizer state"]["private"] in (parameters // 4 * 8, (parameters // 4 + 1) * 8)
        assert memory["activations"]["private"] > 0
    assert [node["node"] for node in plan["nodes"]] == [0, 1]
    private = [sum(held["private"] for held in rank["memory"].values()) for rank in plan["ranks"]]
    windows = sum(held["shared"] for held in plan["ranks"][0]["memory"].values())
    assert plan["nodes"][0] == {"node": 0, "bytes": private[0] + private[1] + windows, "window_bytes": windows}


def test_what_does_not_fit_ends_with_status_1_and_one_line(on_threads):
    planned(on_threads, 2, flags=["--memory-per-node", "1GB"])
    outcome = planned(on_threads, 2, flags=["--memory-per-node", "100kB"], status=1)
    (line,) = outcome.err.splitlines()
    assert line.startswith("mpizero: does not fit: node 0 needs ")
    assert "--memory-per-node allows 100,000" in line
    assert "memory of the fullest rank" in outcome.out


@pytest.mark.parametrize(
    ("ranks", "settings", "named"),
    [
        (3, ["parallel.pipeline=2"], "3 ranks are not a multiple of pipeline=2"),
        (2, ["parallel.tensor=2", "model.heads=1"], "parallel.tensor = 2"),
        (4, ["parallel.pipeline=4"], "more stages than layers"),
    ],
)
def test_what_a_run_would_refuse_the_plan_refuses_alike(on_threads, ranks, settings, named):
    (line,) = planned(on_threads, ranks, *settings, status=78).told
    assert named in line
    assert on_threads.train(ranks, *settings, status=78).told == [line]


@pytest.mark.slow
def test_nothing_as_large_as_the_model_is_made(on_threads):
    """A model of 3.8 GB, 15 GB with its optimizer, is planned in a fraction of that."""
    large = ("model.dim=512", "model.layers=300", "model.heads=8", "train.global_batch=64")
    with peak_growth() as grown:
        plan = planned(on_threads, 8, *large, flags=["--json"]).result
    assert plan["parameter_count"] * 4 > 3.7e9
    assert grown[0] < 4e8


@pytest.mark.parametrize(
    ("ranks", "settings", "said"),
    [
        (2, ["parallel.pipeline=2", "parallel.strategy=zero3"], 'parallel.strategy = "zero1" gathers once'),
        (8, [], "ranks 6 to 7 have nothing to compute: 8 ranks share 6 grains"),
        (16, ["parallel.tensor=2"], "ranks 6 to 7, 14 to 15 have nothing to compute: 8 replicas share 6 grains"),
        (2, ["parallel.pipeline=2", "train.micro_batch=6"], "1 micro-batches cannot keep 2 stages busy"),
        (2, [*INTERLEAVED, "train.micro_batch=2"], "interleaved pads 3 micro-batches to 4"),
        (2, ["parallel.pipeline=2", "parallel.cuts=[1]"], "times the mean work of a stage"),
    ],
)
def test_what_is_legal_but_unwise_is_said_with_advice(on_threads, ranks, settings, said):
    warnings = planned(on_threads, ranks, *settings, flags=["--json"]).result["warnings"]
    assert any(said in warning for warning in warnings), warnings


def test_tensor_groups_over_nodes_are_advised_another_order(on_threads):
    settings = ["parallel.tensor=2", "train.global_batch=8"]
    flags = ["--json", "--ranks-per-node", "2"]
    crossing = planned(on_threads, 4, *settings, flags=flags).result
    (warning,) = crossing["warnings"]
    assert 'parallel.order = "pipeline,data,tensor"' in warning
    advised = planned(on_threads, 4, *settings, "parallel.order=pipeline,data,tensor", flags=flags).result
    assert not advised["warnings"]
    assert "tensor" not in advised["ranks"][0]["sent"]


def test_a_timetable_is_printed(on_threads):
    settings = ["parallel.pipeline=2", "model.layers=2", "parallel.schedule=zero_bubble"]
    text = planned(on_threads, 2, *settings, flags=["--timetable"]).out
    assert "stage 0 | F0" in text
    assert "bubble" in text


def test_an_mlp_takes_its_width_from_the_data(on_threads):
    (on_threads.folder / "mlp.toml").write_text(
        '[model]\nname = "mlp"\n[data]\narrays = "digits"\n[train]\nglobal_batch = 64\nsteps = 2\nvalidate_every = 0\n'
    )
    plan = on_threads(0, "plan", "mlp.toml", "--ranks", "2", "--ranks-per-node", "1", "--json")
    on_threads(2, "train", "mlp.toml", "--set", "parallel.ranks_per_node=1")
    assert on_threads.metrics()[-1]["bytes_sent"] == plan.result["ranks"][0]["bytes_sent"]
    assert json.loads(plan.out)["parameter_count"] == 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10


def test_one_of_the_ranks_plans_and_prints(on_threads):
    plans = [json.loads(on_threads(ranks, "plan", "tiny.toml", "--ranks", "2", "--json").out) for ranks in (1, 3)]
    for plan in plans:
        for rank in plan["ranks"]:  # these parts are found by trying, in which other threads take memory, too
            del rank["memory"]["activations"], rank["memory"]["working arrays"], rank["bytes"]
    alone, three = ({key: plan[key] for key in ("parameter_count", "axes", "grains", "ranks")} for plan in plans)
    assert three == alone
