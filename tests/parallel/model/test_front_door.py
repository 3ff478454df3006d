"""Models that take their optimizer when they are made: what they have, what they refuse, what copies keep."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import MpizeroError, StateError
from mpizero.testing import run_in_threads
from tests.parallel.models import KINDS as CLASSES
from tests.parallel.models import Signum, mlp, part, points, ten

X, Y = points(12)
MEMORIES: tuple[dict[str, Any], ...] = ({}, {"share_node_memory": False}, {"ranks_per_node": 1})
ADAMW = mz.AdamW(lr=1e-2)


#: How a model is made, by the class of the optimizer that it then has.
KINDS: dict[str, tuple[Any, type[mz.ShardedOptimizer]]] = {
    "ddp": (mz.DDPModel, mz.DDPOptimizer),
    "zero1": (mz.ZeRO1Model, mz.ZeRO1Optimizer),
    "zero2": (mz.ZeRO2Model, mz.ZeRO2Optimizer),
    "zero3": (mz.ZeRO3Model, mz.ZeRO3Optimizer),
    "fsdp": (mz.FSDPModel, mz.FSDPOptimizer),
    "hybrid": (mz.HybridShardedModel, mz.HybridShardedOptimizer),
    "tensor": (partial(mz.TensorParallelModel, tensor_parallel_size=1), mz.HybridShardedOptimizer),
    "pipeline": (partial(mz.PipelineParallelModel, pipeline_parallel_size=1), mz.HybridShardedOptimizer),
}


def config_of(comm: Any, **settings: Any) -> mz.ShardingConfig:
    return mz.ShardingConfig(
        comm="self" if comm is None else comm, **{"micro_batch": 2, "minimum_parameter_group_size": 1, **settings}
    )


def trained(model: Any, steps: int = 3) -> tuple[list[float], str]:
    batch = part(model.batch_group, X, Y)
    return [model.train(*batch) for _ in range(steps)], model.parameters_sha256()


def made(kind: str, comm: Any, optimizer: Any, *, later: bool = False, **memory: Any) -> Any:
    """Train a model that has its optimizer from the start, or is given it; return what it found, and the state."""
    first = None if later else optimizer
    with config_of(comm, **memory) as config, KINDS[kind][0](mlp(), config, optimizer=first) as model:
        if later:
            KINDS[kind][1](optimizer, config).set_model(model)
        assert type(model.optimizer) is KINDS[kind][1]
        assert model.optimizer.model is model
        assert not list(config.mesh.unbound)
        return trained(model), model.optimizer.step_count, model.optimizer.state_dict()


#: A library's optimizer and one of a user's own.
OPTIMIZERS: tuple[Callable[[], Any], ...] = (lambda: mz.AdamW(lr=1e-2), Signum)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_that_is_made_with_its_optimizer_trains_as_one_that_is_given_it(ranks: int) -> None:
    """Each kind with one optimizer, way and kind of memory, others on the other number of ranks; on a part of them."""
    expected = [made("ddp", None, make(), later=True) for make in OPTIMIZERS]

    def run(comm: Any) -> None:
        for number, kind in enumerate(KINDS, ranks):
            which, later = number % 2, number // 2 % 2 == 1
            found = made(kind, comm, OPTIMIZERS[which](), later=later, **MEMORIES[number % 3])
            assert found[:2] == expected[which][:2]
            np.testing.assert_equal(found[2], expected[which][2])
        with comm.split(comm.rank % 2, comm.rank, "half") as half:
            assert made("hybrid", half, ADAMW)[:2] == expected[0][:2]

    run_in_threads(ranks, run)


def test_distribute_makes_a_model_of_one_class_for_every_strategy_and_mesh() -> None:
    def names(comm: Any) -> list[str]:
        found = []
        for strategy in CLASSES:
            with mz.Mesh(comm, pipeline=comm.size) as mesh, mz.distribute(mlp(), ADAMW, strategy, mesh=mesh) as model:
                assert (type(model), type(model.optimizer)) == (mz.Model, mz.ShardedOptimizer)
                found.append(model.metadata().strategy)
        return found

    assert run_in_threads(1, names) == [["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP"]]
    assert run_in_threads(2, names) == [["3D-Parallelism (Hybrid)"] * 5] * 2


def members(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_what_the_classes_of_single_strategies_have_is_answered_by_a_model() -> None:
    kinds = [kind for kind, _ in KINDS.values() if isinstance(kind, type)]
    more = set().union(*map(members, kinds)) - members(mz.Model) - {"strategy", "zero_stage"}
    assert more >= {"get_parameters", "clone", "deep_copy", "serialize", "jit_compile", "shard_size"}
    with mz.distribute(mlp(), ADAMW, mesh=mz.Mesh("self")) as model:
        for name in more:
            with pytest.raises(AttributeError, match=rf"'Model' object has no attribute '{name}': \w+"):
                getattr(model, name)


@pytest.mark.parametrize("habit", [lambda model: model(X), pickle.dumps, copy.copy, copy.deepcopy])
def test_a_model_that_is_called_pickled_or_copied_says_what_to_do(habit: Any) -> None:
    with mz.distribute(mlp(), ADAMW, mesh=mz.Mesh("self")) as model:
        with pytest.raises(TypeError, match=r"a sharded model .*: model\.(predict\(x\)|save_model\(path\))"):
            habit(model)
        assert np.isfinite(model.train(X, Y))


def test_a_sharded_optimizer_without_a_configuration_takes_that_of_its_model() -> None:
    def run(comm: Any) -> None:
        options = mz.OptimizationOptions(epochs=2, batch_size=6)
        with config_of(comm) as config, mz.ZeRO2Model(mlp(), config, optimizer=ADAMW) as plain:
            expected = plain.optimizer.optimize((X, Y), options).history
            own = mz.ZeRO2Optimizer(ADAMW, options=options)
            with pytest.raises(StateError, match="ZeRO2Optimizer has no model yet"):
                _ = own.config
            with mz.ZeRO2Model(mlp(), config, optimizer=own) as model:
                assert model.optimizer is own
                assert own.config is config
                assert own.optimize((X, Y)).history == expected
            compressed = mz.GradientCompressionOptimizer(ADAMW, compression="int8")
            with mz.ZeRO1Model(mlp(), config, optimizer=compressed) as model:
                trained(model)
                assert model._engine.exchange.codec is not None
            with mz.DDPModel(mlp(), config, optimizer=mz.LocalSGDOptimizer(mz.SGD(lr=0.1), every=2)) as model:
                trained(model, 2)
                assert len(set(comm.allgather_object(model.get_parameters().tobytes()))) == 1

    run_in_threads(2, run)


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("zero2", 3), ("zero3", 2)])
def test_copies_are_independent_a_deep_copy_has_the_optimizer_and_a_clone_has_none(kind: str, ranks: int) -> None:
    def run(comm: Any) -> None:
        with config_of(comm) as config, KINDS[kind][0](mlp(), config, optimizer=ADAMW) as model:
            trained(model, 1)
            start = model.get_parameters()
            with model.deep_copy() as copy:
                assert copy.wrapped_model is not model.wrapped_model
                assert type(copy.optimizer) is type(model.optimizer)
                assert copy.optimizer.model is copy
                assert model.optimizer.model is model
                assert copy.optimizer.step_count == 1
                expected = trained(model)
                assert copy.optimizer.step_count == 1
                assert trained(copy) == expected
                np.testing.assert_equal(copy.optimizer.state_dict(), model.optimizer.state_dict())
            after = model.get_parameters()
            for twin, values in ((model.clone(), after), (model.with_parameters(start), start)):
                with twin:
                    assert twin.config is model.config
                    assert twin.wrapped_model is model.wrapped_model
                    np.testing.assert_array_equal(twin.get_parameters(), values)
                    with pytest.raises(StateError, match="has no optimizer: give it one when it is made"):
                        _ = twin.optimizer
                    KINDS[kind][1](ADAMW).set_model(twin)
                    assert twin.optimizer.step_count == 0
                    trained(twin, 1)
                    assert (twin.get_parameters() != values).any()
                np.testing.assert_array_equal(model.get_parameters(), after)

    run_in_threads(ranks, run)


def test_a_loaded_model_keeps_its_optimizer_and_takes_the_state() -> None:
    def run(comm: Any) -> None:
        with config_of(comm) as config, mz.ZeRO2Model(mlp(), config, optimizer=ADAMW) as model:
            trained(model, 2)
            data, expected = model.serialize(), trained(model, 2)
            with mz.ZeRO3Model(mlp(), config, optimizer=ADAMW) as other:
                bound = other.optimizer
                other.deserialize(data)
                assert other.optimizer is bound
                assert bound.step_count == 2
                assert trained(other, 2) == expected
                bound.deserialize(model.optimizer.serialize())
                assert bound.step_count == 4

    run_in_threads(2, run)


def test_another_optimizer_takes_the_place_of_the_first_which_may_go_to_a_new_model() -> None:
    """Also to one of another configuration, where it begins anew."""
    first, second = mz.ZeRO2Optimizer(ADAMW), mz.ZeRO2Optimizer(mz.SGD(lr=0.1))
    with config_of(None) as config, mz.ZeRO2Model(mlp(), config, optimizer=first) as model:
        found = trained(model)
        second.set_model(model)
        assert model.optimizer is second
        assert second.step_count == 0
        assert (second.is_bound, first.is_bound) == (True, False)
        with pytest.raises(StateError, match="has been given another optimizer meanwhile"):
            _ = first.step_count
        with config_of(None) as another, mz.ZeRO2Model(mlp(), another) as other:
            first.set_model(other)
            assert (first.config, model.optimizer, other.optimizer) == (another, second, first)
            assert trained(other) == found
            second.set_model(other)
            with pytest.raises(StateError, match="the ZeRO2Optimizer of this ZeRO2Model has been bound to another"):
                _ = model.optimizer


def made_with(comm: Any, optimizer: Any) -> Any:
    return mz.ZeRO2Model(ten(), config_of(comm), optimizer=optimizer)


#: Other mistakes are those of test_wrong_uses and test_ranks_differ.
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a sharded optimizer of another configuration": (
        lambda comm: made_with(comm, mz.ZeRO2Optimizer(mz.SGD(), config_of(comm))),
        "must share one ShardingConfig object",
    ),
    "a sharded optimizer of another strategy": (
        lambda comm: made_with(comm, mz.ZeRO1Optimizer(mz.SGD())),
        "ZeRO1Optimizer belongs to a model of strategy 'zero1', got ZeRO2Model",
    ),
    "no optimizer at all": (lambda comm: made_with(comm, "adamw"), r"str is not a gradient-based optimizer"),
    "an optimizer of another model": (
        lambda comm: made_with(comm, made_with(comm, mz.SGD()).optimizer),
        "belongs to another model: give each model its own",
    ),
    "another learning rate on a rank": (
        lambda comm: made_with(comm, mz.SGD(lr=0.1 * (1 + comm.rank))), r"learning rate 0\.1 on rank 0, 0\.2 on rank 1"
    ),
    "none on a rank": (
        lambda comm: made_with(comm, mz.SGD(lr=0.1) if comm.rank else None), "the class of the sharded optimizer"
    ),
    "a class on a rank": (
        lambda comm: made_with(comm, mz.SGD if comm.rank == 1 else mz.SGD(lr=0.1)),
        "got the class SGD|rank.* 1 raised",
    ),
    "a loss scale for a black box": (
        lambda comm: made_with(comm, mz.ZeRO2Optimizer(mz.SGD(), loss_scale=mz.DynamicLossScale())),
        "a loss scale needs a model of blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_are_told_on_all_ranks_and_the_next_model_is_made(name: str) -> None:
    make, expected = WRONG[name]

    def run(comm: Any) -> str:
        with pytest.raises(MpizeroError) as found:
            make(comm)
        with config_of(comm) as config, mz.ZeRO2Model(mlp(), config, optimizer=mz.SGD(lr=0.1)) as model:
            trained(model, 1)
        return str(found.value)

    for told in run_in_threads(2, run):
        assert re.search(expected, told), told


def test_training_without_an_optimizer_says_once_which_one_it_uses(capsys: Any) -> None:
    def run(comm: Any) -> None:
        with config_of(comm, learning_rate=0.05) as config:
            with mz.ZeRO2Model(mlp(), config) as model:
                model.compute_gradients(*part(comm, X, Y))
                comm.barrier()
                assert capsys.readouterr().err == ""
                comm.barrier()
                expected = trained(model)
            with mz.ZeRO2Model(mlp(), config, optimizer=mz.SGD(lr=0.05)) as model:
                assert trained(model) == expected

    run_in_threads(3, run)
    (told,) = capsys.readouterr().err.splitlines()
    assert "ZeRO2Model has no optimizer: plain SGD with learning_rate=0.05 trains it (optimizer=... gives" in told


def test_an_optimizer_that_was_made_and_forgotten_is_named(capsys: Any) -> None:
    config = config_of(None)
    optimizer = mz.ZeRO2Optimizer(mz.AdamW(lr=1e-2), config)
    with mz.ZeRO2Model(mlp(), config) as model:
        trained(model)
    assert capsys.readouterr().err.count("; ZeRO2Optimizer is bound to no model: call its set_model") == 1
    assert not optimizer.is_bound


def test_evaluate_names_what_it_returns_and_still_unpacks() -> None:
    with config_of(None) as config, mz.ZeRO2Model(mlp(), config) as model:
        found = model.evaluate(X, Y)
        loss_sum, weight, correct = found
        assert weight == 12.0
        assert (found.loss, found.accuracy) == (loss_sum / 12, correct / 12)
    with config_of(None) as config, mz.ZeRO2Model(ten(), config) as model:
        black_box = model.evaluate(np.ones((2, 10)), np.ones(2))
        assert black_box.accuracy is None
        assert black_box[:2] == (90.0, 2.0)


class Quarter:
    """A loss that gives every prediction the weight 1/4."""

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        loss, weight, cache = mz.nn.CrossEntropy().forward(prediction, target)
        return loss / 4, weight / 4, cache

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        return mz.nn.CrossEntropy().backward(cache, scale / 4)


@pytest.mark.parametrize("optimizer", [mz.ZeRO2Optimizer, mz.LocalSGDOptimizer])
def test_accuracy_counts_predictions_whatever_their_weight(optimizer: Any) -> None:
    x = np.tile(X, (4, 1))

    def run(comm: Any) -> None:
        kind = mz.ZeRO2Model if optimizer is mz.ZeRO2Optimizer else mz.DDPModel
        with config_of(comm) as config, kind(mz.nn.MLP(6, (7,), 3, loss=Quarter()), config) as model:
            optimizer(mz.SGD(lr=0.1), config).set_model(model)
            guesses = model.predict(x).argmax(-1)
            y = np.where(np.arange(len(x)) % 2 == 0, guesses, (guesses + 1) % 3)
            y[::3] = -1  # without a target: neither right nor wrong
            found = model.evaluate(*part(comm, x, y))
            assert found.weight == 8.0
            assert (found.correct, found.predictions, found.accuracy) == (16, 32, 0.5)

    run_in_threads(3, run)
