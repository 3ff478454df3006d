from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from mpizero import data
from mpizero.comm import Communicator, as_communicator
from mpizero.layout import GrainRule


@dataclass
class Ranks:
    """What batches ask a configuration for."""

    communicator: Communicator
    micro_batch: int | None = None

    def grain_size(self, global_batch: int) -> int:
        return GrainRule(self.micro_batch).grain_size(global_batch)


@pytest.fixture
def ranks() -> Callable[..., Ranks]:
    """Make a configuration: ``ranks(comm, micro_batch=None)``; without a communicator it is one process."""

    def make(comm: Communicator | None = None, micro_batch: int | None = None) -> Ranks:
        return Ranks(as_communicator("self" if comm is None else comm), micro_batch)

    return make


@pytest.fixture
def numbers() -> Callable[[int], data.ArraySource]:
    """Make a source whose sample i is the number i, in x and negated in y."""
    return lambda length: data.ArraySource(np.arange(length), -np.arange(length))
