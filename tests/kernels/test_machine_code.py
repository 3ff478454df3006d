"""Object files of kernels are loaded by LLVM; where that cannot be, the error says what to do."""

from __future__ import annotations

import platform
import subprocess
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest

from mpizero.errors import ConfigError
from mpizero.kernels import machine_code
from mpizero.kernels.cpu import update


def compiled(text):
    """Return the object file that LLVM makes of a function in its assembly."""
    machine_code.initialized_llvm()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return machine.emit_object(llvm.parse_assembly(f'target triple = "{machine.triple}"\n{text}'))


def test_a_loaded_function_reads_its_data_and_calls_python():
    text = """
@number = internal global i64 42
define ptr @answer(ptr %self, ptr %arguments, i64 %count) {
  %value = load i64, ptr @number
  %boxed = call ptr @PyLong_FromLongLong(i64 %value)
  ret ptr %boxed
}
declare ptr @PyLong_FromLongLong(i64)
"""
    assert machine_code.Native("answer", compiled(text), "answer").call() == 42


@pytest.mark.slow
def test_where_written_code_may_not_run_the_error_says_what_to_do():
    update.sgd.load("f")  # by another process, so that it is compiled already
    # PR_SET_MDWE of Linux 6.3
    program = """
import numpy as np
from mpizero.kernels.cpu import update
import ctypes, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): sys.exit("skipped")
update.sgd(np.ones(5, "f"), np.ones(5, "f"), np.zeros(2, "f"), 0, 5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if "skipped" in done.stderr:
        pytest.skip("the kernel cannot forbid it")
    assert "PermissionError" in done.stderr
    assert "execmem or set NUMBA_DISABLE_JIT=1" in done.stderr


@pytest.fixture
def detect(monkeypatch):
    """Find the instruction set as if it were the first time."""
    monkeypatch.delenv("MPIZERO_CPU", raising=False)
    return machine_code.instruction_set.__wrapped__


def test_the_instruction_set_is_the_best_that_llvm_finds(detect):
    found = llvm.get_host_cpu_features()
    best = next((name for feature, name in (("avx512f", "avx512"), ("fma", "avx2")) if found.get(feature)), "")
    assert detect() == (best or "neon" if platform.machine() in ("aarch64", "arm64") else best)


def test_a_narrower_instruction_set_is_taken_where_it_is_asked_for(detect, monkeypatch):
    features = {"AVX512F": True, "FMA3": True, "ASIMD": False}
    monkeypatch.setattr(np._core._multiarray_umath, "__cpu_features__", features)
    assert detect() == "avx512"
    monkeypatch.setenv("MPIZERO_CPU", "avx2")
    assert detect() == "avx2"
    monkeypatch.setenv("MPIZERO_CPU", "neon")
    with pytest.raises(ConfigError, match="MPIZERO_CPU=neon: this CPU has avx512 and avx2"):
        detect()


def test_a_cpu_without_fused_multiply_adds_has_no_instruction_set(detect, monkeypatch):
    monkeypatch.setattr(np._core._multiarray_umath, "__cpu_features__", {"SSE2": True, "FMA3": False})
    assert detect() == ""
