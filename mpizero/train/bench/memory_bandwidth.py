"""Measure memory bandwidth for the reads and writes of a training step, with plain loops and the library's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpizero import optim
from mpizero._util.text import Measurement
from mpizero.comm import Communicator
from mpizero.comm.reduce import program_array
from mpizero.kernels import cpu, memory
from mpizero.planning.machine_file import MemoryPass
from mpizero.train.bench.rounds import alone, together
from mpizero.types import Array

#: Arrays that the passes need at once.
ARRAYS = 7
#: Tree programs that add two and four rows; a row is one array of gradients.
_TWO, _FOUR = (0, -3), (0, -3, 2, -5, -1)

Work = Callable[[], object]


@dataclass
class _Pass:
    """Time one pass over memory, a loop that reads each of ``reads`` arrays and writes each of ``writes`` arrays once.

    It is computed by a plain loop and by the library's kernel, on one rank alone and on all ranks at once. ``values``
    has four lists of seconds: plain loop on one rank, plain loop on all, kernel on one rank, kernel on all.
    """

    name: str
    reads: int
    writes: int
    plain: Work
    own: Work
    values: tuple[list[float], ...] = field(default_factory=lambda: ([], [], [], []))

    def measure(self, comm: Communicator, turn: int, *, keep: bool) -> None:
        """Time all four cases once, in reverse order if ``turn`` is -1; store the seconds if ``keep``. Collective."""
        works = ((self.plain, alone), (self.plain, together), (self.own, alone), (self.own, together))
        for place in (0, 2, 1, 3)[::turn]:
            work, how = works[place]
            took = how(comm, work)
            self.values[place].extend([took] * keep)

    def figure(self, elements: int, itemsize: int) -> MemoryPass:
        """Return the seconds of all four cases, and the ratios of kernel to plain loop. Not collective.

        ``elements`` is the number of elements of each array, ``itemsize`` the bytes of an element.
        """
        one, every, own_one, own_every = (Measurement.of(values) for values in self.values)
        return MemoryPass(
            name=self.name,
            reads=self.reads,
            writes=self.writes,
            elements=elements,
            itemsize=itemsize,
            one=one,
            every=every,
            own_one=own_one,
            own_every=own_every,
            ratio_one=Measurement.of_ratios(self.values[2], self.values[0]),
            ratio_every=Measurement.of_ratios(self.values[3], self.values[1]),
        )


class PassBenchmark:
    """Time all passes over memory, on arrays of this rank with ``elements`` float32 elements each.

    A pass is a loop that reads and writes whole arrays once, such as a copy or the update by AdamW.
    Construction is not collective; :meth:`measure` is.
    """

    def __init__(self, comm: Communicator, elements: int) -> None:
        self.comm, self.elements = comm, elements
        self.arrays: Array = np.ones((ARRAYS, elements), np.float32)  # of even length: read as integers of 64 bits
        self.passes = self._passes()

    def _passes(self) -> Sequence[_Pass]:
        a, b, c, d, w, m, v = self.arrays
        rows_two, rows_four = self.arrays[:2], self.arrays[:4]
        size, one = self.elements, np.ones(1, np.float32)
        hyper = optim.AdamW().hyper(1, 1, np.float32)
        two, four = program_array(_TWO), program_array(_FOUR)
        starts, stops, total = np.array([0]), np.array([size]), np.empty(1)
        adamw, fused, reduction = cpu.optimizer.adamw, cpu.fused, cpu.reduction
        whole = np.array([size])
        bits = a.view(np.int64)
        return (
            _Pass("read", 1, 0, lambda: memory.read(bits), lambda: reduction.all_finite(a)),
            _Pass("norm", 1, 0, lambda: memory.read(bits), lambda: reduction.tree_square_sums(a, starts, stops, total)),
            _Pass("copy", 1, 1, lambda: memory.copy(a, b), lambda: cpu.copy.pack(a, starts, whole, b)),
            _Pass(
                "sum of 2",
                2,
                1,
                lambda: memory.add_two(a, b, w),
                lambda: fused.tree_sum(rows_two, 0, rows_two, 0, two, one, w, 0, size),
            ),
            _Pass(
                "sum of 4",
                4,
                1,
                lambda: memory.add_four(a, b, c, d, w),
                lambda: fused.tree_sum(rows_four, 0, rows_four, 0, four, one, w, 0, size),
            ),
            _Pass("AdamW", 4, 3, lambda: memory.update(a, w, m, v), lambda: adamw(w, a, m, v, hyper, 0, size)),
            _Pass(
                "sum + AdamW",
                5,
                3,
                lambda: memory.add_and_update(a, b, w, m, v),
                lambda: fused.adamw_tree(rows_two, 0, two, one, w, m, v, hyper, 0, size),
            ),
        )

    def measure(self, turn: int, *, keep: bool) -> None:
        """Time every pass once, in reverse order if ``turn`` is -1, and store the seconds if ``keep``.

        Collective. Make the first call without ``keep``: it warms up.
        """
        for entry in self.passes[::turn]:
            self.arrays[:] = 1  # sums of sums would grow, and averages shrink to where processors are slow
            entry.measure(self.comm, turn, keep=keep)

    def figures(self) -> tuple[MemoryPass, ...]:
        """Return the stored seconds of all passes. Not collective."""
        return tuple(entry.figure(self.elements, self.arrays.itemsize) for entry in self.passes)
