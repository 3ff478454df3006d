"""Tell what machine the GPU is in, compare hashes on its CPU, and measure its cores."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_checking.bits import mpiexec
from gpu_checking.report import Report, Skipped
from gpu_checking.running import ROOT, command_line

PACKAGES = (
    "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "mpi4py", "mpich", "h5py", "isal", "greenlet",
    "threadpoolctl", "torch", "jax",
)  # fmt: skip
#: Ranks of the comparison on the host's cores, and the largest share of its seconds that each number may take.
RANKS = (1, 4, 16)


def _said(*command: str) -> str:
    """Return what a command prints, or why it cannot be run."""
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    return (done.stdout or done.stderr).strip()


def facts(report: Report, small: bool) -> None:
    """Write down the machine, the GPU and the versions of all packages; run `mpizero doctor`."""
    from importlib.metadata import PackageNotFoundError, version

    query = "name,driver_version,memory.total,memory.free,compute_mode,mig.mode.current,clocks.max.sm"
    shown = _said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    report.figure("GPU", shown.replace("\n", "; "))
    report.figure("Python", f"{platform.python_version()} {sys.executable}")
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    report.figure("packages", ", ".join(versions))
    cpu = dict(line.split(":", 1) for line in _said("lscpu").splitlines() if ":" in line)
    flags = cpu.get("Flags", "").split()
    kinds = [flag for flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile") if flag in flags]
    model = cpu.get("Model name", "").strip()
    report.figure("CPU", f"{model}, {os.cpu_count()} processors, {', '.join(kinds) or 'no AVX2'}")
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0
    report.figure("/dev/shm", f"{free / 2**30:.1f} GiB free")
    report.figure("MPI", re.sub(r"\s+", " ", _said(mpiexec(), "--version"))[:100])
    report.figure("nvcc", _said("nvcc", "--version").splitlines()[-1])
    for line in _said(*command_line(small), "doctor").splitlines():
        report.figure("doctor", line.strip())
    with report.attempt("the library's GPU"):
        from mpizero.kernels.gpu import available_gpus, open_device

        count, reason = available_gpus()
        report.figure("found by the library", reason or f"{count}, {open_device(0).name}")
        report.figure("in short", f"{reason or open_device(0).name}; {model}, {os.cpu_count()} processors")


# ---------------------------------------------------------------------------------------------- hashes on the CPU


def cpu(report: Report, small: bool) -> None:
    """Compare the golden trainings on this CPU, with its own registers, with those of every other."""
    from mpizero.kernels.machine_code import instruction_set

    command = [sys.executable, "-m", "tests.golden.trainings"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.endswith(("the same", "DIFFERS"))]
    wrong = [line for line in lines if line.endswith("DIFFERS")] or done.stderr.splitlines()[-1:]
    said = f"{instruction_set() or 'no fused multiply-adds'}: {len(lines) - len(wrong)} hashes are those of every CPU"
    report.check("golden trainings", done.returncode == 0, "; ".join(wrong) if done.returncode else said)
    report.figure("in short", said)


# ---------------------------------------------------------------------------------------------- the host's cores


def cores(report: Report, small: bool) -> None:
    """Compare tokens a second with PyTorch DDP and FSDP2 on 1, 4 and 16 ranks of the host's cores."""
    import importlib.util

    contenders = "zero2"
    if importlib.util.find_spec("torch") is not None:
        contenders += ",torch-ddp,torch-fsdp2"
    elif not small:
        raise Skipped("PyTorch is not installed")
    sizes = ["--dim", "8", "--layers", "1", "--heads", "1", "--batch", "1", "--sequence", "4", "--vocabulary", "5"]
    turns = ["--rounds", "1", "--steps", "1", "--warmup", "1"] if small else ["--rounds", "5", "--steps", "4"]
    shown = []
    for ranks in (2,) if small else [ranks for ranks in RANKS if ranks <= (os.cpu_count() or 1)]:
        command = [
            sys.executable, str(ROOT / "scripts/benchmarks/compare.py"), "--ranks", str(ranks), "--contenders",
            contenders, "--no-memory", "--json", "--mpiexec", mpiexec(), *turns, *(sizes if small else []),
        ]  # fmt: skip
        with report.attempt(f"{ranks} ranks"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(done.stderr)
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-300:])
            told = _rates(json.loads(done.stdout))
            report.figure(f"{ranks} ranks", told)
            shown.append(f"{ranks}: {told}")
    report.figure("in short", "tokens/s on ranks " + "; ".join(shown))


def _rates(found: dict[str, Any]) -> str:
    """Return tokens a second of mpizero in a line, and the ratios to those of its peers."""
    ours = found["results"]["zero2"]
    peers = [f"{ratio['median']:.2f} of {name}" for name, ratio in ours["over"].items()]
    return ", ".join([f"{ours['tokens_per_second']['median']:,.0f}", *peers])
