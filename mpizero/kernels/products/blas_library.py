"""Load a BLAS library other than NumPy's, and multiply with it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from mpizero._util.text import installed_version
from mpizero.errors import ConfigError
from mpizero.types import Array

VARIABLE = "MPIZERO_BLAS"

#: Prefixes of the functions' names; the second one is used by SciPy's own OpenBLAS.
_PREFIXES = ("", "scipy_")
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112
_LARGEST = 2**31 - 1
#: Setting of MKL ("conditional numerical reproducibility", strict) that gives the same bits for any alignment of arrays
#: and any number of threads.
_STRICT = 0x10000
_PRODUCT = (
    *(ctypes.c_int,) * 6,
    None,  # alpha
    ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
    None,  # beta
    ctypes.c_void_p, ctypes.c_int,
)  # fmt: skip


class BlasLibrary:
    """Represent a BLAS library other than NumPy's.

    Parameters
    ----------
    path : str or Path
        Path of the shared library.

    Attributes
    ----------
    path : str
        The path as given.
    name : str
        MKL's name and version; for another library the name of its file.
    share : str
        Which products it is asked for.

    Raises
    ------
    ConfigError
        If the library cannot be loaded, or lacks ``cblas_sgemm`` or ``cblas_dgemm``.
    """

    #: Least number of multiplications for which the library is called; such a call takes some 4 microseconds.
    least = 1 << 20
    share = "large products"

    def __init__(self, path: str | Path) -> None:
        way_out = f"set {VARIABLE} to a BLAS library with the C interface, to 'mpizero' or to 'numpy'"
        try:
            found = ctypes.CDLL(str(path))
            prefix = next((prefix for prefix in _PREFIXES if hasattr(found, f"{prefix}cblas_sgemm")), "")
            single, double = (getattr(found, f"{prefix}cblas_{kind}gemm") for kind in "sd")
        except (OSError, AttributeError) as error:
            raise ConfigError(f"{VARIABLE}: cannot multiply with {path}: {error}; {way_out}") from None
        self.path = str(path)
        self.name = _make_mkl_reproducible(found) if hasattr(found, "MKL_CBWR_Set") else Path(path).name
        self._products: dict[str, Any] = {"f": _typed(single, ctypes.c_float), "d": _typed(double, ctypes.c_double)}

    @staticmethod
    def memory(a: Array) -> None:
        """Return nothing: the library has temporary memory of its own."""

    def product(self, a: Array, b: Array, out: Array) -> bool:
        """Write ``a @ b`` to ``out`` and return True; return False and do nothing if the library cannot compute it.

        The three arrays are two-dimensional. The library can multiply arrays of one dtype, float32 or float64, whose
        rows (or, for an operand, columns) are contiguous. ``out`` must not overlap an operand.
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


def _order(x: Array) -> tuple[int, int] | None:
    """Return BLAS's transposition flag and leading dimension (in elements) for a matrix, or None.

    None means that BLAS cannot read the matrix, because neither its rows nor its columns are contiguous, or because it
    is too large for 32-bit integers.
    """
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
    """Make MKL compute the same bits in every run; return its name and version.

    If the user has set the environment variable ``MKL_CBWR``, leave MKL's setting as it is.
    """
    if not os.environ.get("MKL_CBWR"):
        branch = found.MKL_CBWR_Get_Auto_Branch()
        if found.MKL_CBWR_Set(branch | _STRICT):
            found.MKL_CBWR_Set(branch)
    text = ctypes.create_string_buffer(256)
    found.MKL_Get_Version_String(text, len(text))
    return text.value.decode(errors="replace").strip()


def installed_mkl() -> Path | None:
    """Return the library in the installed package ``mkl``, or None."""
    if installed_version("mkl") is None:
        return None
    from importlib import metadata

    files = metadata.distribution("mkl").files or ()
    libraries = sorted(str(file.locate()) for file in files if file.name.startswith("libmkl_rt.so"))
    return next((path for path in map(Path, reversed(libraries)) if path.exists()), None)
