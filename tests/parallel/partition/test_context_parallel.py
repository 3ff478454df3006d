"""What groups that cut sequences add, hold and refuse; the bits of their trainings are in test_hybrid.py."""

from __future__ import annotations

from typing import Any

import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError
from mpizero.sharding.params import paged
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE
from tests.parallel.parallel_layouts import (
    Case,
    Way,
    gpt,
    mlp,
    placed,
    same_within_rounding,
    texts,
    trained,
    trained_alone,
)

DROPOUT = Case(lambda: gpt(layers=2, dtype="float64"), batches=texts(2, 9))


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way(context=3), Way(3, context=3), Way(tensor=2, context=3), Way(tensor=3, context=2)])
def test_three_parts_of_sequences_or_layers_which_are_no_tiles_train_what_one_process_trains(way: Way) -> None:
    lengths = [texts(1, 5, n, length=n)[0] for n in (13, 30, 2)]
    case = Case(lambda: gpt(layers=2, heads=6, sequence=30, dtype="float64"), batches=lengths, config={"clip": 0.2})
    size = way.pipeline * way.tensor * way.context
    found = run_in_threads(size, lambda comm: trained(case, comm, way, **MEMORIES[size % 3]))
    assert found == [found[0]] * size
    assert same_within_rounding(found[0], trained_alone(case))


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


def test_zero_1_holds_of_gradients_what_zero_2_does_and_ddp_a_copy_for_each_grain() -> None:
    def held(comm: Any, zero: int) -> tuple[int, int]:
        with placed(DROPOUT, comm, Way(context=2, zero=zero), **PRIVATE) as model:
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
        with placed(DROPOUT, comm, Way(context=2)) as model:
            other = x[::-1].copy() if comm.rank == 1 else x
            with pytest.raises(DataError, match="rank 1 has another x than rank 0"):
                model.train(other, y)
            with pytest.raises(DataError, match="context parallelism cuts inputs and targets"):
                model.train(x[:, 0], y[:, 0])
            model.train(x, y)

    run_in_threads(2, peers)
