"""Any optimizer at any stage: the library's, the user's own, the whole loop, local steps."""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, RemoteError
from mpizero.sharding.full_params import GlobalView
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, mlp, part, points, sharded, vectors


def test_an_optimizer_is_bound_before_it_steps_and_a_subclass_by_any_name_fits():
    class Mine(mz.ZeRO2Optimizer):
        pass

    config = mz.ShardingConfig()
    optimizer = Mine(mz.SGD(lr=0.1), config)
    with pytest.raises(RuntimeError, match="call set_model first"):
        optimizer.step()
    with mz.ZeRO2Model(mlp(), config, optimizer=optimizer) as model:
        assert model.optimizer is optimizer


def ratio(state, g, step, eps):
    """The corrected mean of gradients over the root of that of their squares; both begin as zeros."""
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g * g
    return state["m"] / (1 - 0.9**step) / (np.sqrt(state["v"] / (1 - 0.999**step)) + eps)


def by_adamw(w, g, state, step):
    return w - 0.05 * (ratio(state, g, step, 1e-8) + 0.1 * w * (w.ndim > 1))  # vectors take no decay


def by_lamb(w, g, state, step):
    u = ratio(state, g, step, 1e-6) + 0.1 * w * (w.ndim > 1)
    return w - 0.05 * np.linalg.norm(w) / np.linalg.norm(u) * u


def by_muon(w, g, state, step):
    """Newton-Schulz on singular values; vectors are trained by AdamW with a rate of their own."""
    if w.ndim == 1:
        return w - 0.05 * ratio(state, g, step, 1e-8)
    state["m"] = 0.95 * state.get("m", 0.0) + 0.05 * g
    u, s, vt = np.linalg.svd(0.05 * g + 0.95 * state["m"], full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return w - 0.1 * 0.01 * w - 0.1 * np.sqrt(11 / 7) * (u * s @ vt)


FORMULAS = {
    "AdamW": (mz.AdamW(lr=0.05, weight_decay=0.1), by_adamw),
    "LAMB": (mz.LAMB(lr=0.05, weight_decay=0.1), by_lamb),
    "Muon": (mz.Muon(lr=0.1, adamw_lr_scale=0.5), by_muon),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_training_follows_the_papers_formulas(name):
    """Of a linear model, whose gradient is written out, too."""
    (optimizer, update), (x, y) = FORMULAS[name], vectors(6)

    def loss_and_grad(p, batch):
        error = batch[0] @ p["w"] + p["b"] - batch[1]
        return float((error**2).sum() / 2), {"w": batch[0].T @ error, "b": error.sum(0)}, float(len(batch[0]))

    def train(comm):
        with sharded("zero2", comm, mz.FunctionModel(w, loss_and_grad), optimizer, micro_batch=2) as model:
            for _ in range(5):
                model.train(*part(comm, x, y))
            return model.named_parameters()

    rng = np.random.default_rng(0)
    w = {"w": rng.normal(size=(7, 11)), "b": rng.normal(size=11)}
    found, states = run_in_threads(3, train)[0], {"w": {}, "b": {}}
    for step in range(1, 6):
        error = x @ w["w"] + w["b"] - y
        gradients = {"w": x.T @ error / 6, "b": error.sum(0) / 6}
        w = {key: update(w[key], gradients[key], states[key], step) for key in w}
    for key, values in w.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("hiden.*", r"no parameter \(did you mean 'hidden.\*'\?\): the parameters are 'hidden.0.linear.weight'"),
        ("[", "matches no parameter: the parameters are"),
    ],
)
def test_a_group_for_no_parameter_is_refused_and_suggests(pattern, told):
    groups = [mz.ParameterGroup("*.bias"), mz.ParameterGroup(pattern, lr_scale=0.1)]

    def run(comm):
        for strategy in ("zero1", "zero3"):
            with pytest.raises(ConfigError, match=told):
                sharded(strategy, comm, mlp(), mz.AdamW(lr=0.1, groups=groups))

    run_in_threads(2, run)


def two_lines():
    x = np.random.default_rng(8).normal(size=(80, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)


@contextmanager
def bound(comm, kind, optimizer, settings=None, options=None, **layout):
    """An optimizer with a model and options of its own."""
    with mz.ShardingConfig(comm=comm or "self", micro_batch=2, **(settings or {})) as config:
        chosen = mz.OptimizationOptions(**{"batch_size": 8, "validation": 0.25, **(options or {})})
        with kind(mlp(), config, optimizer=optimizer, **layout) as model:
            model.optimizer.options = chosen
            yield model.optimizer


def optimized(comm, optimizer=None, settings=None, **options):
    with bound(comm, mz.ZeRO2Model, optimizer or mz.AdamW(lr=0.02), settings, options) as found:
        return found.optimize(two_lines()), found.model.get_parameters(), found.step_count


@pytest.mark.slow
def test_optimize_trains_validates_and_ends_with_the_best_parameters():
    result, parameters, steps = optimized(None, epochs=6)
    assert len(result.history) == 6
    assert result.steps == steps == 6 * 60 // 8
    assert not result.stopped_early
    losses = [record["validation_loss"] for record in result.history]
    assert result.best_loss == min(losses) == losses[result.best_epoch] < losses[0]
    assert 0 <= result.history[-1]["accuracy"] <= 1
    np.testing.assert_array_equal(parameters, result.best_parameters)
    by_hand = optimized(None, epochs=6, settings={"auto_sync_gradients": False})
    for other, values, count in [*run_in_threads(3, lambda comm: optimized(comm, epochs=6)), by_hand]:
        assert other.history == result.history
        assert count == steps
        np.testing.assert_array_equal(values, parameters)


@pytest.mark.parametrize("batch_size", [40, 7, 100])
def test_every_epoch_is_a_pass_and_functions_are_told_the_epoch_of_their_samples(batch_size):
    uses = {}

    def loss_and_grad(parameters, batch, run):
        for number in batch[0].astype(int):
            uses[run.epoch, number] = uses.get((run.epoch, number), 0) + 1
        return 0.0, {"w": np.zeros(1)}, float(len(batch[0]))

    samples = 70
    options = mz.OptimizationOptions(epochs=10, batch_size=batch_size, validation=0.0)
    with mz.distribute(mz.FunctionModel({"w": np.zeros(1)}, loss_and_grad), mz.SGD(), mesh=mz.Mesh("self")) as model:
        model.evaluate = lambda x, y: mz.Evaluation(1.0, 1.0, None)
        result = model.optimizer.optimize((np.arange(samples), np.arange(samples)), options)
    batch = min(batch_size, samples)
    assert result.steps == -(-10 * samples // batch)
    assert len(result.history) == 10
    counts = [sum(uses.get((epoch, number), 0) for epoch in range(11)) for number in range(samples)]
    assert set(counts) <= {10, 11}  # the last step goes on with the first samples of another pass
    assert sum(counts) == result.steps * batch
    told = [sum(count for (epoch, _), count in uses.items() if epoch < end) for end in range(1, 11)]
    assert told == [-(-end * samples // batch) * batch for end in range(1, 11)]  # a batch is told its first sample's


def best_of(comm, kind, **settings):
    """Stop early, when an earlier epoch is the best one; return the history, and what is left of the best epoch."""
    model, layout = {
        "hybrid": (mz.HybridShardedModel, {"pipeline_parallel_size": 2, "zero_stage": 2}),
        "zero1": (mz.ZeRO1Model, {}),
        "zero3": (mz.ZeRO3Model, {}),
    }[kind]
    settings |= {"minimum_parameter_group_size": 1}
    with bound(comm, model, mz.SGD(lr=3.0), settings, {"epochs": 50, "patience": 2}, **layout) as optimizer:
        result = optimizer.optimize(two_lines())
        assert result.stopped_early
        assert len(result.history) == result.best_epoch + 3 < 50
        parameters = optimizer.model.get_parameters()
        if kind != "zero1":
            assert result.best.nbytes == optimizer.model.shard_size * 4 < optimizer.model.parameter_count * 4
            with pytest.raises(TypeError, match="spread over the ranks"):
                pickle.dumps(result)
            np.testing.assert_array_equal(result.best_parameters, parameters)
    later = pickle.loads(pickle.dumps(result)).best_parameters  # the model is closed
    return result.history, [values.tobytes() for values in (parameters, result.best_parameters, later)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [("zero3", PRIVATE), ("hybrid", {}), ("hybrid", PRIVATE), ("zero1", {})])
def test_optimize_stops_early_and_keeps_the_best_parameters_as_the_model_keeps_its_own(kind, settings, monkeypatch):
    """No rank gathers the model to keep them: only who asks for them does; then they stay."""
    history, (one, *others) = best_of(None, "zero1")
    assert others == [one, one]
    if kind == "zero3":
        monkeypatch.setattr(GlobalView, "fill", None)
    ranks = 4 if kind == "hybrid" else 3
    assert run_in_threads(ranks, lambda comm: best_of(comm, kind, **settings)) == [(history, [one] * 3)] * ranks


def test_best_parameters_that_were_never_asked_for_are_gone_with_the_model():
    def run(comm):
        with bound(comm, mz.ZeRO3Model, mz.SGD(lr=0.1), PRIVATE, {"epochs": 1}) as optimizer:
            result = optimizer.optimize(points(12))
        with pytest.raises(RuntimeError, match="is closed .* before close"):
            _ = result.best_parameters

    run_in_threads(2, run)


def test_an_epoch_that_is_not_finite_is_never_the_best_of_several():
    losses = iter([np.nan, 2.0, np.nan, 1.0, 3.0])
    with bound(None, mz.DDPModel, mz.SGD(lr=0.1), options={"epochs": 5}) as optimizer:
        optimizer.model.evaluate = lambda x, y: mz.Evaluation(next(losses), 1.0, None)
        result = optimizer.optimize(points(12))
        assert (result.best_epoch, result.best_loss) == (3, 1.0)


def test_data_that_one_rank_cannot_read_stop_all_ranks():
    class Broken(mz.data.ArraySource):
        rank = 0

        def samples(self, indices):
            if self.rank == 1:
                raise OSError("disk gone")
            return super().samples(indices)

    def run(comm):
        with bound(comm, mz.DDPModel, mz.SGD(lr=0.1), options={"validation": 0.0}) as optimizer:
            source = Broken(*points(12))
            source.rank = comm.rank
            with pytest.raises((OSError, RemoteError), match="disk gone"):
                optimizer.optimize(source)
            with pytest.raises(DataError, match="no samples|need both"):
                optimizer.optimize(points(0))

    run_in_threads(3, run)


@contextmanager
def local(comm, optimizer=None, every=1, **settings):
    """A model whose ranks train by themselves, and its optimizer."""
    with mz.ShardingConfig(comm=comm, **settings) as config:
        chosen = mz.LocalSGDOptimizer(optimizer or mz.SGD(lr=0.1), every=every)
        with mz.DDPModel(mlp(), config, optimizer=chosen) as model:
            yield model, chosen


def test_sgd_averaged_after_every_step_is_distributed_sgd_up_to_rounding():
    def run(comm):
        batch, settings = part(comm, *points(6)), {"micro_batch": 2, **PRIVATE}
        whole = sharded("ddp", comm, optimizer=mz.SGD(lr=0.1), micro_batch=2)
        with whole, local(comm, **settings) as (model, _):
            np.testing.assert_allclose(*([m.train(*batch) for _ in range(3)] for m in (model, whole)), rtol=1e-5)
            np.testing.assert_allclose(model.get_parameters(), whole.get_parameters(), rtol=1e-5, atol=1e-6)
            return model.get_parameters().tobytes()

    assert len(set(run_in_threads(3, run))) == 1


@pytest.mark.slow
def test_bytes_fall_by_the_interval():
    def run(comm, every):
        with local(comm, mz.AdamW(lr=0.01), every, **PRIVATE) as (model, _):
            steps = ((model.train(*part(comm, *points(6))), model.last_step.bytes_sent) for _ in range(8))
            return sum(sent for _, sent in steps)

    sent = {every: sum(run_in_threads(3, partial(run, every=every))) for every in (1, 4, 8)}
    losses = 3 * 8 * 2 * 8 * 2  # ranks, steps, peers, bytes, numbers
    assert sent[4] - losses == 2 * (sent[8] - losses) == (sent[1] - losses) // 4


def test_local_training_is_saved_as_the_mean_and_goes_on_undisturbed():
    def run(comm):
        batch = part(comm, *points(9))
        with local(comm, mz.Adam(lr=0.01), every=100) as (model, optimizer):
            for _ in range(2):
                model.train(*batch)
            alone = model.get_parameters()
            data, state = model.serialize(), optimizer.serialize()
            np.testing.assert_array_equal(model.get_parameters(), alone)
            told = model.metadata()
            assert told.world_size == 3
            assert told.exactness == "no other number of ranks (3 copies are averaged every 100 steps)"
            totals = tuple(model.evaluate(*batch))
            with model.clone() as clone, model.deep_copy() as deep:
                np.testing.assert_array_equal(clone.get_parameters(), alone)
                assert deep.train(*batch) == model.train(*batch)
            optimizer.deserialize(state)
            model.deserialize(data)
            optimizer.average_parameters()
            return alone, data, state, model.get_parameters(), totals

    alone, data, state, means, totals = zip(*run_in_threads(3, run), strict=True)
    assert len(set(data)) == len(set(state)) == len(set(totals)) == 1
    assert not np.array_equal(alone[0], alone[1])
    assert totals[0][1] == 9
    for mean in means:
        np.testing.assert_allclose(mean, np.mean(alone, axis=0), rtol=1e-6, atol=1e-7)
    with sharded("zero3", None, optimizer=mz.Adam(lr=0.01)) as reader:
        reader.deserialize(data[0])
        np.testing.assert_array_equal(reader.get_parameters(), means[0])


@pytest.mark.parametrize("idle", [0, 2])
def test_a_rank_without_samples_keeps_its_copy_until_copies_are_averaged(idle):
    def run(comm):
        with local(comm, every=2) as (model, _):
            x, y = points(6)
            own = slice(2 * comm.rank, 2 * comm.rank + (0 if comm.rank == idle else 2))
            before, found = model.get_parameters(), []
            for _ in range(2):
                found.append((model.train(x[own], y[own]), model.last_step.weight))
                copy = model.get_parameters()
                assert np.array_equal(copy, before) == (comm.rank == idle and len(found) == 1)
            with pytest.raises(DataError, match="no samples on any rank"):
                model.train(x[:0], y[:0])
            model.train(x[own], y[own])  # the third: no copy is averaged
            return copy, found, model.get_parameters(), model.last_step.step

    copies, found, later, steps = zip(*run_in_threads(3, run), strict=True)
    assert len({copy.tobytes() for copy in copies}) == len({str(one) for one in found}) == 1
    assert found[0][0][1] == 4
    assert len({copy.tobytes() for copy in later}) == 3
    assert [step for rank, step in enumerate(steps) if rank != idle] == [3, 3]


def test_local_steps_by_hand_are_averaged_too_and_one_ranks_error_reaches_all():
    def run(comm):
        x, y = points(6)
        with local(comm, every=2, auto_sync_gradients=False) as (model, optimizer):
            for _ in range(2):
                model.train(*part(comm, x, y))
                optimizer.step()
            values = model.get_parameters()
        with local(comm) as (model, _):
            with pytest.raises((DataError, RemoteError), match="features"):
                model.train(x[:, : 5 if comm.rank == 1 else 6], y)
            model.train(x, y)
        return values.tobytes()

    assert len(set(run_in_threads(3, run))) == 1


def test_local_ranks_may_evaluate_only_ignored_targets_and_one_tells_of_a_load(tmp_path, capsys):
    def run(comm, again):
        x, y = points(6)
        with local(comm, micro_batch=3 if again else 2) as (model, _):
            if again:
                model.load_model(tmp_path / "saved")
            found = model.evaluate(x, y if comm.rank == 0 else np.full_like(y, -1))
            with pytest.raises(DataError, match="weight 0: every target in it is ignored"):
                model.evaluate(x, np.full_like(y, -1))
            model.save_model(tmp_path / "saved")
            return found.loss, found.weight

    for again in (False, True):
        first, second = run_in_threads(2, partial(run, again=again))
        assert first == second
        assert first[1] == 6
    assert capsys.readouterr().err.count("the checkpoint was trained with micro_batch=2") == 1


def test_local_sgd_needs_whole_parameters_and_a_sensible_interval():
    config = mz.ShardingConfig()
    with pytest.raises(ConfigError, match="every=0"):
        mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config, every=0)
    with mz.ZeRO2Model(mlp(), config) as model, pytest.raises(ConfigError, match="strategy 'ddp'"):
        mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config).set_model(model)
