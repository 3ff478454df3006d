"""Compile every CUDA kernel to machine code, without a GPU, and check registers, spills and use of doubles.

    python scripts/cuda_kernels.py                   # all kernels: prints a table; exit status 1 if one is wrong
    python scripts/cuda_kernels.py --only losses.     # only kernels whose name begins with "losses."

Each kernel of mpizero/kernels/cuda is compiled by numba-cuda to PTX, in float32 and in float64, for every target (a
compute capability), with the types of arguments with which it is launched. The assembler ptxas then translates the PTX
to machine code. A kernel is wrong if it does not compile, if its registers spill to memory, or if its float32 form has
more instructions on doubles than the table DOUBLES in this script allows.

Needs ``pip install 'numba-cuda[cu13]' 'cuda-toolkit[nvcc]==13.*'``; the exit status is 69 if they are missing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FOLDER = ROOT / "mpizero" / "kernels" / "cuda"
#: Compute capabilities: A100, H100.
TARGETS = ((8, 0), (9, 0))
UNAVAILABLE = 69


class Allowed(NamedTuple):
    """Hold the largest allowed number of instructions on doubles in a float32 kernel, and the reason for them."""

    most: int
    reason: str


_LOSS = Allowed(70, "a row's loss is a double: one logarithm, one difference and one store a row")
_ELEMENT = Allowed(250, "the loss of an element is a double, as the sum of losses; gradients are float32")
#: The float32 kernels that may have instructions on doubles. An entry that no kernel needs is an error, too.
DOUBLES = {
    "losses.absolute_error": _ELEMENT,
    "losses.binary_cross_entropy": _ELEMENT,
    "losses.gaussian_likelihood": _ELEMENT,
    "losses.huber": _ELEMENT,
    "losses.row_square_sums": Allowed(30, "norms are summed in double precision"),
    "losses.merged_cross_entropy": _LOSS,
    "losses.softmax_cross_entropy": _LOSS,
    "reduction.dropout": Allowed(4, "the threshold is a 32-bit word, which float32 cannot hold: once a thread"),
    "reduction._product_nodes": Allowed(35, "norms and dot products are summed in double precision"),
    "reduction._sum_nodes": Allowed(30, "the same sums, a level higher"),
}

#: A PTX instruction: maybe a predicate, then its name, then its modifiers. Declarations begin with a dot.
_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*)((?:\.\w+(?:::\w+)?)*)\s", re.MULTILINE)
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Row:
    """Hold the result of compiling one kernel with one dtype for one target.

    ``spill`` is the number of bytes of registers that are spilled to memory. ``doubles`` are the instructions on
    doubles: pairs of a name and how often it occurs. ``error`` is the message if the kernel does not compile, else "".
    """

    kernel: str
    dtype: str
    target: str = "-"
    registers: int = 0
    spill: int = 0
    doubles: tuple[tuple[str, int], ...] = ()
    error: str = ""

    def complaint(self, allowed: dict[str, Allowed]) -> str:
        """Return a text that says what is wrong with this result, or ""; ``allowed`` is a table like DOUBLES."""
        if self.error:
            return self.error
        if self.spill:
            return f"{self.spill} bytes of its registers are spilled to memory"
        count = sum(number for _, number in self.doubles)
        most = allowed[self.kernel].most if self.kernel in allowed else 0
        if self.dtype == "f4" and count > most:
            found = ", ".join(f"{number} {word}" for word, number in self.doubles)
            return f"{count} instructions on doubles in a float32 kernel ({found}); DOUBLES allows {most}"
        return ""

    def __str__(self) -> str:
        count = sum(count for _, count in self.doubles)
        words = " ".join(word for word, _ in self.doubles) if self.dtype == "f4" else ""
        return f"{self.kernel:42} {self.dtype:4} {self.target:6} {self.registers:9} {self.spill:6} {count:5}  {words}"


HEADER = f"{'kernel':42} {'type':4} {'target':6} {'registers':>9} {'spill':>6} {'f64':>5}  f64 instructions in float32"


def declared() -> set[str]:
    """Return the names "file.kernel" of all kernels that the sources declare, without importing them."""
    return {
        f"{path.stem}.{name}"
        for path in FOLDER.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        for name in _declared_by(node)
    }


def _declared_by(node: ast.stmt) -> list[str]:
    """Return the names of the kernels that a statement declares.

    It declares one if it is a function decorated with ``kernel(...)``. An assignment declares its target names if it
    assigns the result of a function whose name ends with ``_kernel`` or ``_kernels``.
    """
    if isinstance(node, ast.FunctionDef):
        made = any(ast.unparse(decorator).startswith("kernel(") for decorator in node.decorator_list)
        return [node.name] if made else []
    if isinstance(node, ast.Assign) and re.search(r"_kernels?\(", ast.unparse(node.value)):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return []


def kernels() -> dict[str, Any]:
    """Import all kernels, and return them by "file.kernel"; end the script if they differ from the declared ones."""
    from mpizero.kernels.cuda.launch import CudaKernel

    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        module = f"mpizero.kernels.cuda.{path.stem}"
        for value in vars(import_module(module)).values() if path.stem != "__init__" else ():
            if isinstance(value, CudaKernel) and value.__module__ == module:
                found[f"{path.stem}.{value.name}"] = value
    if missing := declared() ^ found.keys():
        sys.exit(f"declared and not found as kernels of their modules, or the other way round: {sorted(missing)}")
    return found


def dtypes(kernel: Any) -> tuple[str, ...]:
    """Return the dtypes for which a kernel is compiled: "f4" and "f8", or only "f4" if its types do not vary."""
    return ("f4",) if kernel.signature.template is None else ("f4", "f8")


def ptx(kernel: Any, dtype: str) -> Callable[[tuple[int, int]], str]:
    """Compile a kernel for the argument types with which it is launched; return a function of a target to PTX code.

    Numba's part, two thirds of the work, is done once: before NVVM it knows of a target only that it is not an old one.
    """
    from numba import types
    from numba.cuda import compiler, dispatcher

    from mpizero.kernels.cuda.launch import rounding_each_operation

    # Numba asks the GPU for its compute capability when it compiles helper functions: answer in its place.
    dispatcher.get_current_device = lambda: argparse.Namespace(compute_capability=TARGETS[0])
    signature = types.void(*kernel.argument_types(dtype))
    # What numba.cuda.compile calls, for a single target.
    library, _ = compiler._compile_pyfunc_with_fixup(
        kernel.dispatcher().py_func, signature, device=False, abi="numba", cc=TARGETS[0]
    )

    def code(target: tuple[int, int]) -> str:
        with rounding_each_operation():
            return str(library.get_asm_str(cc=target))

    return code


def assembled(code: str, target: tuple[int, int]) -> str:
    """Assemble PTX code to machine code, and return the report of ptxas; if it fails, that is the error's message."""
    from cuda.pathfinder import find_nvidia_binary_utility

    with tempfile.NamedTemporaryFile("w", suffix=".ptx", encoding="utf-8") as file:
        file.write(code)
        file.flush()
        command = [find_nvidia_binary_utility("ptxas"), "-v", f"-arch=sm_{target[0]}{target[1]}", file.name]
        ended = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"ptxas ended with {ended.returncode}: {ended.stderr.strip()}")
    return ended.stderr


def resources(said: str) -> tuple[int, int]:
    """Return the largest number of registers and the largest number of spilled bytes in ``said``, a report of ptxas."""
    spills, registers = _SPILL.findall(said), _REGISTERS.findall(said)
    if not spills or not registers:
        raise RuntimeError(f"ptxas said nothing about registers: {said.strip()}")
    return max(map(int, registers)), max(int(number) for pair in spills for number in pair)


def instructions_on_doubles(code: str) -> Counter[str]:
    """Return how many instructions in PTX code read or write doubles, by the name of the instruction."""
    return Counter(word for word, modifiers in _INSTRUCTION.findall(code) if ".f64" in modifiers)


def examine(name: str, kernel: Any) -> list[Row]:
    """Compile one kernel with every dtype for every target, and return a row for each."""
    rows = []
    for dtype in dtypes(kernel):
        code_for = functools.cache(functools.partial(ptx, kernel, dtype))
        for target in TARGETS:
            row = Row(name, dtype, f"sm_{target[0]}{target[1]}")
            try:
                code = code_for()(target)
                registers, spill = resources(assembled(code, target))
                doubles = tuple(sorted(instructions_on_doubles(code).items()))
                rows.append(replace(row, registers=registers, spill=spill, doubles=doubles))
            except Exception as error:  # an error of the compilers is this kernel's result
                rows.append(replace(row, error=f"{type(error).__name__}: {error}"))
    return rows


def examine_file(names: list[str]) -> list[Row]:
    """Compile the kernels ``names`` of one file, and return their rows.

    All kernels of a file are compiled in one process, so that helper functions which they share are compiled once.
    """
    found = kernels()
    return [row for name in names for row in examine(name, found[name])]


def complaints(rows: list[Row], allowed: dict[str, Allowed]) -> list[str]:
    """Return a line of text for each row that is wrong, and for each entry of ``allowed`` that no kernel needs."""
    wrong = [f"{row.kernel} {row.dtype} {row.target}: {said}" for row in rows if (said := row.complaint(allowed))]
    needed = {row.kernel for row in rows if row.dtype == "f4" and row.doubles}
    return wrong + [f"DOUBLES has an entry for {name}, which needs none" for name in sorted(allowed.keys() - needed)]


def main() -> int:
    """Compile all chosen kernels, print a table of results and what is wrong, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", default="", help="kernels whose name begins so, as loss.softmax")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: the processors)")
    options = parser.parse_args()
    try:
        import numba_cuda  # noqa: F401
        from cuda.pathfinder import find_nvidia_binary_utility
    except ModuleNotFoundError as error:
        print(f"{error}: pip install 'numba-cuda[cu13]' 'cuda-toolkit[nvcc]==13.*'", file=sys.stderr)
        return UNAVAILABLE
    if find_nvidia_binary_utility("ptxas") is None:
        print("no ptxas: pip install 'cuda-toolkit[nvcc]==13.*'", file=sys.stderr)
        return UNAVAILABLE
    names = [name for name in kernels() if name.startswith(options.only)]
    if not names:
        print(f"no kernel's name begins with {options.only!r}", file=sys.stderr)
        return 64
    files = [[name for name in names if name.startswith(f"{topic}.")] for topic in {n.split(".")[0] for n in names}]
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = [row for made in pool.map(examine_file, sorted(files, key=len, reverse=True)) for row in made]
    print(HEADER, *sorted(map(str, rows)), sep="\n")
    wrong = complaints(rows, {name: entry for name, entry in DOUBLES.items() if name.startswith(options.only)})
    print(*wrong, sep="\n")
    compiled = sum(not row.error for row in rows)
    print(
        f"{len(names)} kernels, {compiled} of {len(rows)} compiled for {len(TARGETS)} targets; {len(wrong)} complaints"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
