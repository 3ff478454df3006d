"""Tensor and context groups together train the same model within rounding, with the bits of their tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.layout import SCHEDULES
from mpizero.nn import CrossEntropy, Frozen
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import part
from tests.parallel.parallel_layouts import (
    Blocks,
    Case,
    Way,
    alone,
    gpt,
    of_first,
    placed,
    texts,
    trained,
    trained_in_tiles,
)
from tests.parallel.parallel_layouts import trained_alone as by_itself
from tests.parallel.partition.test_tensor_parallel import same_within_rounding

F64 = {"dtype": "float64", "layers": 2, "heads": 4, "sequence": 30}
LENGTHS = [texts(1, 5, n, length=n)[0] for n in (13, 30, 2)]
CASES = {
    "dropout, clipping": Case(lambda: gpt(**F64), batches=LENGTHS, config={"clip": 0.2}),
    "LAMB, checkpointing, accumulate": Case(
        lambda: gpt(activation_checkpointing=True, **F64), lambda: mz.LAMB(lr=1e-2), LENGTHS, config={"accumulate": 2}
    ),
    "untied, loss scale": Case(
        lambda: gpt(tied=False, **F64), batches=LENGTHS, loss_scale=mz.DynamicLossScale(initial=2.0**10)
    ),
    "blocks of a model of one's own": Case(lambda: Blocks(gpt(**F64), {"blocks.0": Frozen}), batches=LENGTHS),
}
MEMORIES: tuple[dict[str, Any], ...] = ({}, {"share_node_memory": False}, {"ranks_per_node": 2})


@pytest.mark.parametrize("name", CASES)
def test_both_groups_together_train_what_one_process_trains(name: str) -> None:
    case, number = CASES[name], list(CASES).index(name)
    expected = by_itself(case)
    for turn, (size, way) in enumerate(
        (
            (4, Way(tensor=2, context=2, zero=number)),
            (8, Way(tensor=2, context=2, zero=3 - number)),
            (8, Way(2, tensor=2, context=2, zero=(number + 1) % 4, schedule=tuple(SCHEDULES)[number])),
            (8, Way(tensor=(2, 4)[number % 2], context=(4, 2)[number % 2], zero=(number + 2) % 4)),
        )
    ):
        memory = MEMORIES[(turn + number) % 3]
        found = run_in_threads(size, lambda comm, w=way, m=memory: trained(case, comm, w, **m))
        assert len(set(map(str, found))) == 1, (way, memory, "other bits on another rank")
        assert same_within_rounding(found[0], expected), (way, memory, found[0], expected)


def test_heads_that_three_ranks_share_and_three_parts_of_a_sequence() -> None:
    case = Case(lambda: gpt(**{**F64, "heads": 6}), batches=LENGTHS[:2], config={"clip": 0.2})
    expected = by_itself(case)
    for way in (Way(tensor=2, context=3), Way(tensor=3, context=2)):
        found = run_in_threads(6, lambda comm, w=way: trained(case, comm, w))
        assert same_within_rounding(found[0], expected), (way, found[0], expected)


def test_beside_both_groups_neither_stages_nor_replicas_nor_schedules_nor_memory_change_a_bit() -> None:
    case = replace(CASES["LAMB, checkpointing, accumulate"], config={})
    found = [(str(trained_in_tiles(case, 2, 2)), "one process")]
    ways = [(4, Way(tensor=2, context=2, zero=zero)) for zero in (0, 3)]
    ways += [(8, Way(2, tensor=2, context=2, zero=zero, schedule=s)) for zero, s in enumerate(list(SCHEDULES)[1:])]
    ways += [(8, Way(tensor=2, context=2, zero=2, more={"order": "context,tensor,data,pipeline"}))]
    for turn, (size, way) in enumerate(ways):
        memory = MEMORIES[turn % 3]
        results = run_in_threads(size, lambda comm, w=way, m=memory: trained(case, comm, w, **m))
        found += [(str(result), way) for result in results]
    assert len({result for result, _ in found}) == 1, found


@pytest.mark.mpi(min_size=4)
def test_over_mpi_too_both_groups_train_what_one_process_trains(world: Any) -> None:
    case = CASES["dropout, clipping"]
    found = trained(case, world, Way(tensor=2, context=2, zero=2))
    expected = of_first(world, lambda: trained_in_tiles(case, 2, 2))
    parallel_assert(world, found == expected, f"{found} {expected}")


def test_float32_stays_within_its_rounding() -> None:
    case = Case(lambda: gpt(layers=2), lambda: mz.AdamW(lr=1e-3), texts(3, 8))
    found = run_in_threads(4, lambda comm: trained(case, comm, Way(tensor=2, context=2)))
    assert same_within_rounding(found[0], by_itself(case), 1e-5)


def test_prediction_and_metrics_are_those_of_one_process_on_every_rank() -> None:
    x, y = texts(1, 6, length=13)[0]
    y = y.copy()
    y[0, 3:] = -1  # ignored places are none of a rank's weight
    case, losses = CASES["dropout, clipping"], (None, CrossEntropy(), mz.nn.MeanSquaredError())

    def told(model: Any, group: Any) -> tuple[list[Any], list[Any]]:
        """Predictions and metrics; the losses are the model's own, one given, and one that takes all scores."""
        with model:
            predictions = [model.predict(x[rows, :length]) for rows, length in ((slice(0, 3), 13), (slice(2, 3), 2))]
            own_x, own_y = part(group, x, y)
            numbers = np.eye(29)[own_y]
            seen = [model.evaluate(own_x, numbers if n == 2 else own_y, loss=loss) for n, loss in enumerate(losses)]
            return predictions, seen

    def body(comm: Any, way: Way) -> Any:
        model, _ = placed(case, comm, way)
        return told(model, model.batch_group)

    predictions, metrics = told(alone(case)[0], None)
    for size, way in ((4, Way(tensor=2, context=2, zero=3)), (8, Way(2, tensor=2, context=2, zero=1))):
        for found in run_in_threads(size, lambda comm, w=way: body(comm, w)):
            for values, expected in zip(found[0], predictions, strict=True):
                np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-11)
            for values, expected in zip(found[1], metrics, strict=True):
                assert values[0] == pytest.approx(expected[0], rel=1e-12)
                assert values[1:] == expected[1:]


def test_a_checkpoint_goes_on_with_other_groups(tmp_path: Any) -> None:
    case, (first, *rest) = CASES["dropout, clipping"], LENGTHS
    expected = by_itself(case)

    def begin(comm: Any) -> float:
        model, _ = placed(case, comm, Way(tensor=2, context=2, zero=1))
        with model:
            loss = model.train(*part(model.batch_group, *first))
            model.save_model(tmp_path / "c")
            return float(loss)

    def go_on(comm: Any, way: Way) -> list[float]:
        model, _ = placed(case, comm, way)
        with model:
            model.load_model(tmp_path / "c")
            return [float(model.train(*part(model.batch_group, *each))) for each in rest]

    assert run_in_threads(4, begin)[0] == pytest.approx(expected.losses[0], rel=1e-12)
    for size, way in (
        (4, Way(tensor=2, context=2, zero=3)),
        (2, Way(tensor=2)),
        (1, Way()),
        (8, Way(tensor=4, context=2)),
    ):
        for losses in run_in_threads(size, lambda comm, w=way: go_on(comm, w)):
            assert losses == pytest.approx(expected.losses[1:], rel=1e-12)


def test_metadata_counts_both_groups_and_a_part_of_a_matrix_is_held_by_every_context() -> None:
    def body(comm: Any) -> Any:
        model, _ = placed(CASES["dropout, clipping"], comm, Way(tensor=2, context=2, zero=0))
        with model:
            told = model.metadata()
            assert told.group_sizes == {"pipeline": 1, "tensor": 2, "data": 2, "context": 2}
            assert (model.batch_group.size, model.engine.grid.data.size) == (2, 4)
            return told.held_count

    counts = run_in_threads(8, body)
    whole = sum(spec.size for spec in mz.nn.model_specs(gpt(**F64)) if spec.tied is None)
    assert len(set(counts[:4])) == len(set(counts[4:])) == 1, "all contexts and replicas of a tensor rank hold the same"
    assert whole < counts[0] + counts[4] < 1.3 * whole
