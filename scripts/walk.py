"""Count the modules of mpizero that one ZeRO-2 step passes, and how often it goes from one module to another.

    mpiexec -n 2 python scripts/walk.py [--modules]

Rank 0 prints the modules and functions that the fourth step of a training calls on rank 0, the calls, and the moves
from one module to another. Another checkout on PYTHONPATH is measured as well.
"""

from __future__ import annotations

import collections
import itertools
import sys
from types import FrameType
from typing import Any

from harness.options import plain


class Walk:
    """Record calls of functions of a package; an instance is a profiler for ``sys.setprofile``.

    ``calls`` has module and qualified name of every function that was called, ``path`` the module that computes, after
    every call and every return; other packages' code counts as its caller's.
    """

    def __init__(self, package: str = "mpizero") -> None:
        self.calls, self.path, self._package = list[tuple[str, str]](), list[str](), package
        self._stack: list[str | None] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call or a return."""
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            own = module.partition(".")[0] == self._package
            self._stack.append(module if own else None)
            if own:
                self.calls.append((module, frame.f_code.co_qualname))
                self.path.append(module)
        elif event == "return" and self._stack:
            self._stack.pop()
            self.path.extend(next(([module] for module in reversed(self._stack) if module), []))

    def modules(self) -> collections.Counter[str]:
        """Return how many calls each module has."""
        return collections.Counter(module for module, _ in self.calls)

    def figures(self) -> dict[str, int]:
        """Return the numbers of modules, functions, calls and moves."""
        moves = sum(one != other for one, other in itertools.pairwise(self.path))
        functions = len(set(self.calls))
        return {"modules": len(self.modules()), "functions": functions, "calls": len(self.calls), "moves": moves}


def walked_step() -> Walk:
    """Return what the fourth step of a small GPT passes on this rank."""
    import numpy as np
    from mpi4py import MPI

    import mpizero as mz

    world = MPI.COMM_WORLD
    text = np.random.default_rng(world.rank).integers(0, 255, (4, 17))
    gpt, config = mz.nn.GPT(dim=16, layers=2, heads=2, sequence=16), mz.Config(micro_batch=2)
    with mz.distribute(gpt, mz.AdamW(lr=1e-3), "zero2", config=config) as model:
        for _ in range(3):
            model.train(text[:, :-1], text[:, 1:])
        world.Barrier()
        walk = Walk()
        sys.setprofile(walk)
        model.train(text[:, :-1], text[:, 1:])
        sys.setprofile(None)
    return walk


def main() -> None:
    """Print the figures on rank 0."""
    parser = plain(__doc__)
    parser.add_argument("--modules", action="store_true", help="print the modules, too, with their calls")
    options = parser.parse_args()
    walk = walked_step()
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        print(", ".join(f"{count} {name}" for name, count in walk.figures().items()))
        if options.modules:
            print(*(f"{module} {count}" for module, count in walk.modules().most_common()), sep="\n")


if __name__ == "__main__":
    main()
