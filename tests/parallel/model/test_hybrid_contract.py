"""The members that the contract promises, of models whose layers are spread; gradients by hand with every strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpizero as mz
from mpizero.data import ArraySource
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import layouts, part, sharded
from tests.parallel.parallel_layouts import Case, Way, alone, mlp, of_first, placed, points, selected, texts
from tests.parallel.parallel_layouts import gpt as larger_gpt


def gpt(**changes: Any) -> Any:
    """As many blocks as two stages have chunks."""
    return larger_gpt(layers=2, **changes)


class Job(NamedTuple):
    """A way and the number of ranks it needs."""

    size: int
    way: Way
    private: bool = False

    @property
    def exact(self) -> bool:
        return self.way.tensor == self.way.context == 1

    def same(self, found: Any, expected: Any) -> None:
        """Compare bits, or numbers where products are split."""
        if self.exact:
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


JOBS = {
    "1": Job(1, Way()),
    "pp 2": Job(2, Way(2, zero=0, schedule="zero_bubble")),
    "pp 3": Job(3, Way(3, zero=1, schedule="gpipe")),
    "pp 2 x dp 2": Job(4, Way(2, zero=2, schedule="interleaved")),
    "V 2 x dp 2": Job(4, Way(2, zero=3, schedule="zero_bubble_v"), private=True),
    "tp 2": Job(2, Way(tensor=2, zero=1)),
    "tp 2 x dp 2": Job(4, Way(tensor=2, zero=3), private=True),
    "2 x 2 x 2": Job(8, Way(2, 2, zero=2), private=True),
    "cp 2": Job(2, Way(context=2, zero=1)),
    "pp 2 x cp 2 x dp 2": Job(8, Way(2, context=2, zero=2)),
}
X, Y = texts(1, 6)[0]
Y[0, 3:] = -1  # ignored
SCORES = np.eye(29, dtype=np.float32)[Y]


def placed_as(job: Job, case: Case, comm: Any, **settings: Any) -> Any:
    return placed(case, comm, job.way, **{"share_node_memory": not job.private, **settings})


def on_threads(name: str, body: Any) -> None:
    run_in_threads(JOBS[name].size, lambda comm: body(JOBS[name], comm))


@pytest.mark.parametrize("name", JOBS)
def test_metadata_tells_groups_places_and_what_is_held(name: str) -> None:
    job = JOBS[name]
    pipeline, tensor, context = job.way.pipeline, job.way.tensor, job.way.context
    data = job.size // pipeline // tensor // context
    total = sum(spec.size for spec in mz.nn.model_specs(gpt()) if spec.tied is None)

    def body(job: Job, comm: Any) -> tuple[dict[str, int], int, int]:
        with placed_as(job, Case(gpt), comm) as model:
            model.train(*part(model.batch_group, X, Y))
            told = model.metadata()
            assert (told.strategy, told.is_distributed) == ("3D-Parallelism (Hybrid)", job.size > 1)
            assert (told.world_size, told.rank, told.zero_stage) == (job.size, comm.rank, job.way.zero)
            assert (model.world_size, model.rank) == (job.size, comm.rank)
            assert told.group_sizes == {"pipeline": pipeline, "tensor": tensor, "data": data, "context": context}
            assert set(told.replicated) | set(told.sharded) == {"parameters", "gradients", "optimizer state"}
            assert len(told.sharded) == job.way.zero
            assert told.parameter_count == told.trainable_count == model.parameter_count == total
            assert model._engine.global_view.layout.size == total
            assert model.shard_size == model.local_parameter_shard.size == sum(span.size for span in model.owned)
            assert told.peak_bytes >= told.bytes_on_rank["parameters"] > 0
            assert (told.bytes_sent_last_step > 0) == (job.size > 1)
            assert told.as_dict()["held_count"] == told.held_count
            for kind, size, stage in (("parameters", 4, 3), ("optimizer state", 8, 1)) if job.private else ():
                wanted = size * told.held_count / (data * context if job.way.zero >= stage else 1)
                assert told.formula_bytes[kind] == wanted
                assert abs(told.bytes_on_rank[kind] - wanted) <= size * len(model._engine.layout.units) + 64
            return told.group_ranks, told.held_count, model.shard_size

    found = run_in_threads(job.size, lambda comm: body(job, comm))
    places = [tuple(ranks[axis] for axis in ("pipeline", "tensor", "data", "context")) for ranks, _, _ in found]
    assert places == [*product(range(pipeline), range(tensor), range(data), range(context))]
    table = 29 * 12  # its copy where the head is on another stage is held, not counted
    held = sum(held for (_, held, _), (_, *others) in zip(found, places, strict=True) if not any(others))
    assert tensor > 1 or held == total + (table if pipeline > 1 and job.way.schedule != "zero_bubble_v" else 0)
    assert tensor > 1 or sum(size for _, _, size in found) == held


class Predicted(NamedTuple):
    """What one process predicts for the samples of each replica and for short ones, its metrics and its loss."""

    rows: list[Any]
    short: Any
    metrics: Any
    squared: float
    loss: float


@cache
def predicted_alone() -> list[Predicted]:
    """Before and after a step."""
    with alone(Case(gpt)) as single:
        return [
            Predicted(
                [single.predict(X[2 * replica : 2 * replica + 2]) for replica in range(2)],
                single.predict(X[:3, :5]),
                single.evaluate(X, Y),
                single.evaluate(X, SCORES, loss=mz.nn.MeanSquaredError()).loss,
                single.train(X, Y),
            )
            for _ in range(2)
        ]


def predicts(job: Job, comm: Any, rounds: list[Predicted]) -> None:
    with placed_as(job, Case(gpt), comm) as model:
        for expected in rounds:  # receives are posted ahead in the second round
            replica = model.batch_group.rank  # each asks for its own
            job.same(model.predict(X[2 * replica : 2 * replica + 2]), expected.rows[replica])
            job.same(model.predict(X[:3, :5]), expected.short)
            if replica:  # the others ask for samples, this one for none
                assert model.predict(X[:0]).shape == (*X[:0].shape, 29)
            else:
                job.same(model.predict(X[:2]), expected.rows[0])
            found = model.evaluate(*part(model.batch_group, X, Y))
            job.same(found[0], expected.metrics[0])
            assert found[1:] == expected.metrics[1:]
            mine = part(model.batch_group, X, SCORES)
            job.same(model.evaluate(*mine, loss=mz.nn.MeanSquaredError()).loss, expected.squared)
            sizes = [0] * (model.batch_group.size - 1) + [len(X)]
            job.same(model.evaluate(*part(model.batch_group, X, Y, sizes))[0], expected.metrics[0])
            job.same(model.train(*part(model.batch_group, X, Y)), expected.loss)


@pytest.mark.parametrize("name", JOBS)
def test_every_rank_gets_the_prediction_and_the_metrics_of_one_process(name: str) -> None:
    expected = predicted_alone()
    on_threads(name, lambda job, comm: predicts(job, comm, expected))


def local_part(engine: Any, named: dict[str, Any]) -> Any:
    """What this rank holds of arrays by name, 1-D in its flat order."""
    specs = [entry.spec for entry in engine.layout.parameters]
    return np.concatenate([selected(spec, named[spec.guest or spec.name]) for spec in specs])


class Step(NamedTuple):
    """Gradients by name, their weight and loss, and the loss and the parameters of the step made of them."""

    named: dict[str, Any]
    weight: float
    loss: float
    step_loss: float
    parameters: Any


@cache
def by_hand_alone() -> tuple[list[Step], Any, Any, Any]:
    """Two steps of one process, a gradient, and the parameters after it was applied and after one more step."""
    single = alone(Case(lambda: gpt(dropout=0.0)))
    taken = []
    with single:
        for _ in range(2):
            found = single.compute_gradients(X, Y)
            named = {
                e.spec.name: found.values[e.span.start : e.span.stop].reshape(e.spec.shape).copy()
                for e in single._engine.global_view.layout.parameters
            }
            single.optimizer.step()
            taken.append(Step(named, found.weight, found.loss, single.last_step.loss, single.get_parameters().copy()))
        found = single.compute_gradients(X, Y)
        gradient = found.values.copy()
        single.apply_gradients(found, 0.1)
        applied = single.get_parameters().copy()
        single.train(X, Y)
        return taken, gradient, applied, single.get_parameters().copy()


def gradients_by_hand(model: Any, same: Callable[[Any, Any], None], expected: tuple[list[Step], Any, Any, Any]) -> None:
    """They are full or owned. Where they are not synchronized at once, they are later."""
    taken, gradient, applied, trained = expected
    auto, batch = model.config.auto_sync_gradients, part(model.batch_group, X, Y)
    with model:
        for wanted in taken:
            before = model.get_parameters()
            found = model.compute_gradients(*batch)
            parallel_assert(
                model.mesh.communicator, np.array_equal(model.get_parameters(), before), "they have changed"
            )
            assert (found.synchronized, found.weight) == (auto, wanted.weight)
            same(found.loss, wanted.loss)
            whole = model.synchronize_gradients()
            assert whole.synchronized
            mine = local_part(model._engine, wanted.named)
            owned = np.concatenate([mine[:0], *(mine[span.start : span.stop] for span in model.owned)])
            for one in (found, whole) if auto else (whole,):
                same(one.values, owned if model.metadata().zero_stage >= 2 else mine)
            model.optimizer.step()
            same(model.last_step.loss, wanted.step_loss)
            same(model.get_parameters(), wanted.parameters)
        assert model.optimizer.step_count == len(taken)
        model.compute_gradients(*batch)
        whole = model.synchronize_gradients(gather=True)
        assert list(whole.named()) == list(model.named_parameters())
        same(whole.values, gradient)
        model.apply_gradients(whole, 0.1)
        same(model.get_parameters(), applied)
        for use in (model.synchronize_gradients, model.optimizer.step):
            with pytest.raises(RuntimeError, match="no gradient waits for it"):
                use()
        if not auto:
            before = model.parameters_sha256()
            model.train(*batch)
            assert model.parameters_sha256() == before  # nothing is updated before the step
            model.optimizer.step()
            same(model.get_parameters(), trained)


def by_hand(job: Job, comm: Any) -> Any:
    """Of jobs with an odd ZeRO stage they are synchronized by hand, too."""
    return placed_as(job, Case(lambda: gpt(dropout=0.0)), comm, auto_sync_gradients=job.way.zero % 2 == 0)


@pytest.mark.parametrize("name", JOBS)
def test_gradients_by_hand_make_the_step_of_one_process(name: str) -> None:
    expected = by_hand_alone()
    on_threads(name, lambda job, comm: gradients_by_hand(by_hand(job, comm), job.same, expected))


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_over_mpi_too_predictions_metrics_and_gradients_are_those_of_one_process(world: Any) -> None:
    """Those of one job of this size, and these of another."""
    predicted, stepped = of_first(world, lambda: (predicted_alone(), by_hand_alone()))
    first, *_, last = [job for job in JOBS.values() if job.size == world.size] * 2
    predicts(first, world, predicted)
    gradients_by_hand(by_hand(last, world), last.same, stepped)


@pytest.mark.mpi
def test_over_mpi_gradients_by_hand_make_the_step_of_one_process_with_every_strategy(world: Any) -> None:
    """Some are synchronized at once, others later; on another number of ranks others."""
    expected = of_first(world, by_hand_alone)
    for number, (strategy, memory) in enumerate(layouts(world.size)):
        settings = {"micro_batch": 2, "auto_sync_gradients": bool((number + number // 2 + world.size // 3) % 2)}
        model = sharded(strategy, world, gpt(dropout=0.0), **settings, **memory)
        gradients_by_hand(model, np.testing.assert_array_equal, expected)


def test_batches_are_dealt_to_the_batch_group() -> None:
    source = ArraySource(np.zeros((20, 3)), np.arange(20))

    def dealt(comm: Any) -> Any:
        with placed(Case(lambda: mlp(features=3)), comm, Way(2)) as model:
            stream = mz.data.batches(source, model.config, 8, steps=2, group=model.batch_group)
            return [y.tolist() for _, y in stream]

    found = run_in_threads(4, dealt)
    assert found[0] == found[2] != found[1] == found[3]
    single = [y.tolist() for _, y in mz.data.batches(source, mz.ShardingConfig(micro_batch=2), 8, steps=2)]
    assert [a + b for a, b in zip(found[0], found[1], strict=True)] == single


@pytest.mark.parametrize("name", ["V 2 x dp 2", "2 x 2 x 2"])
def test_questions_about_the_model_have_the_answers_of_one_process(name: str) -> None:
    x, y = points(1, 10)[0]

    def ask(job: Job | None, comm: Any) -> Any:
        case = Case(lambda: mlp(hidden=(8, 4, 6)))
        job = job and job._replace(way=job.way._replace(schedule="1f1b"))
        model = alone(case) if job is None else placed_as(job, case, comm)
        with model:
            model.active_feature_indices = (0, 2, 3)
            for _ in range(2):
                model.train(*part(model.batch_group, x, y))
            assert model.supports_jit_compilation
            assert (model.is_feature_used(2), model.is_feature_used(1)) == (True, False)
            compiled = model.jit_compile()
            np.testing.assert_allclose(compiled(x), model.predict(x), rtol=1e-4, atol=1e-5)
            importance = model.feature_importance()
            return (
                model.active_feature_indices,
                model.export_computation_graph(),
                importance,
                compiled(x),
                model.predict(x),
            )

    job = JOBS[name]
    expected = ask(None, None)
    assert expected[2]["1"] == 0.0 < expected[2]["2"]
    for found in run_in_threads(job.size, lambda comm: ask(job, comm)):
        assert found[:2] == expected[:2]
        assert list(found[2]) == list(expected[2])
        job.same(list(found[2].values()), list(expected[2].values()))
        job.same(found[3], expected[3])
        job.same(found[4], expected[4])
