"""Find and open a rank's GPU, copy data between host and GPU, and multiply matrices there.

Arrays on the GPU are CuPy's. A :class:`Device` is the GPU of a rank, and :func:`open_device` opens it. Parameters,
gradients and optimizer state are copied in pieces through one pinned buffer on the host, because such copies use the
full rate of the bus. Products (:func:`multiply`) are in float32, or have operands that are rounded to 16 bits.

[Note: simulated GPUs] The tests run on machines without a GPU. mpizero accesses GPUs only through the object that
:func:`gpus` returns: a :class:`Gpus`, or a replacement that was set by :func:`use_gpus`. The tests set a simulator,
whose arrays have ``__cuda_array_interface__`` and ``__array_namespace__``.

[Note: products in 16 bits] mpizero's kernels round the operands of a product to bfloat16 or float16, to nearest even.
The GPU multiplies the rounded operands, and adds the products in float32 to a float32 result. So all stored arrays stay
in float32.

[Note: aligned products] cuBLAS chooses among its kernels by shapes, and may choose by addresses, too. The addresses of
gradients depend on the number of ranks, and those of parameters on whether they are gathered unit by unit, but bits
must be the same. So cuBLAS gets only arrays whose addresses are multiples of ``ALIGNED`` bytes: others are copied,
which takes far less time than a product.
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
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mpizero.errors import ConfigError, DataError
from mpizero.types import Array

#: Size of the pinned buffer in bytes: large enough for fast transfers, and small compared with a node's memory.
STAGING = 1 << 24
#: If the gap between two parts of a GPU array is at most this (elements), both are read at once, with the gap.
_NEAR = 1 << 12
INSTALL = "install them by pip install 'mpizero[cuda12]' (or cuda13)"
#: cuBLAS's constants for the type float32, for computing in float32, and for its default algorithm.
_FLOAT32, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM = 0, 68, -1


#: A function ``fill(first, out)`` that writes the elements of a source, from element ``first`` on, to ``out``.
Fill = Callable[[int, Array], object]


class Upload(NamedTuple):
    """Describe a copy of elements from the host to a range of a GPU array.

    Attributes
    ----------
    start : int
        Index of the first element of the GPU array that is written.
    size : int
        Number of elements.
    fill : callable
        ``fill(first, out)`` writes the elements to copy, from number ``first`` on, to the host array ``out``.
    """

    start: int
    size: int
    fill: Fill


class Device(ABC):
    """Represent the GPU that a rank computes on.

    The class is not thread-safe: a rank must open and use its GPU in one thread.

    Attributes
    ----------
    number : int
        Number of this GPU on its node.
    name : str
        Name of the GPU's model.
    allocated : Counter of str to int
        Bytes of the arrays that :meth:`keep` has allocated on the GPU and that are not released, by kind, such as
        "optimizer state".
    """

    number: int
    name: str

    @contextmanager
    def multiplying_in(self, dtype: str | None) -> Iterator[None]:
        """Round the operands of matrix products of this thread to ``dtype`` while the context is active.

        ``dtype`` is "float16" or "bfloat16"; None means that operands are not rounded.
        """
        token = PRODUCT_DTYPE.set(None if dtype is None else (self, dtype))
        try:
            yield
        finally:
            PRODUCT_DTYPE.reset(token)

    @abstractmethod
    def multiply(self, a: HalfPrecisionArray, b: HalfPrecisionArray, out: Array, batches: Batches) -> None:
        """Write the products of two batches of matrices, ``a @ b``, to the float32 array ``out``.

        ``batches`` describes the memory layouts of ``a``, ``b`` and ``out``.
        """

    def __init__(self) -> None:
        self._staging = self._pinned(STAGING)
        self.allocated: Counter[str] = Counter()

    @abstractmethod
    def _pinned(self, nbytes: int) -> Array:
        """Return an array of ``nbytes`` bytes of pinned host memory, from and to which the GPU can copy directly."""

    @abstractmethod
    def _copy_pinned(self, target: Any, staged: Array) -> None:
        """Start to copy ``staged``, a part of the pinned buffer, to a GPU array of its shape and dtype."""

    @abstractmethod
    def _await_pinned(self) -> None:
        """Wait until all copies that :meth:`_copy_pinned` started have read the pinned buffer."""

    @abstractmethod
    def empty(self, size: int, dtype: Any) -> Array:
        """Allocate a 1-D array of undefined contents on the GPU."""

    def keep(self, kind: str, size: int, dtype: Any) -> Array:
        """Allocate a 1-D array of undefined contents on the GPU, and add its bytes to ``allocated[kind]``."""
        array = self.empty(size, dtype)
        self.allocated[kind] += array.nbytes
        return array

    def release(self, kind: str, array: Array) -> None:
        """Subtract an array's bytes from ``allocated[kind]``; the memory is freed when the caller drops the array."""
        self.allocated[kind] -= array.nbytes

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work that this rank started on the GPU has ended."""

    @abstractmethod
    def _array(self, values: Array) -> Array:
        """Copy a host array to the GPU, and return the copy."""

    @staticmethod
    def check(values: Any) -> None:
        """Raise :class:`DataError` if ``values`` is not a NumPy array of numbers or bools."""
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            kind = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
            raise DataError(
                f"a GPU takes samples and targets that are NumPy arrays of numbers, not {kind}; convert them, or use "
                'device = "cpu"'
            )

    def put(self, values: Any) -> Array:
        """Copy a NumPy array to the GPU and return the copy; return an array that is on the GPU already as it is.

        Raises
        ------
        DataError
            If ``values`` is neither a GPU array nor a NumPy array of numbers or bools.
        """
        if hasattr(values, "__cuda_array_interface__"):
            array: Array = values
            return array
        self.check(values)
        return self._array(np.ascontiguousarray(values))

    def write(self, target: Any, values: Array) -> None:
        """Copy a 1-D host array to a GPU array of the same dtype and length."""
        self.send(target, [Upload(0, values.size, copied(values))])

    def send(self, target: Any, sources: Sequence[Upload]) -> None:
        """Fill a 1-D GPU array from several sources, in pieces of at most ``STAGING`` bytes.

        The sources write each piece to the pinned buffer, which is then copied to the GPU. The ranges of the sources
        together must cover the whole array.
        """
        step = STAGING // target.itemsize
        for first in range(0, target.size, step):
            last = min(first + step, target.size)
            staged = self._staging[: (last - first) * target.itemsize].view(target.dtype)
            self._await_pinned()
            for source in sources:
                low, high = max(source.start, first), min(source.start + source.size, last)
                if low < high:
                    source.fill(low - source.start, staged[low - first : high - first])
            self._copy_pinned(target[first:last], staged)

    def read(self, source: Any, targets: Sequence[tuple[int, Array]]) -> None:
        """Copy parts of a 1-D GPU array to host arrays.

        Parameters
        ----------
        source : Array
            The array on the GPU.
        targets : sequence of (int, Array)
            For each part, the index of its first element in ``source``, and the host array that receives it, which is
            C-contiguous and has the dtype of ``source``. Parts are in ascending order.
        """
        step = STAGING // source.itemsize
        for together in _neighbours([(start, host.reshape(-1)) for start, host in targets if host.size]):
            begin, end = together[0][0], max(start + host.size for start, host in together)
            for first in range(begin, end, step):
                last = min(first + step, end)
                staged = self._staging[: (last - first) * source.itemsize].view(source.dtype)
                self._await_pinned()
                source[first:last].get(out=staged)
                for start, host in together:
                    low, high = max(start, first), min(start + host.size, last)
                    if low < high:
                        host[low - start : high - start] = staged[low - first : high - first]


def copied(values: Array) -> Fill:
    """Return a function ``fill(first, out)`` that copies elements of ``values``, from ``first`` on, to ``out``."""

    def fill(first: int, out: Array) -> None:
        out[:] = values[first : first + out.size]

    return fill


def _neighbours(targets: Sequence[tuple[int, Array]]) -> Iterator[list[tuple[int, Array]]]:
    """Yield ascending parts, (index of first element, host array), in groups that are read from the GPU together.

    A new group begins where the gap between two parts has more than ``_NEAR`` elements.
    """
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

    The constructor makes the GPU the current one of the calling thread, for CuPy and for Numba's kernels. CuPy and
    Numba use the default stream, so work runs in the order in which it is started.
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
        self._copied = cupy.cuda.Event(disable_timing=True)
        super().__init__()

    def _pinned(self, nbytes: int) -> Array:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def _copy_pinned(self, target: Any, staged: Array) -> None:
        target.set(staged)  # returns before the copy has ended: CuPy does not wait, nor CUDA for pinned memory
        self._copied.record()

    def _await_pinned(self) -> None:
        self._copied.synchronize()

    def empty(self, size: int, dtype: Any) -> Array:
        """Allocate a 1-D array of undefined contents on the GPU."""
        array: Array = self._cupy.empty(size, dtype)
        return array

    def synchronize(self) -> None:
        """Wait until all work that this rank started on the GPU has ended."""
        self._cupy.cuda.get_current_stream().synchronize()

    def _array(self, values: Array) -> Array:
        array: Array = self._cupy.asarray(values)
        return array

    def multiply(self, a: HalfPrecisionArray, b: HalfPrecisionArray, out: Array, batches: Batches) -> None:
        """Write the products of two batches of matrices, ``a @ b``, to ``out`` with cuBLAS.

        ``batches`` describes the memory layouts of ``a``, ``b`` and ``out``.
        """
        # cuBLAS stores matrices by columns: a matrix stored by rows is its transpose to cuBLAS. So it computes out.T.
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


def of_tensor(tensor: Any) -> Array:
    """Return an array of CuPy that shares the memory of a tensor of another library on a GPU. Not collective."""
    import cupy

    array: Array = cupy.from_dlpack(tensor)
    return array


class KernelLaunch(Protocol):
    """Define the interface of a kernel for GPUs; :class:`mpizero.kernels.cuda.launch.CudaKernel` implements it."""

    def launch(self, args: tuple[Any, ...]) -> None:
        """Launch the kernel on the current stream of this thread's GPU."""


class Gpus:
    """Find, open and use the GPUs of this process, by CuPy and numba-cuda; see [Note: simulated GPUs].

    Attributes
    ----------
    in_host_memory : bool
        Whether arrays of these GPUs are in host memory (as the simulator's are), so that every MPI library accepts
        them.
    """

    in_host_memory = False

    def available(self) -> tuple[int, str]:
        """Return the number of GPUs that this process can train on, and the reason if there are none (otherwise "")."""
        missing = [name for name in ("cupy", "numba_cuda") if importlib.util.find_spec(name) is None]
        if missing:
            return 0, f"no package {' and no '.join(missing)}; {INSTALL}"
        try:
            import cupy

            count = int(cupy.cuda.runtime.getDeviceCount())
        except Exception as error:  # a package for another CUDA, a driver that is none: whatever it is
            return 0, f"CuPy finds none: {' '.join(str(error).split())}; see nvidia-smi"
        return count, "" if count else "the driver shows none; see nvidia-smi and CUDA_VISIBLE_DEVICES"

    def opened(self, number: int) -> Device:
        """Open the GPU that has the number ``number`` on the node."""
        return CupyDevice(number)

    def launch(self, kernel: KernelLaunch, args: tuple[Any, ...]) -> None:
        """Launch a kernel; the caller has checked the number and the dimensions of the arguments."""
        kernel.launch(args)


_GPUS = [Gpus()]


def gpus() -> Gpus:
    """Return the object through which this process uses GPUs."""
    return _GPUS[0]


def use_gpus(replacement: Gpus) -> None:
    """Replace the object through which this process uses GPUs; see [Note: simulated GPUs]."""
    _GPUS[0] = replacement


def available_gpus() -> tuple[int, str]:
    """Return the number of GPUs that this process can train on, and the reason if there are none (otherwise "")."""
    return gpus().available()


def open_device(local_rank: int) -> Device:
    """Open the GPU of the rank with number ``local_rank`` on its node: that number modulo the number of GPUs.

    Raises
    ------
    ConfigError
        If there is no GPU.
    """
    count, reason = available_gpus()
    if not count:
        raise ConfigError(f'device = "cuda": {reason}, or train with device = "cpu"')
    return gpus().opened(local_rank % count)


#: For each dtype of 16 bits, the kernels that round to it and convert from it, and CUDA's number for the dtype.
SIXTEEN_BITS = {"float16": ("to_float16", "from_float16", 2), "bfloat16": ("to_bfloat16", "from_bfloat16", 14)}


#: The largest alignment that cuBLAS asks for; memory that CuPy allocates begins at multiples of 512 bytes.
ALIGNED = 256


class HalfPrecisionArray:
    """Hold a GPU array whose elements are rounded to 16 bits for products; its last two axes are matrices.

    Parameters
    ----------
    bits : Array
        The bits of the rounded elements, as uint16.
    device : Device
        The GPU on which the array is.
    dtype : str
        The dtype to which the elements are rounded: "float16" or "bfloat16".
    """

    __slots__ = ("bits", "device", "dtype")

    def __init__(self, bits: Array, device: Device, dtype: str) -> None:
        self.bits, self.device, self.dtype = bits, device, dtype

    def __getitem__(self, key: Any) -> HalfPrecisionArray:
        return HalfPrecisionArray(self.bits[key], self.device, self.dtype)

    def swapaxes(self, first: int, second: int) -> HalfPrecisionArray:
        """Return a view with two axes interchanged."""
        return HalfPrecisionArray(self.bits.swapaxes(first, second), self.device, self.dtype)


class MatrixBatch(NamedTuple):
    """Describe the layout in memory of equally spaced matrices of one size, as cuBLAS needs it.

    Attributes
    ----------
    transposed : bool
        Whether the columns of a matrix are contiguous instead of its rows.
    leading : int
        Number of elements from the start of a row (if ``transposed``, of a column) to the start of the next.
    step : int
        Number of elements from the start of a matrix to the start of the next; 0 for a single matrix.
    number : int
        Number of matrices.
    """

    transposed: bool
    leading: int
    step: int
    number: int

    @classmethod
    def of(cls, x: Array) -> MatrixBatch | None:
        """Return the layout of the matrices in the last two axes of ``x``.

        Return None if the matrices are not equally spaced, or neither their rows nor their columns are contiguous.
        """
        strides = [stride // x.itemsize for stride in x.strides]
        steps = [(stride, size) for stride, size in zip(strides[:-2], x.shape[:-2], strict=True) if size != 1]
        if any(outer != step * size for (outer, _), (step, size) in pairwise(steps)):
            return None
        number, step = prod(x.shape[:-2]), steps[-1][0] if steps else 0
        (rows, columns), (down, along) = x.shape[-2:], strides[-2:]
        down, along = down if rows > 1 else columns, along if columns > 1 else rows  # of one row, none comes next
        if step < 0 or (step == 0 and number > 1):
            return None
        if (columns == 1 or along == 1) and down >= columns:
            return cls(False, down, step, number)
        if (rows == 1 or down == 1) and along >= rows:
            return cls(True, along, step, number)
        return None


#: The layouts of the matrices of the two operands and of the result.
Batches = tuple[MatrixBatch, MatrixBatch, MatrixBatch]


def widened(x: HalfPrecisionArray) -> Array:
    """Return a float32 GPU array with the values of ``x``, in the same shape."""
    from mpizero.kernels import cuda

    xp = _library(x.bits)
    wide = xp.empty(x.bits.size, np.float32)
    getattr(cuda.layers, SIXTEEN_BITS[x.dtype][1])(xp.ascontiguousarray(x.bits).reshape(-1), wide)
    shaped: Array = wide.reshape(x.bits.shape)
    return shaped


#: The GPU, and the dtype to which the operands of products in this thread are rounded; None if they are not rounded.
PRODUCT_DTYPE: ContextVar[tuple[Device, str] | None] = ContextVar("products", default=None)


def operand(x: Array) -> Array | HalfPrecisionArray:
    """Return ``x`` as an operand for :func:`multiply`: rounded to 16 bits, or ``x`` itself.

    ``x`` is rounded inside the context of :meth:`Device.multiplying_in`, on the thread that entered the context. The
    last two axes of ``x`` are matrices. See [Note: products in 16 bits].
    """
    setting = PRODUCT_DTYPE.get()
    return x if setting is None else _halved(x, *setting)


def multiply(a: Array | HalfPrecisionArray, b: Array | HalfPrecisionArray, out: Array) -> None:
    """Write ``a @ b`` to ``out``, a float32 GPU array, for all pairs of matrices in their last two axes.

    The other axes of the three arrays have the same lengths. Either both operands come from :func:`operand`, or neither
    does.

    Raises
    ------
    ValueError
        If an operand of 16 bits is a view for which :meth:`MatrixBatch.of` returns None.
    """
    xp, target = _library(out), out
    result = MatrixBatch.of(out)
    if not _is_aligned(out) or (isinstance(a, HalfPrecisionArray) and (result is None or result.transposed)):
        target = xp.empty(out.shape, out.dtype)
        result = MatrixBatch.of(target)
    if not (isinstance(a, HalfPrecisionArray) and isinstance(b, HalfPrecisionArray)):
        xp.matmul(*(x if _is_aligned(x) else xp.array(x, order="K") for x in (a, b)), out=target)
    elif not a.bits.size or not b.bits.size:
        target[...] = 0
    else:
        left, right = MatrixBatch.of(a.bits), MatrixBatch.of(b.bits)
        if left is None or right is None or result is None:
            raise ValueError(f"the matrices of an operand do not lie one after the other: {left}, {right}")
        a.device.multiply(a, b, target, (left, right, result))
    if target is not out:
        xp.copyto(out, target)


def _is_aligned(x: Any) -> bool:
    """Tell whether a GPU array's address is a multiple of ``ALIGNED`` bytes; see [Note: aligned products]."""
    return bool(x.__cuda_array_interface__["data"][0] % ALIGNED == 0)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return the product of two float32 matrices on a GPU, in ``out`` if it is given.

    The operands are rounded to 16 bits inside the context of :meth:`Device.multiplying_in`.
    """
    if out is None:
        out = _library(a).empty((a.shape[0], b.shape[1]), a.dtype)
    multiply(operand(a), operand(b), out)
    return out


def _halved(x: Array, device: Device, dtype: str) -> HalfPrecisionArray:
    """Return ``x`` rounded to 16 bits; if matrices of ``x`` are transposed in memory, those of the result are too."""
    from mpizero.kernels import cuda

    xp, turned = _library(x), x.swapaxes(-1, -2)
    transposed = not x.flags.c_contiguous and turned.flags.c_contiguous
    flat = xp.ascontiguousarray(turned if transposed else x).reshape(-1)
    bits = xp.empty(flat.size, np.uint16)
    getattr(cuda.layers, SIXTEEN_BITS[dtype][0])(flat, bits)
    shaped = bits.reshape(turned.shape if transposed else x.shape)
    return HalfPrecisionArray(shaped.swapaxes(-1, -2) if transposed else shaped, device, dtype)


def _library(array: Any) -> Any:
    """Return the array library of a GPU array."""
    from mpizero.kernels import namespace  # which imports this module

    return namespace(array)
