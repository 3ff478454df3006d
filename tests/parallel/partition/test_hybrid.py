"""Stages, tensor parts and replicas together: the bits depend on the number of tiles alone, and on nothing else."""

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
    texts,
    trained,
    trained_alone,
    trained_in_tiles,
)

F64 = {"dtype": "float64", "layers": 2}
CASES = {
    "GPT": Case(lambda: gpt(**F64), batches=texts(2, 11)),
    "LAMB, clipping": Case(lambda: gpt(**F64), lambda: mz.LAMB(lr=1e-2), texts(2, 10), config={"clip": 0.2}),
    "untied": Case(lambda: gpt(tied=False, **F64), lambda: mz.Lion(lr=1e-3), texts(2, 8)),
    "half frozen": Case(lambda: Blocks(gpt(**F64), {"embedding": Frozen, "blocks.0": Frozen}), batches=texts(2, 7)),
    "checkpointing, accumulate": Case(
        lambda: gpt(activation_checkpointing=True, **F64), batches=texts(2, 9), config={"accumulate": 2}
    ),
    "loss scale": Case(lambda: gpt(**F64), batches=texts(2, 8), loss_scale=mz.DynamicLossScale(initial=2.0**10)),
    "MLP": Case(lambda: mlp(dtype="float64"), batches=points(3, 13)),
    "one grain": Case(lambda: gpt(**F64), batches=texts(2, 2)),
    "float32": Case(lambda: gpt(layers=2), lambda: mz.AdamW(lr=1e-3), texts(4, 8), config={"clip": 0.5}),
}
ORDERS = ("pipeline,tensor,data", "pipeline,data,tensor", "data,tensor,pipeline", "tensor,pipeline,data")


@cache
def serial(name: str) -> Trained:
    return trained_alone(CASES[name])


@cache
def in_two_tiles(name: str) -> Trained:
    """The training in two tiles of one process, which is that of whole layers within rounding."""
    found = trained_in_tiles(CASES[name], 2)
    assert same_within_rounding(found, serial(name), 1e-5 if name == "float32" else 1e-12), (found, serial(name))
    return found


def hybrids(number: int) -> Way:
    """Two stages and two tensor ranks, with schedules, ZeRO stages and orders in turn."""
    more = {"order": ORDERS[number % len(ORDERS)]}
    return Way(2, 2, zero=number % 4, schedule=SCHEDULES[number % len(SCHEDULES)], more=more)


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("name", CASES)
def test_stages_and_replicas_beside_split_layers_change_no_bit(name: str) -> None:
    number = list(CASES).index(name)
    way, memory = hybrids(number + 5 * (number % 2)), MEMORIES[number % 3]
    for found in run_in_threads((4, 8)[number % 2], lambda comm: trained(CASES[name], comm, way, **memory)):
        assert found == in_two_tiles(name), (way, memory)


@pytest.mark.parametrize("zero", range(4))
def test_every_schedule_and_every_zero_stage_on_2_x_2_x_2_has_the_same_bits(zero: int) -> None:
    for schedule in SCHEDULES[zero::4]:  # pipelines without split layers have each with each
        way, memory = Way(2, 2, zero=zero, schedule=schedule), MEMORIES[zero // 2]
        found = run_in_threads(8, lambda comm, w=way, m=memory: trained(CASES["LAMB, clipping"], comm, w, **m))
        assert set(map(str, found)) == {str(in_two_tiles("LAMB, clipping"))}, way


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
    ("size", "way", "model"),
    [
        (2, Way(tensor=2), mlp),
        (2, Way(tensor=2), lambda: gpt(layers=2)),
        (4, Way(context=4), lambda: gpt(layers=2)),
        (4, Way(tensor=2, context=2), lambda: gpt(layers=2)),
    ],
)
def test_float32_stays_within_its_rounding(size: int, way: Way, model: Any) -> None:
    case = Case(model, lambda: mz.AdamW(lr=1e-3), points(6, 8) if model is mlp else texts(6, 8))
    found = run_in_threads(size, lambda comm: trained(case, comm, way))
    assert same_within_rounding(found[0], trained_alone(case), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"cuts": [1]}, {"cuts": [3]}, {"costs": [9, 1, 1, 1]}], ids=["first", "last", "costs"]
)
def test_tied_tables_cut_apart_between_stages_and_split_within_them_change_no_bit(more: dict[str, Any]) -> None:
    way = Way(2, 2, zero=1 if more == {"cuts": [1]} else 3, more=more)
    found = run_in_threads(8, lambda comm: trained(CASES["LAMB, clipping"], comm, way, **MEMORIES[1]))
    assert set(map(str, found)) == {str(in_two_tiles("LAMB, clipping"))}, way


@pytest.mark.slow
def test_four_tensor_ranks_beside_two_stages() -> None:
    """Parts by the shard rule: three of the widths are not divisible by four."""
    case = CASES["MLP"]
    expected = trained_in_tiles(case, 4)
    found = run_in_threads(8, lambda comm: trained(case, comm, Way(2, 4, zero=1, schedule="zero_bubble")))
    assert set(map(str, found)) == {str(expected)}
    assert same_within_rounding(expected, serial("MLP"))


# ---------------------------------------------------------------------- sums over all ranks


@pytest.mark.slow
def test_norms_have_the_same_bits_on_every_rank_and_count_every_element_once() -> None:
    case = Case(lambda: gpt(dropout=0.0, **F64), lambda: mz.SGD(lr=0.1), texts(1, 8), config={"clip": 1e-3})
    expected = trained_alone(case).norms[0]

    def body(comm: Any, way: Way) -> Any:
        model, _ = placed(case, comm, way)
        with model:
            before = model.get_parameters()
            model.train(*part(model.batch_group, *case.batches[0]))
            return model.last_step.gradient_norm, float(np.linalg.norm(model.get_parameters() - before))

    for way in (Way(1, 2, zero=0), Way(2, 2, zero=3), Way(4, 2, zero=1), Way(2, 1, zero=2)):
        found = run_in_threads(8, lambda comm, w=way: body(comm, w))
        assert len({norm for norm, _ in found}) == 1, way
        assert found[0][0] == pytest.approx(expected, rel=1e-12)
        assert found[0][1] == pytest.approx(0.1 * 1e-3, rel=1e-12)


@pytest.mark.slow
def test_parameters_and_state_of_2_x_2_x_2_lie_where_the_formulas_say() -> None:
    """Four stages x tensor parts hold the model once, and the copies that ties and whole parameters need."""
    model_of = gpt(layers=2, dim=16, vocabulary=32)
    specs = [spec for layer in model_of.blocks.values() for spec in layer.specs()]
    whole = sum(spec.size for spec in specs if spec.tied is None)
    unsplit = ("norm", "position", "projection.bias")
    copies = 32 * 16 + sum(spec.size for spec in specs if any(word in spec.name for word in unsplit))

    def held(comm: Any, zero: int) -> int:
        model, _ = placed(Case(lambda: model_of), comm, Way(2, 2, zero=zero), share_node_memory=False)
        with model:
            model.train(*part(model.batch_group, *texts(1, 8, vocabulary=32)[0]))
            told = model.metadata()
            parameters = 4 * told.held_count / (2 if zero == 3 else 1)
            state = 8 * told.held_count / (2 if zero >= 1 else 1)
            slack = 4 * len(model._engine.layout.units)
            assert abs(told.bytes_on_rank["parameters"] - parameters) <= slack + 64
            assert abs(told.bytes_on_rank["optimizer state"] - state) <= 2 * slack
            assert told.formula_bytes["parameters"] == parameters
            return int(told.held_count)

    for zero in range(4):
        assert sum(run_in_threads(8, lambda comm, z=zero: held(comm, z))) == 2 * (whole + copies)


@pytest.mark.slow
def test_replicas_that_see_other_batches_are_no_error_and_peers_that_do_are_named() -> None:
    x, y = texts(1, 8)[0]

    def body(comm: Any) -> str:
        model, _ = placed(Case(gpt), comm, Way(2, 2))
        with model:
            model.train(*part(model.batch_group, x, y))
            mine = part(model.batch_group, x, y)
            wrong = (mine[0], mine[1][::-1].copy()) if comm.rank == 7 else mine
            with pytest.raises(DataError) as caught:
                model.train(*wrong)
            model.train(*mine)
            return str(caught.value)

    for told in run_in_threads(8, body):
        assert told.startswith("rank 7 has another y than rank 1: the ranks of one replica")


def refuses_bad_samples(comm: Any, way: Way) -> None:
    """Tensor ranks find the same fault in the same samples: all ranks raise, and go on as if nothing had been."""
    x, y = texts(1, 8)[0]
    bad_x, bad_y = x.copy(), y.copy()
    bad_x[0, 3] = bad_y[0, 2] = 29  # in the first micro-batch of the first replica
    model, _ = placed(Case(lambda: gpt(**F64)), comm, way)
    with model:
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
    ("size", "way"),
    [
        (2, Way(tensor=2, zero=1)),
        (4, Way(2, 2, zero=2, schedule="zero_bubble_v")),
        (8, Way(2, 2, zero=3, schedule="gpipe")),
        (4, Way(2, 2, zero=0, schedule="zero_bubble")),
    ],
)
def test_bad_samples_are_told_on_all_ranks_and_leave_the_model_as_it_was(size: int, way: Way) -> None:
    run_in_threads(size, lambda comm: refuses_bad_samples(comm, way))


# ---------------------------------------------------------------------- measured costs


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
