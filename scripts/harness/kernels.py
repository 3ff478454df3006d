"""Find the kernels of the CPU, and compile them before others need them."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
from typing import Any

from mpizero import kernels
from mpizero.kernels.jit import DTYPES, Kernel


def cpu_kernels() -> dict[str, Kernel]:
    """Return the CPU kernels by "module:name"."""
    modules = [found.name for found in pkgutil.walk_packages(kernels.__path__, "mpizero.kernels.")]
    every = [value for name in modules if "cuda" not in name for value in vars(importlib.import_module(name)).values()]
    return {f"{kernel.__module__}:{kernel.name}": kernel for kernel in every if isinstance(kernel, Kernel)}


def dtypes(kernel: Any) -> str:
    """Return NumPy's characters of the dtypes for which a kernel is compiled: one if its types do not vary."""
    return "".join(DTYPES) if kernel.signature.template is not None else "f"


def compile_all() -> None:
    """Compile all CPU kernels in two processes, one for each dtype: so nothing that kernels share is compiled twice."""
    with multiprocessing.get_context("fork").Pool(len(DTYPES)) as processes:
        processes.map(_compile, DTYPES)


def _compile(char: str) -> None:
    for kernel in cpu_kernels().values():
        if char in dtypes(kernel):
            kernel.load(char)


if __name__ == "__main__":
    compile_all()
