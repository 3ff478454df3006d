"""Call a BLAS of the user's choice for large products, besides the one inside NumPy.

NumPy's wheels bring OpenBLAS; Intel's MKL, for one, multiplies the shapes of a transformer block about a tenth faster.
The library that multiplies is chosen once in a process: ``MPIZERO_BLAS`` names a file with the C interface of BLAS
(``cblas_sgemm``, 32-bit integers), or says ``numpy``. Without it, MKL is taken where the package ``mkl`` is installed
(the extra of that name), and NumPy's else. Small products stay with NumPy, whose call costs less.

[Note: few rows] A few rows by a transposed matrix (the gradient of a layer's input: ``dy @ weight.T``) take OpenBLAS
longer than the transpose of the same, ``weight @ dy.T``, with a copy of the small result: by 13 % with 64 rows, by half
with 16, on a core with AVX-512. From 200 rows on it is the other way round.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpizero.errors import ConfigError
from mpizero.types import Array

#: Multiplications from which a product is worth a foreign call, which takes some 4 microseconds.
LARGE = 1 << 20
#: Rows up to which NumPy is asked for the transpose of a product: [Note: few rows].
FEW_ROWS = 128
VARIABLE = "MPIZERO_BLAS"

#: Of the names of functions; the second is that of SciPy's own library.
_PREFIXES = ("", "scipy_")
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112
_LARGEST = 2**31 - 1
#: MKL's promise of the same bits wherever arrays begin and however many threads there are: its "conditional numerical
#: reproducibility", strict.
_STRICT = 0x10000
_PRODUCT = (
    *(ctypes.c_int,) * 6,
    None,  # alpha
    ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
    None,  # beta
    ctypes.c_void_p, ctypes.c_int,
)  # fmt: skip


class BlasLibrary:
    """Call a BLAS outside of NumPy.

    Parameters
    ----------
    path : str or Path
        The shared library.

    Attributes
    ----------
    name : str
        What it calls itself, or its file.

    Raises
    ------
    ConfigError
        It cannot be loaded, or has no ``cblas_sgemm`` and ``cblas_dgemm``.
    """

    def __init__(self, path: str | Path) -> None:
        way_out = f"set {VARIABLE} to a BLAS library with the C interface, or to 'numpy'"
        try:
            found = ctypes.CDLL(str(path))
            prefix = next((prefix for prefix in _PREFIXES if hasattr(found, f"{prefix}cblas_sgemm")), "")
            single, double = (getattr(found, f"{prefix}cblas_{kind}gemm") for kind in "sd")
        except (OSError, AttributeError) as error:
            raise ConfigError(f"{VARIABLE}: cannot multiply with {path}: {error}; {way_out}") from None
        self.path = str(path)
        self.name = _make_mkl_reproducible(found) if hasattr(found, "MKL_CBWR_Set") else Path(path).name
        self._products: dict[str, Any] = {"f": _typed(single, ctypes.c_float), "d": _typed(double, ctypes.c_double)}

    def product(self, a: Array, b: Array, out: Array) -> bool:
        """Write ``a @ b`` to ``out``; False, and nothing is done, where this library cannot.

        All are two-dimensional and of one dtype, float32 or float64; an operand may be a transposed
        view. ``out`` overlaps neither.
        """
        product = self._products.get(out.dtype.char)
        left, right, result = _order(a), _order(b), _order(out)
        rows, columns = out.shape
        if product is None or not (left and right and result) or result[0] != _AS_IT_IS:
            return False
        if not (a.dtype == b.dtype == out.dtype and out.flags.writeable):
            return False
        if a.shape != (rows, b.shape[0]) or b.shape[1] != columns:
            return False
        product(
            _ROW_MAJOR, left[0], right[0], rows, columns, a.shape[1],
            1.0, a.ctypes.data, left[1], b.ctypes.data, right[1], 0.0, out.ctypes.data, result[1],
        )  # fmt: skip
        return True


@functools.cache
def library() -> BlasLibrary | None:
    """Return the BLAS that multiplies instead of NumPy's, None where that one does.

    Raises
    ------
    ConfigError
        ``MPIZERO_BLAS`` names a library that cannot be used.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked:
        return None if asked == "numpy" else BlasLibrary(asked)
    return None if (found := _installed_mkl()) is None else BlasLibrary(found)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Compute ``a @ b`` of NumPy arrays, into ``out`` where it is given."""
    if not _large(a, b) or _multiplies_itself(a) or _multiplies_itself(b):
        return np.matmul(a, b, out=out)
    chosen = library()
    if chosen is None:
        return _by_numpy(a, b, out)
    result = np.empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out
    return result if chosen.product(a, b, result) else np.matmul(a, b, out=out)


def _by_numpy(a: Array, b: Array, out: Array | None) -> Array:
    if len(a) > FEW_ROWS or not (a.flags.c_contiguous and b.T.flags.c_contiguous) or not _takes(out, a, b):
        return np.matmul(a, b, out=out)
    transposed = np.matmul(b.T, a.T).T
    if out is None:
        return np.ascontiguousarray(transposed)
    out[...] = transposed
    return out


def _takes(out: Array | None, a: Array, b: Array) -> bool:
    """Tell whether a product can be copied to ``out`` as it is; NumPy says what is wrong otherwise."""
    return out is None or (out.shape == (len(a), b.shape[1]) and a.dtype == b.dtype == out.dtype)


def _large(a: Array, b: Array) -> bool:
    return a.ndim == b.ndim == 2 and prod(a.shape) * b.shape[1] >= LARGE


def _multiplies_itself(x: Array) -> bool:
    """Tell whether an array is of a kind that says what its products are."""
    return type(x).__array_ufunc__ is not np.ndarray.__array_ufunc__


def _order(x: Array) -> tuple[int, int] | None:
    """Return how BLAS reads a matrix, and its leading dimension; None where it cannot."""
    (rows, columns), (down, across), size = x.shape, x.strides, x.itemsize
    if across == size and down >= columns * size and down % size == 0:
        order, leading = _AS_IT_IS, down // size
    elif down == size and across >= rows * size and across % size == 0:
        order, leading = _TRANSPOSED, across // size
    else:
        return None
    return (order, leading) if max(leading, rows, columns) <= _LARGEST else None


def _typed(function: Any, scalar: Any) -> Any:
    function.argtypes = tuple(scalar if kind is None else kind for kind in _PRODUCT)
    function.restype = None
    return function


def _make_mkl_reproducible(found: ctypes.CDLL) -> str:
    """Have MKL give the same bits for the same numbers, unless the user has said what else; return its name."""
    if not os.environ.get("MKL_CBWR"):
        branch = found.MKL_CBWR_Get_Auto_Branch()
        if found.MKL_CBWR_Set(branch | _STRICT):
            found.MKL_CBWR_Set(branch)
    text = ctypes.create_string_buffer(256)
    found.MKL_Get_Version_String(text, len(text))
    return text.value.decode(errors="replace").strip()


def _installed_mkl() -> Path | None:
    with suppress(metadata.PackageNotFoundError):
        files = metadata.distribution("mkl").files or ()
        libraries = sorted(str(file.locate()) for file in files if file.name.startswith("libmkl_rt.so"))
        return next((path for path in map(Path, reversed(libraries)) if path.exists()), None)
    return None
