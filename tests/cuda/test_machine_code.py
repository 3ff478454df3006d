"""What ``scripts/cuda_kernels.py`` finds in kernels and in what compilers say; the part "ptx" runs it on all."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cuda_kernels.py"
compiling = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None or os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"),
    reason="needs numba-cuda and ptxas, without the simulator: scripts/test.sh --only ptx",
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("cuda_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks for its annotations there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def examine(script):
    """Examine a kernel of planted_kernels.py."""
    from tests.cuda import planted_kernels as planted

    return lambda name: script.complaints(script.examine(name, getattr(planted, name)), {})


@compiling
def test_a_kernel_as_it_should_be_compiles_for_every_type_and_target(examine, script):
    from tests.cuda.planted_kernels import good

    assert examine("good") == []
    rows = script.examine("good", good)
    assert [(row.dtype, row.target) for row in rows] == [
        ("f4", "sm_80"), ("f4", "sm_90"), ("f8", "sm_80"), ("f8", "sm_90")
    ]  # fmt: skip
    assert all(row.registers > 0 for row in rows)
    assert {bool(row.doubles) for row in rows if row.dtype == "f8"} == {True}


@compiling
def test_a_double_in_a_float32_kernel_is_found(examine):
    assert [line.partition(": ")[0] for line in examine("mixed")] == ["mixed f4 sm_80", "mixed f4 sm_90"]


@pytest.fixture
def launched(monkeypatch):
    """Return a function that compiles a kernel as its first launch does, for an H100, and returns its PTX code."""
    from numba.cuda import codegen, dispatcher

    target = (9, 0)
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=target))
    monkeypatch.setattr(codegen.CUDACodeLibrary, "_ensure_cc", lambda library, cc: cc or target)
    monkeypatch.setattr(dispatcher._Kernel, "bind", lambda made: made._codelibrary.get_cubin())  # all but loading it
    return lambda kernel, dtype: kernel.dispatcher().compile(kernel.argument_types(dtype)).inspect_asm(target)


@compiling
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_no_product_is_contracted_with_a_sum(launched, script, dtype):
    """So a formula has the same bits in every kernel, and those of the CPU."""
    from tests.cuda.planted_kernels import contractible

    for code in (launched(contractible, dtype), script.ptx(contractible, dtype)((9, 0))):
        assert f"mul.rn.f{8 * int(dtype[1])}" in code
        assert "fma" not in code


@compiling
def test_numba_contracts_kernels_of_others_as_before(launched):
    from numba import cuda

    from tests.cuda.planted_kernels import contractible

    launched(contractible, "f4")
    kernel = SimpleNamespace(dispatcher=lambda: cuda.jit(contractible.python, lto=False))
    kernel.argument_types = contractible.argument_types
    assert "fma.rn.f32" in launched(kernel, "f4")


@compiling
def test_what_does_not_compile_is_told_for_every_type_and_target(examine):
    told = examine("impossible")
    assert len(told) == 4
    assert all("nothing" in line for line in told)


@compiling
def test_arguments_have_the_types_of_a_launch(examine, script):
    """A u8 is one whatever its value: numba would take a small Python integer for an i8."""
    from tests.cuda.planted_kernels import keyed

    assert [str(kind) for kind in keyed.argument_types("f4")] == ["uint64", "array(float32, 1d, C)"]
    assert examine("keyed") == []


@compiling
def test_a_spill_is_found(script):
    """300 values that all live at once do not fit 255 registers."""
    names = range(300)
    loads = "".join(f"ld.volatile.global.f32 %f{i}, [%rd1+{4 * i}];\n" for i in names)
    stores = "".join(f"st.volatile.global.f32 [%rd1+{4 * i}], %f{i};\n" for i in reversed(names))
    head = ".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry hungry(.param .u64 p)\n{\n"
    body = f".reg .f32 %f<300>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n{loads}{stores}ret;\n}}\n"
    registers, spill = script.resources(script.assembled(head + body, (8, 0)))
    assert registers == 255
    assert spill > 0
    assert "spilled" in script.Row("hungry", "f4", "sm_80", registers, spill).complaint({})


@compiling
def test_a_kernel_is_compiled_once_and_loaded_from_the_cache_by_the_next_process(launched, tmp_path, monkeypatch):
    from numba import cuda
    from numba.cuda import dispatcher

    from mpizero.kernels import machine_code
    from mpizero.kernels.cuda.launch import load_or_compile
    from tests.cuda.planted_kernels import good

    monkeypatch.setenv("MPIZERO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "find_folder", machine_code.find_folder.__wrapped__)
    monkeypatch.setattr(cuda, "get_current_device", dispatcher.get_current_device)

    def load(dtype):
        made = good.dispatcher()
        load_or_compile(made, good.argument_types(dtype), f"good-{dtype}")
        (kernel,) = made.overloads.values()
        return kernel._codelibrary.get_cubin(cc=(9, 0)).code

    compiled = load("f4")
    assert load("f8") != compiled
    monkeypatch.setattr(dispatcher, "compile_cuda", None)  # what would be called to compile
    assert load("f4") == compiled
    stored = next(tmp_path.rglob("good-f4.cubin"))
    stored.write_bytes(stored.read_bytes()[:-1])  # damaged: it is compiled again
    with pytest.raises(TypeError, match="not callable"):
        load("f4")


@compiling
def test_what_the_assembler_refuses_is_an_error(script):
    with pytest.raises(RuntimeError, match="ptxas ended with"):
        script.assembled(".version 7.8\n.target sm_80\n.address_size 64\nnonsense", (8, 0))


def test_every_declared_kernel_is_examined(script):
    """The list is read from the sources: a kernel of a new file is in it, too."""
    declared = script.declared()
    assert {"losses.softmax_cross_entropy", "reduction._sum_nodes", "attention.running_softmax"} <= declared
    assert declared >= script.DOUBLES.keys()


def test_instructions_on_doubles_are_counted_and_declarations_are_not(script):
    code = """
    .reg .f64 %fd<9>;
    .param .f64 p;
    cvt.f64.f32 %fd1, %f1;
    @%p1 add.rn.f64 %fd2, %fd1, %fd1;
    @!%p2 st.global.f64 [%rd1], %fd2;
    add.f32 %f2, %f1, %f1; // no .f64 here
    """
    assert script.instructions_on_doubles(code) == {"cvt": 1, "add": 1, "st": 1}


def test_complaints_are_what_is_not_allowed_and_what_is_allowed_in_vain(script):
    row, allowed = script.Row("a.b", "f4", "sm_80", 20, 0, (("add", 2),)), script.Allowed(2, "a reason")
    assert script.complaints([row], {"a.b": allowed}) == []
    assert len(script.complaints([row], {"a.b": allowed._replace(most=1)})) == 1
    assert len(script.complaints([row], {})) == 1
    (idle,) = script.complaints([row], {"a.b": allowed, "a.c": allowed})
    assert "a.c, which needs none" in idle
    assert script.complaints([script.Row("a.b", "f8", "sm_80", 20, 0, (("add", 2),))], {}) == []
    assert len(script.complaints([script.Row("a.b", "f8", "sm_80", 20, 8)], {})) == 1
    assert len(script.complaints([script.Row("a.b", "f8", "sm_80", error="no")], {})) == 1
