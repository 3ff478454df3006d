"""Sequences cut among ranks train the same model within rounding, with the bits of their tiles, beside other axes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError
from mpizero.nn import CrossEntropy, Frozen
from mpizero.sharding.params import paged
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, part
from tests.parallel.parallel_layouts import (
    Blocks,
    Case,
    Way,
    alone,
    gpt,
    mlp,
    placed,
    same_within_rounding,
    texts,
    trained,
    trained_alone,
    trained_in_tiles,
)

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
#: For tensor groups beside.
FOUR_HEADS: dict[str, Any] = {**F64, "heads": 4, "sequence": 30}
LENGTHS = [texts(1, 5, n, length=n)[0] for n in (13, 30, 2)]
BOTH = {
    "dropout, clipping": Case(lambda: gpt(**FOUR_HEADS), batches=LENGTHS, config={"clip": 0.2}),
    "LAMB, checkpointing, accumulate": Case(
        lambda: gpt(activation_checkpointing=True, **FOUR_HEADS),
        lambda: mz.LAMB(lr=1e-2),
        LENGTHS,
        config={"accumulate": 2},
    ),
    "untied, loss scale": Case(
        lambda: gpt(tied=False, **FOUR_HEADS), batches=LENGTHS, loss_scale=mz.DynamicLossScale(initial=2.0**10)
    ),
    "blocks of a model of one's own": Case(lambda: Blocks(gpt(**FOUR_HEADS), {"blocks.0": Frozen}), batches=LENGTHS),
}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "way"),
    [
        ("dropout, clipping", 4, Way(tensor=2, context=2)),
        ("dropout, clipping", 8, Way(tensor=2, context=4, zero=2)),
        ("LAMB, checkpointing, accumulate", 8, Way(2, 2, 2, zero=2, schedule="zero_bubble")),
        ("LAMB, checkpointing, accumulate", 8, Way(tensor=4, context=2, zero=3)),
        ("untied, loss scale", 8, Way(tensor=2, context=2, zero=1)),
        ("blocks of a model of one's own", 4, Way(tensor=2, context=2, zero=3)),
        ("blocks of a model of one's own", 8, Way(2, 2, 2, zero=0, schedule="interleaved")),
    ],
    ids=str,
)
def test_tensor_and_context_groups_together_train_what_one_process_trains(name: str, size: int, way: Way) -> None:
    memory = MEMORIES[(size + way.zero) % 3]
    found = run_in_threads(size, lambda comm: trained(BOTH[name], comm, way, **memory))
    assert len(set(map(str, found))) == 1, "other bits on another rank"
    assert same_within_rounding(found[0], trained_alone(BOTH[name]))


@pytest.mark.slow
def test_heads_that_three_ranks_share_and_three_parts_of_a_sequence() -> None:
    case = Case(lambda: gpt(**{**FOUR_HEADS, "heads": 6}), batches=LENGTHS[:2], config={"clip": 0.2})
    expected = trained_alone(case)
    for way in (Way(tensor=2, context=3), Way(tensor=3, context=2)):
        found = run_in_threads(6, lambda comm, w=way: trained(case, comm, w))
        assert same_within_rounding(found[0], expected), (way, found[0], expected)


# ---------------------------------------------------------------------- the bits of the tiles


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.slow
def test_neither_stages_nor_replicas_nor_schedules_nor_memory_nor_zero_stages_change_a_bit(tensor: int) -> None:
    case = replace(BOTH["LAMB, checkpointing, accumulate"], config={}) if tensor > 1 else CASES["LAMB, clipping"]
    expected = str(trained_in_tiles(case, tensor, 2))
    ways = (
        (2 * tensor, Way(context=2)),
        (4 * tensor, Way(2, context=2, zero=1 + tensor % 2, schedule=("zero_bubble_v", "gpipe")[tensor - 1])),
        (4, Way(context=2, zero=3)),
        (8, Way(2, context=2, zero=2 - tensor % 2, more={"order": "context,pipeline,tensor,data"})),
    )
    for turn, (size, way) in enumerate(ways):
        used, memory = way._replace(tensor=tensor), MEMORIES[(turn + tensor) % 3]
        found = run_in_threads(size, lambda comm, w=used, m=memory: trained(case, comm, w, **m))
        assert set(map(str, found)) == {expected}, (used, memory)


@pytest.mark.slow
@pytest.mark.parametrize(("context", "accumulate"), [(2, 2), (3, 1), (4, 2)])
def test_every_zero_stage_adds_the_parts_of_grains_in_one_order(context: int, accumulate: int) -> None:
    """The last grain is short; with ``accumulate`` it has fewer micro-batches than the others."""
    config = {"clip": 0.2, "accumulate": accumulate}
    case = Case(lambda: gpt(layers=1), batches=texts(2, 5 + 4 * accumulate), config=config)
    found = []
    for zero in range(4):
        ranks, memory, way = context * (1 + zero // 2), MEMORIES[(zero + context) % 3], Way(context=context, zero=zero)
        found += run_in_threads(ranks, lambda comm, w=way, m=memory: trained(case, comm, w, **m))
    assert len(set(map(str, found))) == 1, found


# ---------------------------------------------------------------------- predictions, metrics, gradients, checkpoints


@pytest.mark.slow
def test_prediction_and_metrics_are_those_of_one_process_on_every_rank() -> None:
    """The losses are the model's own, one given, and one that takes all scores."""
    x, y = texts(1, 6, length=13)[0]
    y = y.copy()
    y[0, 3:] = -1  # ignored places are none of a rank's weight
    case, losses = BOTH["dropout, clipping"], (None, CrossEntropy(), mz.nn.MeanSquaredError())

    def told(model: Any, group: Any) -> tuple[list[Any], list[Any], list[Any]]:
        with model:
            cuts = product((slice(0, 3), slice(2, 3)), (13, 2, 1))
            predictions = [model.predict(x[rows, :length]) for rows, length in cuts]
            own_x, own_y = part(group, x, y)
            numbers = np.eye(29)[own_y]
            seen = [model.evaluate(own_x, numbers if n == 2 else own_y, loss=loss) for n, loss in enumerate(losses)]
            return predictions, seen, [model.train(own_x, own_y) for _ in range(2)]

    def body(comm: Any, way: Way) -> Any:
        model, _ = placed(case, comm, way)
        return told(model, model.batch_group)

    predictions, metrics, trained_losses = told(alone(case)[0], None)
    for size, way in (
        (2, Way(context=2)),
        (4, Way(context=4, zero=3)),
        (8, Way(2, context=2, zero=2)),
        (8, Way(2, tensor=2, context=2, zero=1)),
    ):
        for found in run_in_threads(size, lambda comm, w=way: body(comm, w)):
            for values, expected in zip(found[0], predictions, strict=True):
                np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-11)
            for values, expected in zip(found[1], metrics, strict=True):
                assert values[0] == pytest.approx(expected[0], rel=1e-12)
                assert values[1:] == expected[1:]
            assert found[2] == pytest.approx(trained_losses, rel=1e-12)


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


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_groups(tmp_path: Any) -> None:
    case, (first, *rest) = BOTH["dropout, clipping"], LENGTHS
    expected = trained_alone(case)

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
    for size, way in ((1, Way()), (2, Way(tensor=2)), (8, Way(tensor=4, context=2, zero=3))):
        for losses in run_in_threads(size, lambda comm, w=way: go_on(comm, w)):
            assert losses == pytest.approx(expected.losses[1:], rel=1e-12)


# ---------------------------------------------------------------------- what is said, and what is refused


@pytest.mark.slow
def test_metadata_counts_all_groups_and_a_part_of_a_matrix_is_held_by_every_context() -> None:
    def body(comm: Any, way: Way) -> Any:
        model, _ = placed(BOTH["dropout, clipping"], comm, way)
        with model:
            told = model.metadata()
            sizes = {"pipeline": way.pipeline, "tensor": way.tensor, "data": 2, "context": 2}
            assert told.group_sizes == sizes
            assert (model.batch_group.size, model._engine.grid.data.size) == (2, 4)
            return tuple(told.group_ranks.values()), told.held_count

    staged = run_in_threads(8, lambda comm: body(comm, Way(2, context=2, zero=3)))
    assert [ranks for ranks, _ in staged] == [(p, 0, d, c) for p in range(2) for d in range(2) for c in range(2)]
    counts = [held for _, held in run_in_threads(8, lambda comm: body(comm, Way(tensor=2, context=2, zero=0)))]
    whole = sum(spec.size for spec in mz.nn.model_specs(gpt(**FOUR_HEADS)) if spec.tied is None)
    assert len(set(counts[:4])) == len(set(counts[4:])) == 1, "all contexts and replicas of a tensor rank hold the same"
    assert whole < counts[0] + counts[4] < 1.3 * whole


def test_zero_1_holds_of_gradients_what_zero_2_does_and_ddp_a_copy_for_each_grain() -> None:
    def held(comm: Any, zero: int) -> tuple[int, int]:
        model, _ = placed(CASES["dropout"], comm, Way(context=2, zero=zero), **PRIVATE)
        with model:
            model.train(*texts(1, 8)[0])
            told = model.metadata()
            assert told.zero_stage == zero
            return told.bytes_on_rank["gradients"], paged(model._engine.layout.gradient_size * 8)

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
