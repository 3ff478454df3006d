"""Run CUDA kernels in Numba's simulator, which runs every thread in Python: arrays should be small.

Arguments are simulated arrays or NumPy's. The simulator is part of numba (0.68 has it) and of the package numba-cuda,
which GPUs need. If both are installed, numba-cuda provides ``numba.cuda``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda

from mpizero.kernels.cuda.launch import CudaKernel
from mpizero.kernels.jit import with_compiled_helpers
from mpizero.types import Array
from tests.support.simulated.arrays import SimulatedArray

SIMULATED_THREADS = 3  # not a power of two: strides over the grid leave a remainder
_SIMULATOR = threading.Lock()  # it runs one kernel at a time; ranks that are threads wait for each other


def simulate(kernel: CudaKernel, args: tuple[Any, ...]) -> None:
    """Run a kernel."""
    passed = []
    for value, parameter in zip(args, kernel.signature.parameters, strict=True):
        copied = isinstance(value, np.ndarray) and parameter.readonly  # the simulator would write it back
        own = value.values if isinstance(value, SimulatedArray) else value
        passed.append(own.copy() if copied else own)
    with _simulating():
        if kernel._compiled is None:  # not while the simulator runs another: it sets names in the module meanwhile
            kernel._compiled = cuda.jit(_for_simulator(kernel.python))
        kernel._compiled[1, SIMULATED_THREADS](*passed)


@contextmanager
def _simulating() -> Iterator[None]:
    """Let no other thread use the simulator while the context is active, and let Python switch threads more often.

    The simulator polls its threads, so each barrier lasts as long as Python lets one thread run: 5 ms by default.
    """
    with _SIMULATOR:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            yield
        finally:
            sys.setswitchinterval(interval)


def _for_simulator(python: Callable[..., Any]) -> Any:
    """Return a copy of a kernel, or of a helper, in which an object of :class:`_Running` replaces ``numba.cuda``."""
    copy = with_compiled_helpers(python, _for_simulator)
    copy.__globals__.update({name: _Running() for name, value in copy.__globals__.items() if value is cuda})
    return copy


class _Running:
    """Stand for ``numba.cuda`` in simulated kernels and their helpers: attributes are those of the running kernel.

    The simulator itself has two defects. It sets the name ``cuda`` in a module for all threads together, and resets it
    when the first of them returns. And threads that ask for a shared array at the same time get one array each. Both
    lead to wrong sums, the more often the more often Python switches threads.
    """

    @property
    def shared(self) -> _Running:
        """The object whose method ``array`` makes shared arrays: this object itself."""
        return self

    def array(self, shape: int, dtype: Any) -> Array:
        """Return the shared array for the calling line of the kernel: the same array in all threads of the block."""
        asking = sys._getframe(1)
        made = vars(self._kernel()).setdefault("arrays of mpizero", {})
        array: Array = made.setdefault((asking.f_code, asking.f_lineno), np.empty(shape, dtype))
        return array

    @staticmethod
    def _kernel() -> Any:
        from numba.cuda.simulator.kernel import _get_kernel_context

        return _get_kernel_context()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel(), name)
