"""Object files of kernels are loaded by LLVM; where that cannot be, the error says what to do."""

from __future__ import annotations

import builtins
import platform
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

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


def test_features_are_those_that_llvm_finds():
    known = {"fma", "avx2", "avx512f", "neon", "f16c", "bmi2"}
    found = {name for name, present in llvm.get_host_cpu_features().items() if present} & known
    assert machine_code.cpu_features() & (known - {"neon"}) == found - {"neon"}


def test_where_the_system_tells_nothing_llvm_is_asked(monkeypatch):
    def refused(*args, **kwargs):
        raise FileNotFoundError(2, "no such file")

    expected = machine_code.cpu_features()
    machine_code._described.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refused)
        asked, name = machine_code.cpu_features(), machine_code.cpu_identity()
    machine_code._described.cache_clear()
    assert {"fma", "avx512f", "neon"} & asked == {"fma", "avx512f", "neon"} & expected
    assert llvm.get_host_cpu_name() in name
    assert name != machine_code.cpu_identity() or platform.machine() != "x86_64"
