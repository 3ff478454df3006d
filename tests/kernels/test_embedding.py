from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import layers
from tests.support.reference import layers as reference

DTYPES = (np.float32, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "count"), [(1, 1, 0), (1, 1, 1), (5, 3, 9), (7, 65, 200), (300, 16, 33)])
def test_rows_are_copied_and_their_gradients_added_in_order(rows, width, count, dtype):
    rng = np.random.default_rng(count)
    table, ids = rng.normal(size=(rows, width)).astype(dtype), rng.integers(0, rows, count)
    table.flags.writeable = False
    got, want = np.empty((count, width), dtype), np.empty((count, width), dtype)
    layers.gather(table, ids, got)
    reference.gather(table, ids, want)
    assert got.tobytes() == want.tobytes() == table[ids].tobytes()
    dy = rng.normal(size=(count, width)).astype(dtype)
    dgot, dwant = np.ones((rows, width), dtype), np.ones((rows, width), dtype)
    layers.scatter_add(dy, ids, dgot)
    reference.scatter_add(dy, ids, dwant)
    assert dgot.tobytes() == dwant.tobytes()


def test_scatter_is_the_adjoint_of_gather():
    rng = np.random.default_rng(0)
    table, dy, ids = rng.normal(size=(6, 4)), rng.normal(size=(20, 4)), rng.integers(0, 6, 20)
    out, dtable = np.empty((20, 4)), np.zeros((6, 4))
    layers.gather(table, ids, out)
    layers.scatter_add(dy, ids, dtable)
    assert (out * dy).sum() == pytest.approx((table * dtable).sum(), rel=1e-12)


def test_ids_outside_of_the_table_read_and_write_nothing():
    table, ids = np.ones((3, 2), np.float32), np.array([-1, 3, 2])
    out, dtable = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32)
    layers.gather(table, ids, out)
    layers.scatter_add(table, ids, dtable)
    assert np.isnan(out[:2]).all()
    assert (out[2] == 1).all()
    assert dtable.tolist() == [[0, 0], [0, 0], [1, 1]]
