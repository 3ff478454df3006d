"""The moving average of parameters: as defined, with the same bits on every layout, saved, loaded, used when asked."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.checkpoint.convert import export
from mpizero.checkpoint.npz import read_arrays
from mpizero.errors import ConfigError, DataError, StateError
from mpizero.testing import run_in_threads
from tests.parallel.models import KINDS, part

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4)).astype("f4"), RNG.integers(0, 3, 12)
OPTIMIZERS = {
    "adamw": lambda: mz.AdamW(1e-2),
    "lamb": lambda: mz.LAMB(1e-2),
    "muon": lambda: mz.Muon(1e-2),
    "own": lambda: Own(),
}


class Own:
    """Gradient descent by a class of one's own."""

    slots = ()

    def update(self, params, grads, state):
        params -= 0.1 * grads


def network(dtype="f4"):
    return mz.nn.MLP(4, (8, 6), 3, dtype=dtype)


def placed(comm, optimizer, strategy="zero3", layout=None, **settings):
    config = mz.ShardingConfig(comm=comm, micro_batch=3, **{"ema": 0.9, **settings})
    if layout:
        return mz.HybridShardedModel(network(), config, **layout, optimizer=optimizer)
    return KINDS[strategy](network(), config, optimizer=optimizer)


def average_of(model):
    return np.concatenate([array.reshape(-1) for array in model.optimizer.state_dict()["state"]["ema"].values()])


def trained(comm, name, *where, **settings):
    """Train; return the parameters' hash, the average, and what it evaluates and predicts, checked on the way."""
    with placed(comm, OPTIMIZERS[name](), *where, **settings) as model:
        x, y = part(model.batch_group, X, Y)
        start = model.evaluate(x, y)
        assert model.evaluate(x, y, ema=True) == start  # before the first step
        wanted = model.get_parameters().astype("f8")
        for _ in range(4):
            model.train(x, y)
            wanted += 0.1 * (model.get_parameters() - wanted)
        sha256, average = model.parameters_sha256(), average_of(model)
        found, prediction = model.evaluate(x, y, ema=True), model.predict(x, ema=True)
        assert model.parameters_sha256() == sha256
        assert (average_of(model) == average).all()
        np.testing.assert_allclose(average, wanted, rtol=1e-5, atol=1e-6)
        plain = model.evaluate(x, y).loss
        model.set_parameters(average)
        assert model.evaluate(x, y) == found != plain
        np.testing.assert_array_equal(model.predict(x), prediction)
        return sha256, average.tobytes(), found


LAYOUTS = [
    (2, "ddp", None, {}),
    (4, "ddp", None, {"ranks_per_node": 2}),
    (3, "zero1", None, {"share_node_memory": False}),
    (2, "zero2", None, {}),
    (3, "zero3", None, {"share_node_memory": False}),
    (4, "", {"pipeline_parallel_size": 2}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_average_has_the_same_bits_on_every_layout(name):
    alone = trained("self", name, "ddp")
    for ranks, strategy, layout, settings in LAYOUTS if name == "adamw" else LAYOUTS[3:]:
        found = run_in_threads(ranks, lambda comm, w=(strategy, layout), s=settings: trained(comm, name, *w, **s))
        assert found[0] == alone, (ranks, strategy, layout, settings)


SETTERS = {
    "set_parameters": lambda model, values, path: model.set_parameters(values),
    "load_named": lambda model, values, path: model.load_named(model._engine.global_view.named(values)),
    "load_parameters": lambda model, values, path: model.load_parameters(path / "saved"),
    "load_model": lambda model, values, path: model.load_model(path / "saved"),
}


@pytest.mark.parametrize(("name", "strategy"), list(zip(SETTERS, ["ddp", "zero3"] * 2, strict=True)))
def test_the_average_begins_anew_with_parameters_that_are_set_after_a_step(strategy, name, tmp_path, capsys):
    """Of the old parameters nothing is left; before the first step nothing is told."""

    def run(comm):
        with mz.DDPModel(network(), mz.ShardingConfig(comm=comm, share_node_memory=False)) as other:
            other.save_model(tmp_path / "saved")
            values = other.get_parameters()
        with placed(comm, mz.AdamW(1e-2), strategy, share_node_memory=False) as model:
            x, y = part(model.batch_group, X, Y)
            SETTERS[name](model, values, tmp_path)
            model.train(x, y)
            moved = average_of(model)
            SETTERS[name](model, values, tmp_path)
            SETTERS[name](model, values, tmp_path)
            anew = average_of(model)
            assert model.evaluate(x, y, ema=True) == model.evaluate(x, y)
            model.train(x, y)
            np.testing.assert_allclose(average_of(model), values + 0.1 * (model.get_parameters() - values), atol=1e-6)
            return (moved != values).any() and (anew == values).all()

    assert all(run_in_threads(2, run))
    assert capsys.readouterr().err.count("begins anew with them") == 1


def test_split_layers_average_their_parts_and_clipping_changes_nothing_of_it():
    alone = trained("self", "adamw", "ddp", clip=0.1)
    split = run_in_threads(2, lambda comm: trained(comm, "adamw", "", {"tensor_parallel_size": 2}, clip=0.1))[0]
    averages = (np.frombuffer(found[1], "f4") for found in (split, alone))
    np.testing.assert_allclose(*averages, rtol=1e-4, atol=1e-6)
    whole = run_in_threads(3, lambda comm: trained(comm, "adamw", "zero1", None, clip=0.1))[0]
    assert whole == alone


@pytest.mark.slow
def test_a_resume_goes_on_with_the_average_on_another_layout(tmp_path, capsys):
    def two_steps(comm, begin="", end="", **where):
        with placed(comm, mz.AdamW(1e-2), **where) as model:
            if begin:
                model.load_model(tmp_path / begin)
            for _ in range(2):
                model.train(*part(model.batch_group, X, Y))
            if end:
                model.save_model(tmp_path / end)
            return model.parameters_sha256(), average_of(model).tobytes()

    run_in_threads(3, lambda comm: two_steps(comm, end="saved", strategy="zero3", share_node_memory=False))
    wanted = trained("self", "adamw", "ddp")[:2]
    assert two_steps("self", "saved", strategy="ddp") == wanted
    assert run_in_threads(4, lambda comm: two_steps(comm, "saved", layout={"pipeline_parallel_size": 2}))[0] == wanted
    with placed("self", mz.AdamW(1e-2), ema=None) as model:
        model.load_model(tmp_path / "saved")
        assert "holds an average of the parameters, which is not read" in capsys.readouterr().err
        model.save_model(tmp_path / "without")
    with placed("self", mz.AdamW(1e-2)) as model:
        model.load_model(tmp_path / "without")
        assert "it begins with the parameters that are loaded" in capsys.readouterr().err
        np.testing.assert_array_equal(average_of(model), model.get_parameters())

    def begun(comm):  # every node has a whole copy of the parameters, and a rank updates parts of those of other nodes
        with placed(comm, mz.AdamW(1e-2), "ddp", share_node_memory=False) as model:
            model.load_model(tmp_path / "without")
            x, y = part(model.batch_group, X, Y)
            return model.evaluate(x, y, ema=True) == model.evaluate(x, y)

    assert all(run_in_threads(2, begun))
    with mz.checkpoint.open_checkpoint(tmp_path / "saved", "self") as reader:
        export(reader, tmp_path / "average.npz", "npz", ema=True)
        exported = read_arrays(tmp_path / "average.npz")
        assert len(exported) == 6
        for name, values in exported.items():
            np.testing.assert_array_equal(values, reader.read_whole(f"optimizer/ema/{name}"))
    told = pytest.raises(ConfigError, match="holds no average of the parameters")
    with mz.checkpoint.open_checkpoint(tmp_path / "without", "self") as reader, told:
        export(reader, tmp_path / "none.npz", "npz", ema=True)


def test_a_skipped_step_leaves_the_average_and_an_error_the_parameters():
    def run(comm):
        with placed(comm, mz.AdamW(1e-2), "zero2", bad_steps=mz.BadSteps(warn=False)) as model:
            x, y = part(model.batch_group, X, Y)
            model.train(x, y)
            average, sha256 = average_of(model), model.parameters_sha256()
            model.train(np.full_like(x, np.nan), y)
            assert (average_of(model) == average).all()
            wrong = y + 3 * (comm.rank == comm.size - 1)
            with pytest.raises(Exception, match="not below the number of classes"):
                model.evaluate(x, wrong, ema=True)
            with pytest.raises(Exception, match="takes 4 features"):
                model.predict(x[:, : 3 + (comm.rank > 0)], ema=True)
            assert model.parameters_sha256() == sha256
            assert (average_of(model) == average).all()
            return model.train(x, y)

    assert len(set(run_in_threads(3, run) + run_in_threads(1, run))) == 1


def test_an_average_that_is_not_kept_or_cannot_be_is_an_error():
    with placed("self", mz.SGD(0.1), ema=None) as model:
        for use in (lambda: model.evaluate(X, Y, ema=True), lambda: model.predict(X, ema=True)):
            with pytest.raises(StateError, match=r"keeps no average .* ShardingConfig\(ema=0.999\)"):
                use()
    with placed("self", None) as model, pytest.raises(StateError, match="keeps no average .* and give it an optimizer"):
        model.predict(X, ema=True)
    with pytest.raises(ConfigError, match="LocalSGDOptimizer: each rank trains a copy of its own"):
        placed("self", mz.LocalSGDOptimizer(mz.SGD(0.1)), "ddp")
    named = Own()
    named.slots = ("ema",)
    with pytest.raises(ConfigError, match="Own has a state array of this name already"):
        placed("self", named)


def test_copies_have_averages_of_their_own():
    with placed("self", mz.AdamW(1e-2)) as model:
        model.train(X, Y)
        with model.deep_copy() as copy:
            assert (average_of(copy) == average_of(model)).all()
            assert copy.train(X, Y) == model.train(X, Y)
            assert copy.evaluate(X, Y, ema=True) == model.evaluate(X, Y, ema=True)
        with pytest.raises(DataError):
            model.evaluate(X, Y[:3], ema=True)
        assert model.metadata().bytes_on_rank["optimizer state"] == 3 * 4 * model.parameter_count
