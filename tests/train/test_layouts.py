"""``mpizero train``, ``--resume`` and ``generate`` on models that are split over ranks.

They are threads; ``scripts/exactness_hybrid.py`` trains on more layouts under mpiexec.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from mpizero.errors import ExitStatus
from tests.train.conftest import ThreadCommands, write_inputs


def parallel(*settings):
    return [f"parallel.{setting}" for setting in settings]


@pytest.fixture(scope="module")
def deeper(tmp_path_factory):
    """A finished run on one process of a model with blocks for four parts: its commands and its outcome."""
    folder = tmp_path_factory.mktemp("deeper")
    write_inputs(folder)
    commands = ThreadCommands(folder)
    outcome = commands.train(1, "model.layers=2")
    return commands, outcome


def test_a_pipeline_computes_the_same_bits_as_one_process(deeper, on_threads):
    settings = ["pipeline=2", "strategy=zero2", "order=data,pipeline,tensor", "cuts=[2]"]
    outcome = on_threads.train(4, "model.layers=2", *parallel(*settings))
    assert outcome.result["parameters_sha256"] == deeper[1].result["parameters_sha256"]
    assert outcome.result["parameter_count"] == deeper[1].result["parameter_count"]
    alone, together = deeper[0].metrics(), on_threads.metrics()
    for key in ("loss", "validation_loss", "perplexity", "learning_rate"):
        assert [line.get(key) for line in alone] == [line.get(key) for line in together]


def test_the_layout_stands_in_the_result_and_in_what_is_told_as_are_replicas_without_a_grain(on_threads):
    outcome = on_threads.train(4, "train.steps=1", "train.micro_batch=6", *parallel("pipeline=2", "strategy=zero1"))
    assert outcome.result["layout"] == {"pipeline": 2, "tensor": 1, "data": 2, "context": 1, "schedule": "1f1b"}
    assert (outcome.result["ranks"], outcome.result["strategy"]) == (4, "zero1")
    assert "pipeline 2 x tensor 1 x data 2, 1f1b, zero1" in outcome.err
    assert "replicas 1 to 1 have no grain" in outcome.err
    assert json.loads((on_threads.folder / "run" / "run_complete").read_text()) == outcome.result


def test_a_run_resumed_on_other_layouts_equals_an_uninterrupted_one(deeper, on_threads):
    layouts = [
        (4, ["pipeline=2", "strategy=zero1", "schedule=gpipe"]),
        (2, ["strategy=zero3", "share_node_memory=false"]),
        (4, ["pipeline=4", "schedule=zero_bubble"]),
        (2, ["pipeline=2", "strategy=zero3", "schedule=zero_bubble_v"]),
        (1, []),
    ]
    for steps, (ranks, settings) in enumerate(layouts, 2):
        outcome = on_threads.train(
            ranks, "model.layers=2", f"train.steps={steps}", *parallel(*settings), flags=["--resume"]
        )
        assert ("resuming from" in outcome.err) == (steps > 2)
    assert outcome.result["parameters_sha256"] == deeper[1].result["parameters_sha256"]
    assert [line["step"] for line in on_threads.metrics()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_keeps_the_tiles_of_its_checkpoint_on_one_process(on_threads):
    whole = on_threads.train(1, "train.steps=2", "checkpoint.folder=whole", *parallel("tiles.tensor=2"))
    on_threads.train(2, "train.steps=1", *parallel("tensor=2"))
    last = on_threads.train(1, "train.steps=2", flags=["--resume"])
    assert last.result["parameters_sha256"] == whole.result["parameters_sha256"]


@pytest.mark.slow
def test_groups_beside_stages_and_replicas_compute_the_bits_of_one_process_with_their_tiles(on_threads):
    short = ["model.layers=2", "train.steps=2", "checkpoint.every=0"]
    layouts = {
        ("tensor",): (8, ["pipeline=2", "tensor=2", "data=2", "strategy=zero1"]),
        ("tensor", "context"): (4, ["tensor=2", "context=2", "strategy=zero1"]),
    }
    for axes, (ranks, sizes) in layouts.items():
        alone = on_threads.train(1, *short, *parallel(*(f"tiles.{axis}=2" for axis in axes)))
        assert "zero2 on 1 rank, the bits of one process with tiles=" in alone.err
        expected = [(line["loss"], line.get("validation_loss")) for line in on_threads.metrics()]
        outcome = on_threads.train(ranks, *short, *parallel(*sizes))
        assert outcome.result["parameters_sha256"] == alone.result["parameters_sha256"]
        assert "zero1, the bits of one process with tiles=" in outcome.err
        assert [line["loss"] for line in on_threads.metrics()] == [loss for loss, _ in expected]
        assert on_threads.metrics()[-1]["validation_loss"] == pytest.approx(expected[-1][1], rel=1e-5)


@pytest.mark.slow
def test_a_multi_layer_perceptron_is_cut_into_stages_and_tensors(on_threads):
    pytest.importorskip("sklearn", reason="scikit-learn's digits are optional data")
    (on_threads.folder / "digits.toml").write_text(
        '[model]\nname = "mlp"\nhidden = [32, 16]\n[data]\narrays = "digits"\n'
        "[train]\nsteps = 8\nglobal_batch = 60\nmicro_batch = 15\nvalidate_every = 8\n[optimizer]\nlr = 3e-2\n"
    )
    alone = on_threads(1, "train", "digits.toml")
    lines = on_threads.metrics()
    assert lines[-1]["accuracy"] > 0.3  # by chance 0.1
    together = on_threads.run(3, "train", "digits.toml", *parallel("pipeline=3", "schedule=gpipe"))
    assert together.result["parameters_sha256"] == alone.result["parameters_sha256"]
    assert on_threads.metrics()[-1]["accuracy"] == lines[-1]["accuracy"]
    assert together.result["samples_per_second"] > 0
    uneven = on_threads.run(3, "train", "digits.toml", "train.steps=5", *parallel("tensor=3"))  # of 32 and 16 features
    assert uneven.result["loss"] == pytest.approx(lines[4]["loss"], rel=1e-5)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_u_net_that_takes_its_channels_from_the_data_is_cut_into_stages(on_threads, task):
    x = np.random.default_rng(0).normal(size=(24, 5, 6, 2)).astype("f4")
    np.save(on_threads.folder / "x.npy", x)
    np.save(on_threads.folder / "flat.npy", x[:, :, 0, 0])
    np.save(on_threads.folder / "y.npy", np.roll(x, 1, axis=1) if task == "regression" else (x > 0).sum(-1))
    (on_threads.folder / "fields.toml").write_text(
        f'[model]\nname = "unet"\ntask = "{task}"\nwidth = 4\ngroups = 2\nlevels = 2\ndropout = 0.1\n'
        '[data]\narrays = {x = "x.npy", y = "y.npy"}\n[train]\nsteps = 2\nglobal_batch = 6\nmicro_batch = 2\n'
    )
    alone = on_threads(1, "train", "fields.toml")
    for ranks, settings in ((2, ["strategy=zero3"]), (4, ["pipeline=2", "strategy=zero1"])):
        together = on_threads.run(ranks, "train", "fields.toml", *parallel(*settings))
        assert together.result["parameters_sha256"] == alone.result["parameters_sha256"]
    for setting, why in (
        ("model.groups=3", "must divide model.width = 4"),
        ('model.padding=["zeros"]', "must be one for all axes of space, or one for each of 2"),
        ('data.arrays={x="flat.npy",y="y.npy"}', r"a unet takes fields .*, the data have shape \(5,\) each"),
        ('data.arrays={x="x.npy",y="flat.npy"}', rf'task = "{task}" takes .* \(samples, 5, 6.*of shape \(samples, 5\)'),
    ):
        refused = on_threads.run(1, "train", "fields.toml", setting, status=None)
        assert refused.status
        assert re.search(why, refused.err), refused.err
    refused = on_threads.run(2, "train", "fields.toml", *parallel("tensor=2"), status=ExitStatus.CONFIG)
    assert 'parallel.tensor = 2: must be 1: blocks of model.name = "unet" are not split' in refused.err


def test_a_fourier_operator_takes_its_channels_and_extents_from_the_data(on_threads):
    x = np.random.default_rng(0).normal(size=(12, 9, 8, 2)).astype("f4")
    for name, fields in {"x": x, "y": np.roll(x, 1, axis=1), "short": x[:, :5]}.items():
        np.save(on_threads.folder / f"{name}.npy", fields)
    (on_threads.folder / "fno.toml").write_text(
        '[model]\nname = "fno"\nwidth = 4\nlayers = 2\nmodes = [7, 4]\npadding = 0.25\nloss = "relative_l2"\n'
        '[data]\narrays = {x = "x.npy", y = "y.npy"}\n[train]\nsteps = 2\nglobal_batch = 6\nmicro_batch = 2\n'
    )
    alone = on_threads(1, "train", "fno.toml")
    for ranks, settings in ((4, ["domain=[2,2]", "strategy=zero3"]), (2, ["pipeline=2"])):
        together = on_threads.run(ranks, "train", "fno.toml", *parallel(*settings))
        assert together.result["parameters_sha256"] == alone.result["parameters_sha256"]
    for setting, why in (
        ("model.modes=[7]", "must be one for all axes of space, or one for each of 2"),
        ("model.modes=0", "must be a whole number >= 1"),
        ("model.padding=-1", "must be a finite number >= 0"),
        ('data.arrays={x="short.npy",y="short.npy"}', r"modes=\(7, 4\) are more than a field of \(5, 8\) "),
    ):
        refused = on_threads.run(1, "train", "fno.toml", setting, status=None)
        assert refused.status
        assert re.search(why, refused.err), refused.err


@pytest.mark.slow
def test_text_is_the_same_however_the_model_is_laid_out_and_was(deeper, on_threads):
    whole = ["model.layers=2", "checkpoint.every=0", "train.validate_every=0"]  # one checkpoint, at the end
    on_threads.train(4, *whole, *parallel("pipeline=2"))
    options = ["--prompt", "abc", "--length", "12", "--seed", "1"]
    alone = deeper[0](1, "generate", "run", *options)
    run, split = str(deeper[0].folder / "run"), ["--pipeline", "2", "--strategy", "zero1"]
    together = on_threads(4, "generate", run, *options, *split)
    assert on_threads(1, "generate", "run", *options).out == together.out == alone.out
    assert together.out.startswith("abc")
