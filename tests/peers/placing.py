"""Models of other libraries, placed and trained on threads as ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mpizero as mz
from mpizero.testing import run_in_threads

SIZES = ("pipeline_parallel_size", "schedule", "virtual_stages")


@contextmanager
def placed(model: Any, comm: Any, strategy: str = "ddp", *, optimizer: Any = None, **layout: Any) -> Iterator[Any]:
    """Place a model; ``layout`` has settings of the configuration, and for a hybrid model also its sizes."""
    sizes = {key: layout.pop(key) for key in SIZES if key in layout}
    optimizer = optimizer or mz.AdamW(1e-3)
    settings = {"micro_batch": 2, "minimum_parameter_group_size": 1, **layout}
    with mz.ShardingConfig(comm=comm, **settings) as config:
        if sizes:
            stage = ["ddp", "zero1", "zero2", "zero3"].index(strategy)
            made = mz.HybridShardedModel(model, config, optimizer=optimizer, zero_stage=stage, **sizes)
        else:
            made = mz.distribute(model, optimizer, strategy=strategy, config=config)
        with made:
            yield made


def digest(model: Any, *_: Any) -> str:
    return str(model.parameters_sha256())


def trained(
    make: Callable[[], Any],
    batch: Any,
    ranks: int = 1,
    strategy: str = "ddp",
    *,
    steps: int = 2,
    result: Callable[..., Any] = digest,
    **layout: Any,
) -> Any:
    """Train what ``make`` makes on threads as ranks, each on its samples; return ``result(model, x, y)`` of rank 0."""

    def on(comm: Any) -> Any:
        replicas = comm.size // layout.get("pipeline_parallel_size", 1)
        place = comm.rank % replicas
        x, y = (one[len(one) * place // replicas : len(one) * (place + 1) // replicas] for one in batch)
        with placed(make(), comm, strategy, **layout) as model:
            for _ in range(steps):
                model.train(x, y)
            return result(model, x, y)

    found = run_in_threads(ranks, on)
    assert result is not digest or set(found) == {found[0]}
    return found[0]
