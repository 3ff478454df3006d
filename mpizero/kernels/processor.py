"""Tell what CPU runs this process, and describe it to LLVM, which is imported only where Linux does not tell."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress
from typing import Any

_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")


@functools.cache
def _described() -> dict[str, str]:
    """Return what Linux tells of the first x86-64 CPU, by the names in ``_IDENTITY``; nothing on other systems.

    Loading LLVM, to ask it, takes 40 ms of processor time in each process.
    """
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, colon, value = line.partition(":")
            if not colon:
                break
            if name.strip() in _IDENTITY:
                found[name.strip()] = value.strip()
    return found if len(found) == len(_IDENTITY) and os.uname().machine == "x86_64" else {}


def cpu_identity() -> str:
    """Return a text that differs where other machine code is compiled, as far as Linux and NumPy tell features.

    NumPy asks the CPU itself, so an emulator that has fewer features than the machine has another text.
    """
    if described := _described():
        return repr((described, getattr(sys.modules.get("numpy._core._multiarray_umath"), "__cpu_features__", None)))
    llvm = initialized_llvm()
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def cpu_features() -> frozenset[str]:
    """Return the names of the features that this CPU has, among them "fma", "avx512f" and "neon" as LLVM calls them."""
    if described := _described():
        return frozenset(described["flags"].split())
    llvm = initialized_llvm()
    features = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    return features | ({"neon"} if llvm.get_process_triple().startswith("aarch64") else set())


@functools.cache
def initialized_llvm() -> Any:
    """Return llvmlite's binding, ready to compile for this CPU."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def make_target_machine() -> Any:
    """Make an LLVM target machine for this CPU; every execution engine needs its own, because it takes ownership."""
    llvm = initialized_llvm()
    chosen = llvm.Target.from_default_triple()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return chosen.create_target_machine(cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault")
