"""Provide the simulated GPUs of a process."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from mpizero.kernels import namespace
from mpizero.kernels.cuda.launch import CudaKernel
from mpizero.kernels.gpu import Batches, Device, Gpus, HalfPrecisionArray, widened
from mpizero.types import Array
from tests.support.simulated.arrays import NAMESPACE, SimulatedArray
from tests.support.simulated.launching import simulate

#: Number of GPUs that the simulator has: more than one, so that tests also see ranks on different GPUs.
SIMULATED_DEVICES = 2


class SimulatedGpus(Gpus):
    """Stand for the GPUs of a process."""

    in_host_memory = True

    def available(self) -> tuple[int, str]:
        """Return the number of simulated GPUs."""
        return SIMULATED_DEVICES, ""

    def opened(self, number: int) -> Device:
        """Open a simulated GPU."""
        return SimulatedDevice(number)

    def launch(self, kernel: CudaKernel, args: tuple[Any, ...]) -> None:
        """Run a kernel in the simulator."""
        simulate(kernel, args)


class SimulatedDevice(Device):
    """Represent a GPU of Numba's simulator, which is slow and meant for tests."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, "simulated"
        super().__init__()

    def _pinned(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    def _copy_pinned(self, target: Any, staged: Array) -> None:
        target.set(staged)

    def _await_pinned(self) -> None:
        pass

    def empty(self, size: int, dtype: Any) -> Array:
        """Allocate a 1-D array on the simulated GPU, filled with NaN to show any use before it is written."""
        array: Array = NAMESPACE.full(size, np.nan, dtype)
        return array

    def synchronize(self) -> None:
        """Do nothing, because the simulator finishes all work at once."""

    def _array(self, values: Array) -> Array:
        return cast("Array", SimulatedArray(values.copy()))

    def multiply(self, a: HalfPrecisionArray, b: HalfPrecisionArray, out: Array, batches: Batches) -> None:
        """Write the products of two batches of matrices, ``a @ b``, to ``out``, after converting both to float32."""
        namespace(out).matmul(widened(a), widened(b), out=out)
