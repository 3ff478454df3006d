"""Layers, sequences and stages that are split: the bits depend on the number of tiles alone, and on nothing else."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, RemoteError
from mpizero.layout import SCHEDULES
from mpizero.nn import Frozen
from mpizero.sharding.pipeline import measure_blocks, measured_costs
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import MEMORIES, part, ten
from tests.parallel.parallel_layouts import (
    CHUNKS,
    Blocks,
    Case,
    Trained,
    Way,
    gpt,
    mlp,
    of_first,
    placed,
    points,
    same_within_rounding,
    steps,
    texts,
    trained,
    trained_alone,
    trained_in_tiles,
)

F64: dict[str, Any] = {"dtype": "float64", "layers": 2, "heads": 4, "sequence": 30}
#: Sequences that ranks cut into unequal parts, and shorter ones than there are ranks.
LENGTHS = [texts(1, 5, n, length=n)[0] for n in (13, 30, 2)]
CASES = {
    "dropout": Case(lambda: gpt(**F64), batches=LENGTHS),
    "untied": Case(lambda: gpt(tied=False, **F64), lambda: mz.Lion(lr=1e-3), LENGTHS),
    "clipping": Case(lambda: gpt(**F64), batches=LENGTHS, config={"clip": 0.2}),
    "LAMB, clipping": Case(lambda: gpt(**F64), lambda: mz.LAMB(lr=1e-2), LENGTHS, config={"clip": 0.2}),
    "checkpointing, accumulate": Case(
        lambda: gpt(activation_checkpointing=True, **F64), batches=LENGTHS, config={"accumulate": 2}
    ),
    "loss scale": Case(lambda: gpt(**F64), batches=LENGTHS, loss_scale=mz.DynamicLossScale(initial=2.0**10)),
    "half frozen": Case(lambda: Blocks(gpt(**F64), {"embedding": Frozen, "blocks.0": Frozen}), batches=LENGTHS),
    "one grain": Case(lambda: gpt(**F64), batches=texts(2, 2)),
    "float32": Case(lambda: gpt(layers=2, heads=4), lambda: mz.AdamW(lr=1e-3), texts(2, 5), config={"clip": 0.5}),
    "heads of one number": Case(lambda: gpt(heads=12, layers=1, dtype="float64"), batches=texts(2, 6)),
    "long sequences": Case(lambda: gpt(**{**F64, "sequence": 83}), batches=texts(2, 4, length=83)),
    "MLP": Case(lambda: mlp(dtype="float64"), batches=points(3, 13)),
    "an odd number of layers": Case(lambda: mlp(hidden=(7, 5), dtype="float64"), batches=points(3, 8)),
    "regression": Case(
        lambda: mlp(hidden=(7, 5), task="regression", outputs=4, dtype="float64"),
        lambda: mz.SGD(lr=0.01, momentum=0.9),
        [(x, np.stack([x[:, 0], x[:, 1] ** 2, y, -x[:, 2]], axis=1)) for x, y in points(3, 8)],
    ),
}
ORDERS = ("pipeline,tensor,data", "pipeline,data,tensor", "data,tensor,pipeline", "tensor,pipeline,data")
#: Ranks and ways: a training of sequences has one of two of these rows.
TENSOR = ((2, Way(tensor=2)), (4, Way(tensor=2)), (4, Way(2, 2)), (8, Way(2, 2)), (4, Way(tensor=4)), (8, Way(2, 4)))
CONTEXT = (
    (2, Way(context=2)), (4, Way(context=2)), (4, Way(2, context=2)), (8, Way(2, context=2)), (4, Way(context=4)),
)  # fmt: skip
BOTH = (
    (4, Way(tensor=2, context=2)), (8, Way(2, 2, context=2)), (8, Way(tensor=4, context=2)),
    (8, Way(tensor=2, context=2)), (8, Way(tensor=2, context=4)),
)  # fmt: skip


@cache
def serial(name: str) -> Trained:
    return trained_alone(CASES[name])


@cache
def in_tiles(name: str, tensor: int, context: int) -> Trained:
    """The training in tiles of one process, which is that of whole layers and sequences within rounding."""
    found = trained_in_tiles(CASES[name], tensor, context)
    assert same_within_rounding(found, serial(name), 1e-5 if name == "float32" else 1e-12), (found, serial(name))
    return found


def in_turn(way: Way, number: int, blocks: int) -> Way:
    """ZeRO stages, orders of the axes, and schedules that have a block for each chunk."""
    orders = ORDERS if way.context == 1 else (*ORDERS[:1], "context,pipeline,tensor,data")
    fitting = [name for name in SCHEDULES if way.pipeline * CHUNKS[name] <= blocks]
    schedule = fitting[number % len(fitting)] if way.pipeline > 1 else "1f1b"
    return way._replace(zero=number % 4, schedule=schedule, more={"order": orders[number % len(orders)]})


@pytest.mark.parametrize("name", CASES)
def test_split_layers_learn_what_whole_layers_learn(name: str) -> None:
    """Groups, with stages and replicas beside them or without, have the bits of their tiles."""
    case, number = CASES[name], list(CASES).index(name)
    sequences = case.batches[0][0].dtype.kind == "i"
    groups = (TENSOR, CONTEXT, BOTH) if sequences else (TENSOR[::2], TENSOR[1::2])
    for ways in (groups[number % len(groups)], groups[(number + 1) % len(groups)]):
        size, plain = ways[number % len(ways)]
        way, memory = in_turn(plain, number + size, len(case.model().blocks)), MEMORIES[number % 3]
        found = run_in_threads(size, lambda comm, w=way, m=memory: trained(case, comm, w, **m))
        assert found == [found[0]] * size, "the same bits on every rank"
        expected = in_tiles(name, way.tensor, way.context)
        if "accumulate" in case.config and way.context > 1:  # a rank adds its parts of a grain before ranks do
            assert same_within_rounding(found[0], expected), (way, memory)
        else:
            assert found[0] == expected, (way, memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "way", "tensor", "context"),
    [(2, Way(tensor=2, zero=2), 4, 1), (4, Way(2, context=2), 1, 4), (4, Way(tensor=2, context=2, zero=3), 4, 4)],
    ids=str,
)
def test_ranks_that_compute_several_tiles_each_have_the_bits_of_all_tiles(
    size: int, way: Way, tensor: int, context: int
) -> None:
    tiles = {"tensor": tensor, "context": context}
    found = run_in_threads(size, lambda comm: trained(CASES["LAMB, clipping"], comm, way, tiles=tiles))
    assert found == [in_tiles("LAMB, clipping", tensor, context)] * size


@pytest.mark.parametrize("zero", range(4))
def test_every_schedule_and_every_zero_stage_on_2_x_2_x_2_has_the_same_bits(zero: int) -> None:
    for schedule in SCHEDULES[zero::4]:  # pipelines without split layers have each with each
        way, memory = Way(2, 2, zero=zero, schedule=schedule), MEMORIES[zero // 2]
        found = run_in_threads(8, lambda comm, w=way, m=memory: trained(CASES["LAMB, clipping"], comm, w, **m))
        assert found == [in_tiles("LAMB, clipping", 2, 1)] * 8, way


@pytest.mark.slow
@pytest.mark.parametrize("kind", [mz.PipelineParallelModel, mz.TensorParallelModel])
def test_pipeline_and_tensor_models_take_all_ranks_unless_told_otherwise(kind: Any) -> None:
    name = kind.__name__.removesuffix("Model")

    def run(comm: Any, *size: int) -> Any:
        case = CASES["MLP"]
        with (
            mz.ShardingConfig(comm=comm, micro_batch=2) as config,
            kind(case.model(), config, *size, zero_stage=1, optimizer=case.optimizer()) as model,
        ):
            with model.clone() as clone:
                assert clone.parameters_sha256() == model.parameters_sha256()
            found, told = steps(model, case), model.metadata()
            return found, told.strategy, told.group_sizes[name.removesuffix("Parallel").lower()]

    for size, ranks in (((), 3), ((3,), 3), ((1,), 1)):
        for found, *told in run_in_threads(3, lambda comm, s=size: run(comm, *s)):
            assert told == [name, ranks]
            assert same_within_rounding(found, serial("MLP"))


#: Ways that a job of so many processes trains.
OVER_MPI = {
    2: (Way(tensor=2, zero=1), Way(context=2, zero=3)),
    3: (Way(tensor=3, zero=2), Way(context=3)),
    4: (Way(2, 2, zero=3, schedule="zero_bubble"), Way(tensor=2, context=2, zero=2)),
    8: (Way(2, 2, zero=2, schedule="interleaved"), Way(2, context=2, zero=1)),
}


@pytest.mark.mpi(min_size=2)
def test_processes_that_split_layers_sequences_and_stages_have_the_bits_of_their_tiles(world: Any) -> None:
    """Three have no tiles of their own, and agree within rounding."""
    for number, way in enumerate(OVER_MPI.get(world.size, ())):
        case = CASES["LAMB, clipping"] if way.tensor != 3 else CASES["MLP"]
        found = trained(case, world, way, **MEMORIES[(number + world.size) % 3])
        if world.size == 3:
            same = same_within_rounding(found, of_first(world, lambda c=case: trained_alone(c)))
            same &= world.allgather_object(str(found)) == [str(found)] * 3
        else:
            same = found == of_first(world, lambda c=case, w=way: trained_in_tiles(c, w.tensor, w.context))
        parallel_assert(world, same, str(way))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "more"), [(1, {"cuts": [1]}), (3, {"cuts": [3]}), (3, {"costs": [9, 1, 1, 1]})], ids=str
)
def test_tied_tables_cut_apart_between_stages_and_split_within_them_change_no_bit(zero: int, more: Any) -> None:
    way = Way(2, 2, zero=zero, more=more)
    found = run_in_threads(8, lambda comm: trained(CASES["LAMB, clipping"], comm, way, **MEMORIES[1]))
    assert found == [in_tiles("LAMB, clipping", 2, 1)] * 8


def refuses_bad_samples(comm: Any, way: Way) -> None:
    """Tensor ranks find the same fault in the same samples: all ranks raise, and go on as if nothing had been."""
    x, y = texts(1, 8)[0]
    bad_x, bad_y = x.copy(), y.copy()
    bad_x[0, 3] = bad_y[0, 2] = 29  # in the first micro-batch of the first replica
    with placed(Case(lambda: gpt(**F64)), comm, way) as model:
        model.train(*part(model.batch_group, x, y))
        with model.deep_copy() as twin:
            for call in (model.train, model.evaluate, model.compute_gradients):
                for batch in ((bad_x, y), (x, bad_y)):
                    with pytest.raises((DataError, RemoteError), match="29"):
                        call(*part(model.batch_group, *batch))
            with pytest.raises((DataError, RemoteError), match="29"):
                model.predict(bad_x)
            for _ in range(2):
                losses = [each.train(*part(each.batch_group, x, y)) for each in (model, twin)]
                parallel_assert(comm, losses[0] == losses[1], "loss")
            parallel_assert(comm, model.parameters_sha256() == twin.parameters_sha256(), "parameters")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "way"), [(2, Way(tensor=2, zero=1)), (4, Way(2, 2, zero=2, schedule="zero_bubble_v"))], ids=str
)
def test_bad_samples_are_told_on_all_ranks_and_leave_the_model_as_it_was(size: int, way: Way) -> None:
    run_in_threads(size, lambda comm: refuses_bad_samples(comm, way))


def test_every_block_has_three_times_and_a_black_box_none() -> None:
    times = measure_blocks(gpt(layers=3), *texts(1, 2)[0])
    assert list(times) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert all(min(block) >= 0 and block.forward > 0 for block in times.values())
    with pytest.raises(ConfigError, match="black box"):
        measure_blocks(ten(), *texts(1, 2)[0])


def test_all_ranks_get_the_costs_that_rank_0_has_measured() -> None:
    def run(comm: Any) -> Any:
        with mz.ShardingConfig(comm=comm) as config:
            costs = measured_costs(gpt(layers=3), *texts(1, 2)[0], config)
            with mz.HybridShardedModel(gpt(layers=3), config, 2, costs=costs) as model:
                held = model._engine.layout.size * (model.metadata().group_ranks["data"] == 0)
                return costs, held, model.parameter_count

    found = run_in_threads(4, run)
    assert all(costs == found[0][0] for costs, *_ in found)
    # The head's copy of the token table is the only thing that two stages hold.
    assert sum(held for _, held, _ in found) - found[0][2] in (0, 29 * 12)
