"""Build pipeline schedules: for each schedule a generator of one stage's instructions, and a table of all schedules.

The backward pass of a chunk has two halves: the input half computes the gradient of the chunk's input, the weight half
the gradients of its weights. In every schedule the backward passes of a chunk, and its weight halves, come in ascending
order of the micro-batches, because the sum over grains (``layout/tree.py``) adds gradients in this order.

The generators take the same four arguments: the number of the stage, the number of stages, the number of micro-batches,
and the number of chunks on each stage (``virtual``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from mpizero._util.checks import is_whole
from mpizero.errors import ConfigError
from mpizero.layout.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, Instruction
from mpizero.layout.schedule import Schedule


def gpipe(stage: int, _stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage: all forward passes, then all backward passes.

    Huang et al. 2019, GPipe, section 2.2.
    """
    for kind in (FORWARD, BACKWARD):
        for micro in range(micro_batches):
            yield Instruction(kind, stage, micro)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage: ``stages - 1 - stage`` forward passes, then forward and backward in turn.

    This is the schedule 1F1B: Narayanan et al. 2019, PipeDream, section 3.2, with a flush at the end of the batch
    (Narayanan et al. 2021, Efficient large-scale language model training, section 2.2.1). A stage holds activations of
    at most ``stages - stage`` micro-batches.
    """
    micros = range(micro_batches)
    forwards = [Instruction(FORWARD, stage, micro) for micro in micros]
    return _alternate(stages - 1 - stage, forwards, [Instruction(BACKWARD, stage, micro) for micro in micros])


def interleaved(stage: int, stages: int, micro_batches: int, virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage with ``virtual`` chunks, in the order of interleaved 1F1B.

    Narayanan et al. 2021, Efficient large-scale language model training, section 2.2.2. A stage computes one chunk for
    ``stages`` micro-batches before it goes to its next chunk. ``micro_batches`` is a multiple of ``stages``. Chunk
    ``c`` is on stage ``c % stages``.
    """
    forwards, backwards = [], []
    for first in range(0, micro_batches, stages):
        group = range(first, first + stages)
        forwards += [Instruction(FORWARD, k * stages + stage, micro) for k in range(virtual) for micro in group]
        backwards += [
            Instruction(BACKWARD, k * stages + stage, micro) for k in reversed(range(virtual)) for micro in group
        ]
    return _alternate(2 * (stages - 1 - stage) + (virtual - 1) * stages, forwards, backwards)


def zero_bubble(stage: int, stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage: 1F1B, with each weight half delayed by ``stage`` micro-batches.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.2 (ZB-H1). A backward pass is cut into an input half
    (gradient of the stage's input) and a weight half (gradients of the weights). The later a stage is in the pipeline,
    the fewer forward passes it does before its first backward pass, and the more weight halves it keeps for the end,
    where it would have to wait without them. So every stage holds activations of at most ``stages`` micro-batches,
    like the first stage of 1F1B.
    """
    ahead = min(micro_batches, stages - 1 - stage)
    for micro in range(ahead):
        yield Instruction(FORWARD, stage, micro)
    for micro in range(micro_batches):
        if micro + ahead < micro_batches:
            yield Instruction(FORWARD, stage, micro + ahead)
        yield Instruction(BACKWARD_INPUT, stage, micro)
        if micro >= stage:
            yield Instruction(BACKWARD_WEIGHTS, stage, micro - stage)
    for micro in range(max(micro_batches - stage, 0), micro_batches):
        yield Instruction(BACKWARD_WEIGHTS, stage, micro)


def zero_bubble_v(stage: int, stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage in the V-shaped zero-bubble schedule: two chunks on each stage.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 6 (ZB-V), in the order of PyTorch's
    ``ScheduleZBVZeroBubble``. Once a stage has started, it never waits if forward pass, input half and weight half take
    the same time and there are at least ``2 * stages - 1`` micro-batches.

    A micro-batch first passes the stages in ascending order (down the V), through chunk ``stage`` of each stage. Then
    it passes them in descending order (up the V), through chunk ``2 * stages - 1 - stage``. So stage 0 computes the
    loss, and the last stage passes the output of its first chunk to its second chunk. A stage holds at most
    ``2 * stages`` activation caches (one per chunk and micro-batch). A chunk has half as many blocks as a stage of
    1F1B, so this is the memory of the first stage of 1F1B.

    With fewer than ``2 * stages - 1`` micro-batches, the instructions are those for ``2 * stages - 1`` micro-batches
    without those of the micro-batches that are missing.
    """
    down, up = _Chunk(stage), _Chunk(2 * stages - 1 - stage)
    enough = max(micro_batches, 2 * stages - 1)
    program = _v_program(stage, stages, enough, down, up)
    return (instruction for instruction in program if instruction.micro < micro_batches)


class _Chunk:
    """Make the instructions of one chunk: each method returns the instruction of its kind for the next micro-batch.

    Attributes
    ----------
    chunk : int
        Number of the chunk.
    forwards, inputs, weights : int
        Number of forward passes, input halves and weight halves that have been returned so far.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.forwards = self.inputs = self.weights = 0

    def forward(self) -> Instruction:
        self.forwards += 1
        return Instruction(FORWARD, self.chunk, self.forwards - 1)

    def backward_input(self) -> Instruction:
        self.inputs += 1
        return Instruction(BACKWARD_INPUT, self.chunk, self.inputs - 1)

    def backward_weights(self) -> Instruction:
        self.weights += 1
        return Instruction(BACKWARD_WEIGHTS, self.chunk, self.weights - 1)


def _v_program(stage: int, stages: int, micro_batches: int, down: _Chunk, up: _Chunk) -> Iterator[Instruction]:
    for _ in range(2 * (stages - stage) - 1):  # until the first micro-batch comes up the V
        yield down.forward()
    for _ in range(stage):
        yield up.forward()
        yield down.forward()
    for _ in range(stages - stage):  # until the first gradient comes up the other side
        yield up.forward()
        yield up.backward_input()
        yield up.backward_weights()
    while up.forwards < micro_batches:
        if down.forwards < micro_batches:
            yield down.forward()
        yield down.backward_input()
        yield down.backward_weights()
        yield up.forward()
        yield up.backward_input()
        yield up.backward_weights()
    for _ in range(stage):  # gradients first: other stages wait for them
        yield down.backward_input()
        yield up.backward_input()
    for _ in range(stages - stage):
        yield down.backward_input()
        yield down.backward_weights()
    for chunk in (up, down):
        while chunk.weights < micro_batches:
            yield chunk.backward_weights()


def _alternate(ahead: int, forwards: list[Instruction], backwards: list[Instruction]) -> Iterator[Instruction]:
    """Yield ``ahead`` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for position, backward in enumerate(backwards):
        yield from forwards[ahead + position : ahead + position + 1]
        yield backward


def fuse(program: Iterable[Instruction], stage_of: tuple[int, ...]) -> Iterator[Instruction]:
    """Yield a stage's program with whole backward passes where halving them gains no time.

    An input half and the weight half that directly follows it become one backward pass if no other stage waits for the
    input gradient: if the chunk is the first of the model, or if the previous chunk is on the same stage. ``stage_of``
    holds the stage of every chunk.
    """
    held: Instruction | None = None
    for instruction in program:
        if held is not None:
            if instruction == held._replace(kind=BACKWARD_WEIGHTS):
                instruction = held._replace(kind=BACKWARD)
            else:
                yield held
            held = None
        chunk = instruction.chunk
        if instruction.kind == BACKWARD_INPUT and (chunk == 0 or stage_of[chunk - 1] == stage_of[chunk]):
            held = instruction
        else:
            yield instruction
    if held is not None:
        yield held


class _ScheduleRow(NamedTuple):
    """Describe one schedule: its generator and the numbers of chunks and micro-batches that it accepts.

    Attributes
    ----------
    program : callable
        The generator of one stage's instructions, called with (stage, stages, micro-batches, chunks per stage).
    virtual : callable
        Tells whether a number of chunks per stage is allowed.
    wanted : str
        Text for the error message: the allowed numbers of chunks per stage.
    shape : callable
        Returns the stage of every chunk, called with (stages, chunks per stage).
    padded : bool
        Whether the number of micro-batches is padded to a multiple of the number of stages.
    """

    program: Callable[[int, int, int, int], Iterator[Instruction]]
    virtual: Callable[[int], bool] = lambda virtual: virtual == 1
    wanted: str = "1"
    shape: Callable[[int, int], tuple[int, ...]] = lambda stages, virtual: tuple(range(stages)) * virtual
    padded: bool = False


_ROWS = {
    "gpipe": _ScheduleRow(gpipe),
    "1f1b": _ScheduleRow(one_forward_one_backward),
    "interleaved": _ScheduleRow(
        interleaved, lambda virtual: virtual >= 2, "at least 2 (with 1 it is the schedule '1f1b')", padded=True
    ),
    "zero_bubble": _ScheduleRow(zero_bubble),
    "zero_bubble_v": _ScheduleRow(
        zero_bubble_v,
        lambda virtual: virtual in {1, 2},
        "2 (or 1, the default: it always has two chunks a stage)",
        lambda stages, _: (*range(stages), *reversed(range(stages))),
    ),
}
#: Names of the schedules.
SCHEDULES = tuple(_ROWS)
#: The most chunks into which a model is cut.
MOST_CHUNKS = 1 << 16


def chunk_stages(name: str, stages: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the stage of every chunk, in the order of the chunks from the model's input.

    Parameters
    ----------
    name : str
        Name of the schedule, one of :data:`SCHEDULES`.
    stages : int
        Number of stages.
    virtual : int
        Number of chunks on each stage. "interleaved" needs two or more. "zero_bubble_v" always has two, also with
        ``virtual=1``. The other schedules need 1.

    Raises
    ------
    ConfigError
        If the name is unknown, or the schedule does not allow this number of stages or of chunks.

    Examples
    --------
    >>> from mpizero.layout import chunk_stages
    >>> chunk_stages("interleaved", 2, 3), chunk_stages("zero_bubble_v", 2)
    ((0, 1, 0, 1, 0, 1), (0, 1, 1, 0))
    """
    if name not in _ROWS:
        raise ConfigError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    row = _ROWS[name]
    _require_whole(name, "stages", stages)
    _require_whole(name, "virtual stages", virtual)
    if not row.virtual(virtual):
        raise ConfigError(f"schedule {name!r} cannot have {virtual} virtual stages; expected {row.wanted}")
    if stages * virtual > MOST_CHUNKS:
        raise ConfigError(f"{stages} stages with {virtual} chunks each: expected at most {MOST_CHUNKS:,} chunks")
    return row.shape(stages, virtual)


@lru_cache(maxsize=64, typed=True)
def build_schedule(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """Build a schedule and check by simulation that it can be run; the schedules built last are cached.

    Parameters
    ----------
    name : str
        Name of the schedule, one of :data:`SCHEDULES`.
    stages, micro_batches : int
        Number of stages and of micro-batches. "interleaved" adds empty micro-batches up to a multiple of the number of
        stages.
    virtual : int
        Number of chunks on each stage, as in :func:`chunk_stages`.

    Raises
    ------
    ConfigError
        If the name is unknown, or the schedule does not allow one of the three numbers.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.layout.build_schedule("gpipe", 2, 4).caches(), mz.layout.build_schedule("1f1b", 2, 4).caches()
    ((4, 4), (2, 1))
    >>> mz.layout.build_schedule("2f2b", 2, 4)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: unknown schedule '2f2b'; expected one of gpipe, 1f1b, interleaved, ...
    """
    stage_of = chunk_stages(name, stages, virtual)
    _require_whole(name, "micro-batches", micro_batches)
    row = _ROWS[name]
    micros = -(-micro_batches // stages) * stages if row.padded else micro_batches
    schedule = Schedule(
        name,
        stages,
        len(stage_of),
        micros,
        stage_of,
        tuple(tuple(fuse(row.program(stage, stages, micros, virtual), stage_of)) for stage in range(stages)),
    )
    from mpizero.layout.simulation import Costs, simulate

    simulate(schedule, Costs.uniform(schedule.chunks))
    return schedule


def _require_whole(name: str, what: str, value: object) -> None:
    if not is_whole(value, 1):
        raise ConfigError(f"schedule {name!r} cannot have {value!r} {what}; expected a whole number >= 1")
