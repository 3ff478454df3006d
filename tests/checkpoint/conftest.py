from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray
from mpizero.types import Array

#: Without MPI in h5py there is one back end; that the other is refused is tested with the arguments.
BACKENDS = ["direct", "mpio"] if h5py.get_config().mpi else ["direct"]


@dataclass
class State:
    """Whole arrays, and the pieces of them that a rank of ``size`` holds under odd cuts."""

    arrays: dict[str, Array]
    attributes: dict[str, object] = field(default_factory=lambda: {"step": 7, "layout": [1, 2], "note": None})

    def pieces(self, rank: int, size: int, fill: bool = True) -> list[LocalArray]:
        found = []
        for number, (path, whole) in enumerate(self.arrays.items()):
            flat = whole.reshape(-1)
            # Uneven, different for every array, and empty for some ranks; ranks hold two ranges of each array.
            cuts = sorted((k * k * 7919 + number * 31) % (flat.size + 1) for k in range(1, 2 * size))
            cuts = [0, *cuts, flat.size]
            held = [(cuts[k], cuts[k + 1]) for k in ((rank + number) % size, 2 * size - 1 - (rank + number) % size)]
            values = [(a, flat[a:b].copy() if fill else np.zeros(b - a, whole.dtype)) for a, b in held]
            found.append(LocalArray(path, whole.shape, whole.dtype, tuple(values)))
        return found

    def whole(self) -> list[LocalArray]:
        return [LocalArray(p, a.shape, a.dtype, ((0, a.reshape(-1).copy()),)) for p, a in self.arrays.items()]

    def plus_one(self) -> State:
        """Another state with the same names and shapes."""
        return State({path: whole + 1 for path, whole in self.arrays.items()})

    def agrees(self, requests: list[LocalArray]) -> bool:
        return all(
            values.tobytes() == self.arrays[r.path].reshape(-1)[start : start + values.size].tobytes()
            for r in requests
            for start, values in r.pieces
        )

    def begin(self, folder: Path | str, comm: object = "self", **options: Any) -> checkpoint.PendingSave:
        rank, size = getattr(comm, "rank", 0), getattr(comm, "size", 1)
        return checkpoint.begin(folder, self.pieces(rank, size), self.attributes, comm, **options)

    def save(self, folder: Path | str, comm: object = "self", waits: bool = True, **options: Any) -> None:
        """Save by the call that waits, or beside training."""
        if waits:
            rank, size = getattr(comm, "rank", 0), getattr(comm, "size", 1)
            checkpoint.write(folder, self.pieces(rank, size), self.attributes, comm, **options)
        else:
            self.begin(folder, comm, **options).commit()

    def loads(self, folder: Path | str, comm: object = "self") -> bool:
        wanted = self.pieces(getattr(comm, "rank", 0), getattr(comm, "size", 1), fill=False)
        with checkpoint.open_checkpoint(folder, comm) as reader:
            reader.read(wanted)
            return self.agrees(wanted) and reader.attributes == self.attributes


@pytest.fixture(scope="session")
def state() -> State:
    """Arrays of three blocks, of two and of less, of every kind of shape."""
    draw = np.random.default_rng(3)
    return State(
        {
            "parameters/embedding.weight": draw.normal(size=(1031, 2049)).astype(np.float32),
            "parameters/blocks.0.scale": draw.normal(size=()).astype(np.float64),
            "parameters/blocks.0.prime": draw.normal(size=(13, 7, 1)).astype(np.float64),
            "parameters/none": np.zeros((0, 5), np.float32),
            "optimizer/exp_avg/embedding.weight": draw.normal(size=(1031, 1303)).astype(np.float32),
            "optimizer/bits/half": draw.integers(0, 2**16, size=1001).astype(np.uint16).view(np.float16),
            "optimizer/steps": np.arange(5),
        }
    )


@pytest.fixture(scope="session")
def small() -> State:
    """A few hundred bytes, so that every one of them can be damaged."""
    return State(
        {
            "parameters/a": np.arange(40, dtype=np.float32).reshape(5, 8),
            "parameters/b": np.arange(3, dtype=np.float64),
            "optimizer/exp_avg/a": np.full((5, 8), -2, np.float32),
        }
    )


@pytest.fixture
def folder(world, tmp_path) -> Path:
    """One folder for all ranks."""
    return Path(world.broadcast_object(str(tmp_path)))
