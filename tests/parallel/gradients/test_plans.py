"""Batches of ever other sizes leave nothing behind that grows with the number of sizes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from mpizero.sharding.grad_reduce import KEPT_PLANS
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, STRATEGIES, mlp, points, sharded

#: More sizes than a buffer keeps plans of.
SIZES = KEPT_PLANS + 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_does_not_grow_with_the_number_of_sizes(strategy: str) -> None:
    def run(comm: Any) -> Any:
        model, _ = sharded(strategy, comm, mlp(hidden=()), micro_batch=1, **PRIVATE)
        x, y = points(4 * SIZES)
        held = []
        with model:
            model.reserve(len(x))
            for first in (SIZES, 2 * SIZES):
                for size in range(first, first + SIZES):
                    own = slice(None if comm.rank else 0, size if comm.rank == 0 else 0)
                    model.train(x[own], y[own])
                comm.barrier()
                if comm.rank == 0:
                    gc.collect()
                    held.append(Counter(type(found).__name__ for found in gc.get_objects()))
                comm.barrier()
        return held

    early, late = run_in_threads(2, run)[0]
    grown = {name: count for name, count in (late - early).items() if name.endswith("Plan")}
    assert not grown or max(grown.values()) < SIZES, grown
    assert late["RowsPlan"] + late["WavePlan"] > 0
