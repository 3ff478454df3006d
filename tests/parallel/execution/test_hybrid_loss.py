"""A loss of the user's own sees whole predictions, however the last block is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from tests.parallel.parallel_layouts import of_first


class Twice:
    """Cross-entropy, twice."""

    def __init__(self) -> None:
        self.once = mz.nn.CrossEntropy()

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        """Refuse a part of the classes."""
        assert prediction.shape[-1] == 30
        loss, weight, cache = self.once.forward(prediction, target)
        return 2 * loss, weight, cache

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        """Twice the gradient."""
        return self.once.backward(cache, 2 * scale)


def loss_of(comm: Any, pipeline: int, tensor: int) -> float:
    model = mz.nn.GPT(dim=8, layers=2, heads=4, sequence=5, vocabulary=30, dtype="float64")
    ids = np.random.default_rng(0).integers(0, 30, (2, 5))
    config = mz.ShardingConfig(comm="self" if comm is None else comm, micro_batch=1)
    with config, mz.HybridShardedModel(model, config, pipeline, tensor, zero_stage=0) as sharded:
        first = sharded.batch_group.rank == 0
        return sharded.compute_gradients(ids[: 2 * first], ids[: 2 * first], loss=Twice()).loss


@pytest.mark.mpi(min_size=2)
def test_a_loss_of_the_users_own_takes_whole_predictions(world: Any) -> None:
    ways = {2: [(1, 2), (2, 1)], 4: [(2, 1), (2, 2), (1, 4)], 8: [(1, 2), (2, 2)]}
    if world.size not in ways:
        pytest.skip("an even number of ranks")
    expected = of_first(world, lambda: loss_of(None, 1, 1))
    for pipeline, tensor in ways[world.size]:
        assert loss_of(world, pipeline, tensor) == pytest.approx(expected, rel=1e-12), (pipeline, tensor)
