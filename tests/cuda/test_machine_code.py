"""What ``scripts/cuda_kernels.py`` finds in kernels and in what compilers say; the part "ptx" runs it on all."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

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
def test_a_kernel_is_compiled_once_and_loaded_from_the_cache_by_the_next_process(tmp_path, monkeypatch):
    """There is no GPU here: a stand-in tells for which one to compile."""
    from types import SimpleNamespace

    from numba import cuda
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import devices

    from mpizero.kernels import cache
    from mpizero.kernels.cuda import launch
    from tests.cuda.planted_kernels import good

    monkeypatch.setenv("MPIZERO_CACHE_DIR", str(tmp_path))
    cache.find_folder.cache_clear()
    device = SimpleNamespace(compute_capability=(9, 0))
    for module in (cuda, dispatcher):
        monkeypatch.setattr(module, "get_current_device", lambda: device)
    monkeypatch.setattr(devices, "get_context", lambda: SimpleNamespace(device=device))

    def load(name):
        made = good.dispatcher()
        launch.load_or_compile(made, good.argument_types("f4"), name)
        (kernel,) = made.overloads.values()
        return kernel._codelibrary.get_cubin(cc=(9, 0)).code

    compiled = load("good-f4")
    (stored,) = tmp_path.rglob("*.cubin")
    monkeypatch.setattr(dispatcher, "compile_cuda", None)  # what would be called to compile
    assert load("good-f4") == compiled
    stored.write_bytes(stored.read_bytes()[:-1])  # damaged: it is compiled again
    with pytest.raises(TypeError, match="not callable"):
        load("good-f4")
    cache.find_folder.cache_clear()


@compiling
def test_what_the_assembler_refuses_is_an_error(script):
    with pytest.raises(RuntimeError, match="ptxas ended with"):
        script.assembled(".version 7.8\n.target sm_80\n.address_size 64\nnonsense", (8, 0))


def test_every_declared_kernel_is_examined(script):
    """The list is read from the sources: a kernel of a new file is in it, too."""
    declared = script.declared()
    assert {"loss.softmax_cross_entropy", "reduction._sum_nodes", "ring.running_softmax"} <= declared
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
