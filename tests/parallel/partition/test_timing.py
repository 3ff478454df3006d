"""Measured costs cut a pipeline the same way on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.sharding.pipeline import measure_blocks, measured_costs


def micro_batch() -> tuple[Any, Any]:
    ids = np.random.default_rng(0).integers(0, 32, (2, 16))
    return ids, ids


def model(layers: int = 3) -> mz.nn.GPT:
    return mz.nn.GPT(dim=32, layers=layers, heads=2, sequence=16, vocabulary=32)


def test_every_block_has_three_positive_times() -> None:
    times = measure_blocks(model(), *micro_batch())
    assert list(times) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert all(min(block) >= 0 and block.forward > 0 for block in times.values())


def test_a_black_box_cannot_be_measured_block_by_block() -> None:
    box = mz.FunctionModel({"w": np.zeros(3, np.float32)}, lambda parameters, batch: (0.0, {}, 1.0))
    with pytest.raises(ConfigError, match="black box"):
        measure_blocks(box, *micro_batch())


@pytest.mark.mpi
def test_all_ranks_get_the_costs_that_rank_0_has_measured(world: Any) -> None:
    with mz.ShardingConfig(comm=world) as config:
        costs = measured_costs(model(), *micro_batch(), config)
        assert world.allgather_object(costs) == [costs] * world.size
        stages = min(world.size, len(costs))
        if world.size % stages == 0:
            with mz.HybridShardedModel(model(), config, stages, costs=costs) as sharded:
                held = sharded.engine.layout.size
                counts = world.allgather_object((sharded.metadata().group_ranks["data"] == 0) * held)
                # The head's copy of the token table is the only thing that two stages hold.
                assert sum(counts) - sharded.parameter_count in (0, 32 * 32)
