"""No rank holds more than its shard and a buffer while it saves or loads, as Python's allocators count it."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray
from mpizero.checkpoint.format import BLOCK
from tests.checkpoint.conftest import BACKENDS
from tests.traced import traced_peak

pytestmark = pytest.mark.mpi
#: A copy of the shard would be more than the buffer that is allowed.
ROWS, COLUMNS, ARRAYS = 64, 2048, 24 if "mpio" in BACKENDS else 8


@pytest.fixture
def shard(world) -> list[LocalArray]:
    """Equal parts of arrays that make up 4 MB a rank, or 12 MB."""
    rows = ROWS * world.size
    return [
        LocalArray(f"w{k}", (rows, COLUMNS), np.dtype("f4"), ((world.rank * ROWS * COLUMNS, values),))
        for k in range(ARRAYS)
        for values in [np.full(ROWS * COLUMNS, k + world.rank, np.float32)]
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_and_a_load_take_a_buffer_beside_the_shard(world, folder, shard, backend):
    checkpoint.write(folder / "warm", shard, {}, world, backend)
    buffer, number = 2 * BLOCK if backend == "mpio" else BLOCK // 2, count()
    assert traced_peak(lambda: checkpoint.write(folder / f"c{next(number)}", shard, {}, world, backend)) < buffer

    def load() -> None:
        with checkpoint.open_checkpoint(folder / "c0", world) as reader:
            reader.read(shard)

    load()
    assert traced_peak(load) < BLOCK // 2
    world.barrier()


def test_a_save_beside_training_takes_one_copy_of_the_shard_and_a_buffer(world, folder, shard):
    nbytes, number = sum(values.nbytes for array in shard for _, values in array.pieces), count()
    checkpoint.begin(folder / "warm", shard, {}, world).commit()
    most = traced_peak(lambda: checkpoint.begin(folder / f"c{next(number)}", shard, {}, world).commit())
    assert nbytes <= most < nbytes + BLOCK // 2
    world.barrier()
