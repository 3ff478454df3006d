"""Any optimizer at any stage: the library's, the user's own, the whole loop, local steps."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, RemoteError
from mpizero.sharding.full_params import GlobalView
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, layouts, mlp, part, points, sharded, vectors


class Signum:
    """A user's own: the sign of a running mean, with a state made by its first update."""

    def update(self, params: Any, grads: Any, state: Any) -> None:
        m = state.setdefault("m", np.zeros_like(params))
        m += (grads - m) * params.dtype.type(0.1)
        params -= params.dtype.type(0.01) * np.sign(m)


@pytest.mark.mpi
def test_a_users_own_optimizer_has_the_bits_of_one_process_at_every_stage(world: Any) -> None:
    x, y = points(9)

    def train(comm: Any, strategy: str, **settings: Any) -> Any:
        model, optimizer = sharded(strategy, comm, optimizer=Signum(), micro_batch=2, **settings)
        with model:
            for _ in range(3):
                model.train(*part(comm, x, y))
            return model.parameters_sha256(), optimizer.serialize()

    expected = train(None, "ddp")
    for strategy, memory in layouts(world.size):
        found = train(world, strategy, **memory)
        assert found[0] == expected[0]
    w, m = np.ones(48), np.zeros(48)
    state: dict[str, Any] = {"step": 1}
    Signum().update(w, np.ones(48), state)  # and the class itself is used as the user would
    np.testing.assert_array_equal(state["m"], m + 0.1)


def test_what_is_no_gradient_based_optimizer_is_refused_with_what_is_missing() -> None:
    config = mz.ShardingConfig()
    for cls in (mz.DDPOptimizer, mz.ZeRO1Optimizer, mz.ZeRO2Optimizer, mz.FSDPOptimizer, mz.LocalSGDOptimizer):
        with pytest.raises(TypeError, match=r"no method update\(params, grads, state\)"):
            cls(object(), config)
        with pytest.raises(TypeError, match="needs a ShardingConfig, got 'x'"):
            cls(mz.SGD(lr=0.1), "x")

    class Normalized:
        def update(self, params: Any, grads: Any, state: Any) -> None:
            params -= grads / (np.linalg.norm(grads) + 1)

    with pytest.raises(TypeError, match="Normalized.update is not elementwise"):
        mz.ZeRO1Optimizer(Normalized(), config)


def test_an_optimizer_is_bound_to_a_model_of_its_kind_and_configuration() -> None:
    config = mz.ShardingConfig()
    with mz.ZeRO2Model(mlp(), config) as model:
        with pytest.raises(ConfigError, match="belongs to a model of strategy 'zero1', got ZeRO2Model"):
            mz.ZeRO1Optimizer(mz.SGD(lr=0.1), config).set_model(model)
        with pytest.raises(ConfigError, match="share one ShardingConfig"):
            mz.ZeRO2Optimizer(mz.SGD(lr=0.1), mz.ShardingConfig()).set_model(model)
        first = mz.ZeRO2Optimizer(mz.SGD(lr=0.1), config)
        with pytest.raises(RuntimeError, match="call set_model first"):
            first.step()

        class Mine(mz.ZeRO2Optimizer):
            """A subclass by any name fits."""

        first.set_model(model)
        Mine(mz.Adam(lr=0.1), config).set_model(model)
        with pytest.raises(RuntimeError, match="another optimizer meanwhile"):
            _ = first.step_count


def test_lamb_against_the_papers_formulas() -> None:
    x, y = vectors(6)

    def loss_and_grad(p: Any, batch: Any) -> Any:
        error = batch[0] @ p["w"] + p["b"] - batch[1]
        return float((error**2).sum() / 2), {"w": batch[0].T @ error, "b": error.sum(0)}, float(len(batch[0]))

    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=(7, 11)), "b": rng.normal(size=11)}
    w = {name: value.copy() for name, value in start.items()}
    m, v = ({name: np.zeros_like(a) for name, a in w.items()} for _ in range(2))

    def train(comm: Any) -> dict[str, Any]:
        wrapped = mz.FunctionModel(start, loss_and_grad)
        model, _ = sharded("zero2", comm, wrapped, mz.LAMB(lr=0.05, weight_decay=0.1), micro_batch=2)
        with model:
            for _ in range(5):
                model.train(*part(comm, x, y))
            return model.named_parameters()

    found = run_in_threads(3, train)[0]
    for step in range(1, 6):
        error = x @ w["w"] + w["b"] - y
        for name, g in (("w", x.T @ error / 6), ("b", error.sum(0) / 6)):
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            u = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-6)
            u = u + (0.1 if name == "w" else 0.0) * w[name]  # vectors take no decay
            w[name] = w[name] - 0.05 * np.linalg.norm(w[name]) / np.linalg.norm(u) * u
    for name, values in w.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-10)


# ---------------------------------------------------------------------- the whole loop


def optimized(comm: Any, optimizer: Any = None, **options: Any) -> Any:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(80, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
    settings = options.pop("settings", {})
    config = mz.ShardingConfig(comm="self" if comm is None else comm, micro_batch=2, **settings)
    with config, mz.ZeRO2Model(mlp(), config) as model:
        chosen = optimizer if optimizer is not None else mz.AdamW(lr=0.02)
        bound = mz.ZeRO2Optimizer(
            chosen, config, options=mz.OptimizationOptions(**{"batch_size": 8, "validation": 0.25, **options})
        )
        bound.set_model(model)
        return bound.optimize((x, y)), model.get_parameters(), bound.step_count


def test_optimize_trains_validates_and_ends_with_the_best_parameters() -> None:
    result, parameters, steps = optimized(None, epochs=6)
    assert len(result.history) == 6
    assert result.steps == steps == 6 * 60 // 8
    assert not result.stopped_early
    losses = [record["validation_loss"] for record in result.history]
    assert result.best_loss == min(losses) == losses[result.best_epoch] < losses[0]
    assert 0 <= result.history[-1]["accuracy"] <= 1
    np.testing.assert_array_equal(parameters, result.best_parameters)
    for other, values, _ in run_in_threads(3, lambda comm: optimized(comm, epochs=6)):
        assert other.history == result.history
        np.testing.assert_array_equal(values, parameters)


@pytest.mark.parametrize("batch_size", [40, 70, 7, 100, 3])
def test_every_epoch_is_a_pass_and_functions_are_told_the_epoch_of_their_samples(batch_size: int) -> None:
    uses: dict[tuple[int, int], int] = {}

    def loss_and_grad(parameters: Any, batch: Any, run: Any) -> Any:
        for number in batch[0].astype(int):
            uses[run.epoch, number] = uses.get((run.epoch, number), 0) + 1
        return 0.0, {"w": np.zeros(1)}, float(len(batch[0]))

    config, samples = mz.ShardingConfig(comm="self"), 70
    with config, mz.DDPModel(mz.FunctionModel({"w": np.zeros(1)}, loss_and_grad), config) as model:
        options = mz.OptimizationOptions(epochs=10, batch_size=batch_size, validation=0.0)
        optimizer = mz.DDPOptimizer(mz.SGD(lr=0.1), config, options=options)
        optimizer.set_model(model)
        model.evaluate = lambda x, y: mz.Evaluation(1.0, 1.0, None)  # type: ignore[method-assign]
        result = optimizer.optimize((np.arange(samples), np.arange(samples)))
    batch = min(batch_size, samples)
    assert result.steps == -(-10 * samples // batch)
    assert len(result.history) == 10
    counts = [sum(uses.get((epoch, number), 0) for epoch in range(11)) for number in range(samples)]
    assert set(counts) <= {10, 11}  # the last step goes on with the first samples of another pass
    assert sum(counts) == result.steps * batch
    told = [sum(count for (epoch, _), count in uses.items() if epoch < end) for end in range(1, 11)]
    assert told == [-(-end * samples // batch) * batch for end in range(1, 11)]  # a batch is told its first sample's


def test_optimize_updates_also_where_gradients_are_synchronized_by_hand() -> None:
    result, parameters, _ = optimized(None, epochs=2)
    other, values, steps = optimized(None, epochs=2, settings={"auto_sync_gradients": False})
    assert other.history == result.history
    assert steps == result.steps
    np.testing.assert_array_equal(values, parameters)


def test_optimize_stops_early_and_goes_back_to_the_best_epoch() -> None:
    result, parameters, _ = optimized(None, mz.SGD(lr=3.0), epochs=50, patience=2)
    assert result.stopped_early
    assert len(result.history) == result.best_epoch + 3 < 50
    np.testing.assert_array_equal(parameters, result.best_parameters)


def best_of(comm: Any, kind: str, **settings: Any) -> Any:
    """Optimize so that an earlier epoch is the best one; return what is left of it, before and after the end."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(80, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
    options = mz.OptimizationOptions(batch_size=8, validation=0.25, epochs=50, patience=2)
    with mz.ShardingConfig(
        comm="self" if comm is None else comm, micro_batch=2, minimum_parameter_group_size=1, **settings
    ) as config:
        model: Any
        if kind == "hybrid":
            model = mz.HybridShardedModel(mlp(), config, pipeline_parallel_size=2, zero_stage=2)
            bound: Any = mz.HybridShardedOptimizer(mz.SGD(lr=3.0), config, options=options)
        else:
            model = (mz.ZeRO3Model if kind == "zero3" else mz.ZeRO1Model)(mlp(), config)
            bound = mz.ShardedOptimizer(mz.SGD(lr=3.0), config, options=options)
        with model:
            bound.set_model(model)
            result = bound.optimize((x, y))
            assert result.best_epoch < len(result.history) - 1
            held = result.best.nbytes
            if kind != "zero1" and config.communicator.size > 1:
                assert held == model.shard_size * 4 < model.parameter_count * 4
                with pytest.raises(TypeError, match="spread over the ranks"):
                    pickle.dumps(result)
            parameters = model.get_parameters()
            if kind != "zero1":
                np.testing.assert_array_equal(result.best_parameters, parameters)
    return parameters, result.best_parameters, pickle.loads(pickle.dumps(result)).best_parameters


@pytest.mark.parametrize(("kind", "settings"), [("zero3", PRIVATE), ("hybrid", {}), ("hybrid", PRIVATE), ("zero1", {})])
def test_the_best_parameters_are_kept_as_the_model_keeps_its_own(
    kind: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank gathers the model to keep them: only who asks for them does; then they stay."""
    expected = best_of(None, "zero1")
    with monkeypatch.context() as patch:
        if kind == "zero3":
            patch.setattr(GlobalView, "fill", None)
        everyone = run_in_threads(4 if kind == "hybrid" else 3, lambda comm: best_of(comm, kind, **settings))
    for found in everyone:
        for values in found:
            np.testing.assert_array_equal(values, expected[0])


def test_best_parameters_that_were_never_asked_for_are_gone_with_the_model() -> None:
    def run(comm: Any) -> None:
        config = mz.ShardingConfig(comm=comm, **PRIVATE)
        with mz.ZeRO3Model(mlp(), config) as model:
            bound = mz.ZeRO3Optimizer(mz.SGD(lr=0.1), config, options=mz.OptimizationOptions(epochs=1, batch_size=4))
            bound.set_model(model)
            result = bound.optimize(points(12))
        with pytest.raises(RuntimeError, match="is closed .* before close"):
            _ = result.best_parameters

    run_in_threads(2, run)


def test_an_epoch_that_is_not_finite_is_never_the_best_of_several() -> None:
    losses = iter([np.nan, 2.0, np.nan, 1.0, 3.0])
    config = mz.ShardingConfig()
    with mz.DDPModel(mlp(), config) as model:
        model.evaluate = lambda x, y: mz.Evaluation(next(losses), 1.0, None)  # type: ignore[method-assign]
        bound = mz.DDPOptimizer(mz.SGD(lr=0.1), config, options=mz.OptimizationOptions(epochs=5, batch_size=4))
        bound.set_model(model)
        result = bound.optimize(points(12))
        assert (result.best_epoch, result.best_loss) == (3, 1.0)


def test_data_that_one_rank_cannot_read_stop_all_ranks() -> None:
    class Broken(mz.data.ArraySource):
        rank = 0

        def samples(self, indices: Any) -> Any:
            if self.rank == 1:
                raise OSError("disk gone")
            return super().samples(indices)

    def run(comm: Any) -> None:
        config = mz.ShardingConfig(comm=comm)
        with mz.DDPModel(mlp(), config) as model:
            options = mz.OptimizationOptions(validation=0.0, batch_size=4)
            bound = mz.DDPOptimizer(mz.SGD(lr=0.1), config, options=options)
            bound.set_model(model)
            source = Broken(*points(12))
            source.rank = comm.rank
            with pytest.raises((OSError, RemoteError), match="disk gone"):
                bound.optimize(source)
            with pytest.raises(DataError, match="no samples|need both"):
                bound.optimize((points(0)[0], points(0)[1]))

    run_in_threads(3, run)


# ---------------------------------------------------------------------- local SGD


def local(comm: Any, every: int, steps: int, optimizer: Any, batch: Any) -> Any:
    config = mz.ShardingConfig(comm="self" if comm is None else comm, micro_batch=2, **PRIVATE)
    with config, mz.DDPModel(mlp(), config) as model:
        bound = mz.LocalSGDOptimizer(optimizer, config, every=every)
        bound.set_model(model)
        sent, losses = 0, []
        for _ in range(steps):
            losses.append(model.train(*part(comm, *batch)))
            sent += model.last_step.bytes_sent
        return model.get_parameters(), sent, losses, model


@pytest.mark.mpi
def test_sgd_averaged_after_every_step_is_distributed_sgd_up_to_rounding(world: Any) -> None:
    batch = points(2 * world.size)
    whole, _ = sharded("ddp", world, optimizer=mz.SGD(lr=0.1), micro_batch=2)
    with whole:
        expected = [whole.train(*part(world, *batch)) for _ in range(3)]
        values, _, losses, _ = local(world, 1, 3, mz.SGD(lr=0.1), batch)
        np.testing.assert_allclose(values, whole.get_parameters(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(set(world.allgather_object(values.tobytes()))) == 1


def test_bytes_fall_by_the_interval() -> None:
    def bytes_of(every: int) -> int:
        return sum(found[1] for found in run_in_threads(3, lambda c: local(c, every, 8, mz.AdamW(lr=0.01), points(6))))

    losses = 3 * 8 * 2 * 8 * 2  # ranks, steps, peers, bytes, numbers
    assert bytes_of(4) - losses == 2 * (bytes_of(8) - losses) == (bytes_of(1) - losses) // 4


def test_local_training_is_saved_as_the_mean_and_goes_on_undisturbed() -> None:
    def run(comm: Any) -> Any:
        config = mz.ShardingConfig(comm=comm)
        batch = part(comm, *points(9))
        with mz.DDPModel(mlp(), config) as model:
            bound = mz.LocalSGDOptimizer(mz.Adam(lr=0.01), config, every=100)
            bound.set_model(model)
            for _ in range(2):
                model.train(*batch)
            alone = model.get_parameters()
            data, state = model.serialize(), bound.serialize()
            np.testing.assert_array_equal(model.get_parameters(), alone)
            assert model.metadata().world_size == 3
            told = "no other number of ranks (3 copies are averaged every 100 steps)"
            assert model.metadata().exactness == told
            loss, weight, right = model.evaluate(*batch)
            with model.clone() as clone, model.deep_copy() as deep:
                np.testing.assert_array_equal(clone.get_parameters(), alone)
                assert deep.train(*batch) == model.train(*batch)
            bound.deserialize(state)
            model.deserialize(data)
            bound.average_parameters()
            return alone, data, state, model.get_parameters(), (loss, weight, right)

    everyone = run_in_threads(3, run)
    alone, data, state, means, totals = zip(*everyone, strict=True)
    assert len(set(data)) == len(set(state)) == len(set(totals)) == 1
    assert not np.array_equal(alone[0], alone[1])
    assert totals[0][1] == 9
    for mean in means:
        np.testing.assert_allclose(mean, np.mean(alone, axis=0), rtol=1e-6, atol=1e-7)
    reader, _ = sharded("zero3", None, optimizer=mz.Adam(lr=0.01))
    with reader:
        reader.deserialize(data[0])
        np.testing.assert_array_equal(reader.get_parameters(), means[0])


@pytest.mark.parametrize("idle", [0, 2])
def test_a_rank_without_samples_keeps_its_copy_until_copies_are_averaged(idle: int) -> None:
    def run(comm: Any) -> Any:
        config = mz.ShardingConfig(comm=comm)
        with mz.DDPModel(mlp(), config) as model:
            mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config, every=2).set_model(model)
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


def test_local_steps_by_hand_are_averaged_too_and_one_ranks_error_reaches_all() -> None:
    def run(comm: Any) -> Any:
        config = mz.ShardingConfig(comm=comm, auto_sync_gradients=False)
        with mz.DDPModel(mlp(), config) as model:
            bound = mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config, every=2)
            bound.set_model(model)
            for _ in range(2):
                model.train(*part(comm, *points(6)))
                bound.step()
            values = model.get_parameters()
        config = mz.ShardingConfig(comm=comm)
        with mz.DDPModel(mlp(), config) as model:
            mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config).set_model(model)
            x, y = points(6)
            with pytest.raises((DataError, RemoteError), match="features"):
                model.train(x[:, : 5 if comm.rank == 1 else 6], y)
            model.train(x, y)
        return values.tobytes()

    assert len(set(run_in_threads(3, run))) == 1


def test_local_ranks_may_evaluate_only_ignored_targets_and_one_tells_of_a_load(tmp_path: Any, capsys: Any) -> None:
    def run(comm: Any, again: bool) -> Any:
        config = mz.ShardingConfig(comm=comm, micro_batch=3 if again else 2)
        x, y = points(6)
        with mz.DDPModel(mlp(), config) as model:
            mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config).set_model(model)
            if again:
                model.load_model(tmp_path / "saved")
            found = model.evaluate(x, y if comm.rank == 0 else np.full_like(y, -1))
            with pytest.raises(DataError, match="weight 0: every target in it is ignored"):
                model.evaluate(x, np.full_like(y, -1))
            model.save_model(tmp_path / "saved")
            return found.loss, found.weight

    for again in (False, True):
        first, second = run_in_threads(2, lambda comm, a=again: run(comm, a))
        assert first == second
        assert first[1] == 6
    assert capsys.readouterr().err.count("the checkpoint was trained with micro_batch=2") == 1


def test_local_sgd_needs_whole_parameters_and_a_sensible_interval() -> None:
    config = mz.ShardingConfig()
    with pytest.raises(ConfigError, match="every=0"):
        mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config, every=0)
    with mz.ZeRO2Model(mlp(), config) as model, pytest.raises(ConfigError, match="strategy 'ddp'"):
        mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config).set_model(model)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (
            "hiden.*",
            r"matches no parameter \(did you mean 'hidden.\*'\?\): the parameters are 'hidden.0.linear.weight'",
        ),
        ("output.linear.wieght", r"\(did you mean 'output.linear.weight'\?\)"),
        ("[", "matches no parameter: the parameters are"),
    ],
)
def test_a_group_for_no_parameter_is_refused_and_suggests(pattern: str, told: str) -> None:
    def run(comm: Any) -> None:
        for strategy in ("zero1", "zero3"):
            groups = [mz.ParameterGroup("*.bias"), mz.ParameterGroup(pattern, lr_scale=0.1)]
            with pytest.raises(ConfigError, match=told):
                sharded(strategy, comm, mlp(), mz.AdamW(lr=0.1, groups=groups))

    run_in_threads(2, run)
