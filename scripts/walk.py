"""Count the modules of mpizero that one ZeRO-2 step passes, and how often it goes from one module to another.

    mpiexec -n 2 python scripts/walk.py [--ranks-per-node N] [--modules]

Rank 0 prints JSON: of ``distribute``, of the fourth step of training and of ``save_model``, the modules and functions
that are called on rank 0, the calls, and the moves from one module to another. ``scripts/structure_report.py`` prints
the figures of the step together with others; there and here another checkout on PYTHONPATH is measured as well.
"""

from __future__ import annotations

import collections
import itertools
import sys
import tempfile
from collections.abc import Callable
from types import FrameType
from typing import Any

from harness.jobs import answer
from harness.options import plain


class Walk:
    """Record calls of functions of a package; an instance is a profiler for ``sys.setprofile``.

    Attributes
    ----------
    calls : list of (str, str)
        Module and qualified name of every function that was called, in this order.
    path : list of str
        The module that computes, after every call and every return; other packages' code counts as its caller's.
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


def walked(call: Callable[[], Any]) -> tuple[Any, Walk]:
    """Return the result of a call, and what it passes."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, walk


def train(settings: dict[str, Any]) -> dict[str, Walk]:
    """Return what ``distribute``, the fourth step and ``save_model`` of a small GPT pass on this rank."""
    import numpy as np
    from mpi4py import MPI

    import mpizero as mz

    world = MPI.COMM_WORLD
    text = np.random.default_rng(world.rank).integers(0, 255, (4, 17))
    batch, gpt = (text[:, :-1], text[:, 1:]), mz.nn.GPT(dim=16, layers=2, heads=2, sequence=16)
    with tempfile.TemporaryDirectory() as own, mz.ShardingConfig(**settings) as config:
        folder = world.bcast(own)
        world.Barrier()
        made, begin = walked(lambda: mz.distribute(gpt, mz.AdamW(lr=1e-3), strategy="zero2", config=config))
        with made as model:
            for _ in range(3):
                model.train(*batch)
            world.Barrier()
            _, step = walked(lambda: model.train(*batch))
            world.Barrier()
            _, save = walked(lambda: model.save_model(f"{folder}/saved"))
        world.Barrier()  # rank 0 removes its folder when all have saved
    return {"distribute": begin, "step": step, "save": save}


def main() -> None:
    """Print the figures as JSON on rank 0."""
    parser = plain(__doc__)
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="simulate nodes of N ranks")
    parser.add_argument("--modules", action="store_true", help="print the modules of each, too, with their calls")
    options = parser.parse_args()
    nodes = {} if options.ranks_per_node is None else {"ranks_per_node": options.ranks_per_node}
    walks = train({"micro_batch": 2} | nodes)
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank:
        return
    if options.modules:
        for name, walk in walks.items():
            print(f"{name}: {', '.join(f'{module} {count}' for module, count in walk.modules().most_common())}")
    answer({name: walk.figures() for name, walk in walks.items()})


if __name__ == "__main__":
    main()
