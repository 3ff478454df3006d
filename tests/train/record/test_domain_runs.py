"""``mpizero train`` and the commands beside it where a domain cuts the space of fields; ranks are threads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, RemoteError
from mpizero.testing import parallel_assert, run_in_threads

FIELDS = """
[model]
name = "unet"
width = 4
groups = 2
levels = 2
dropout = 0.1
[data]
hdf5 = {path = "fields.h5", x = "x", y = "y"}
validation = 0.25
[train]
steps = 4
global_batch = 6
micro_batch = 2
validate_every = 2
validate_ema = true
ema = 0.5
clip = 0.1
"""


@pytest.fixture
def commands(on_threads):
    x = np.random.default_rng(0).normal(size=(24, 13, 11, 2)).astype("f4")
    y = np.roll(x, 1, axis=1)
    with h5py.File(on_threads.folder / "fields.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(1, 4, 4, 2))
        file["y"] = y
    for name, values in (("x", x), ("y", y), ("mask", (x > 0).sum(-1))):
        np.save(on_threads.folder / f"{name}.npy", values)
    (on_threads.folder / "fields.toml").write_text(FIELDS)
    return on_threads


def lines(commands):
    keys = ("step", "loss", "validation_loss", "accuracy", "gradient_norm")
    return [{key: line.get(key) for key in keys} for line in commands.metrics()]


CLASSES = FIELDS.replace(
    'hdf5 = {path = "fields.h5", x = "x", y = "y"}', 'arrays = {x = "x.npy", y = "mask.npy"}'
).replace("[data]", 'task = "classification"\n[data]')
FULL_BATCHES = (
    re.sub("(dropout|global_batch|validate_ema|ema|clip) = .*\n", "", FIELDS) + '[optimizer]\nname = "l-bfgs"\n'
)


@pytest.mark.parametrize(
    ("text", "layouts"),
    [
        (FIELDS, [(4, "domain=[2,2]", "strategy=zero3"), (4, "domain=[1,2]")]),
        (CLASSES, [(2, "domain=[2,1]")]),
        (FULL_BATCHES, [(2, "domain=[1,2]")]),
    ],
    ids=["hdf5", "classes in arrays", "full batches"],
)
def test_domains_train_with_the_bits_of_one_process(commands, text, layouts):
    (commands.folder / "fields.toml").write_text(text)
    alone = commands.run(1, "train", "fields.toml")
    expected = lines(commands)
    assert expected[-1]["validation_loss"] is not None
    for ranks, *settings in layouts:
        together = commands.run(ranks, "train", "fields.toml", *(f"parallel.{one}" for one in settings))
        assert together.result["parameters_sha256"] == alone.result["parameters_sha256"]
        assert lines(commands) == expected
        assert f"domain {settings[0][8]} x {settings[0][10]}" in together.err


def test_a_run_is_resumed_with_another_domain_and_told_of(commands):
    whole = commands.run(1, "train", "fields.toml", "train.steps=6")
    first = commands.run(4, "train", "fields.toml", "parallel.domain=[2,2]", "parallel.pipeline=1")
    events = (commands.folder / "run/events.jsonl").read_text().splitlines()
    (start,) = (json.loads(line) for line in events if '"kind": "start"' in line)
    assert start["layout"]["domain"] == first.result["layout"]["domain"] == [2, 2]
    assert start["coordinates"]["context"] == [0, 1, 2, 3]
    for ranks, domain, steps in ((2, "[1,2]", 5), (1, "[]", 6)):
        settings = (f"parallel.domain={domain}", f"train.steps={steps}")
        resumed = commands.run(ranks, "train", "fields.toml", *settings, flags=["--resume"])
    assert resumed.result["parameters_sha256"] == whole.result["parameters_sha256"]
    commands(1, "report", "run")
    page = (commands.folder / "run/report.html").read_text()
    assert "boxes of space (2 x 2)" in page
    commands(1, "watch", "run", "--once")


@pytest.mark.parametrize(
    ("ranks", "settings", "why"),
    [
        (2, ["parallel.domain=[2,2]"], r"domain = \[2, 2\]: does not fit this job: 2 ranks are not a multiple"),
        (2, ["parallel.domain=[2]"], r'must have 2 numbers: model.name = "unet" has fields of 2 axes of space'),
        (4, ["parallel.domain=[2,1]", "parallel.tensor=2"], "parallel.tensor = 2: must be 1 with parallel.domain"),
        (4, ["parallel.domain=[2,1]", "parallel.context=2"], "parallel.context = 2: must be 1 with parallel.domain"),
        (2, ["parallel.domain=[2,1]", 'train.wire="bfloat16"'], r"cannot be used with parallel.domain = \[2, 1\]"),
        (9, ["parallel.domain=[9,1]"], "at most as many parts as it has tiles"),
    ],
)
def test_domains_that_do_not_fit_are_refused_in_one_line(commands, ranks, settings, why):
    refused = commands.run(ranks, "train", "fields.toml", *settings, status=78)
    assert re.search(why, refused.err), refused.err


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_models_without_space_take_no_domain(commands, name):
    data = 'text = "text.txt"' if name == "gpt" else 'arrays = {x = "x.npy", y = "y.npy"}'
    (commands.folder / "other.toml").write_text(f'[model]\nname = "{name}"\n[data]\n{data}\n[parallel]\ndomain = [2]\n')
    refused = commands(2, "train", "other.toml", status=78)
    assert f'parallel.domain = [2]: must be left out: model.name = "{name}" has no space to cut' in refused.err


def test_verify_compares_domains(commands):
    compared = commands(1, "verify", "fields.toml", "--steps", "1", "--layouts", "domain=2x1; pipeline=2, domain=1x2")
    assert "zero2*2, domain=2x1 " in compared.out
    assert "zero2*4, pipeline=2, domain=1x2, schedule=1f1b " in compared.out
    refused = commands(1, "verify", "fields.toml", "--layouts", "domain=2x1x1", status=78)
    assert "must have 2 numbers" in refused.err


def test_the_samples_of_a_skipped_step_are_kept_whole_and_replayed(commands):
    y = np.load(commands.folder / "y.npy")
    y[:, 9, 8] = np.inf
    np.save(commands.folder / "y.npy", y)
    text = FIELDS.replace('hdf5 = {path = "fields.h5", x = "x", y = "y"}', 'arrays = {x = "x.npy", y = "y.npy"}')
    (commands.folder / "fields.toml").write_text(text.replace("validate_every = 2", "validate_every = 0"))
    kept = []
    for ranks, domain in ((1, "[]"), (4, "[2,2]")):
        settings = (f"parallel.domain={domain}", "train.steps=1", "train.validate_ema=false", "train.ema=0.5")
        outcome = commands.run(ranks, "train", "fields.toml", *settings)
        assert "see: mpizero replay" in outcome.err, outcome.err
        with np.load(commands.folder / "run/bad_steps/step_00000001/grain_00000.npz") as file:
            kept.append({name: file[name] for name in file})
    assert kept[0].keys() == kept[1].keys()
    for name, values in kept[0].items():
        np.testing.assert_array_equal(kept[1][name], values, name)
    replayed = commands(1, "replay", "run/bad_steps/step_00000001")
    assert "not finite" in replayed.out, (replayed.out, replayed.err)


def error(model, batch):
    """The absolute error, and its weight: the mean over all positions."""
    errors = np.abs(model.predict(batch[0]) - batch[1])
    return errors, np.ones_like(errors)


def hits(model, batch):
    """Where the sign is right, of values that are far from zero; a weight for all channels."""
    return (model.predict(batch[0]) > 0) == (batch[1] > 0), np.abs(batch[1]).min(axis=-1, keepdims=True) > 0.1


def validated(comm, cut, folder, metrics, space=(13, 11)):
    """The validations of a run, and the error and hits that NumPy computes of the last model and whole fields."""
    x = np.random.default_rng(0).normal(size=(14, *space, 2)).astype("f4")
    source, held_back = (mz.data.ArraySource(part, np.roll(part, 1, axis=1)) for part in (x[:7], x[7:]))
    given = {"optimizer": mz.Adam(0.01), "steps": 1, "global_batch": 6, "run": folder, "validation": held_back}
    net = mz.nn.UNet(2, 2, len(space), width=4, levels=2, groups=2, space=space)
    with (
        mz.Mesh(comm, domain=cut) as mesh,
        mz.Trainer(
            net, source, mesh=mesh, config=mz.Config(micro_batch=2), **given, validate_every=1, progress=False,
            metrics=metrics,
        ) as trainer,
    ):  # fmt: skip
        validations = trainer.fit().validations
        if cut:
            return validations, ()
        wrong, weight = error(trainer.model, held_back.samples(range(7)))
        right, counts = hits(trainer.model, held_back.samples(range(7)))
        return validations, (wrong.sum(dtype="f8") / weight.sum(), right.sum() / counts.sum())


@pytest.mark.parametrize(("space", "layouts"), [((13, 11), [(4, (2, 2)), (6, (1, 2))]), ((9, 6, 7), [(4, (2, 1, 2))])])
def test_metrics_of_fields_are_those_of_whole_fields_with_the_same_bits_on_every_cut(tmp_path, space, layouts):
    metrics = {"error": error, "hits": hits}
    alone, expected = validated("self", (), tmp_path, metrics, space)
    np.testing.assert_allclose([alone[-1]["error"], alone[-1]["hits"]], expected, rtol=1e-12)
    for ranks, cut in layouts:
        for found, _ in run_in_threads(ranks, lambda comm, cut=cut: validated(comm, cut, tmp_path, metrics, space)):
            assert found == alone


@pytest.mark.mpi
def test_in_a_job_metrics_of_fields_have_the_bits_of_one_process(world, tmp_path):
    cut = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (4, 2)}[world.size]
    folder = Path(world.broadcast_object(str(tmp_path)))
    metrics = {"error": error, "hits": hits}
    alone = validated("self", (), folder / "alone", metrics)[0] if world.rank == 0 else None
    with world.split(0) as comm:
        found, _ = validated(comm, cut, folder / "together", metrics)
    parallel_assert(world, found == world.broadcast_object(alone), str(found))


@pytest.mark.parametrize(
    ("metric", "kind", "told"),
    [
        (lambda rank, part: (1.0, 1), ConfigError, "metric 'own' returned (1.0, 1): expected two arrays"),
        (lambda rank, part: (part, -part), ConfigError, "metric 'own' returned (array("),
        (lambda rank, part: (part[:, rank:],) * 2, DataError, "metric 'own' returned a field of ("),
        (lambda rank, part: (part, part[:, 1:]), DataError, "metric 'own' returned a field of ("),
        (lambda rank, part: (np.repeat(part, 2, 1),) * 2, DataError, "this rank's part of the samples has ("),
        (lambda rank, part: (part, part[:1, ..., :0]), DataError, "metric 'own', domain_sum: takes fields of the same"),
        (lambda rank, part: ((part, part), (1.0, 1))[rank], ConfigError, "expected two arrays"),
    ],
)  # fmt: skip
def test_a_metric_that_does_not_return_the_rank_s_part_of_fields_ends_all_ranks(tmp_path, metric, kind, told):
    def work(comm):
        own = {"own": lambda model, batch: metric(comm.rank, np.ones_like(batch[1]))}
        with pytest.raises((kind, RemoteError)) as caught:
            validated(comm, (2, 1), tmp_path, own)
        return caught.value

    errors = run_in_threads(2, work)
    assert any(isinstance(error, kind) for error in errors)
    assert all(told in str(error) for error in errors)
