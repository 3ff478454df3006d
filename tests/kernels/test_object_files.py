"""Object files are loaded without LLVM, as LLVM would load them."""

from __future__ import annotations

import builtins
import ctypes
import platform
import subprocess
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest

from mpizero.kernels import machine_code
from mpizero.kernels.cpu import losses, update

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM loads the code of other processors")


def code_of(kernel):
    kernel.load("f")
    entry = kernel._entry("f4")
    return machine_code._read(machine_code.folder(machine_code.cpu_identity()) / f"{entry}.o"), entry


def called(address, *args):
    method = machine_code._MethodDef(b"kernel", address, machine_code._METH_FASTCALL, None)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    assert new(ctypes.addressof(method), np.ndarray, None)(*args) is None


def compiled(text, **how):
    """Return the object file that LLVM makes of a function in its assembly."""
    machine_code.initialized_llvm()
    machine = llvm.Target.from_default_triple().create_target_machine(**how)
    return machine.emit_object(llvm.parse_assembly(f'target triple = "{machine.triple}"\n{text}'))


def process_with_sgd(before, after=""):
    """Run a process that imports a kernel, then does ``before``, calls the kernel, and does ``after``."""
    call = "optimizer.sgd(np.ones(5, 'f'), np.ones(5, 'f'), np.zeros(2, 'f'), 0, 5)"
    program = "\n".join(
        ["import numpy as np; from mpizero.kernels.cpu import update as optimizer", before, call, after]
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def problem(kernel):
    rng = np.random.default_rng(0)
    if kernel is losses.softmax_cross_entropy:
        return [rng.normal(size=(4, 9)).astype(np.float32), np.array([1, -1, 12, 8]), np.zeros(4)]
    w, g, m, v = (rng.random(1000).astype(np.float32) for _ in range(4))
    return [w, g, m, v, rng.random(8).astype(np.float32), 3, 990]


@on_x86
@pytest.mark.parametrize("kernel", [losses.softmax_cross_entropy, update.adamw], ids=lambda kernel: kernel.name)
def test_a_placed_kernel_computes_the_bits_of_one_that_llvm_has_loaded(kernel):
    code, entry = code_of(kernel)
    ours, theirs = problem(kernel), problem(kernel)
    called(machine_code._place(code, entry), *ours)
    called(machine_code._place_by_llvm(code, entry), *theirs)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True) if isinstance(a, np.ndarray))
    assert any(a.tobytes() != np.asarray(b).tobytes() for a, b in zip(ours, problem(kernel), strict=True))


@on_x86
def test_no_kernel_that_was_ever_compiled_here_needs_llvm():
    code_of(update.sgd)
    files = list(machine_code.folder(machine_code.cpu_identity()).glob("*.o"))
    assert all(machine_code._place(machine_code._read(file), file.stem) for file in files)


@on_x86
def test_a_process_that_loads_kernels_does_not_load_llvm():
    code_of(update.sgd)
    done = process_with_sgd("import sys", "print({'llvmlite', 'numba'} & set(sys.modules))")
    assert done.stdout == "set()\n"


RELATIVE = """
@number = internal global i64 42
define ptr @answer() {
  %value = load i64, ptr @number
  %boxed = call ptr @PyLong_FromLongLong(i64 %value)
  ret ptr %boxed
}
declare ptr @PyLong_FromLongLong(i64)
"""


def test_code_whose_addresses_are_not_absolute_is_left_to_llvm():
    code = compiled(RELATIVE, reloc="pic", codemodel="small", jit=True)
    assert machine_code._place(code, "answer") is None
    function = ctypes.PYFUNCTYPE(ctypes.py_object)(machine_code._place_by_llvm(code, "answer"))
    assert function() == 42


@on_x86
def test_data_and_functions_are_found_wherever_the_image_lies():
    code = compiled(RELATIVE.replace("internal global", "internal constant"), reloc="static", codemodel="large")
    places = {machine_code._place(code, "answer") for _ in range(3)}
    assert len(places) == 3
    assert [ctypes.PYFUNCTYPE(ctypes.py_object)(place)() for place in places] == [42] * 3


@on_x86
@pytest.mark.parametrize("kind", ["internal global i64 42", "internal global i64 0", "common global i64 0"])
def test_data_that_may_change_is_left_to_llvm(kind):
    text = RELATIVE.replace("internal global i64 42", kind)
    assert machine_code._place(compiled(text, reloc="static", codemodel="large"), "answer") is None


@on_x86
def test_a_function_that_no_library_has_is_named():
    text = "declare void @no_such_function()\ndefine void @go() {\n call void @no_such_function()\n ret void\n}"
    with pytest.raises(RuntimeError, match="no_such_function"):
        machine_code._place(compiled(text, reloc="static", codemodel="large"), "go")


def test_a_file_of_another_processor_is_left_to_llvm():
    assert machine_code._place(b"\x7fELF\x02\x01" + bytes(12) + b"\xb7\x00" + bytes(44), "go") is None


@on_x86
def test_where_written_code_may_not_run_the_error_says_what_to_do():
    code_of(update.sgd)
    # PR_SET_MDWE of Linux 6.3
    forbid = "import ctypes, sys\nif ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): sys.exit('skipped')"
    done = process_with_sgd(forbid)
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
