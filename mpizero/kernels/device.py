"""Find the GPUs that a rank can compute on, copy between host and GPU, and call cuBLAS.

CuPy holds the arrays; under ``NUMBA_ENABLE_CUDASIM=1`` simulated ones take their place. Copies of model state go
through one pinned buffer, a piece after the other, at the full rate of the bus.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np

from mpizero.errors import ConfigError, DataError
from mpizero.kernels.device_products import PRODUCT_DTYPE, SIXTEEN_BITS, Batches, HalfPrecisionArray, widened
from mpizero.types import Array

#: Bytes of the pinned buffer: far above what a transfer needs to be fast, far below what a node has.
STAGING = 1 << 24
#: Parts of a GPU's array that lie no further apart than this (elements) are read together, with what is between them.
_NEAR = 1 << 12
#: GPUs that the simulator shows, so that several ranks do not all have the same.
SIMULATED_DEVICES = 2
INSTALL = "install them by pip install 'mpizero[cuda12]' (or cuda13)"
#: CUDA's numbers for float32, for sums in it, and for cuBLAS's own choice of an algorithm.
_FLOAT32, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM = 0, 68, -1


#: ``fill(first, out)`` writes elements ``first ...`` of something to ``out``.
Fill = Callable[[int, Array], object]


class Upload(NamedTuple):
    """Describe ``size`` elements for a GPU's array, from its element ``start`` on."""

    start: int
    size: int
    fill: Fill


class Device(ABC):
    """Represent one GPU, for one rank.

    Not thread-safe; a rank opens and uses its GPU in one thread.

    Attributes
    ----------
    number : int
        Of this GPU among the node's.
    name : str
        What the GPU calls itself.
    held : Counter of str to int
        Bytes of model state that this rank keeps on it, by kind.
    """

    number: int
    name: str

    @contextmanager
    def multiplying_in(self, dtype: str | None) -> Iterator[None]:
        """Let :func:`operand` in this thread round to ``dtype``; None leaves operands as they are."""
        token = PRODUCT_DTYPE.set(None if dtype is None else (self, dtype))
        try:
            yield
        finally:
            PRODUCT_DTYPE.reset(token)

    @abstractmethod
    def multiply(
        self,
        a: HalfPrecisionArray,
        b: HalfPrecisionArray,
        out: Array,
        batches: Batches,
    ) -> None:
        """Write the products of matrices to ``out``, float32; ``batches`` say how the three lie."""

    def __init__(self) -> None:
        self._staging = self._pinned(STAGING)
        self.held: Counter[str] = Counter()

    @abstractmethod
    def _pinned(self, nbytes: int) -> Array:
        """Return host memory that the GPU can copy from and to by itself, as bytes."""

    @abstractmethod
    def empty(self, size: int, dtype: Any) -> Array:
        """Return a 1-D array of the GPU, of undefined contents."""

    def keep(self, kind: str, size: int, dtype: Any) -> Array:
        """Return what :meth:`empty` does, counted as model state of a kind."""
        array = self.empty(size, dtype)
        self.held[kind] += array.nbytes
        return array

    def release(self, kind: str, array: Array) -> None:
        """Stop counting an array that its owner drops."""
        self.held[kind] -= array.nbytes

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work that this rank started on the GPU has ended."""

    @abstractmethod
    def _array(self, values: Array) -> Array:
        """Return a copy of a host array on the GPU."""

    @staticmethod
    def check(values: Any) -> None:
        """Raise :class:`DataError` unless ``values`` can be put on a GPU."""
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            kind = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
            raise DataError(
                f"a GPU takes samples and targets that are NumPy arrays of numbers, not {kind}; convert them, or use "
                'device = "cpu"'
            )

    def put(self, values: Any) -> Array:
        """Return a copy of an array on the GPU; one that is there already is returned itself.

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
        """Copy a 1-D host array to one of the GPU, of the same dtype and length."""
        self.send(target, [Upload(0, values.size, copied(values))])

    def send(self, target: Any, sources: Sequence[Upload]) -> None:
        """Fill a 1-D array of the GPU from sources that cover all of it: they write to the pinned buffer."""
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
        """Copy parts of a 1-D array of the GPU to host arrays.

        Parameters
        ----------
        source : Array
            On the GPU.
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
    """Return what copies elements of a host array."""

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


class CupyDevice(Device):
    """Use an NVIDIA GPU through CuPy.

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
        """Return a 1-D array of the GPU, of undefined contents."""
        array: Array = self._cupy.empty(size, dtype)
        return array

    def synchronize(self) -> None:
        """Wait until all work that this rank started on the GPU has ended."""
        self._cupy.cuda.get_current_stream().synchronize()

    def _array(self, values: Array) -> Array:
        array: Array = self._cupy.asarray(values)
        return array

    def multiply(
        self,
        a: HalfPrecisionArray,
        b: HalfPrecisionArray,
        out: Array,
        batches: Batches,
    ) -> None:
        """Ask cuBLAS."""
        # It counts by columns: what lies in memory by rows is the transpose to it, so it is asked for out.T.
        (rows, columns), inner, kind = out.shape[-2:], a.bits.shape[-1], SIXTEEN_BITS[a.dtype][2]
        (left, right, target), one, zero = batches, np.ones(1, np.float32), np.zeros(1, np.float32)
        start = self._cupy.cuda.device.get_cublas_handle(), int(right.transposed), int(left.transposed)
        sizes, settings = (columns, rows, inner, one.ctypes.data), (_COMPUTE_FLOAT32, _DEFAULT_ALGORITHM)
        first, second = (
            (cast("Any", x).data.ptr, kind, batch.leading) for x, batch in ((b.bits, right), (a.bits, left))
        )
        result = cast("Any", out).data.ptr, _FLOAT32, target.leading
        if target.number == 1:
            self._cublas.gemmEx(*start, *sizes, *first, *second, zero.ctypes.data, *result, *settings)
        else:
            self._cublas.gemmStridedBatchedEx(
                *start, *sizes, *first, right.step, *second, left.step, zero.ctypes.data,
                *result, target.step, target.number, *settings,
            )  # fmt: skip


class SimulatedDevice(Device):
    """Represent a GPU of Numba's simulator: for tests, and slow."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, "simulated"
        super().__init__()

    def _pinned(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a 1-D array of the GPU; undefined contents are NaN here."""
        from mpizero.kernels.simulated import NAMESPACE

        array: Array = NAMESPACE.full(size, np.nan, dtype)
        return array

    def synchronize(self) -> None:
        """Return at once: the simulator has no work of its own."""

    def _array(self, values: Array) -> Array:
        from mpizero.kernels.simulated import SimulatedArray

        return cast("Array", SimulatedArray(values.copy()))

    def multiply(
        self,
        a: HalfPrecisionArray,
        b: HalfPrecisionArray,
        out: Array,
        batches: Batches,
    ) -> None:
        """Multiply what the 16 bits stand for."""
        from mpizero.kernels import namespace

        namespace(out).matmul(widened(a), widened(b), out=out)


def simulated() -> bool:
    """Tell whether Numba simulates its GPUs."""
    from numba.core import config

    return bool(config.ENABLE_CUDASIM)


def found() -> tuple[int, str]:
    """Return the number of GPUs that this process can train on, and if there are none, why."""
    if simulated():
        return SIMULATED_DEVICES, ""
    missing = [name for name in ("cupy", "numba_cuda") if importlib.util.find_spec(name) is None]
    if missing:
        return 0, f"no package {' and no '.join(missing)}; {INSTALL}"
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # a package for another CUDA, a driver that is none: whatever it is, it is the reason
        return 0, f"CuPy finds none: {' '.join(str(error).split())}; see nvidia-smi"
    return count, "" if count else "the driver shows none; see nvidia-smi and CUDA_VISIBLE_DEVICES"


def open_device(place: int) -> Device:
    """Open the GPU of the ``place``-th rank of a node: ranks take GPUs in turn.

    Raises
    ------
    ConfigError
        If there is none.
    """
    count, reason = found()
    if not count:
        raise ConfigError(f'device = "cuda": {reason}, or train with device = "cpu"')
    return SimulatedDevice(place % count) if simulated() else CupyDevice(place % count)
