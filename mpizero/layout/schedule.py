"""Pipeline schedules: which stage computes what, in which order.

A model is cut into *chunks* (contiguous runs of its blocks), a batch into micro-batches. A schedule gives each chunk a
stage and each stage a program. A stage runs its program in order; sends do not block, receives wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mpizero.errors import ConfigError
from mpizero.layout import schedules
from mpizero.layout.instructions import BACKWARD, BACKWARD_INPUT, FORWARD, Instruction
from mpizero.layout.simulate import Costs, simulate
from mpizero.layout.timetable import timetable


@dataclass(frozen=True)
class Schedule:
    """The programs of all stages; make one with :func:`build_schedule`.

    Attributes
    ----------
    name : str
        One of :data:`SCHEDULES`.
    stages, chunks : int
        Number of stages, and of chunks on all of them.
    micro_batches : int
        Number of micro-batches, those included that pad it to a multiple which the schedule needs; the absent ones are
        the last.
    stage_of : tuple of int
        The stage of every chunk.
    programs : tuple of tuple of Instruction
        What every stage does, in order.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    stage_of: tuple[int, ...]
    programs: tuple[tuple[Instruction, ...], ...]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks of a stage, in the order of the model."""
        return tuple(chunk for chunk, owner in enumerate(self.stage_of) if owner == stage)

    def caches(self) -> tuple[int, ...]:
        """Return how many caches (of one chunk and one micro-batch) every stage holds at most.

        A cache lives from the start of its forward to the end of its backward or weight half.
        """
        return tuple(round(peak) for peak in self.peaks([1.0] * self.chunks))

    def peaks(self, sizes: Sequence[float], deferred: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return how much the caches of every stage weigh together at most.

        Parameters
        ----------
        sizes : sequence of float
            Weight (for example bytes) of one cache of each chunk.
        deferred : sequence of float, optional
            Weight that is left between input half and weight half; ``sizes`` by default.

        Returns
        -------
        tuple of float
            One a stage.
        """
        left = sizes if deferred is None else deferred
        peaks = []
        for program in self.programs:
            held = peak = 0.0
            for kind, chunk, _ in program:
                if kind == FORWARD:
                    held += sizes[chunk]
                elif kind == BACKWARD:
                    held -= sizes[chunk]
                else:
                    held += left[chunk] - sizes[chunk] if kind == BACKWARD_INPUT else -left[chunk]
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)

    def timetable(self, costs: Costs | None = None, unit: float | None = None) -> str:
        """Return the simulated run as text: one row a stage, one column a unit of time.

        Parameters
        ----------
        costs : Costs, optional
            By default each of forward, input half and weight half of a chunk takes one second.
        unit : float, optional
            Seconds a column; by default the longest that all costs are multiples of, if there is one.
        """
        return timetable(simulate(self, costs or Costs.uniform(self.chunks)), unit)


class _Row(NamedTuple):
    """What distinguishes one schedule from the others."""

    program: Callable[[int, int, int, int], Iterator[Instruction]]
    virtual: Callable[[int], bool] = lambda virtual: virtual == 1
    wanted: str = "1"
    shape: Callable[[int, int], tuple[int, ...]] = lambda stages, virtual: tuple(range(stages)) * virtual
    padded: bool = False


_ROWS = {
    "gpipe": _Row(schedules.gpipe),
    "1f1b": _Row(schedules.one_forward_one_backward),
    "interleaved": _Row(
        schedules.interleaved,
        lambda virtual: virtual >= 2,
        "at least 2 (with 1 it is the schedule '1f1b')",
        padded=True,
    ),
    "zero_bubble": _Row(schedules.zero_bubble),
    "zero_bubble_v": _Row(
        schedules.zero_bubble_v,
        lambda virtual: virtual in {1, 2},
        "2 (or 1, the default: it always has two chunks a stage)",
        lambda stages, _: (*range(stages), *reversed(range(stages))),
    ),
}
#: Names of the schedules.
SCHEDULES = tuple(_ROWS)


def chunk_stages(name: str, stages: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the stage of every chunk. Not collective.

    Parameters
    ----------
    name : str
        One of :data:`SCHEDULES`.
    stages : int
        Number of stages.
    virtual : int
        Chunks a stage; "interleaved" needs two or more, "zero_bubble_v" has two, the others one.

    Raises
    ------
    ConfigError
        On an unknown name or numbers that the schedule does not take.

    Examples
    --------
    >>> chunk_stages("interleaved", 2, 3), chunk_stages("zero_bubble_v", 2)
    ((0, 1, 0, 1, 0, 1), (0, 1, 1, 0))
    """
    if name not in _ROWS:
        raise ConfigError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    row = _ROWS[name]
    _positive(name, "stages", stages)
    _positive(name, "virtual stages", virtual)
    if not row.virtual(virtual):
        raise ConfigError(f"schedule {name!r} cannot have {virtual} virtual stages; expected {row.wanted}")
    return row.shape(stages, virtual)


@lru_cache(maxsize=64, typed=True)
def build_schedule(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """Build a schedule and prove that it can be run. Not collective; cached.

    Parameters
    ----------
    name : str
        One of :data:`SCHEDULES`.
    stages, micro_batches : int
        Number of stages and of micro-batches; "interleaved" pads the latter to a multiple of the former.
    virtual : int
        Chunks a stage, as in :func:`chunk_stages`.

    Raises
    ------
    ConfigError
        On an unknown name or numbers that the schedule does not take.
    """
    stage_of = chunk_stages(name, stages, virtual)
    _positive(name, "micro-batches", micro_batches)
    row = _ROWS[name]
    micros = -(-micro_batches // stages) * stages if row.padded else micro_batches
    schedule = Schedule(
        name,
        stages,
        len(stage_of),
        micros,
        stage_of,
        tuple(tuple(schedules.fuse(row.program(stage, stages, micros, virtual), stage_of)) for stage in range(stages)),
    )
    simulate(schedule, Costs.uniform(schedule.chunks))
    return schedule


def _positive(name: str, what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"schedule {name!r} cannot have {value!r} {what}; expected an integer >= 1")
