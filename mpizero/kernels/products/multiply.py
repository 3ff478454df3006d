"""Multiply matrices on the CPU, by this package's kernel, by NumPy or by a BLAS library of the user's choice.

It is chosen once in a process. The environment variable ``MPIZERO_BLAS`` is ``mpizero``, ``numpy``, or the path of a
library with the C interface of BLAS. Without it, Intel's MKL is used if the package ``mkl`` is installed; otherwise the
kernel of :mod:`mpizero.kernels.products.product`, or NumPy's BLAS on a CPU without fused multiply-adds.

The kernel multiplies as many matrices at once as NumPy's BLAS has threads, which ``ShardingConfig(threads=...)`` sets.
The number of threads changes no bit of its products.
"""

from __future__ import annotations

import functools
import os
from math import prod

import numpy as np

from mpizero.errors import ConfigError
from mpizero.kernels import pool
from mpizero.kernels.cache import interpreted
from mpizero.kernels.products.blas_library import VARIABLE, BlasLibrary, installed_mkl
from mpizero.types import Array

#: NumPy's own; a subclass of its array may have another.
_NUMPY_UFUNC = np.ndarray.__array_ufunc__
#: Least number of multiplications of a thread's part of a product: 0.2 ms, as much as a second thread takes to begin.
_WORTH_A_THREAD = 1 << 23
#: Rows and columns of a thread's part are multiples of these, which are whole tiles of every CPU.
_ROWS, _COLUMNS = 12, 64


class KernelProducts:
    """Multiply by this package's kernel: see [Note: equal bits] in :mod:`mpizero.kernels.products.product`."""

    name, share, least = "mpizero's kernel", "products of layers", 0

    def __init__(self) -> None:
        from mpizero.kernels.products.product import memory_size, product

        self._kernel, self._memory_size = product, functools.lru_cache(memory_size)

    def memory(self, a: Array) -> Array:
        """Return the temporary memory for a product whose left operand is ``a``."""
        return np.empty(self._memory_size(*a.shape, a.itemsize), a.dtype)

    def product(self, a: Array, b: Array, out: Array) -> bool:
        """Write ``a @ b`` to ``out`` and return True; return False and do nothing if the shapes or dtypes do not fit.

        The dtype is float32 or float64. ``out`` must not overlap an operand.
        """
        (rows, depth), columns, dtype = a.shape, b.shape[1], out.dtype
        if b.shape[0] != depth or out.shape != (rows, columns) or dtype.char not in "fd":
            return False
        if not (a.dtype == b.dtype == dtype and dtype.isnative and out.flags.writeable):
            return False
        work = rows * depth * columns
        if work >= 2 * _WORTH_A_THREAD and (parts := threads_for(work)) > 1:
            self._in_parts(a, b, out, parts)
        elif work:
            self._part(a, b, out)
        else:
            out[...] = 0
        return True

    def _in_parts(self, a: Array, b: Array, out: Array, parts: int) -> None:
        """Divide the longer side of ``out`` by ``parts``, and compute each part in a thread of its own."""
        rows, columns = out.shape
        if rows >= columns:
            tasks = [functools.partial(self._part, a[part], b, out[part]) for part in pool.parts_of(rows, parts, _ROWS)]
        else:
            cut = pool.parts_of(columns, parts, _COLUMNS)
            tasks = [functools.partial(self._part, a, b[:, part], out[:, part]) for part in cut]
        pool.run_tasks(tasks, parts)

    def _part(self, a: Array, b: Array, out: Array) -> None:
        """Compute one thread's part of a product, in temporary memory of its own."""
        memory = self.memory(a)
        if not self._kernel(a, b, out, memory):
            result = np.empty_like(out, order="C")
            self._kernel(np.ascontiguousarray(a), np.ascontiguousarray(b), result, memory)
            out[...] = result


def threads_for(multiplications: int) -> int:
    """Return how many threads to use for a product: see :func:`mpizero.kernels.pool.threads_for`."""
    return pool.threads_for(multiplications, _WORTH_A_THREAD)


@functools.cache
def library() -> KernelProducts | BlasLibrary | None:
    """Return what multiplies instead of NumPy's BLAS, or None for NumPy's BLAS.

    Raises
    ------
    ConfigError
        If ``MPIZERO_BLAS`` names a library that cannot be used, or the kernel on a CPU that cannot run it.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked == "numpy":
        return None
    if asked not in ("", "mpizero"):
        return BlasLibrary(asked)
    if not asked and (found := installed_mkl()) is not None:
        return BlasLibrary(found)
    if fuses():
        return KernelProducts()
    if asked:
        raise ConfigError(f"{VARIABLE}=mpizero: this CPU has no fused multiply-add of vectors; set {VARIABLE}=numpy")
    return None


def by_kernels(x: Array) -> bool:
    """Tell whether this package's kernels multiply NumPy arrays like ``x``, of float32 or float64."""
    return type(x) is np.ndarray and x.dtype.char in "fd" and isinstance(library(), KernelProducts)


def fuses() -> bool:
    """Tell whether the kernel can run here: compiled, on a CPU that multiplies and adds vectors with one rounding."""
    if interpreted():
        return False
    from mpizero.kernels.products.tile import registers

    return registers()[0] > 0


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b`` of NumPy arrays, computed by what :func:`library` returns.

    If ``out`` is given, the product is written to it, and ``out`` is returned.
    """
    chosen = library()
    if chosen is None or a.ndim != 2 or b.ndim != 2 or (chosen.least and prod(a.shape) * b.shape[1] < chosen.least):
        return np.matmul(a, b, out=out)
    plain = type(a) is type(b) is np.ndarray and (out is None or type(out) is np.ndarray)
    if not plain and any(type(x).__array_ufunc__ is not _NUMPY_UFUNC for x in (a, b, out) if x is not None):
        memory = chosen.memory(a)  # for those who measure what a product takes, by arrays that do not compute it
        result: Array = np.matmul(a, b, out=out)
        del memory
        return result
    result = np.empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out
    return result if chosen.product(a, b, result) else np.matmul(a, b, out=out)
