"""Define the decorator of CUDA kernels, which have the same names and signatures as the CPU kernels.

::

    from mpizero.kernels.cuda.launch import cuda, kernel
    from mpizero.kernels.formulas import sgd as updated

    @kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
    def sgd(w, g, hyper, start, stop):
        lr, decay = hyper[0], hyper[1]
        for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
            w[i] = updated(w[i], g[i], lr, decay)

Every loop over elements or rows strides over the grid of threads, so results are right with any number of threads.
Kernels return nothing; where the CPU kernel returns a result, a plain function launches kernels and reads their output.

Arrays are CuPy's. Small host arrays (scalars of a step, programs, sums) may be passed too: they are copied to the
device, and copied back afterwards if they are not declared ``const``.

On a GPU, one process of each node compiles a kernel when it is first called with arrays of a dtype, and stores the
machine code in the folder of :mod:`mpizero.kernels.machine_code`; other processes load it from there. The first
functions of this module do that: they make numba-cuda work with every version of NumPy, and make it round each
operation as on the CPU.

[Note: contraction] NVVM contracts ``a * b + c`` to one operation, rounded once, wherever it finds that. What it finds
depends on the code around: a formula could give different bits in two kernels, or in two branches of one kernel. A
single rank updates by other kernels than several ranks, and their bits must be equal. So contraction is off.
Contraction would save little time, because these kernels are limited by memory bandwidth. (Link-time optimization is
off, too: it would contract after NVVM, and gains nothing, since NVVM sees a kernel and its helper functions together.)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda as _cuda
from numba import cuda as compiler

from mpizero.kernels import machine_code
from mpizero.kernels.gpu import gpus
from mpizero.kernels.jit import DTYPES, PACKAGE, Signature, numba_type, with_compiled_helpers


def compiled_on_call(python: Callable[..., Any]) -> Any:
    """Return numba's dispatcher of the kernel ``python``: the first call with arguments of new types compiles it."""
    with _row_stack():
        importlib.import_module("numba.cuda.np.arrayobj")
    dispatcher: Any = compiler.jit(python, lto=False)
    compile_for = dispatcher.compile

    def compiled(signature: Any) -> Any:
        with rounding_each_operation():
            return compile_for(signature)

    dispatcher.compile = compiled
    return dispatcher


def load_or_compile(dispatcher: Any, arguments: tuple[Any, ...], file_name: str) -> None:
    """Give a dispatcher the machine code for arguments of these types, from the cache or newly compiled.

    numba's own cache is not used: it would not notice that a formula in another file has changed, and each rank would
    compile for itself. ``file_name`` is the name of the kernel's file in the cache without its ending.
    """
    import numba_cuda
    from numba.cuda.dispatcher import _Kernel
    from numba.cuda.serialize import dumps

    def build() -> bytes:
        return bytes(dumps(dispatcher.compile(arguments)._reduce_states()))

    capability = "".join(map(str, compiler.get_current_device().compute_capability))
    folder = machine_code.folder(f"sm_{capability}, numba-cuda {numba_cuda.__version__}")
    code = machine_code.load_or_build(folder / f"{file_name}.cubin", build)
    if arguments not in dispatcher.overloads:
        dispatcher.add_overload(_Kernel._rebuild(**pickle.loads(code)), arguments)


@contextmanager
def rounding_each_operation() -> Iterator[None]:
    """Keep numba-cuda from contracting products and sums while the context is active; see [Note: contraction].

    numba-cuda has no public option for this. So the function that calls NVVM is replaced, under the compiler's lock.
    """
    from numba.cuda.core.compiler_lock import global_compiler_lock
    from numba.cuda.cudadrv import nvvm

    with global_compiler_lock:
        compile_ir = nvvm.compile_ir
        nvvm.compile_ir = functools.partial(compile_ir, fma=False)
        try:
            yield
        finally:
            nvvm.compile_ir = compile_ir


@contextmanager
def _row_stack() -> Iterator[None]:
    """Define ``numpy.row_stack`` while the context is active, if NumPy does not have it (from version 2.5 on).

    numba-cuda, at least up to version 0.30.4, needs this function at its first compilation.
    """
    known = vars(np)
    missing = "row_stack" not in known
    if missing:
        known["row_stack"] = np.vstack
    try:
        yield
    finally:
        if missing:
            del known["row_stack"]


cuda: Any = _cuda  # numba publishes types without the names that kernels use

THREADS = 128
#: Blocks of a launch: at least about as many as a GPU has multiprocessors (numba warns of fewer than 128), for small
#: arrays may have few long rows.
LEAST_BLOCKS, BLOCKS = 128, 1024
#: CUDA's number for the default stream on which CuPy computes: numba's own 0 may mean one stream for each thread.
_LEGACY_STREAM = 1


class CudaKernel:
    """Represent a CUDA kernel, called like the CPU kernel; numba compiles it at the first call with each dtype.

    Attributes
    ----------
    python : function
        The plain Python function.
    signature : Signature
        Types of the parameters.
    """

    def __init__(self, python: Callable[..., None], signature: Signature) -> None:
        functools.update_wrapper(self, python)
        self.name = python.__qualname__
        self.python = python
        self.signature = signature
        self.__signature__ = inspect.signature(python)
        self._compiled: Any = None
        self._loaded: set[str] = set()

    def __call__(self, *args: Any) -> None:
        """Launch the kernel on the current stream; raise TypeError if the number or the axes of arguments are wrong."""
        names = list(self.__signature__.parameters)
        if len(args) != len(names):
            raise TypeError(f"kernel {self.name} takes {len(names)} arguments ({', '.join(names)})")
        for name, value, parameter in zip(names, args, self.signature.parameters, strict=True):
            if parameter.ndim and getattr(value, "ndim", None) != parameter.ndim:
                raise TypeError(f"kernel {self.name}: {name} must have {parameter.ndim} dimension(s)")
        gpus().launch(self, args)

    def launch(self, args: tuple[Any, ...]) -> None:
        """Launch the kernel on CuPy's current stream, so that it runs after all that was started there before.

        Host arrays are copied by CuPy, too: on the same stream, and in memory of the pool that all arrays come from.
        """
        import cupy

        passed: list[Any] = []
        returned = []
        for value, parameter in zip(args, self.signature.parameters, strict=True):
            if parameter.ndim:
                there = cupy.asarray(value) if isinstance(value, np.ndarray) else value
                passed.append(cuda.as_cuda_array(there, sync=False))  # on one stream there is nothing to wait for
                if there is not value and not parameter.readonly:
                    returned.append((there, value))
            else:  # of its declared type: numba would compile another kernel for a u8 below 2**63 than for one above
                passed.append(np.dtype(parameter.dtype).type(value))
        self.load(self._dtype(args))
        stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr or _LEGACY_STREAM)
        self._compiled[(*_grid(args), stream)](*passed)
        for there, host in returned:
            there.get(out=host)

    def dispatcher(self) -> Any:
        """Return numba's dispatcher of this kernel, which has compiled nothing yet."""
        return compiled_on_call(with_compiled_helpers(self.python, _device_function))

    def _dtype(self, args: tuple[Any, ...]) -> str:
        """Return the dtype that ``T`` stands for in a call with these arguments, "f4" or "f8"; "f4" without a ``T``."""
        position = self.signature.template
        char = "f" if position is None else getattr(getattr(args[position], "dtype", None), "char", "f")
        return DTYPES.get(char, "f4")

    def load(self, dtype: str) -> None:
        """Compile the kernel for ``dtype`` ("f4" or "f8") and this process's GPU, or load its code, if not done yet."""
        if dtype in self._loaded:
            return
        if self._compiled is None:
            self._compiled = self.dispatcher()
        file_name = f"{self.__module__.removeprefix(PACKAGE)}.{self.name}-{dtype}"
        load_or_compile(self._compiled, self.argument_types(dtype), file_name)
        self._loaded.add(dtype)

    def argument_types(self, dtype: str) -> tuple[Any, ...]:
        """Return numba's types of the arguments of a launch on a GPU, with ``dtype`` in place of ``T``.

        Arrays have the type of writable arrays, also those declared ``const``.
        """
        parameters = self.signature.resolve(dtype).parameters
        return tuple(numba_type(dataclasses.replace(parameter, readonly=False)) for parameter in parameters)


def _grid(args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the number of blocks to launch, and of threads per block, which is the same for all launches.

    So sums over the threads of a block have the same bits in every launch.
    """
    largest = max((int(value.size) for value in args if hasattr(value, "size")), default=1)
    return max(LEAST_BLOCKS, min(BLOCKS, -(-largest // THREADS))), THREADS


def kernel(signature: str) -> Callable[[Callable[..., None]], CudaKernel]:
    """Make a decorator that turns a plain Python function into a CUDA kernel; nothing is compiled yet.

    Parameters
    ----------
    signature : str
        Types of the result and of the parameters, as for :func:`mpizero.kernels.jit.kernel`; the result is void.
    """
    parsed = Signature.parse(signature)
    return lambda python: CudaKernel(python, parsed)


@functools.cache
def _device_function(helper: Callable[..., Any]) -> Any:
    return cuda.jit(device=True)(with_compiled_helpers(helper, _device_function))
