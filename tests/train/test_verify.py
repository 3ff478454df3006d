from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero import nn
from mpizero.comm import as_communicator
from mpizero.tools.check_model.checks import examine
from mpizero.tools.verify.command import choose, verify
from mpizero.tools.verify.verdicts import Layout, default_layouts
from mpizero.train.config.toml import ConfigDocument, parse_config
from tests.testing import planted
from tests.train.conftest import TINY, write_inputs

# ------------------------------------------------------------------ names of layouts


@pytest.mark.parametrize(
    ("text", "name", "ranks"),
    [
        ("1", "zero2*1", 1),
        ("3", "zero2*3", 3),
        ("zero3*2", "zero3*2", 2),
        ("ddp * 2, private", "ddp*2, private", 2),
        ("pipeline=2,data=2", "zero2*4, pipeline=2, data=2, schedule=1f1b", 4),
        ("zero1*8, pipeline=2, tensor=2", "zero1*8, pipeline=2, tensor=2, data=2, schedule=1f1b", 8),
        ("strategy=ddp, context=3", "ddp*3, context=3", 3),
        ("tensor=2,tiles=4", "zero2*2, tensor=2, tiles=4", 2),
        ("pipeline=2, schedule=interleaved, virtual_stages=2", None, 2),
        ("4, ranks_per_node=2", "zero2*4, ranks_per_node=2", 4),
    ],
)
def test_a_layout_is_named_shortly_and_its_full_name_means_the_same(text, name, ranks):
    layout = Layout.parse(text)
    assert layout.ranks == ranks
    assert name is None or str(layout) == name
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_defaults_are_every_strategy_and_every_cut_that_the_model_allows(ranks):
    layouts = default_layouts(ranks, blocks=4, heads=4, sequence=8)
    assert all(layout.ranks == ranks for layout in layouts)
    assert {layout.parallel.strategy for layout in layouts} == {"ddp", "zero1", "zero2", "zero3"}
    stages = {layout.parallel.pipeline for layout in layouts}
    assert stages == {1} | {n for n in (2, 3, 4) if ranks % n == 0}
    assert max(layout.parallel.tensor for layout in layouts) == max(n for n in (1, 2, 4) if ranks % n == 0)
    assert [Layout.parse(str(layout)) for layout in layouts] == layouts


# ------------------------------------------------------------------ the command


def test_layouts_in_threads_agree_and_are_listed(on_threads):
    outcome = on_threads(
        0, "verify", "tiny.toml", "--steps", "2", "--layouts", "2; zero3*3, private; pipeline=2; tensor=2"
    )
    model, head, one, *rest = outcome.out.splitlines()
    assert model.startswith("model: right in 6 ways, ")
    assert head.split() == ["layout", "ranks", "steps", "sha256", "seconds", "verdict"]
    names = ["zero2*2", "zero3*3, private", "zero2*2, pipeline=2, schedule=1f1b", "zero2*2, tensor=2"]
    assert [line.split("  ")[0] for line in rest] == names
    assert all(line.endswith("same bits") for line in rest[:3])
    assert rest[3].endswith("  same bits with tiles={'tensor': 2}")
    assert "step 10/10" in outcome.err


@pytest.mark.slow
def test_layouts_on_several_ranks_take_the_first_of_them(on_threads):
    outcome = on_threads(3, "verify", "tiny.toml", "--steps", "2", "--layouts", "1; 2; zero1*3", "--json")
    assert outcome.result["model"]["right"]
    assert "ranks: the same bits on all 3" in outcome.result["model"]["passed"]
    one, *others = outcome.result["layouts"]
    assert [v["ranks"] for v in others] == [1, 2, 3]
    assert {v["sha256"] for v in others} == {one["sha256"]}


def options(**given):
    return SimpleNamespace(
        **{"layouts": "1; zero1*2", "ranks": None, "steps": 2, "tolerance": None, "json": False, **given}
    )


@pytest.fixture
def config(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return parse_config(ConfigDocument("tiny.toml", TINY, ["train.clip=0.1", "model.dim=8", "model.sequence=8"]))


@pytest.mark.slow
def test_a_difference_is_printed_and_the_status_is_1(config, monkeypatch, capsys):
    planted.missed_clip(monkeypatch, first=2)
    assert verify(config, as_communicator(None), options()) == 1
    shown = capsys.readouterr()
    assert "zero1*2: step 2: clip factor: 1.0, expected 0." in shown.out
    assert "probably: a missed clip" in shown.out
    assert "1 of 2 layouts differs from one process" in shown.err
    assert verify(config, as_communicator(None), options(json=True)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"] is False
    assert [v["finding"] and v["finding"]["quantity"] for v in found["layouts"]] == [None, None, "clip factor"]


@pytest.mark.slow
def test_a_model_that_is_wrong_on_one_process_too_is_said_before_any_layout(config, monkeypatch, capsys):
    """All layouts would agree with one process, which is wrong itself."""
    found = []

    def examined_once(*args, **settings):
        if not found:
            found.append(examine(*args, **settings))
        return found[0]

    monkeypatch.setattr("mpizero.tools.verify.command.examine", examined_once)
    right = nn.CrossEntropy.backward
    monkeypatch.setattr(nn.CrossEntropy, "backward", lambda self, cache, scale=1.0: right(self, cache, 2 * scale))
    assert verify(config, as_communicator(None), options(json=False)) == 1
    shown = capsys.readouterr()
    assert "wrong: gradients of all" in shown.out
    assert "it is 2 times what it must be: multiply it by 0.5" in shown.out
    assert "one process" not in shown.out
    assert "the model is wrong, so no layout was compared" in shown.err
    assert verify(config, as_communicator(None), options(json=True)) == 1
    assert json.loads(capsys.readouterr().out)["model"]["right"] is False


def chosen(*settings):
    """The layouts of two ranks that are compared where none is named, for a model of three blocks."""
    config = parse_config(ConfigDocument("tiny.toml", TINY, settings))
    model = SimpleNamespace(blocks=dict.fromkeys("abc"), loss=None, dtype=None, seed=0)
    return choose(config, model, as_communicator(None), None, 2)


def test_without_names_the_configurations_own_layout_comes_first():
    names = [str(layout) for layout in chosen("parallel.strategy=ddp", "parallel.ranks_per_node=1")]
    assert names[0] == "ddp*2, ranks_per_node=1"
    assert "zero1*2, context=2" in names
    own, *others = chosen("parallel.grain_assignment=dynamic")
    assert str(own) == "zero2*2, grain_assignment=dynamic"
    assert Layout.parse(str(own)).parallel.grain_assignment == "dynamic"
    assert "zero2*2" in map(str, others)


@pytest.mark.parametrize(
    "settings",
    [
        ["strategy=zero3", "bucket_mb=2"],
        ["strategy=zero3", "schedule=gpipe"],
        ["strategy=zero3", "tiles=2"],
        ["strategy=zero3", 'order="data,pipeline,tensor"'],
        ["strategy=ddp", "pipeline=2", "cuts=[1]"],
        ["strategy=zero1", "tensor=2"],
    ],
)
def test_without_names_each_layout_is_listed_once(settings):
    names = [str(layout) for layout in chosen(*(f"parallel.{setting}" for setting in settings))]
    assert len(set(names)) == len(names)
    assert names[0].startswith(settings[0].partition("=")[2])


@pytest.mark.parametrize(
    ("setting", "axes"),
    [
        ("optimizer.name=adamw", {"context", "tensor"}),
        ("train.wire=bfloat16", {"tensor"}),  # sums are rounded
        ("optimizer.name=muon", {"context"}),  # whole tensors are updated
    ],
)
def test_groups_that_a_setting_does_not_allow_are_left_out(setting, axes):
    layouts = chosen(setting)
    assert {axis for axis in ("context", "tensor") if any(getattr(one.parallel, axis) > 1 for one in layouts)} == axes


def test_layouts_that_are_named_twice_are_compared_once():
    batch = np.eye(4, dtype=np.float32), np.arange(4) % 2
    report = mz.testing.compare_layouts(lambda comm: nn.MLP(4, [3], 2), [batch], ["zero3*2", "zero3 * 2"], comm="self")
    assert [verdict.layout for verdict in report.verdicts] == ["one process", "zero3*2"]
