"""The graphics cards that a rank can compute on: what there is, copies between host and card, products in 16 bits.

CuPy holds the arrays; under ``NUMBA_ENABLE_CUDASIM=1`` simulated ones take their place. Copies of model state go
through one pinned buffer, a piece after the other, at the full rate of the bus.

[Note: products in 16 bits] Operands are rounded to bfloat16 or float16, to nearest even, by the library's own kernels;
the card multiplies those and adds in float32, into float32. So what is stored stays in float32, and what a product
gives is the same wherever its operands came from.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from mpizero.errors import ConfigError, DataError
from mpizero.types import Array

#: Bytes of the pinned buffer: far above what a transfer needs to be fast, far below what a node has.
STAGING = 1 << 24
#: Parts of a card's array that lie no further apart than this (elements) are read together, with what is between them.
_NEAR = 1 << 12
#: Cards that the simulator shows, so that several ranks do not all have the same.
SIMULATED_CARDS = 2
INSTALL = "install them by pip install 'mpizero[cuda12]' (or cuda13)"
#: Kernels that round to a dtype of 16 bits and widen from it, and CUDA's number for the dtype.
SIXTEEN_BITS = {"float16": ("to_float16", "from_float16", 2), "bfloat16": ("to_bfloat16", "from_bfloat16", 14)}
_FLOAT32, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM = 0, 68, -1


#: ``fill(first, out)`` writes elements ``first ...`` of something to ``out``.
Fill = Callable[[int, Array], object]


class Source(NamedTuple):
    """``size`` elements for a card's array, from its element ``start`` on."""

    start: int
    size: int
    fill: Fill


class Halves:
    """Matrices of a card, rounded to 16 bits for products: an array of any number of axes, the last two of a matrix.

    Parameters
    ----------
    bits : Array
        The rounded elements, as uint16.
    card : Card
        Where they lie.
    dtype : str
        What they are rounded to, a key of :data:`SIXTEEN_BITS`.
    """

    __slots__ = ("bits", "card", "dtype")

    def __init__(self, bits: Array, card: Card, dtype: str) -> None:
        self.bits, self.card, self.dtype = bits, card, dtype

    def __getitem__(self, key: Any) -> Halves:
        return Halves(self.bits[key], self.card, self.dtype)

    def swapaxes(self, first: int, second: int) -> Halves:
        """Return a view with two axes interchanged. Not collective."""
        return Halves(self.bits.swapaxes(first, second), self.card, self.dtype)


class Stack(NamedTuple):
    """How matrices of one size lie in memory, one after the other, in elements.

    Attributes
    ----------
    transposed : bool
        Whether their columns are contiguous instead of their rows.
    leading : int
        From one row (or, transposed, column) to the next.
    step : int
        From one matrix to the next; 0 for a single one.
    number : int
        Of matrices.
    """

    transposed: bool
    leading: int
    step: int
    number: int

    @classmethod
    def of(cls, x: Array) -> Stack | None:
        """Describe the last two axes of ``x``; None where no such numbers do. Not collective."""
        strides = [stride // x.itemsize for stride in x.strides]
        steps = [(stride, size) for stride, size in zip(strides[:-2], x.shape[:-2], strict=True) if size != 1]
        if any(outer != step * size for (outer, _), (step, size) in pairwise(steps)):
            return None
        number, step = prod(x.shape[:-2]), steps[-1][0] if steps else 0
        (rows, columns), (down, along) = x.shape[-2:], strides[-2:]
        if columns == 1 or along == 1:
            return cls(False, max(down if rows > 1 else 0, columns), step, number)
        if rows == 1 or down == 1:
            return cls(True, max(along, rows), step, number)
        return None


class Card(ABC):
    """One card, for one rank.

    Not thread-safe; a rank opens and uses its card in one thread.

    Attributes
    ----------
    number : int
        Of this card among the node's.
    name : str
        What the card calls itself.
    held : Counter of str to int
        Bytes of model state that this rank keeps on it, by kind.
    """

    number: int
    name: str

    @contextmanager
    def multiplying_in(self, dtype: str | None) -> Iterator[None]:
        """Let :func:`matmul` in this thread round operands to ``dtype``; None leaves them. Not collective."""
        token = _PRODUCTS.set(None if dtype is None else (self, dtype))
        try:
            yield
        finally:
            _PRODUCTS.reset(token)

    @abstractmethod
    def _multiply(self, a: Halves, b: Halves, out: Array) -> None:
        """Write the products of matrices that are stacks to a stack of contiguous rows in float32."""

    def __init__(self) -> None:
        self._staging = self._pinned(STAGING)
        self.held: Counter[str] = Counter()

    @abstractmethod
    def _pinned(self, nbytes: int) -> Array:
        """Return host memory that the card can copy from and to by itself, as bytes."""

    @abstractmethod
    def empty(self, size: int, dtype: Any) -> Array:
        """Return a 1-D array of the card, of undefined contents. Not collective."""

    def keep(self, kind: str, size: int, dtype: Any) -> Array:
        """Return what :meth:`empty` does, counted as model state of a kind. Not collective."""
        array = self.empty(size, dtype)
        self.held[kind] += array.nbytes
        return array

    def release(self, kind: str, array: Array) -> None:
        """Stop counting an array that its owner drops. Not collective."""
        self.held[kind] -= array.nbytes

    @abstractmethod
    def settle(self) -> None:
        """Return when all that this rank has started on the card has ended. Not collective."""

    @abstractmethod
    def _array(self, values: Array) -> Array:
        """Return a copy of a host array on the card."""

    @staticmethod
    def check(values: Any) -> None:
        """Raise :class:`DataError` unless ``values`` can be put on a card. Not collective."""
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            kind = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
            raise DataError(
                f"a card takes samples and targets that are NumPy arrays of numbers, not {kind}; convert them, or use "
                'device = "cpu"'
            )

    def put(self, values: Any) -> Array:
        """Return a copy of an array on the card; one that is there already is returned itself. Not collective.

        Raises
        ------
        DataError
            If ``values`` are no array of numbers.
        """
        if hasattr(values, "__cuda_array_interface__"):
            array: Array = values
            return array
        self.check(values)
        return self._array(np.ascontiguousarray(values))

    def write(self, target: Any, values: Array) -> None:
        """Copy a 1-D host array to one of the card, of the same dtype and length. Not collective."""
        self.send(target, [Source(0, values.size, copied(values))])

    def send(self, target: Any, sources: Sequence[Source]) -> None:
        """Fill a 1-D array of the card from sources that cover all of it: they write to the pinned buffer.

        Not collective.
        """
        step = STAGING // target.itemsize
        for first in range(0, target.size, step):
            last = min(first + step, target.size)
            staged = self._staging[: (last - first) * target.itemsize].view(target.dtype)
            for source in sources:
                low, high = max(source.start, first), min(source.start + source.size, last)
                if low < high:
                    source.fill(low - source.start, staged[low - first : high - first])
            target[first:last].set(staged)

    def read(self, source: Any, targets: Sequence[tuple[int, Array]]) -> None:
        """Copy parts of a 1-D array of the card to host arrays. Not collective.

        Parameters
        ----------
        source : Array
            On the card.
        targets : sequence of (int, Array)
            Where a part starts, and the C-contiguous host array that takes it; ascending, of the source's dtype.
        """
        step = STAGING // source.itemsize
        for together in _neighbours([(start, host.reshape(-1)) for start, host in targets if host.size]):
            begin, end = together[0][0], max(start + host.size for start, host in together)
            for first in range(begin, end, step):
                last = min(first + step, end)
                staged = self._staging[: (last - first) * source.itemsize].view(source.dtype)
                source[first:last].get(out=staged)
                for start, host in together:
                    low, high = max(start, first), min(start + host.size, last)
                    if low < high:
                        host[low - start : high - start] = staged[low - first : high - first]


def copied(values: Array) -> Fill:
    """Return what copies elements of a host array. Not collective."""

    def fill(first: int, out: Array) -> None:
        out[:] = values[first : first + out.size]

    return fill


def _neighbours(targets: Sequence[tuple[int, Array]]) -> Iterator[list[tuple[int, Array]]]:
    """Cut ascending targets where there is so much between two that it is not worth reading."""
    group: list[tuple[int, Array]] = []
    for start, host in targets:
        if group and start - group[-1][0] - group[-1][1].size > _NEAR:
            yield group
            group = []
        group.append((start, host))
    if group:
        yield group


class CupyCard(Card):
    """A card of NVIDIA's, through CuPy.

    The thread that opens it has it as its current one from then on, for CuPy and for Numba's kernels, both on the
    default stream: what is started later runs later.
    """

    def __init__(self, number: int) -> None:
        import cupy
        from cupy_backends.cuda.libs import cublas

        self._cupy, self._cublas = cupy, cublas
        cupy.cuda.Device(number).use()
        from numba import cuda

        cuda.select_device(number)
        self.number = number
        self.name = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
        super().__init__()

    def _pinned(self, nbytes: int) -> Array:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a 1-D array of the card, of undefined contents. Not collective."""
        array: Array = self._cupy.empty(size, dtype)
        return array

    def settle(self) -> None:
        """Return when all that this rank has started on the card has ended. Not collective."""
        self._cupy.cuda.get_current_stream().synchronize()

    def _array(self, values: Array) -> Array:
        array: Array = self._cupy.asarray(values)
        return array

    def _multiply(self, a: Halves, b: Halves, out: Array) -> None:
        # cuBLAS counts by columns: what lies in memory by rows is the transpose to it, so it is asked for out.T.
        (rows, columns), inner, kind = out.shape[-2:], a.bits.shape[-1], SIXTEEN_BITS[a.dtype][2]
        (left, right, target), one, zero = _stacks(a, b, out), np.ones(1, np.float32), np.zeros(1, np.float32)
        start = self._cupy.cuda.device.get_cublas_handle(), int(right.transposed), int(left.transposed)
        sizes, settings = (columns, rows, inner, one.ctypes.data), (_COMPUTE_FLOAT32, _DEFAULT_ALGORITHM)
        first, second = (
            (cast("Any", x).data.ptr, kind, stack.leading) for x, stack in ((b.bits, right), (a.bits, left))
        )
        result = cast("Any", out).data.ptr, _FLOAT32, target.leading
        if target.number == 1:
            self._cublas.gemmEx(*start, *sizes, *first, *second, zero.ctypes.data, *result, *settings)
        else:
            self._cublas.gemmStridedBatchedEx(
                *start, *sizes, *first, right.step, *second, left.step, zero.ctypes.data,
                *result, target.step, target.number, *settings,
            )  # fmt: skip


class SimulatedCard(Card):
    """A card of Numba's simulator: for tests, and slow."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, "simulated"
        super().__init__()

    def _pinned(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a 1-D array of the card; undefined contents are NaN here. Not collective."""
        from mpizero.kernels.simulated import NAMESPACE

        array: Array = NAMESPACE.full(size, np.nan, dtype)
        return array

    def settle(self) -> None:
        """Return at once: the simulator has no work of its own. Not collective."""

    def _array(self, values: Array) -> Array:
        from mpizero.kernels.simulated import SimulatedArray

        return cast("Array", SimulatedArray(values.copy()))

    def _multiply(self, a: Halves, b: Halves, out: Array) -> None:
        _stacks(a, b, out)
        _library(out).matmul(_widened(a), _widened(b), out=out)


def _stacks(a: Halves, b: Halves, out: Array) -> tuple[Stack, Stack, Stack]:
    found = Stack.of(a.bits), Stack.of(b.bits), Stack.of(out)
    left, right, target = found
    if left is None or right is None or target is None or target.transposed:
        raise ValueError(f"these are no stacks of matrices: {found}")
    return left, right, target


def _widened(x: Halves) -> Array:
    """Return the elements in float32."""
    from mpizero.kernels import cuda

    xp = _library(x.bits)
    wide = xp.empty(x.bits.size, np.float32)
    getattr(cuda.copy, SIXTEEN_BITS[x.dtype][1])(xp.ascontiguousarray(x.bits).reshape(-1), wide)
    shaped: Array = wide.reshape(x.bits.shape)
    return shaped


#: The card and the dtype that products of this thread round their operands to; None leaves them.
_PRODUCTS: ContextVar[tuple[Card, str] | None] = ContextVar("products", default=None)


def operand(x: Array) -> Array | Halves:
    """Return what :func:`multiply` shall take for ``x``: itself, or :class:`Halves` where this thread has asked so.

    Not collective. [Note: products in 16 bits]. ``x`` has a matrix in its last two axes.
    """
    asked = _PRODUCTS.get()
    return x if asked is None else _halved(x, *asked)


def multiply(a: Array | Halves, b: Array | Halves, out: Array) -> None:
    """Write the products of the matrices of two operands to ``out``, float32 on a card.

    Not collective. All have the same leading axes, and both operands come from :func:`operand`, or both do not.
    """
    if not (isinstance(a, Halves) and isinstance(b, Halves)):
        _library(out).matmul(a, b, out=out)
        return
    if not a.bits.size or not b.bits.size:
        out[...] = 0
        return
    stack = Stack.of(out)
    if stack is not None and not stack.transposed:
        a.card._multiply(a, b, out)
        return
    xp = _library(out)
    target = xp.empty(out.shape, np.float32)
    a.card._multiply(a, b, target)
    xp.copyto(out, target)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Compute the product of two float32 matrices on a card: [Note: products in 16 bits]. Not collective."""
    if out is None:
        out = _library(a).empty((a.shape[0], b.shape[1]), a.dtype)
    multiply(operand(a), operand(b), out)
    return out


def _halved(x: Array, card: Card, dtype: str) -> Halves:
    """Round an array, in the order in which its matrices lie in memory."""
    from mpizero.kernels import cuda

    xp, turned = _library(x), x.swapaxes(-1, -2)
    transposed = not x.flags.c_contiguous and turned.flags.c_contiguous
    flat = xp.ascontiguousarray(turned if transposed else x).reshape(-1)
    bits = xp.empty(flat.size, np.uint16)
    getattr(cuda.copy, SIXTEEN_BITS[dtype][0])(flat, bits)
    shaped = bits.reshape(turned.shape if transposed else x.shape)
    return Halves(shaped.swapaxes(-1, -2) if transposed else shaped, card, dtype)


def _library(array: Any) -> Any:
    """Return the array library of an array of a card."""
    from mpizero.kernels import namespace  # which imports this module

    return namespace(array)


def simulated() -> bool:
    """Tell whether Numba simulates its cards. Not collective."""
    from numba.core import config

    return bool(config.ENABLE_CUDASIM)


def found() -> tuple[int, str]:
    """Return the number of cards that this process can train on, and if there are none, why. Not collective."""
    if simulated():
        return SIMULATED_CARDS, ""
    missing = [name for name in ("cupy", "numba_cuda") if importlib.util.find_spec(name) is None]
    if missing:
        return 0, f"no package {' and no '.join(missing)}; {INSTALL}"
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # a package for another CUDA, a driver that is none: whatever it is, it is the reason
        return 0, f"CuPy finds none: {' '.join(str(error).split())}; see nvidia-smi"
    return count, "" if count else "the driver shows none; see nvidia-smi and CUDA_VISIBLE_DEVICES"


def open_card(place: int) -> Card:
    """Open the card of the ``place``-th rank of a node: ranks take cards in turn. Not collective.

    Raises
    ------
    ConfigError
        If there is none.
    """
    count, reason = found()
    if not count:
        raise ConfigError(f'device = "cuda": {reason}, or train with device = "cpu"')
    return SimulatedCard(place % count) if simulated() else CupyCard(place % count)
