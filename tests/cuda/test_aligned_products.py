"""cuBLAS may round by the address of an array, which differs between layouts: it gets aligned ones."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels import gpu
from tests.support.simulated import ASKED
from tests.support.simulated.arrays import NAMESPACE, SimulatedArray


def lying(values, offset, *, transposed=False):
    """Return a copy of ``values`` that begins ``offset`` bytes after a multiple of 256, stored by rows or columns."""
    values = values.T if transposed else values
    raw = np.zeros(values.nbytes + 512, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    placed = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    placed[...] = values
    return SimulatedArray(placed.T if transposed else placed)


def address(x):
    return x.__cuda_array_interface__["data"][0] % 256


@pytest.fixture
def library(monkeypatch):
    """Return a list of the addresses at which the library is given arrays; its memory is aligned as CuPy's."""
    seen, matmul = [], NAMESPACE.matmul

    def recorded(a, b, out):
        seen.append([address(x) for x in (a, b, out)])
        return matmul(a, b, out=out)

    monkeypatch.setattr(NAMESPACE, "matmul", recorded, raising=False)
    monkeypatch.setattr(NAMESPACE, "empty", lambda shape, dtype: lying(np.empty(shape, dtype), 0), raising=False)
    monkeypatch.setattr(
        NAMESPACE,
        "array",
        lambda x, order: lying(x.values, 0, transposed=x.flags.f_contiguous and not x.flags.c_contiguous),
        raising=False,
    )
    return seen


@pytest.mark.parametrize(
    ("places", "transposed"),
    [((0, 0, 0), True), ((4, 0, 0), False), ((0, 8, 0), True), ((0, 0, 252), False), ((4, 8, 12), True)],
)
def test_a_product_of_arrays_anywhere_is_one_of_aligned_arrays(library, places, transposed):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    left, right, out = lying(a, places[0], transposed=transposed), lying(b, places[1]), lying(a @ b * 0, places[2])
    gpu.multiply(left, right, out)
    assert library == [[0, 0, 0]]
    assert np.allclose(out.get(), a @ b)


@pytest.mark.skipif(not ASKED, reason="opens a simulated GPU: NUMBA_ENABLE_CUDASIM=1")
@pytest.mark.parametrize("place", [0, 4])
def test_so_is_a_product_in_sixteen_bits(library, place):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    out = lying(a @ b * 0, place)
    with gpu.open_device(0).multiplying_in("bfloat16"):
        gpu.multiply(*(gpu.operand(lying(x, 4)) for x in (a, b)), out)
    assert [outs for *_, outs in library] == [0]
    assert np.allclose(out.get(), a @ b, atol=0.1)
