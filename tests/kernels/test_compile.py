from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpizero
from mpizero import kernels
from mpizero.kernels import machine_code
from mpizero.kernels.cpu import layers, reduction, update
from mpizero.kernels.jit import REFUSED, Signature, apart, kernel

PACKAGE = Path(mpizero.__file__).parent
STEP = """
import sys
import numpy as np
from mpizero.kernels import jit as compile
build = compile.Kernel._build
def counted(self, dtype):
    print("built", self.name, flush=True)
    return build(self, dtype)
compile.Kernel._build = counted
from mpizero.kernels.cpu.update import sgd
w = np.ones(5, np.float32)
sgd(w, np.ones(5, np.float32), np.array([0.5, 0.0], np.float32), 0, 5)
print("w", w[0], "numba" in sys.modules)
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package that a test may edit, with its bytecode: four processes need not make it again."""
    shutil.copytree(PACKAGE, tmp_path / "mpizero")
    return tmp_path


def start(checkout, program=STEP, place=1):
    """Start the program as the rank of that number on its node."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(checkout), "MPIZERO_CACHE_DIR": str(checkout / "cache")}
    environment |= {"NUMBA_CACHE_DIR": str(checkout / "numba"), "OMPI_COMM_WORLD_LOCAL_RANK": str(place)}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, told = process.communicate(timeout=600)
    assert process.returncode == 0, told
    return out.split("\n")[:-1], told


@pytest.mark.slow
def test_a_kernel_is_compiled_once_loaded_without_numba_and_compiled_anew_when_a_formula_changes(checkout):
    """The first process of a node tells how many kernels are missing, whichever compiles; no other, and not of none."""
    runs = [finish(process) for process in [start(checkout, place=place) for place in (1, 2)]]  # at the same time
    assert sorted(line for run, _ in runs for line in run if line.startswith("built")) == ["built sgd"]
    assert all(run[-1].startswith("w 0.5") and not told for run, told in runs)
    assert finish(start(checkout, place=0)) == (["w 0.5 False"], "")
    formulas = checkout / "mpizero/kernels/formulas.py"
    formulas.write_text(formulas.read_text().replace("return w - lr * (g + decay * w)\n", "return w + lr * g\n"))
    run, told = finish(start(checkout, place=0))
    assert run == ["built sgd", "w 1.5 True"]
    line = r"mpizero: kernels: (\d+) of \1 are not compiled yet for this CPU; .* \(kept in .*\)\n"
    assert re.fullmatch(line, told)
    assert told.count("\n") == 1
    assert not (checkout / "numba").exists()  # Numba's index and data files are pickles
    assert not list(checkout.rglob("*.nb[ic]"))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_call_runs_although_another_thread_has_just_chosen_the_code_of_another_dtype(dtype, monkeypatch):
    def refuse(*args):
        return REFUSED

    class Contended(type(update.sgd)):
        """Whatever a thread chooses, another one has chosen other code when it looks again."""

        _latest = property(lambda self: refuse, lambda self, code: None)

    monkeypatch.setattr(update.sgd, "__class__", Contended)
    w = np.ones(5, dtype)
    update.sgd(w, np.ones(5, dtype), np.array([0.5, 0.0], dtype), 0, 5)
    assert (w == 0.5).all()
    monkeypatch.setitem(update.sgd._calls, np.dtype(dtype).char, refuse)
    with pytest.raises(TypeError, match=f"sgd refuses {np.dtype(dtype)}"):  # never without a word
        update.sgd(w, np.ones(5, dtype), np.array([0.5, 0.0], dtype), 0, 5)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPIZERO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))):
        machine_code.folder("another cpu")


def test_a_damaged_file_is_built_again(tmp_path):
    built = []

    def build():
        built.append(1)
        return b"machine code"

    path = tmp_path / "a.o"
    machine_code.load_or_build(path, build)
    stored = path.read_bytes()
    for damaged in (stored[:-1] + b"x", stored[:20], b""):
        path.write_bytes(damaged)
        assert machine_code.load_or_build(path, build) == b"machine code"
        assert machine_code.load_or_build(path, build) == b"machine code"
        assert path.read_bytes() == stored
    assert len(built) == 4


def test_arguments_that_do_not_fit_are_named_with_what_was_given_and_expected():
    w, g, hyper = np.ones(4, np.float32), np.ones(4, np.float32), np.zeros(2, np.float32)
    readonly = w.copy()
    readonly.flags.writeable = False
    for args, message in [
        ((w, g, hyper, 0), "takes 5 arguments (w, g, hyper, start, stop), got 4"),
        ((w, g.astype(np.float64), hyper, 0, 4), "g must be a C-contiguous float32 array of 1 dimension(s)"),
        ((w[::2], g, hyper, 0, 2), "w must be a C-contiguous writable float32 array of 1 dimension(s), got float32 of"),
        ((readonly, g, hyper, 0, 4), "read-only"),
        ((w, g.reshape(2, 2), hyper, 0, 4), "of shape (2, 2)"),
        ((w, g.astype(">f4"), hyper, 0, 4), "got >f4"),
        ((w, g, [0.1, 0.0], 0, 4), "hyper must be"),
        ((w, g, hyper, 0.5, 4), "start must be a scalar of type i8, got 0.5"),
        ((w.astype(np.int32), g, hyper, 0, 4), "got int32"),
        ((None, g, hyper, 0, 4), "got None"),
    ]:
        with pytest.raises(TypeError, match=re.escape(message)) as error:
            update.sgd(*args)
        assert "cpu.update.sgd" in str(error.value)
    assert np.all(w == 1)


def test_read_only_and_memory_mapped_inputs_are_taken(tmp_path):
    np.save(tmp_path / "g.npy", np.full(4, 2, np.float32))
    g = np.load(tmp_path / "g.npy", mmap_mode="r")
    w, hyper = np.ones(4, np.float32), np.array([0.5, 0.0], np.float32)
    hyper.flags.writeable = False
    update.sgd(w, g, hyper, np.int64(0), np.int32(3))
    np.testing.assert_array_equal(w, [0, 0, 0, 1])


def test_results_come_back_as_python_objects():
    x = np.array([1.0, np.nan])
    assert reduction.all_finite(x) is False
    assert reduction.all_finite(x[:1]) is True
    assert reduction.first_nonfinite(x) == 1
    assert layers.scale(x, np.array([2.0])) is None


@pytest.mark.slow
def test_a_kernel_that_allocates_or_raises_is_refused_when_it_is_compiled():
    @kernel("void(T[::1])")
    def allocates(x):
        y = np.empty(x.size, x.dtype)
        for i in range(x.size):
            y[i] = x[x.size - i - 1]
        for i in range(x.size):
            x[i] = y[i]

    @kernel("void(T[::1])")
    def raises(x):
        if x[0] > x[1]:
            raise ValueError("unsorted")

    @apart
    def check(x):
        if x[0] > x[1]:
            raise ValueError("unsorted")

    check.__module__ = f"{kernels.__name__}.check"  # functions of this package are compiled with kernels

    @kernel("void(T[::1])")
    def calls(x):
        check(x)
        check(x)

    for bad in (allocates, raises, calls):
        with pytest.raises(RuntimeError, match="neither allocate"):
            bad._build("f4")


@pytest.mark.slow
@pytest.mark.parametrize(("function", "named"), [(math.atan2, "atan2"), (pow, "llvm.pow")])
def test_a_kernel_that_calls_libm_is_refused_when_it_is_compiled(function, named):
    @kernel("void(T[::1])")
    def foreign(x):
        for i in range(x.size):
            x[i] = function(x[i], x[0])

    with pytest.raises(RuntimeError, match=f"the bits of kernels are the same on every CPU; this one has .*{named}"):
        foreign._build("f4")


@pytest.mark.parametrize(
    "text", ["void(T[::2])", "int(T[::1])", "void(T)", "void(u2)", "void(x4[::1])", "void(T[::1]", "void(,)"]
)
def test_a_signature_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ValueError, match="kernel signature"):
        Signature.parse(text)


def test_a_signature_must_have_as_many_parameters_as_the_function():
    with pytest.raises(TypeError, match="1 parameters, but the signature has 2"):
        kernel("void(T[::1], i8)")(lambda x: None)


@pytest.mark.slow
def test_without_numba_a_kernel_is_plain_python():
    program = STEP.replace("import sys\n", "import os, sys\nos.environ['NUMBA_DISABLE_JIT'] = '1'\n", 1)
    assert finish(start(PACKAGE.parent, program))[0] == ["w 0.5 False"]
