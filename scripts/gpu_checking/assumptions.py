"""Check what the code takes for granted of CuPy, cuBLAS, numba-cuda and the driver, and no GPU-less test can show."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_checking.report import Report
from mpizero.kernels import cpu, cuda, gpu, namespace
from tests.kernels.cases import UPDATES

Array = np.ndarray[Any, np.dtype[Any]]
#: Environment variables that give each thread a default stream of its own: launches and copies must still be in order.
STREAMS = ("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM")


def assumptions(report: Report, small: bool) -> None:
    """Check each of them; in the simulator those that do not need a GPU."""
    device = gpu.open_device(0)
    checks: list[Callable[[Report, gpu.Device, bool], None]] = [_updates, _row_sums, _pinned]
    if not small:
        checks += [_addresses, _launch_cost, _pools, _streams]
    for check in checks:
        with report.attempt(str(check.__doc__).partition(".")[0]):
            check(report, device, small)


def _updates(report: Report, device: gpu.Device, small: bool) -> None:
    """Compare the bits of updates with those of the CPU.

    A rank that is alone updates on the GPU by fused kernels, several ranks by others: nothing may be contracted.
    """
    rng, size = np.random.default_rng(0), 50 if small else 100_003
    differ = []
    for dtype in (np.float32, np.float64):
        for name, (slots, scalars) in UPDATES.items():
            arrays = [np.abs(rng.standard_normal(size)).astype(dtype) for _ in range(2 + slots)]
            hyper = np.array(scalars, dtype)
            placed = [device.put(values) for values in arrays]
            getattr(cuda.update, name)(*placed, hyper, 0, size)
            getattr(cpu.update, name)(*arrays, hyper, 0, size)
            if any(_bytes(one) != other.tobytes() for one, other in zip(placed, arrays, strict=True)):
                differ.append(f"{name} {dtype.__name__}")
    report.check("updates have the bits of the CPU", not differ, ", ".join(differ) or f"{2 * len(UPDATES)} kernels")


def _row_sums(report: Report, device: gpu.Device, small: bool) -> None:
    """Check that a row's sum does not depend on the number of rows, in CuPy's einsum of ring attention."""
    shape = (2, 4, 2, 4) if small else (2, 512, 8, 64)
    x = device.put(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    half = shape[1] // 2
    part = device.put(np.ascontiguousarray(_host(x)[:, :half]))
    whole, alone = (namespace(x).einsum("...f,...f->...", values, values) for values in (x, part))
    report.check(
        "a row's sum does not depend on the number of rows", bool((_host(whole)[:, :half] == _host(alone)).all()), shape
    )


def _pinned(report: Report, device: gpu.Device, small: bool) -> None:
    """Check that copies through the pinned buffer arrive whole while the GPU is busy."""
    size, times = (100, 2) if small else (50_000_000, 10)
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    there = device.empty(size, np.float32)
    busy = device.put(np.zeros((4, 4) if small else (8192, 8192), np.float32))
    wrong = 0
    for number in range(times):
        busy @ busy  # noqa: B018 - for the GPU to do
        sent = values + np.float32(number)
        device.write(there, sent)
        wrong += not np.array_equal(_host(there), sent)
    report.check("copies through the pinned buffer arrive whole", not wrong, f"{times} of {size:,} elements")


def _addresses(report: Report, device: gpu.Device, small: bool) -> None:
    """Check that cuBLAS rounds a product in one way at all multiples of 256 bytes; elsewhere it may differ."""
    import cupy

    rng = np.random.default_rng(0)

    def placed(values: Any, offset: int) -> Any:
        memory = cupy.empty(values.nbytes + 2048, cupy.uint8)
        start = -memory.data.ptr % 1024 + offset
        view = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        view[...] = values
        return view

    for rows, inner, columns in ((512, 1024, 1024), (4096, 1024, 3072), (129, 65, 33)):
        a, b = (cupy.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((rows, inner), (inner, columns)))
        found: dict[int, set[bytes]] = {256: set(), 4: set()}
        for step, offsets in ((256, (0, 256, 512)), (4, (0, 4, 8, 16, 64, 128))):
            for offset in offsets:
                for first, second, third in ((offset, 0, 0), (0, offset, 0), (0, 0, offset)):
                    out = placed(cupy.zeros((rows, columns), cupy.float32), third)
                    cupy.matmul(placed(a, first), placed(b, second), out=out)
                    found[step].add(out.get().tobytes())
        told = f"{rows} x {inner} x {columns}: {len(found[256])} result, {len(found[4])} at multiples of 4"
        report.check("cuBLAS at multiples of 256 bytes", len(found[256]) == 1, told)


def _launch_cost(report: Report, device: gpu.Device, small: bool) -> None:
    """Measure what a launch costs the host, beside one by CuPy itself."""
    import cupy

    x, y = (device.put(np.zeros(1000, np.float32)) for _ in range(2))
    plain = cupy.RawKernel('extern "C" __global__ void f(const float *x, float *y) {}', "f")

    def microseconds(launch: Callable[[], Any]) -> float:
        launch()
        device.synchronize()
        begun = time.perf_counter()
        for _ in range(1000):
            launch()
        taken = time.perf_counter() - begun
        device.synchronize()
        return taken * 1e3

    ours = microseconds(lambda: cuda.layers.relu(x, y))
    theirs = microseconds(lambda: plain((8,), (128,), (x, y)))
    report.figure("a launch takes the host", f"{ours:.0f} microseconds, one of a RawKernel of CuPy {theirs:.0f}")


def _pools(report: Report, device: gpu.Device, small: bool) -> None:
    """Tell how much memory CuPy's pool keeps, which other ranks of the GPU cannot take."""
    import cupy

    pool, (free, total) = cupy.get_default_memory_pool(), cupy.cuda.runtime.memGetInfo()
    kept = f"{pool.used_bytes() / 1e6:.0f} MB used of {pool.total_bytes() / 1e6:.0f} kept"
    report.figure("memory pool", f"{kept}; {free / 1e9:.1f} of {total / 1e9:.1f} GB of the GPU free")


def _streams(report: Report, device: gpu.Device, small: bool) -> None:
    """Check that work is in order where the environment gives each thread a default stream of its own."""
    for name in STREAMS:
        command = [sys.executable, "-c", "from gpu_checking.assumptions import in_order; in_order()"]
        done = subprocess.run(command, env=os.environ | {name: "1"}, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, sep="\n")
        report.check(f"in order with {name}", done.returncode == 0, done.stderr.strip()[-200:] or "3 trainings")


def in_order() -> None:
    """Train three times; end with an error if the parameters differ."""
    from gpu_checking.bits import Row, train
    from mpizero.comm import InMemoryCommunicator

    found = {train(InMemoryCommunicator(), Row(1, "ddp"), False) for _ in range(3)}
    if len(found) != 1:
        sys.exit(f"{len(found)} different results of 3 equal trainings")


def _host(array: Any) -> Array:
    from mpizero.kernels import to_host

    values: Array = to_host(array)
    return values


def _bytes(array: Any) -> bytes:
    return _host(array).tobytes()
