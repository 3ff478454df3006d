"""Large products by a BLAS outside of NumPy: MKL where it is installed, else the one inside SciPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpizero.errors import ConfigError
from mpizero.kernels import matmul

MKL = matmul.installed_mkl()
OTHER = MKL or next(iter(Path(np.__file__).parents[1].glob("scipy.libs/libscipy_openblas*.so")), None)
needs_library = pytest.mark.skipif(OTHER is None, reason="needs the extra `mkl`, or SciPy")


@pytest.fixture(scope="module")
def library():
    return matmul.BlasLibrary(OTHER)


def matrix(rows, columns, dtype="f", transposed=False, seed=0):
    shape = (columns, rows) if transposed else (rows, columns)
    x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return x.T if transposed else x


@needs_library
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("left", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("right", [False, True], ids=["rows", "columns"])
def test_products_of_views_are_those_of_numpy_within_rounding(library, dtype, left, right):
    a, b = matrix(70, 40, dtype, left), matrix(40, 90, dtype, right, seed=1)
    out = np.full((70, 90), np.nan, dtype)
    assert library.product(a, b, out)
    np.testing.assert_allclose(out, a.astype("d") @ b.astype("d"), rtol=0, atol=40 * np.finfo(dtype).eps * 20)


@needs_library
def test_rows_that_lie_apart_are_read_and_written_in_place(library):
    a, b, out = matrix(30, 50)[:, 3:23], matrix(60, 41, seed=1)[5:25, 1:], np.zeros((30, 60), "f")
    assert library.product(a, b, out[:, 7:47])
    np.testing.assert_allclose(out[:, 7:47], a @ b, rtol=1e-5, atol=1e-5)
    assert not out[:, :7].any()
    assert not out[:, 47:].any()


@pytest.mark.skipif(MKL is None, reason="needs the extra `mkl`")
def test_bits_of_mkl_do_not_depend_on_where_arrays_begin(library):
    a, b, first = matrix(128, 96), matrix(96, 64, seed=1), np.empty((128, 64), "f")
    assert library.product(a, b, first)
    for offset in (1, 4, 7, 8):
        moved = [np.empty(x.size + 16, "f")[offset : offset + x.size].reshape(x.shape) for x in (a, b, first)]
        moved[0][:], moved[1][:] = a, b
        assert library.product(*moved)
        assert moved[2].tobytes() == first.tobytes()


@needs_library
@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        (matrix(8, 4), matrix(4, 8), np.empty((8, 8), "d")),
        (matrix(8, 4), matrix(4, 8, "d"), np.empty((8, 8), "f")),
        (matrix(8, 4, "i"), matrix(4, 8, "i"), np.empty((8, 8), "i")),
        (matrix(8, 4), matrix(4, 8), np.empty((8, 8), "f").T),
        (matrix(8, 8)[::2, ::2], matrix(4, 8), np.empty((4, 8), "f")),
        (matrix(8, 4), matrix(5, 8), np.empty((8, 8), "f")),
        (matrix(8, 4), matrix(4, 8), np.empty((8, 9), "f")),
        (np.broadcast_to(matrix(1, 4), (8, 4)), matrix(4, 8), np.empty((8, 8), "f")),
    ],
    ids=["out", "right", "integers", "columns", "steps", "inner", "shape", "repeated"],
)
def test_what_the_library_cannot_is_left_to_numpy(library, a, b, out):
    assert not library.product(a, b, out)


SCRIPT = """
import numpy as np
from mpizero.kernels import matmul as blas
from mpizero.kernels.matmul import library, matmul
a, b = (np.random.default_rng(s).standard_normal((128, 128)).astype("f") for s in (0, 1))
used = []
real = blas.BlasLibrary.product
blas.BlasLibrary.product = lambda self, *arrays: used.append(1) or real(self, *arrays)
out = np.empty((128, 128), "f")
assert matmul(a, b, out) is out and np.allclose(out, a @ b, atol=1e-4)
assert np.allclose(matmul(a, b), out)
matmul(a[:8], b)
print(len(used), library() is None)
"""


def run(**variables):
    environment = {name: value for name, value in os.environ.items() if name != matmul.VARIABLE} | variables
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, text=True, capture_output=True, check=False)
    return found.stdout + found.stderr


@pytest.mark.slow
def test_numpy_multiplies_where_it_is_asked_for():
    assert run(MPIZERO_BLAS="numpy") == "0 True\n"


@pytest.mark.slow
@needs_library
def test_a_named_library_makes_the_large_products_and_no_others():
    assert run(MPIZERO_BLAS=str(OTHER)) == "2 False\n"


@pytest.mark.slow
@pytest.mark.skipif(MKL is None, reason="needs the extra `mkl`")
def test_mkl_multiplies_where_it_is_asked_for_and_only_there():
    assert run(MPIZERO_BLAS="mkl") == "2 False\n"
    assert run() == "0 True\n"


@pytest.mark.skipif(MKL is not None, reason="needs a machine without the extra `mkl`")
def test_mkl_that_is_asked_for_and_not_installed_is_an_error(monkeypatch):
    monkeypatch.setenv("MPIZERO_BLAS", "mkl")
    with pytest.raises(ConfigError, match="MPIZERO_BLAS=mkl: the package mkl is not installed: pip install"):
        matmul.library.__wrapped__()


@pytest.mark.parametrize("name", ["/nowhere/libblas.so", "libc.so.6"])
def test_a_library_that_cannot_multiply_is_an_error_that_says_what_can(name):
    with pytest.raises(ConfigError, match=f"MPIZERO_BLAS: cannot multiply with {name}: .*; set MPIZERO_BLAS to a BLAS"):
        matmul.BlasLibrary(name)
