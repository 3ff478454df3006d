"""Compile the CUDA kernels, compare each with its NumPy form in float64, and run them under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
from cuda_kernels import dtypes
from cuda_kernels import kernels as cuda_kernels
from harness import kernels
from harness.kernels import cpu_kernels

from gpu_checking.__main__ import simulate_if_asked
from gpu_checking.report import Report, Skipped, timed
from mpizero.kernels import cuda
from mpizero.kernels import gpu as devices
from tests.kernels.cases import Case, Draw, Host, cases
from tests.support.simulated import ASKED

#: For each size: flat elements, rows, columns, and the length of what the NumPy form does element by element. The last
#: one has more elements and more rows than a launch has threads and blocks.
SIZES = ((1, 1, 1, 1), (333, 61, 67, 100), (140_001, 1_501, 131, 100))
SMALL = ((7, 3, 2, 3),)
#: Number of blocks of a launch with which results must have the bits that they have with the usual one.
OTHER_BLOCKS = 3


def _tasks() -> list[tuple[str, str]]:
    """Return what is compiled: pairs of a kernel's name and a dtype."""
    on_gpu = [(f"cuda.{name}", dtype) for name, kernel in cuda_kernels().items() for dtype in dtypes(kernel)]
    return on_gpu + [(name, char) for name, kernel in cpu_kernels().items() for char in kernels.dtypes(kernel)]


def _load(task: tuple[str, str]) -> float:
    """Compile or load a kernel in this process; return the seconds that it took."""
    name, dtype = task
    if name.startswith("cuda."):
        devices.open_device(0)
        kernel = cuda_kernels()[name.removeprefix("cuda.")]
    else:
        kernel = cpu_kernels()[name]
    return timed(kernel.load, dtype)[0]


def _load_all(tasks: list[tuple[str, str]]) -> float:
    """Load kernels one after the other in this process; return the seconds that it took."""
    return timed(lambda: [_load(task) for task in tasks])[0]


def compiling(report: Report, small: bool) -> None:
    """Compile all kernels for this GPU and this CPU on all cores, then load those of the GPU in a new process."""
    count, reason = devices.available_gpus()
    tasks = [task for task in _tasks() if count or not task[0].startswith("cuda.")]
    on_gpu = [task for task in tasks if task[0].startswith("cuda.")]
    if small:
        raise Skipped(f"the simulator compiles nothing; {len(on_gpu)} kernels of the GPU were imported")
    shutil.rmtree(os.environ["MPIZERO_CACHE_DIR"], ignore_errors=True)
    context = get_context("spawn")
    jobs = os.cpu_count() or 1
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        wall, taken = timed(lambda: list(pool.map(_load, tasks)))
    report.figure("CPU kernels", f"{len(tasks) - len(on_gpu)} in {sum(taken[len(on_gpu) :]):.1f} s of one core")
    if not count:
        report.figure("in short", f"only the CPU's {len(tasks)}, {wall:.1f} s on {jobs} processes: {reason}")
        return
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(devices.open_device, 0).result()
        again = pool.submit(_load_all, on_gpu).result()
    gpu = sum(taken[: len(on_gpu)])
    slowest = max(range(len(tasks)), key=taken.__getitem__)
    report.figure("slowest", f"{' '.join(tasks[slowest])} {taken[slowest]:.1f} s")
    report.check("loading from the cache is faster", again < gpu / 5, f"{again:.2f} s of {gpu:.1f} s")
    report.figure(
        "in short",
        f"{len(on_gpu)} kernels of the GPU: {gpu:.1f} s of one core, with the CPU's {wall:.1f} s on {jobs} processes; "
        f"{again:.2f} s from the cache",
    )


# ---------------------------------------------------------------------------------------------- beside NumPy


def compared(report: Report, small: bool) -> None:
    """Run every kernel at odd sizes on random data, compare with NumPy in float64, and with other launch shapes."""
    device, launched = devices.open_device(0), set()
    with _watched(launched):
        worst: dict[str, tuple[float, str]] = {}
        calls = 0
        for dtype in (np.float32, np.float64):
            for sizes in SMALL if small else SIZES:
                for case in cases(Draw(dtype, *sizes)):
                    with report.attempt(f"{case.kernel} {dtype.__name__} {sizes}"):
                        calls += 1
                        error, places = case.error(partial(_on_device, device))
                        key = f"{dtype.__name__} {case.kernel}"
                        worst[key] = max(worst.get(key, (0.0, "")), (error, f"{sizes}{places}"))
    for key, (error, where) in sorted(worst.items()):
        if not error <= 1:
            report.check(key, False, f"{error:.3g} times the allowed error, sizes {where}")
    kinds = {name.split(".")[0] for name in launched}
    missing = sorted(cuda_kernels().keys() - launched)
    report.check("every kernel was launched", not missing, ", ".join(missing) or f"{len(launched)}")
    if not small:  # the simulator runs one block
        _other_blocks(report, device)
        extra = [
            name for name, kernel in cuda_kernels().items() if len(kernel._compiled.overloads) > len(dtypes(kernel))
        ]
        report.check("no launch compiled a kernel a second time", not extra, ", ".join(extra) or "none")
    single, double = (max(v for k, v in worst.items() if k.startswith(kind))[0] for kind in ("float32", "float64"))
    report.figure(
        "in short",
        f"{len(launched)} kernels of {len(kinds)} families, {calls} calls; largest errors {single:.2f} (float32) and "
        f"{double:.2f} (float64) of the allowed",
    )


@contextmanager
def _watched(launched: set[str]) -> Iterator[None]:
    """Add the names "file.kernel" of all launched kernels to ``launched`` while the context is active."""
    from mpizero.kernels.cuda.launch import CudaKernel

    call = CudaKernel.__call__

    def watched(kernel: Any, *args: Any) -> None:
        launched.add(f"{kernel.__module__.rpartition('.')[2]}.{kernel.name}")
        call(kernel, *args)

    CudaKernel.__call__ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaKernel.__call__ = call  # type: ignore[method-assign]


def _on_device(device: devices.Device, case: Case) -> tuple[Any, list[Any]]:
    """Call a kernel on the GPU; return its result and the arguments afterwards, on the host."""
    from mpizero.kernels import to_host

    args = case.copies()
    placed = [
        device.put(own) if isinstance(own, np.ndarray) and not isinstance(value, Host) else own
        for own, value in zip(args, case.args, strict=True)
    ]
    result = case.called(cuda, placed)
    return result, [to_host(value) for value in placed]


def _other_blocks(report: Report, device: devices.Device) -> None:
    """Check that no result depends on the number of blocks of a launch."""
    from mpizero.kernels.cuda import launch

    usual, differ, count = launch._grid, [], 0

    def few(args: tuple[Any, ...]) -> tuple[int, int]:
        return OTHER_BLOCKS, usual(args)[1]

    for case in cases(Draw(np.float32, *SIZES[-1])):
        _, first = _on_device(device, case)
        launch._grid = few
        try:
            _, second = _on_device(device, case)
        finally:
            launch._grid = usual
        count += 1
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, np.ndarray)]
        if any(a.tobytes() != b.tobytes() for number, (a, b) in enumerate(pairs) if number != case.scratch):
            differ.append(case.kernel)
    told = ", ".join(sorted(set(differ))) or f"{count} calls"
    report.check("results do not depend on the number of blocks", not differ, told)


# ---------------------------------------------------------------------------------------------- the sanitizer


def sanitizer(report: Report, small: bool) -> None:
    """Run every kernel at small sizes under memcheck and racecheck of compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    command = [sys.executable, "-c", "from gpu_checking.kernels import every_kernel; every_kernel()"]
    if tool is None and not small:
        raise Skipped("there is no compute-sanitizer on the PATH")
    for check in ("memcheck", "racecheck"):
        options = [] if small else [str(tool), "--tool", check, "--error-exitcode", "9", "--print-limit", "5"]
        seconds, done = timed(
            partial(subprocess.run, [*options, *command], capture_output=True, text=True, check=False)
        )
        print(done.stdout, done.stderr, sep="\n")
        summary = [line for line in (done.stdout + done.stderr).splitlines() if "SUMMARY" in line]
        told = summary[-1].strip("= ") if summary else f"exit status {done.returncode}"
        report.check(check, done.returncode == 0, f"{told}, {seconds:.0f} s")
        if small:
            break
    report.figure("in short", "without the sanitizer: every kernel ran" if small else "memcheck, racecheck: no errors")


def every_kernel() -> None:
    """Run every kernel in float32 at small sizes, each array in memory of its own, so that the end of each is seen."""
    simulate_if_asked()
    device = devices.open_device(0)
    if not ASKED:
        import cupy

        cupy.cuda.set_allocator(None)  # a pool would hide what is read beyond an array
    for case in cases(Draw(np.float32, *(SMALL[0] if ASKED else (333, 11, 67, 10)))):
        _on_device(device, case)
    device.synchronize()
