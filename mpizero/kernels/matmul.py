"""Multiply matrices on the CPU, by this package's kernel, by NumPy or by a BLAS library of the user's choice.

The implementation is chosen once per process (:func:`library`). The environment variable ``MPIZERO_BLAS`` is
``mpizero``, ``numpy``, ``mkl`` (the library of the package of this name), or the path of a library with the C interface
of BLAS. Without it the kernel is used, or NumPy's BLAS on a CPU without fused multiply-adds.

The kernel, :func:`product`, cuts the left operand into blocks that stay in the cache and the right one into panels as
wide as a tile; both are packed, that is copied into the order in which tiles read them (Goto and van de Geijn, *Anatomy
of High-Performance Matrix Multiplication*, 2008). While a tile computes, the next panel is prefetched. A large product
is divided among as many threads as NumPy's BLAS has, which ``ShardingConfig(threads=...)`` sets. The number of threads
changes no bit of the product.

[Note: equal bits] The bits of an element of a product do not depend on the shape of the product. An element is a sum
over the inner axis. ``DEPTH`` terms at a time are added in ascending order, each by a fused multiply-add, and then
these sums in ascending order. The bits depend neither on the numbers of rows and columns, nor on the element's
position, on strides, threads or the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpizero._util.text import installed_version, notice
from mpizero.errors import ConfigError
from mpizero.kernels import jit, recording
from mpizero.kernels.jit import apart, kernel
from mpizero.kernels.machine_code import interpreted, speaks
from mpizero.kernels.matmul_tile import (
    HIGH,
    LOW,
    UNROLL,
    VECTOR,
    SumsTile,
    VectorCopy,
    VectorTranspose,
    registers,
    tile_columns,
)
from mpizero.types import Array

VARIABLE = "MPIZERO_BLAS"


#: NumPy's own; a subclass of its array may have another.
_NUMPY_UFUNC = np.ndarray.__array_ufunc__


def matmul(a: Array, b: Array, out: Array | None = None, between: Callable[[], object] | None = None) -> Array:
    """Return ``a @ b`` of NumPy arrays, computed by the implementation that :func:`library` returns.

    NumPy computes the products that this implementation cannot compute, and those that are too small for it. If ``out``
    is given, the product is written to it, and ``out`` is returned. ``between`` is called after each part of a long
    product, if this package's kernel computes the product: messages can then progress.
    """
    chosen = library()
    if chosen is None or a.ndim != 2 or b.ndim != 2 or (chosen.least and prod(a.shape) * b.shape[1] < chosen.least):
        return _by_numpy(chosen, a, b, out)
    plain = type(a) is type(b) is np.ndarray and (out is None or type(out) is np.ndarray)
    if not plain and any(type(x).__array_ufunc__ is not _NUMPY_UFUNC for x in (a, b, out) if x is not None):
        memory = chosen.memory(a, b)  # for those who measure what a product takes, by arrays that do not compute it
        result: Array = np.matmul(a, b, out=out)
        del memory
        return result
    result = np.empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out
    if between is not None and isinstance(chosen, KernelProducts):
        done = chosen.product_by_parts(a, b, result, between)
    elif isinstance(chosen, KernelProducts):
        done = chosen.product(a, b, result)
    else:
        done = recording.call(chosen.product, a, b, result)
    return result if done else _by_numpy(chosen, a, b, result)


def _by_numpy(chosen: KernelProducts | BlasLibrary | None, a: Array, b: Array, out: Array | None) -> Array:
    """Multiply by NumPy; if this package's kernel computes all other products, count this one and print a notice."""
    if out is None and a.ndim == b.ndim == 2 and type(a) is type(b) is np.ndarray:  # a subclass makes its own result
        out = np.empty((a.shape[0], b.shape[1]), np.result_type(a, b))
    result: Array = np.matmul(a, b) if out is None else recording.call(np.matmul, a, b, out)
    if isinstance(chosen, KernelProducts):
        what = f"NumPy multiplies {a.dtype} with {a.ndim} axes by {b.dtype} with {b.ndim}"
        if not chosen.by_numpy and speaks():
            notice(f"{what}, which mpizero's kernel does not: the bits are this CPU's")
        chosen.by_numpy[what] = chosen.by_numpy.get(what, 0) + 1
    return result


@functools.cache
def library() -> KernelProducts | BlasLibrary | None:
    """Return the implementation of matrix products; None stands for NumPy's BLAS.

    Raises
    ------
    ConfigError
        If ``MPIZERO_BLAS`` names a library that cannot be used, or the kernel on a CPU that cannot run it.
    """
    requested = os.environ.get(VARIABLE, "")
    if requested == "numpy":
        return None
    if requested == "mkl":
        if (mkl := installed_mkl()) is None:
            raise ConfigError(f"{VARIABLE}=mkl: the package mkl is not installed: pip install 'mpizero[mkl]'")
        return BlasLibrary(mkl)
    if requested not in ("", "mpizero"):
        return BlasLibrary(requested)
    if fuses():
        return KernelProducts()
    if requested:
        raise ConfigError(f"{VARIABLE}=mpizero: this CPU has no fused multiply-add of vectors; set {VARIABLE}=numpy")
    if not interpreted() and speaks():
        notice("this CPU has no fused multiply-adds of vectors: NumPy multiplies, and the bits are this CPU's")
    return None


def foreign_products() -> str:
    """Say which library multiplies matrices in place of this package's kernel, and why; "" if the kernel does."""
    chosen = library()
    if isinstance(chosen, KernelProducts):
        return "; ".join(chosen.by_numpy)
    if chosen is not None:
        return f"{chosen.name} multiplies ({VARIABLE}={os.environ[VARIABLE]})"
    if interpreted():
        return "NumPy multiplies (kernels are not compiled: NUMBA_DISABLE_JIT=1)"
    return f"NumPy multiplies ({f'{VARIABLE}=numpy' if registers()[0] else 'this CPU has no fused multiply-adds'})"


def by_kernels(x: Array) -> bool:
    """Tell whether this package's kernels multiply NumPy arrays like ``x``, of float32 or float64."""
    return type(x) is np.ndarray and x.dtype.char in "fd" and isinstance(library(), KernelProducts)


def fuses() -> bool:
    """Tell whether the kernel can run here: compiled, on a CPU that multiplies and adds vectors with one rounding."""
    return not interpreted() and registers()[0] > 0


#: Least number of multiplications of a thread's part of a product: 0.2 ms, as much as a second thread takes to begin.
_WORTH_A_THREAD = 1 << 23
#: Multiplications of a part of a long product: about 5 ms, in which a link of 1 Gbit/s takes 0.6 MB.
_LONG = 1 << 27
#: Rows and columns of a thread's part are multiples of these, which are whole tiles of every CPU.
_ROWS, _COLUMNS = 12, 64


class KernelProducts:
    """Multiply matrices by this package's kernel, :func:`product`: see [Note: equal bits]."""

    name, applies_to, least = "mpizero's kernel", "products of layers", 0

    def __init__(self) -> None:
        #: What NumPy has multiplied because the kernel does not, in words, and how often.
        self.by_numpy: dict[str, int] = {}

    def memory(self, a: Array, b: Array) -> Array:
        """Return the temporary memory for the product ``a @ b``."""
        return recording.temporary(memory_size(*a.shape, b.shape[1], a.itemsize), a.dtype)

    def product(self, a: Array, b: Array, out: Array) -> bool:
        """Write ``a @ b`` to ``out`` and return True; return False and do nothing if the shapes or dtypes do not fit.

        The dtype is float32 or float64. ``out`` must not overlap an operand.
        """
        (rows, depth), columns, dtype = a.shape, b.shape[1], out.dtype
        if b.shape[0] != depth or out.shape != (rows, columns) or dtype.char not in "fd":
            return False
        if not (a.dtype == b.dtype == dtype and dtype.isnative and out.flags.writeable):
            return False
        if columns == 1 and out.strides[0] == out.itemsize:  # a tile's columns are then filled by the rows
            a, b, out = b.T, a.T, out.T
        work = rows * depth * columns
        if work >= 2 * _WORTH_A_THREAD and (parts := threads_for(work)) > 1:
            self._in_parts(a, b, out, parts)
        elif work:
            self._part(a, b, out)
        else:
            recording.call(out.fill, 0)
        return True

    def product_by_parts(self, a: Array, b: Array, out: Array, between: Callable[[], object]) -> bool:
        """Do as :meth:`product`, but compute a long product part by part, and call ``between`` after each.

        The bits are the same ([Note: equal bits]).
        """
        parts = a.size * b.shape[1] // _LONG
        if parts < 2 or out.shape != (a.shape[0], b.shape[1]):
            return self.product(a, b, out)
        for part in self._cut(a, b, out, parts):
            if not self.product(*part):
                return False
            recording.call(between)
        return True

    def _in_parts(self, a: Array, b: Array, out: Array, parts: int) -> None:
        """Compute ``parts`` parts of a product, each in a thread of its own."""
        jit.run_tasks([functools.partial(self._part, *part) for part in self._cut(a, b, out, parts)], parts)

    def _cut(self, a: Array, b: Array, out: Array, parts: int) -> list[tuple[Array, Array, Array]]:
        """Divide the longer axis of ``out`` into ``parts`` parts; return the operands and the result of each part."""
        rows, columns = out.shape
        if rows >= columns:
            return [(a[part], b, out[part]) for part in jit.parts_of(rows, parts, _ROWS)]
        return [(a, b[:, part], out[:, part]) for part in jit.parts_of(columns, parts, _COLUMNS)]

    def _part(self, a: Array, b: Array, out: Array) -> None:
        """Compute one thread's part of a product, in temporary memory of its own."""
        memory = self.memory(a, b)
        if not product(a, b, out, memory):
            result = np.empty_like(out, order="C")
            product(np.ascontiguousarray(a), np.ascontiguousarray(b), result, memory)
            recording.call(np.copyto, out, result)


def threads_for(multiplications: int) -> int:
    """Return how many threads to use for a product: see :func:`mpizero.kernels.jit.threads_for`."""
    return jit.threads_for(multiplications, _WORTH_A_THREAD)


#: Terms of a sum that are added before the sum is stored. Longer is faster, up to the size of a cache; shorter is more
#: accurate.
DEPTH = 1024
#: Bytes of one column of a block of the left operand: 480 rows of float32.
_BLOCK = 1920
_high, _low, _one = SumsTile(HIGH), SumsTile(LOW), SumsTile(1)
_copy_one, _copy_rows, _copy_columns = VectorCopy(1), VectorCopy(HIGH), VectorCopy()
_transpose, _transpose_rest = VectorTranspose(), VectorTranspose(HIGH)
#: Panels that are packed at once, and their bytes, at most: rows of the right operand lie in one page after the other.
_MOST_PANELS, _PANEL_BYTES = 8, 1 << 18
#: Tiles whose rows are packed at once, where these are columns of the left operand in memory.
_TOGETHER = 4
_LINE = 64


@functools.lru_cache
def memory_size(rows: int, depth: int, columns: int, itemsize: int) -> int:
    """Return how many elements of temporary memory :func:`product` needs; ``depth`` is the length of the inner axis."""
    terms, wide = min(depth, DEPTH), tile_columns(itemsize)
    panels = max(wide * terms, min(min(_MOST_PANELS, -(-columns // wide)) * wide * terms, _PANEL_BYTES // itemsize))
    return min(rows, _BLOCK // itemsize) * terms + panels + 2 * (VECTOR + _LINE) // itemsize


@kernel("bool(const T[:,:], const T[:,:], T[:,:], T[::1])")
def product(a: Array, b: Array, c: Array, memory: Array) -> bool:
    """Write ``a @ b`` to ``c``; return False and do nothing if the strides of a matrix are not supported.

    No axis may have length 0. Rows or columns of ``a`` and ``b``, and rows of ``c``, must be contiguous. ``memory`` is
    temporary memory of :func:`memory_size` elements.
    """
    item, wide = c.itemsize, tile_columns(c.itemsize)
    (rows, depth), columns = a.shape, b.shape[1]
    a_rows, b_rows = by_rows(a), by_rows(b)
    if not ((a_rows or by_columns(a)) and (b_rows or by_columns(b)) and by_rows(c)):
        return False
    a_step, b_step = a.strides[0 if a_rows else 1] // item, b.strides[0 if b_rows else 1] // item
    c_step, block = c.strides[0] // item, _BLOCK // item
    for start in range(0, depth, DEPTH):  # numba wants steps that are constants: others might be 0 and raise
        terms = min(DEPTH, depth - start)
        right = first_line(memory, min(rows, block) * terms + VECTOR // item)
        together = _MOST_PANELS
        while together > 1 and together * wide * terms * item > _PANEL_BYTES:
            together //= 2
        for number in range((rows + block - 1) // block):
            top = number * block
            height = min(block, rows - top)
            at = top * a_step + start if a_rows else start * a_step + top
            pack_left(a, at, a_step, a_rows, height, terms, memory, 0)
            left = 0
            while left < columns:
                width = min(wide, columns - left)
                panels = min(together, (columns - left) // wide) if width == wide and b_rows else 1
                at = start * b_step + left if b_rows else left * b_step + start
                pack_right(b, at, b_step, b_rows, width, panels, terms, memory, right)
                further = columns - left - panels * wide >= panels * wide
                ahead = next_panels(at, b_step, b_rows, panels, terms, item) if further else nothing_ahead()
                for panel in range(panels):
                    at, to = right + panel * wide * terms, top * c_step + left + panel * wide
                    tiles(memory, 0, at, height, terms, c, to, c_step, width, start == 0, b, ahead)
                    ahead = after_tiles(ahead, height // HIGH)
                left += panels * width
    return True


def by_rows(x: Any) -> Any:
    """Tell whether the rows of a matrix are contiguous."""
    return x.strides[1] == x.itemsize or x.shape[1] == 1


def by_columns(x: Any) -> Any:
    """Tell whether the columns of a matrix are contiguous."""
    return x.strides[0] == x.itemsize or x.shape[0] == 1


def first_line(memory: Any, index: Any) -> Any:
    """Return the first index of ``memory``, not below ``index``, at which a cache line begins."""
    past = (np.int64(memory.ctypes.data) + index * memory.itemsize) % _LINE
    return index + (_LINE - past) % _LINE // memory.itemsize


def nothing_ahead() -> Any:
    """Return a plan (what tiles prefetch, six numbers as from :func:`next_panels`) by which tiles prefetch nothing."""
    return 0, 0, 1, -1, 0, 0


def next_panels(at: Any, step: Any, by_rows: Any, panels: Any, terms: Any, item: Any) -> Any:
    """Return a plan of six numbers by which tiles prefetch panels of the right operand: those after index ``at``.

    A panel has as many columns as a tile. The plan consists of the index at which the first tile begins to prefetch,
    the distance from there to the next tile's index, the number of tiles, and the arguments ``mask``, ``step`` and
    ``line`` of a :class:`.SumsTile`. If rows of the operand are contiguous, a tile prefetches all cache lines of some
    rows, since each row may lie in another page. If columns are contiguous, a tile prefetches as many columns as a
    cache line has elements, and of each column as many elements as the loop of the tile has steps.
    """
    wide, line, steps = tile_columns(item), _LINE // item, terms // UNROLL
    if by_rows:
        lines = panels * wide // line
        return at + panels * wide, steps // lines * step, lines * UNROLL, lines - 1, line, step // lines
    return at + wide * step, line * step if UNROLL == 1 else steps, wide // line * UNROLL, line - 1, step, 1


def after_tiles(ahead: Any, count: Any) -> Any:
    """Return the rest of ``ahead``, a plan of :func:`next_panels` (what tiles prefetch), after ``count`` tiles."""
    at, further, tiles_left, mask, step, line = ahead
    done = min(count, tiles_left - 1)
    return at + done * further, further, tiles_left - done, mask, step, line


@apart
def tiles(
    memory: Any, left: Any, right: Any, rows: Any, terms: Any, c: Any, c_at: Any, c_step: Any, columns: Any, first: Any,
    b: Any, ahead: Any,
) -> None:  # fmt: skip
    """Multiply the packed block at index ``left`` of ``memory`` by the packed panel at index ``right``, tile by tile.

    The block holds rows of the left operand, the panel columns of the right one, as many as a tile (what one loop
    computes) has; both are packed: copied in the order in which tiles read them. The sums overwrite ``c`` from index
    ``c_at`` on, or are added there if ``first`` is 0. While tiles of the product are computed, parts of ``b`` are
    prefetched: ``ahead`` is the plan of :func:`next_panels`.
    """
    prefetch, further, tiles_left, mask, step, line = ahead
    row = 0
    while rows - row >= HIGH:
        at, packed = c_at + row * c_step, left + row * terms
        _high(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, prefetch, mask, step, line)
        row, tiles_left = row + HIGH, tiles_left - 1
        if tiles_left > 0:
            prefetch += further
    while rows - row >= LOW:
        at, packed = c_at + row * c_step, left + row * terms
        _low(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, prefetch, mask, step, line)
        row += LOW
    while rows - row >= 1:
        at, packed = c_at + row * c_step, left + row * terms
        _one(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, prefetch, mask, step, line)
        row += 1


@apart
def pack_left(a: Any, at: Any, step: Any, by_rows: Any, rows: Any, terms: Any, memory: Any, first: Any) -> None:
    """Copy ``rows`` rows of ``terms`` elements, from index ``at`` of ``a`` on, to index ``first`` of ``memory``.

    The elements are stored in the order in which tiles (the parts of a product that one loop computes) read them.
    """
    row = 0
    while row < rows:
        left, to, packed = rows - row, first + row * terms, 0
        height = HIGH if left >= HIGH else (LOW if left >= LOW else 1)
        source = at + row * step if by_rows else at + row
        if height == HIGH and by_rows:
            packed = pack_transposed(a, source, step, HIGH, terms, memory, to)
        elif height == HIGH:
            packed, together = terms, min(left // HIGH, _TOGETHER)  # several tiles' rows share lines of the cache
            for p in range(terms):
                for tile in range(together):
                    _copy_rows(a, source + p * step + tile * HIGH, memory, to + (tile * terms + p) * HIGH)
            row += (together - 1) * HIGH
        for i in range(height):
            for p in range(packed, terms):
                _copy_one(a, source + (i * step + p if by_rows else i + p * step), memory, to + p * height + i)
        row += height


@apart
def pack_right(
    b: Any, at: Any, step: Any, by_rows: Any, columns: Any, panels: Any, terms: Any, memory: Any, right: Any
) -> None:  # fmt: skip
    """Copy ``terms`` rows of ``columns`` elements, from index ``at`` of ``b`` on, to index ``right`` of ``memory``.

    If a tile of the product has more than ``columns`` columns, the others become 0. If rows of ``b`` are contiguous,
    ``panels`` panels (each as many columns as a tile has) are copied together.
    """
    wide, packed = tile_columns(b.itemsize), 0
    if columns == wide and by_rows:
        packed = terms
        for p in range(terms):
            for panel in range(panels):
                _copy_columns(b, at + p * step + panel * wide, memory, right + (panel * terms + p) * wide)
    elif columns == wide:
        packed = pack_transposed(b, at, step, wide, terms, memory, right)
    else:
        memory[right : right + terms * wide] = 0
    for j in range(columns):
        for p in range(packed, terms):
            _copy_one(b, at + (p * step + j if by_rows else j * step + p), memory, right + p * wide + j)


def pack_transposed(x: Any, at: Any, step: Any, count: Any, terms: Any, memory: Any, to: Any) -> Any:
    """Copy columns of ``count`` rows of ``terms`` elements, one after the other, to ``memory``; return how many.

    Only as many columns are copied as fill whole vectors. ``count`` is the number of rows of a high tile (the tile with
    the most rows), or the number of columns of a tile. The rows left over from whole vectors are copied first, as a
    whole vector; the other rows then overwrite the excess.
    """
    lanes = VECTOR // x.itemsize
    rest = count % lanes
    for number in range(terms // lanes):
        p = number * lanes
        if rest:
            _transpose_rest(x, at + (count - rest) * step + p, step, memory, to + p * count + count - rest, count)
        for group in range(count // lanes):
            i = group * lanes
            _transpose(x, at + i * step + p, step, memory, to + p * count + i, count)
    return terms // lanes * lanes


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
    applies_to : str
        Which products the library computes, in words.

    Raises
    ------
    ConfigError
        If the library cannot be loaded, or lacks ``cblas_sgemm`` or ``cblas_dgemm``.
    """

    #: Least number of multiplications for which the library is called; such a call takes some 4 microseconds.
    least = 1 << 20
    applies_to = "large products"

    def __init__(self, path: str | Path) -> None:
        hint = f"set {VARIABLE} to a BLAS library with the C interface, to 'mkl', 'mpizero' or 'numpy'"
        try:
            blas = ctypes.CDLL(str(path))
            prefix = next((prefix for prefix in _PREFIXES if hasattr(blas, f"{prefix}cblas_sgemm")), "")
            single, double = (getattr(blas, f"{prefix}cblas_{kind}gemm") for kind in "sd")
        except (OSError, AttributeError) as error:
            raise ConfigError(f"{VARIABLE}: cannot multiply with {path}: {error}; {hint}") from None
        self.path = str(path)
        self.name = _make_mkl_reproducible(blas) if hasattr(blas, "MKL_CBWR_Set") else Path(path).name
        self._products: dict[str, Any] = {"f": _typed(single, ctypes.c_float), "d": _typed(double, ctypes.c_double)}

    @staticmethod
    def memory(a: Array, b: Array) -> None:
        """Return None: the library allocates temporary memory itself."""

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


def _make_mkl_reproducible(mkl: ctypes.CDLL) -> str:
    """Make MKL compute the same bits in every run; return its name and version.

    If the user has set the environment variable ``MKL_CBWR``, leave MKL's setting as it is.
    """
    if not os.environ.get("MKL_CBWR"):
        branch = mkl.MKL_CBWR_Get_Auto_Branch()
        if mkl.MKL_CBWR_Set(branch | _STRICT):
            mkl.MKL_CBWR_Set(branch)
    text = ctypes.create_string_buffer(256)
    mkl.MKL_Get_Version_String(text, len(text))
    return text.value.decode(errors="replace").strip()


def installed_mkl() -> Path | None:
    """Return the path of the library in the installed package ``mkl``, or None."""
    if installed_version("mkl") is None:
        return None
    from importlib import metadata

    files = metadata.distribution("mkl").files or ()
    libraries = sorted(str(file.locate()) for file in files if file.name.startswith("libmkl_rt.so"))
    return next((path for path in map(Path, reversed(libraries)) if path.exists()), None)
