#!/usr/bin/env python3
"""Count fused multiply-adds and other arithmetic in the machine code of all CPU kernels, for three kinds of CPU.

Only matrix products may have fused multiply-adds, which are written as such; a compiler that fused others would make
bits depend on the CPU. Exits with 1 if it did. Every kernel is compiled anew, by Numba for this machine and then by
LLVM for each of the three. (A kernel that calls a function of another library is refused when it is compiled.)
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness.kernels import cpu_kernels, dtypes  # noqa: E402
from harness.options import plain  # noqa: E402
from harness.tables import aligned  # noqa: E402

from mpizero.kernels import jit, machine_code  # noqa: E402

_X86 = "x86_64-unknown-linux-gnu"
_FUSED, _OTHER = r"\tvfn?m(?:add|sub)", r"\tv?(?:mul|add|sub|div)[ps][sd]\t"
#: Triple, CPU, and the names of fused and of other arithmetic, by instruction set.
TARGETS = {
    "AVX-512": (_X86, "skylake-avx512", _FUSED, _OTHER),
    "AVX2": (_X86, "haswell", _FUSED, _OTHER),
    "NEON": ("aarch64-unknown-linux-gnu", "generic", r"\tfn?m(?:la|ls|add|sub)\t", r"\tf(?:mul|add|sub|div)\t"),
}
#: Modules whose kernels multiply matrices.
PRODUCTS = {
    "mpizero.kernels.attention",
    "mpizero.kernels.convolution",
    "mpizero.kernels.matmul",
    "mpizero.kernels.spectral",
}


def assembly(code: str, function: str, triple: str, cpu: str) -> str:
    """Compile a function in LLVM code, which was made for this machine, for another one."""
    llvm = machine_code.initialized_llvm()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    of_this_machine = r'^target (?:triple|datalayout) = .*$|"target-(?:cpu|features)"="[^"]*"'
    code = re.sub(of_this_machine, "", code, flags=re.MULTILINE)
    # Counting references of arrays, which no kernel owns, is written for x86-64; it is no arithmetic that counts here.
    code = re.sub(r"(?:tail )?call i8 @llvm\.x86\.atomic\.sub\.cc\S*\(.*\)", "add i8 0, 0", code)
    module = llvm.parse_assembly(code)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3, reloc="static")
    module.triple, module.data_layout = triple, str(machine.target_data)
    for defined in (*module.functions, *module.global_variables):  # Numba's run time is of this machine
        if not defined.is_declaration and defined.name != function:
            defined.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0)))
    return str(machine.emit_assembly(module))


def code_of(kernel: Any, dtype: str) -> tuple[str, str]:
    """Return a kernel's LLVM code as Numba makes it, and the name of its function there."""
    made: list[tuple[str, str]] = []
    emit, jit.emit = jit.emit, lambda code, function, *rest: made.append((code, function)) or b""
    try:
        kernel._build(dtype)
    finally:
        jit.emit = emit
    return made[0]


def main() -> int:
    """Print a table of modules, and what is not as it should be."""
    parser = plain(__doc__)
    parser.add_argument("--kernels", default="", metavar="TEXT", help="only kernels in whose names TEXT occurs")
    options = parser.parse_args()
    counts: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for name, kernel in cpu_kernels().items():
        if options.kernels not in name:
            continue
        for char in dtypes(kernel):
            code = code_of(kernel, jit.DTYPES[char])
            for target, (triple, cpu, fused, other) in TARGETS.items():
                text = assembly(*code, triple, cpu)
                found = {kind: len(re.findall(pattern, text)) for kind, pattern in (("fused", fused), ("other", other))}
                for kind, count in found.items():
                    counts[kernel.__module__, target, kind] += count
                if found["fused"] and kernel.__module__ not in PRODUCTS:
                    wrong.append(f"{name} ({char}): {found['fused']} fused multiply-adds for {target}")
    modules = sorted({module for module, _, _ in counts})
    head = ["module", *(f"{target} {kind}" for target in TARGETS for kind in ("fused", "other"))]
    rows = [[m, *(f"{counts[m, t, k]:,}" for t in TARGETS for k in ("fused", "other"))] for m in modules]
    print(aligned(head, rows))
    print("\n".join(wrong) or "only matrix products have fused multiply-adds")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
