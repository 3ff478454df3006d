from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
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
def compressed(tmp_path) -> tuple[Path, np.ndarray]:
    """A file of 100 samples in 13 chunks of 8, of which the last holds 4, and their values."""
    values = np.random.default_rng(0).normal(size=(100, 5)).astype("f4")
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 5), compression="gzip")
        file["y"] = np.arange(100)
    return tmp_path / "d.h5", values


@pytest.fixture
def numbers() -> Callable[[int], data.ArraySource]:
    """Make a source whose sample i is the number i, in x and negated in y."""
    return lambda length: data.ArraySource(np.arange(length), -np.arange(length))
