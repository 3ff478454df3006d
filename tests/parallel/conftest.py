from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mpizero as mz

Sharded = tuple[mz.ShardedModelBase, mz.ShardedOptimizer]


@pytest.fixture
def place() -> Iterator[Callable[..., Sharded]]:
    """Place a model and an optimizer; everything is closed after the test, in the order it was made."""
    made: list[Any] = []

    def make(model: Any, optimizer: Any, strategy: str, comm: Any = None, **settings: Any) -> Sharded:
        config = mz.ShardingConfig(
            comm="self" if comm is None else comm, **{"minimum_parameter_group_size": 1, **settings}
        )
        sharded = mz.distribute(model, optimizer, strategy=strategy, config=config)
        made.extend([sharded, config])
        return sharded, sharded.optimizer

    yield make
    for thing in made:
        thing.close()
