"""Let numba-cuda compile kernels with any NumPy, round each operation as the CPU does, and keep their machine code.

[Note: contraction] NVVM contracts ``a * b + c`` to one operation, rounded once, wherever it finds that. What it finds
depends on the code around: one formula would have other bits in another kernel, or in another branch of the same one.
A rank that is alone updates by other kernels than several ranks, and their bits must be equal. So nothing is contracted
here. These kernels wait for memory, not for arithmetic. (Link-time optimization would contract after NVVM, and gains
nothing: NVVM sees a kernel and its helper functions together.)
"""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda as compiler

from mpizero.kernels import machine_code


def compiled_on_call(python: Callable[..., Any]) -> Any:
    """Return numba's dispatcher of a kernel, which compiles it at the first call with each type of arguments."""
    with _row_stack():
        importlib.import_module("numba.cuda.np.arrayobj")
    dispatcher: Any = compiler.jit(python, lto=False)
    compile_for = dispatcher.compile

    def compiled(signature: Any) -> Any:
        with rounding_each_operation():
            return compile_for(signature)

    dispatcher.compile = compiled
    return dispatcher


def load_or_compile(dispatcher: Any, arguments: tuple[Any, ...], place: str) -> None:
    """Give a dispatcher the machine code for arguments of these types, from the cache or newly compiled.

    numba's own cache would not see that a formula in another file has changed, and each rank would compile for itself.
    ``place`` is the name of the kernel's file in the cache without its ending.
    """
    import numba_cuda
    from numba.cuda.dispatcher import _Kernel
    from numba.cuda.serialize import dumps

    def build() -> bytes:
        return bytes(dumps(dispatcher.compile(arguments)._reduce_states()))

    capability = "".join(map(str, compiler.get_current_device().compute_capability))
    folder = machine_code.folder(f"sm_{capability}, numba-cuda {numba_cuda.__version__}")
    code = machine_code.load_or_build(folder / f"{place}.cubin", build)
    if arguments not in dispatcher.overloads:
        dispatcher.add_overload(_Kernel._rebuild(**pickle.loads(code)), arguments)


@contextmanager
def rounding_each_operation() -> Iterator[None]:
    """Keep numba-cuda from contracting products and sums while the context is active; see [Note: contraction].

    No public option says so, therefore this replaces the function that calls NVVM, which one thread at a time may call.
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
    """Give NumPy the function ``row_stack`` while the context is active, if it has none, as from NumPy 2.5 on.

    numba-cuda, up to 0.30.4 at least, asks for it when it is first to compile something, and cannot do without.
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
