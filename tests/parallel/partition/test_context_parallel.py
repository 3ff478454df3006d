"""Sequences cut among ranks train the same model within rounding, with the bits of their tiles, beside other axes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError
from mpizero.nn import Frozen
from mpizero.sharding.params import paged
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import part
from tests.parallel.parallel_layouts import (
    Blocks,
    Case,
    Trained,
    Way,
    alone,
    gpt,
    mlp,
    of_first,
    placed,
    texts,
    trained,
    trained_alone,
    trained_in_tiles,
)
from tests.parallel.partition.test_tensor_parallel import same_within_rounding

F64 = {"dtype": "float64", "layers": 2}
CASES = {
    "dropout": Case(lambda: gpt(**F64), batches=texts(2, 9)),
    "no dropout": Case(lambda: gpt(dropout=0.0, **F64), lambda: mz.SGD(lr=0.1, momentum=0.9), texts(2, 8)),
    "untied": Case(lambda: gpt(tied=False, **F64), batches=texts(2, 8)),
    "LAMB, clipping": Case(lambda: gpt(**F64), lambda: mz.LAMB(lr=1e-2), texts(2, 8), config={"clip": 0.2}),
    "checkpointing, accumulate": Case(
        lambda: gpt(activation_checkpointing=True, **F64), batches=texts(2, 9), config={"accumulate": 2}
    ),
    "loss scale": Case(lambda: gpt(**F64), batches=texts(2, 8), loss_scale=mz.DynamicLossScale(initial=2.0**10)),
    "half frozen": Case(lambda: Blocks(gpt(**F64), {"blocks.0": Frozen}), batches=texts(2, 7)),
    "long sequences": Case(lambda: gpt(sequence=83, **F64), batches=texts(2, 4, length=83)),
    "sequences of all lengths": Case(
        lambda: gpt(sequence=20, **F64), batches=[texts(1, 4, n, length=n)[0] for n in (20, 3, 1, 7)]
    ),
}
MEMORIES: tuple[dict[str, Any], ...] = ({}, {"share_node_memory": False}, {"ranks_per_node": 2})


# ---------------------------------------------------------------------- the same training within rounding


@pytest.mark.parametrize("name", CASES)
def test_cut_sequences_train_what_whole_ones_train(name: str) -> None:
    case, number = CASES[name], list(CASES).index(name)
    expected = trained_alone(case)
    ways = (
        (2, Way(context=2)),
        (3, Way(context=3)),
        (4, Way(context=2)),
        (4, Way(2, context=2)),
        (8, Way(2, context=2)),
    )
    for offset, (size, way) in list(enumerate(ways))[number % 3 :: 3]:
        schedule = ("1f1b", "gpipe", "zero_bubble")[(number + offset) % 3] if way.pipeline > 1 else "1f1b"
        used = way._replace(zero=(number + offset) % 4, schedule=schedule)
        memory = MEMORIES[(number + offset) % 3]
        found = run_in_threads(size, lambda comm, w=used, m=memory: trained(case, comm, w, **m))
        again = run_in_threads(size, lambda comm, w=used, m=memory: trained(case, comm, w, **m)) if number < 2 else []
        assert len(set(map(str, found + again))) == 1, (used, memory, "other bits on another rank or another time")
        assert same_within_rounding(found[0], expected), (used, memory, found[0], expected)


@pytest.mark.mpi(min_size=2)
def test_over_mpi_too_cut_sequences_train_what_whole_ones_train(world: Any) -> None:
    """Two and four ranks have the bits of one process with as many tiles, if micro-batches are not accumulated."""
    first, every = (world.size % 2, 2) if world.size <= 3 else (world.size // 8, 3)
    for number, (name, case) in list(enumerate(CASES.items()))[first::every]:
        stages = 2 if world.size == 8 else 1
        context = world.size if world.size <= 4 and number % 2 else (2 if world.size % 2 == 0 else world.size)
        way = Way(stages, context=context, zero=(number // every + world.size) % 4)
        found = trained(case, world, way, **MEMORIES[number % 3])
        if context == 3 or "accumulate" in case.config:
            expected = of_first(world, lambda case=case: trained_alone(case))
            same = same_within_rounding(found, expected) and len(set(world.allgather_object(str(found)))) == 1
        else:
            expected = of_first(world, lambda case=case, context=context: trained_in_tiles(case, context=context))
            same = found == expected
        parallel_assert(world, same, f"{name}, {way}: {found} {expected}")


def test_beside_cut_sequences_neither_stages_nor_replicas_nor_schedules_change_a_bit() -> None:
    case = CASES["LAMB, clipping"]
    found = [(str(trained_in_tiles(case, context=2)), "one process")]
    stages = ((4, Way(2, context=2, schedule="zero_bubble_v")), (8, Way(4, context=2, schedule="gpipe")))
    replicas = ((4, Way(context=2)), (8, Way(2, context=2, more={"order": "context,pipeline,tensor,data"})))
    for zero in range(4):
        for size, way in ((2, Way(context=2)), *(stages if zero % 2 else replicas)):
            used = way._replace(zero=zero)
            results = run_in_threads(size, lambda comm, w=used: trained(case, comm, w, **MEMORIES[1]))
            found += [(str(result), way) for result in results]
    assert len({result for result, _ in found}) == 1, found


@pytest.mark.parametrize("context", [2, 3, 4])
def test_every_zero_stage_adds_the_parts_of_grains_in_one_order(context: int) -> None:
    """The last grain is short; with ``accumulate`` it has fewer micro-batches than the others."""
    expected: dict[int, str] = {}
    for number, (zero, accumulate) in enumerate(product(range(4), (1, 2))):
        config = {"clip": 0.2, "accumulate": accumulate}
        case = Case(lambda: gpt(layers=1), batches=texts(2, 5 + 4 * accumulate), config=config)
        replicas, memory = 1 + (number + zero // 2 + context) % 2, MEMORIES[number % 3]
        way = Way(context=context, zero=zero)
        for found in run_in_threads(context * replicas, lambda comm, c=case, w=way, m=memory: trained(c, comm, w, **m)):
            assert str(found) == expected.setdefault(accumulate, str(found)), (zero, accumulate, replicas, memory)


def test_float32_stays_within_its_rounding() -> None:
    case = Case(lambda: gpt(layers=2), lambda: mz.AdamW(lr=1e-3), texts(6, 8))
    found: list[Trained] = run_in_threads(4, lambda comm: trained(case, comm, Way(context=4)))
    assert same_within_rounding(found[0], trained_alone(case), 1e-5)


def test_prediction_and_metrics_are_those_of_one_process_on_every_rank() -> None:
    x, y = texts(1, 6)[0]
    y = y.copy()
    y[0, 3:] = -1  # ignored places are none of a rank's weight
    case = CASES["dropout"]

    def told(model: Any, group: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Predictions, metrics and losses."""
        with model:
            cuts = product((slice(0, 3), slice(2, 3)), (7, 2, 1))
            predictions = [model.predict(x[rows, :length]) for rows, length in cuts]
            seen = [(model.evaluate(*part(group, x, y)), model.train(*part(group, x, y))) for _ in range(2)]
            return predictions, *map(list, zip(*seen, strict=True))

    def body(comm: Any, way: Way) -> Any:
        model, _ = placed(case, comm, way)
        return told(model, model.batch_group)

    predictions, metrics, losses = told(alone(case)[0], None)
    for size, way in ((2, Way(context=2)), (4, Way(context=4, zero=3)), (8, Way(2, context=2, zero=2))):
        for found in run_in_threads(size, lambda comm, w=way: body(comm, w)):
            for values, expected in zip(found[0], predictions, strict=True):
                np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-11)
            for values, expected in zip(found[1], metrics, strict=True):
                assert values[0] == pytest.approx(expected[0], rel=1e-12)
                assert values[1:] == expected[1:]
            assert found[2] == pytest.approx(losses, rel=1e-12)


def test_gradients_by_hand_are_those_of_one_process() -> None:
    x, y = texts(1, 6)[0]
    case = Case(lambda: gpt(dropout=0.0, **F64), lambda: mz.SGD(lr=0.1))
    with alone(case)[0] as single:
        expected = single.compute_gradients(x, y)

    def body(comm: Any, auto: bool) -> None:
        model, optimizer = placed(case, comm, Way(context=2, zero=1), auto_sync_gradients=auto)
        with model:
            before = model.get_parameters()
            found = model.compute_gradients(*part(model.batch_group, x, y))
            assert found.loss == pytest.approx(expected.loss, rel=1e-12)
            found = model.synchronize_gradients()
            np.testing.assert_allclose(found.values, expected.values, rtol=1e-9, atol=1e-13)
            optimizer.step()
            np.testing.assert_allclose(model.get_parameters(), before - 0.1 * expected.values, rtol=1e-9, atol=1e-12)

    for auto in (True, False):
        run_in_threads(4, lambda comm, a=auto: body(comm, a))


# ---------------------------------------------------------------------- what is said, and what is refused


def test_metadata_and_replicas_count_the_context() -> None:
    def body(comm: Any) -> Any:
        model, _ = placed(CASES["dropout"], comm, Way(2, context=2, zero=3))
        with model:
            told = model.metadata()
            assert told.group_sizes == {"pipeline": 2, "tensor": 1, "data": 2, "context": 2}
            assert model.batch_group.size == 2
            assert model.engine.grid.data.size == 4
            return tuple(told.group_ranks.values())

    expected = [(p, 0, d, c) for p in range(2) for d in range(2) for c in range(2)]
    assert run_in_threads(8, body) == expected


def test_zero_1_holds_of_gradients_what_zero_2_does_and_ddp_a_copy_for_each_grain() -> None:
    def held(comm: Any, zero: int) -> tuple[int, int]:
        model, _ = placed(CASES["dropout"], comm, Way(context=2, zero=zero), **MEMORIES[1])
        with model:
            model.train(*texts(1, 8)[0])
            told = model.metadata()
            assert told.zero_stage == zero
            return told.bytes_on_rank["gradients"], paged(model.engine.layout.gradient_size * 8)

    found = [run_in_threads(2, lambda comm, z=zero: held(comm, z)) for zero in (0, 1, 2)]
    assert found[1] == found[2]
    assert all(4 * row <= held < 5 * row for held, row in found[0])


def test_models_and_batches_without_sequences_are_refused_on_all_ranks() -> None:
    def build(comm: Any, model: Any) -> str:
        with mz.ShardingConfig(comm=comm) as config, pytest.raises(ConfigError) as caught:
            mz.HybridShardedModel(model, config, context_parallel_size=2)
        return str(caught.value)

    for told in run_in_threads(2, lambda comm: build(comm, mlp())):
        assert "no attention along a sequence" in told

    def peers(comm: Any) -> None:
        x, y = texts(1, 4)[0]
        model, _ = placed(CASES["dropout"], comm, Way(context=2))
        with model:
            other = x[::-1].copy() if comm.rank == 1 else x
            with pytest.raises(DataError, match="rank 1 has another x than rank 0"):
                model.train(other, y)
            with pytest.raises(DataError, match="context parallelism cuts inputs and targets"):
                model.train(x[:, 0], y[:, 0])
            model.train(x, y)

    run_in_threads(2, peers)
