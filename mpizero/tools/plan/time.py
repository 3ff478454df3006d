"""Compute the least time of each phase of a step on a measured machine.

The least time is the phase's operations divided by their measured rate, or its bytes divided by the measured bandwidth.
:class:`Machine` holds the measured speeds, which :func:`write_machine` and :func:`read_machine` keep in the machine
file, a small JSON document. :class:`StepPasses` counts the bytes that one rank reads and writes in a step to sum and
check gradients and to update parameters. :class:`TimeFloors` divides these counts by the speeds.

[Note: least passes] A row is an array that holds a gradient or a partial sum. Every row of a sum is counted as read
once, and every result as written once. A sum that a fused update uses itself is not written. Copies into and out of
message buffers are not counted here; they are part of the time of the messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from mpizero._util.checks import Check, Unexpected, flag, positive, whole
from mpizero._util.numbers import Measurement
from mpizero._util.text import printable, write_atomic
from mpizero.checkpoint.format import parse
from mpizero.errors import DataError
from mpizero.layout.sum_tree import Program
from mpizero.optim.elementwise import tensor_state_size
from mpizero.sharding.config import fuses_update
from mpizero.sharding.diagnostics import PHASES
from mpizero.sharding.whole_tensors import tensor_cost
from mpizero.tools.plan.counts import ExchangeCost, Sent
from mpizero.tools.plan.plan import TrainingPlan
from mpizero.tools.plan.traffic import RankTraffic

#: The name of the file format, and the only version of it so far.
FORMAT, VERSION = "mpizero-machine", 1
_LIMIT = 1 << 20
_REMEDY = "measure it again: mpiexec -n N python -m mpizero bench machine"

T = TypeVar("T")


@dataclass(frozen=True)
class MemoryPass:
    """Hold the seconds of a plain pass over memory, and of mpizero's kernel with the same reads and writes.

    Attributes
    ----------
    name : str
        Name of the pass, for example "sum + AdamW".
    reads, writes : int
        Number of arrays that a pass reads, and number that it writes.
    elements, itemsize : int
        Number of elements of each array, and bytes of an element.
    one, every : Measurement
        Seconds of the plain pass: of one rank alone, and of the slowest when all ranks run it.
    own_one, own_every : Measurement
        Seconds of mpizero's kernel: of one rank alone, and of the slowest when all ranks run it.
    ratio_one, ratio_every : Measurement
        Seconds of the kernel divided by those of the plain pass in the same repetition: of one rank alone, and of the
        slowest when all ranks run it.
    """

    name: str
    reads: int
    writes: int
    elements: int
    itemsize: int
    one: Measurement
    every: Measurement
    own_one: Measurement
    own_every: Measurement
    ratio_one: Measurement
    ratio_every: Measurement

    @property
    def nbytes(self) -> int:
        """Bytes that one rank reads and writes in a pass."""
        return (self.reads + self.writes) * self.elements * self.itemsize


@dataclass(frozen=True)
class MatrixProduct:
    """Hold the seconds of one matrix product of a layer: of the forward pass, or of an input's or weight's gradient.

    Attributes
    ----------
    name, form : str
        The layer, "expand" for example, and the form: "weights", for example, for the product of a weight's gradient.
    batch, rows, inner, columns : int
        The measured work is ``batch`` products of matrices (rows, inner) and (inner, columns).
    linear : bool
        Whether it is a product of a block's linear layers. :meth:`Machine.rate` uses only those.
    one, every : Measurement
        Seconds of one rank alone, and of the slowest when all ranks run it.
    """

    name: str
    form: str
    batch: int
    rows: int
    inner: int
    columns: int
    linear: bool
    one: Measurement
    every: Measurement

    @property
    def operations(self) -> int:
        """Floating-point operations of all ``batch`` products together."""
        return 2 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class MessageSpeed:
    """Hold the seconds of a collective, or of a message from one rank to another.

    Attributes
    ----------
    operation : str
        "exchange", "gather", "allreduce", "one to one" or "barrier".
    where : str
        "all ranks"; for operation "one to one", "inside a node" or "between nodes".
    nbytes : int
        Bytes of the whole vector: of which each rank sends slices (exchange), which slices of all ranks form (gather),
        or which is reduced (allreduce); for "one to one" the bytes of the message, for "barrier" 0.
    sent : int
        Bytes that rank 0 sends to all other ranks together; for "one to one" the bytes of the message.
    seconds : Measurement
        Seconds of the slowest rank.
    """

    operation: str
    where: str
    nbytes: int
    sent: int
    seconds: Measurement


@dataclass(frozen=True)
class FileSpeed:
    """Hold the seconds in which all ranks write or read one file, each rank its own part.

    Attributes
    ----------
    operation : str
        "write with fsync", "read" (from the disk again) or "read from memory" (from the page cache).
    nbytes : int
        Bytes that all ranks write or read together.
    seconds : Measurement
        Seconds of the slowest rank.
    """

    operation: str
    nbytes: int
    seconds: Measurement


@dataclass(frozen=True)
class Machine:
    """Hold the measurements of a machine, and where, when and with which software they were made.

    Attributes
    ----------
    host, date, cpu, blas : str
        Name of the first rank's node, time at which the measurement ended (UTC), type of the CPU, and BLAS that NumPy
        uses.
    libraries : dict of str to str
        Versions of Python, mpizero and the libraries that they use, MPI among them.
    ranks, nodes, ranks_per_node, threads : int
        Number of ranks and of nodes in the measurement, largest number of ranks on a node, and BLAS threads of a rank.
    dtype : str
        The dtype of the matrix products.
    repeat : int
        Number of repetitions of each measurement.
    streams, products, messages, files : tuple
        The measurements of memory passes, matrix products, messages and files.
    """

    host: str
    date: str
    cpu: str
    blas: str
    libraries: dict[str, str]
    ranks: int
    nodes: int
    ranks_per_node: int
    threads: int
    dtype: str
    repeat: int
    streams: tuple[MemoryPass, ...]
    products: tuple[MatrixProduct, ...]
    messages: tuple[MessageSpeed, ...]
    files: tuple[FileSpeed, ...]

    def rate(self, ranks_per_node: int) -> float:
        """Return the floating-point operations per second of one rank on a node of ``ranks_per_node``. Not collective.

        The rate is the number of operations of all measured linear products, divided by the sum of their seconds.

        [Note: limits] Only the fastest repetition of each measurement is used, because other processes may have slowed
        the other repetitions.

        [Note: other numbers of ranks] One rank alone and all ranks together were measured. For another number of ranks
        on a node, a rank gets an equal part of the rate that a node's measured ranks had together, but at most the rate
        of one rank alone.
        """
        chosen = [product for product in self.products if product.linear]
        work = sum(product.operations for product in chosen)
        one = work / sum(product.one.least for product in chosen)
        every = work / sum(product.every.least for product in chosen)
        return _shared(one, every, self.ranks_per_node, ranks_per_node)

    def bandwidth(self, name: str, ranks_per_node: int) -> float:
        """Return the bytes per second that one rank moves in the plain memory pass ``name``.

        The rank is on a node of ``ranks_per_node`` ranks. Not collective. See [Note: limits] and [Note: other numbers
        of ranks] at :meth:`rate`.
        """
        stream = next(stream for stream in self.streams if stream.name == name)
        one, every = stream.nbytes / stream.one.least, stream.nbytes / stream.every.least
        return _shared(one, every, self.ranks_per_node, ranks_per_node)

    def pass_seconds(self, read: int, written: int, ranks_per_node: int) -> float:
        """Return the seconds in which one rank reads ``read`` bytes and writes ``written`` bytes of memory.

        The rank is on a node of ``ranks_per_node`` ranks. Not collective. The bandwidth is taken from the measured pass
        with the nearest fraction of written bytes.
        """
        if not read + written:
            return 0.0
        fraction = written / (read + written)
        name = min(NEEDED, key=lambda name: abs(self._write_fraction(name) - fraction))
        return (read + written) / self.bandwidth(name, ranks_per_node)

    def _write_fraction(self, name: str) -> float:
        stream = next(stream for stream in self.streams if stream.name == name)
        return stream.writes / (stream.reads + stream.writes)

    def longest_way(self, ranks: int, ranks_per_node: int) -> str:
        """Return the slowest measured kind of path between two ranks of a job: "between nodes" or "inside a node".

        The job has ``ranks`` ranks, ``ranks_per_node`` on a node. Not collective.
        """
        return "between nodes" if self.nodes > 1 and ranks > ranks_per_node else "inside a node"

    def seconds(self, operation: str, sent: float, where: str = "all ranks") -> float:
        """Return the seconds of a collective in which a rank sends ``sent`` bytes, by interpolation.

        ``operation`` and ``where`` are those of :class:`MessageSpeed`. Between measured sizes the time is linear. Above
        the largest measured size, the time grows in proportion to the bytes. Returns 0 if the operation was not
        measured, for example on a single rank. Not collective. See [Note: limits] at :meth:`rate`.
        """
        known = sorted((m.sent, m.seconds.least) for m in self.messages if (m.operation, m.where) == (operation, where))
        if not known:
            return 0.0
        before, (last, longest) = known[0], known[-1]
        if sent >= last:
            return longest * sent / last if last else longest
        for size, taken in known:
            if sent <= size:
                fraction = (sent - before[0]) / (size - before[0]) if size > before[0] else 1.0
                return before[1] + max(0.0, fraction) * (taken - before[1])
            before = size, taken
        return longest


def _shared(one: float, every: float, measured: int, wanted: int) -> float:
    """Return one rank's rate on a node of ``wanted`` ranks: see [Note: other numbers of ranks] at :meth:`Machine.rate`.

    ``one`` is the rate of one rank alone, ``every`` the rate of each rank when ``measured`` ranks run together.
    """
    return min(one, every * measured / wanted)


def write_machine(path: str, machine: Machine) -> None:
    """Write a machine file; an older file of this name is replaced atomically. Not collective."""
    document = {"format": FORMAT, "version": VERSION, **asdict(machine)}
    write_atomic(Path(path), (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def read_machine(path: str) -> Machine:
    """Read a machine file. Not collective.

    Raises
    ------
    DataError
        The file is missing, damaged, of another kind or of another version. The message names the file, the entry and
        the reason.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {_REMEDY}") from None
    if len(data) > _LIMIT:
        raise DataError(f"{path}: no machine file: more than {_LIMIT} bytes; {_REMEDY}")
    try:
        document = parse(data)
    except ValueError as error:
        raise DataError(f"{path}: no machine file, or a damaged one: {error}; {_REMEDY}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f'{path}: no machine file: expected a JSON object with "format": "{FORMAT}"; {_REMEDY}')
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise DataError(
            f"{path}: a machine file of version {version!r:.40}; this mpizero reads version {VERSION}: {_REMEDY}"
        )
    document = {key: value for key, value in document.items() if key not in ("format", "version")}
    try:
        machine: Machine = _parsed(Machine, document, "")
        _check(machine)
    except ValueError as error:
        raise DataError(f"{path}: a damaged machine file: {error}; {_REMEDY}") from None
    return machine


def _check(machine: Machine) -> None:
    if not any(product.linear for product in machine.products):
        raise ValueError("products: none of them is linear")
    if missing := sorted(set(NEEDED) - {stream.name for stream in machine.streams}):
        raise ValueError(f"streams: {missing} missing")
    for key in ("ranks", "nodes", "ranks_per_node", "threads"):
        if getattr(machine, key) < 1:
            raise ValueError(f"{key}: expected at least 1, found {getattr(machine, key)}")


#: Names of the memory passes that a machine file must have.
NEEDED = ("read", "copy", "sum of 2", "sum of 4", "AdamW", "sum + AdamW")


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """Convert the JSON value ``value`` to the type ``kind``, or raise ``ValueError``.

    ``where`` is the path of the value in the file, for the message.
    """
    origin = get_origin(kind)
    if origin is tuple:
        items = _of(list, value, where, "a list")
        return tuple(_parsed(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        table = _of(dict, value, where, "an object")
        return {key: _parsed(get_args(kind)[1], item, f"{where}.{key}") for key, item in table.items()}
    if kind not in _SCALARS:
        return _record(kind, value, where)
    try:
        return _SCALARS[kind](value)
    except Unexpected as expected:
        raise ValueError(f"{where}: expected {expected}, found {value!r:.80}") from None


def _record(kind: Any, value: Any, where: str) -> Any:
    table, inside = _of(dict, value, where or "the file", "an object"), f"{where}." if where else ""
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    if wrong := sorted(set(known) ^ set(table)):
        raise ValueError(f"{inside}{wrong[0]:.80}: {'missing' if wrong[0] in known else 'unknown'}")
    return kind(**{name: _parsed(hints[name], table[name], inside + name) for name in known})


def _of(kind: type[T], value: Any, where: str, expected: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: expected {expected}, found {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or printable(value) != value:
        raise Unexpected("a text of printable characters")
    return value


_SCALARS: Mapping[Any, Check] = {int: whole(), float: positive, str: _text, bool: flag}


class PassBytes(NamedTuple):
    """Hold the bytes that one pass over memory reads, and the bytes that it writes."""

    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written together."""
        return self.read + self.written


@dataclass(frozen=True)
class StepPasses:
    """Compute the passes over memory of one rank in a step.

    Attributes
    ----------
    traffic : RankTraffic
        The rank's part of the model, and its messages.
    """

    traffic: RankTraffic

    @property
    def _item(self) -> int:
        return self.traffic.training.itemsize

    def _pass(self, elements: int, reads: int, writes: int) -> PassBytes:
        return PassBytes(elements * reads * self._item, elements * writes * self._item)

    @property
    def _stage_gradients(self) -> int:
        """Number of gradient elements that this rank's stage has."""
        return sum(unit.gradients for unit in self.traffic.part.layout.units)

    @property
    def _owned(self) -> int:
        """Number of gradient elements whose sums over all ranks this rank computes, because it owns the parameters."""
        return sum(self.traffic.part.shards.gradients[self.traffic.grid.data.rank])

    @property
    def _group(self) -> int:
        """Number of gradient elements that this rank and its peers own, and that this rank sums over its node."""
        gradients = self.traffic.part.shards.gradients
        return sum(sum(gradients[rank]) for rank in self.traffic.grid.inter_node_ranks)

    @property
    def fused(self) -> bool:
        """Tell whether the last sum of gradients and the update are one pass.

        In rounds, the sum of all grains is complete before this pass, which reads it from the memory for partial sums.
        """
        training, partitioned = self.traffic.training, self.traffic.part.partitioned
        return fuses_update(
            training.optimizer,
            norm=training.needs_norm,
            ties=partitioned.has_shared_parameters,
            nodes=self.traffic.grid.inter_node.size,
            in_rounds=training.step.in_rounds,
        )

    # ------------------------------------------------------------------ by phase

    def local_sums(self) -> list[PassBytes]:
        """Return the passes over memory that check each micro-batch's gradients, or add gradients within the rank.

        Not collective.
        """
        present = sum(size > 0 for size in self.traffic.jobs)
        passes = [self._pass(self._stage_gradients, 1, 0)] * present
        step = self.traffic.training.step
        if step.accumulate > 1:
            grains = -(-present // step.accumulate)
            if step.in_rounds or step.scratch is None:
                passes += [self._pass(self._stage_gradients, 1, 1)] * 2 * grains  # into the partial sum, and out of it
            passes += [self._pass(self._stage_gradients, 2, 1)] * (present - grains)
        if not step.in_rounds:
            folds = step.rows_plan(self.traffic.grid).folds[self.traffic.grid.order_index].folds
            passes += [self._pass(self._stage_gradients, 2, 1)] * sum(len(fold.targets) for fold in folds)
        return passes

    def reduction(self) -> list[PassBytes]:
        """Return the passes that sum gradients over ranks. Not collective.

        The last sum is left out if the update is fused with it.
        """
        return list(self._rounds() if self.traffic.training.step.in_rounds else self._rows())

    def _rows(self) -> Iterator[PassBytes]:
        plan = self.traffic.training.step.rows_plan(self.traffic.grid)
        if self.traffic.grid.inter_node.size > 1:
            yield from self._folded(self._group, plan.group_programs[self.traffic.grid.inter_node.rank])
        if not self.fused:
            yield self._pass(self._owned, _rows_read(plan.root), 1)

    def _rounds(self) -> Iterator[PassBytes]:
        for this_round in self.traffic.training.step.round_plan(self.traffic.grid).rounds:
            if self.traffic.grid.inter_node.size > 1:
                yield from self._folded(self._group, this_round.group_programs[self.traffic.grid.inter_node.rank])
            for merge in this_round.merges:
                yield self._pass(self._owned, _rows_read(merge.program), 1)
        if not self.fused:
            yield self._pass(self._owned, 1, 1)  # divided by the weight

    def _folded(self, elements: int, programs: Sequence[Program]) -> Iterator[PassBytes]:
        for program in programs:
            yield self._pass(elements, _rows_read(program), 1)

    def optimizer(self) -> list[PassBytes]:
        """Return one entry: the bytes of norm and update together, and of the last sum if it is fused.

        Not collective. For tensors that are updated as a whole, only one pass over values and state is counted;
        :func:`tensor_work` counts their operations.
        """
        training, tensors = self.traffic.training, self.traffic.tensors
        arrays = 1 + len(training.optimizer.slots)
        rows = 1
        if self.fused and not training.step.in_rounds:
            rows = _rows_read(training.step.rows_plan(self.traffic.grid).root)
        gradients = self._owned if training.row.shard_optimizer else self._group
        elementwise = self.traffic.updated - self.traffic.updated_in_tensors
        passes = [self._pass(gradients, rows, 0), self._pass(elementwise, arrays, arrays)]
        for spec in (tensors.tensors[number].spec for number in tensors.owned(self.traffic.grid.data.rank)):
            passes.append(self._pass(spec.size + tensor_state_size(training.optimizer, spec), 1, 1))
        if training.needs_norm:
            passes.append(self._pass(self._owned, 1, 0))
        return [PassBytes(sum(p.read for p in passes), sum(p.written for p in passes))]


def tensor_work(traffic: RankTraffic) -> int:
    """Return the floating-point operations of updating the tensors that a rank updates as a whole. Not collective."""
    tensors, optimizer = traffic.tensors, traffic.training.optimizer
    owned = (tensors.tensors[number].spec.shape for number in tensors.owned(traffic.grid.data.rank))
    return sum(tensor_cost(optimizer, shape) for shape in owned)


def _rows_read(program: Program) -> int:
    """Return how many arrays are read by ``program``, the instructions that sum gradients in the order of a tree."""
    return sum(code != -1 for code in program)


#: For each purpose of messages, the measured operation whose times are used; "gather" for the others.
_OPERATIONS = {
    "whole tensors": "one to one",
    "tensor": "allreduce",
    "context": "one to one",
    "ties": "one to one",
    "samples": "exchange",
}


@dataclass(frozen=True)
class TimeFloors:
    """Compute the least seconds of every phase of a step of a planned training.

    Attributes
    ----------
    plan : TrainingPlan
        The plan: what every rank holds, sends and computes.
    machine : Machine
        The measured speeds of the machine.
    ranks_per_node : int
        Number of ranks that share a node's cores and memory.
    """

    plan: TrainingPlan
    machine: Machine
    ranks_per_node: int

    def of(self, rank: int) -> dict[str, float]:
        """Return the least seconds of each phase in :data:`PHASES` on one rank, by phase. Not collective.

        The work of layers that do not count their operations is not included.
        """
        traffic = self.plan.traffic(rank)
        passes, sent = StepPasses(traffic), traffic.sent
        forward, backward = self._work(traffic)
        products = tensor_work(traffic) / self.machine.rate(self.ranks_per_node)
        seconds = {
            "forward": forward,
            "backward": backward,
            "layers' messages": self._purposes(sent, "tensor", "context") + self._windows(traffic),
            "local sums": self._passes(passes.local_sums()),
            "reduction": self._passes(passes.reduction()) + self._reduction(traffic, sent),
            "optimizer": self._passes(passes.optimizer()) + products + self._purposes(sent, "whole tensors"),
            "publication": self._parameter_messages(traffic),
            "agreement": self._purposes(sent, "samples", "norms", "control"),
            "waiting": self._bubble(traffic),
        }
        return {phase: seconds[phase] for phase in PHASES}

    @cached_property
    def by_rank(self) -> tuple[dict[str, float], ...]:
        """For every rank, the least seconds of each phase."""
        return tuple(self.of(rank) for rank in range(self.plan.ranks))

    @property
    def slowest(self) -> int:
        """The rank whose phases take longest in total."""
        return max(range(self.plan.ranks), key=lambda rank: sum(self.by_rank[rank].values()))

    # ------------------------------------------------------------------ parts

    def _work(self, traffic: RankTraffic) -> tuple[float, float]:
        part, samples, rate = traffic.part, sum(traffic.jobs), self.machine.rate(self.ranks_per_node)
        work = [part.work(chunk) for chunk in part.partitioned.chunks]
        forward = sum(chunk.forward for chunk in work) * samples
        return forward / rate, sum(chunk.total for chunk in work) * samples / rate - forward / rate

    def _passes(self, passes: Iterable[PassBytes]) -> float:
        alike = Counter(passes).items()
        return sum(n * self.machine.pass_seconds(p.read, p.written, self.ranks_per_node) for p, n in alike)

    def _messages(self, operation: str, sent: Sent) -> float:
        if not sent.messages:
            return 0.0
        where = "all ranks"
        if operation == "one to one":
            where = self.machine.longest_way(self.plan.ranks, self.ranks_per_node)
        return sent.messages * self.machine.seconds(operation, sent.bytes / sent.messages, where)

    def _windows(self, traffic: RankTraffic) -> float:
        """Return the seconds that tensor and context group copy, sum and wait at barriers in shared windows."""
        total = 0.0
        for group, calls in traffic.calls:
            for call, times in calls.items() if group.shares_memory else ():
                copies = call.copies(group.rank, group.size)
                moved = sum(self.machine.pass_seconds(*each, self.ranks_per_node) for each in copies.passes)
                total += times * (moved + copies.barriers * self.machine.seconds("barrier", 0))
        return total

    def _purposes(self, sent: dict[str, Sent], *names: str) -> float:
        return sum(self._messages(_OPERATIONS.get(name, "gather"), sent[name]) for name in names if name in sent)

    def _exchanges(self, operation: str, exchanges: Iterable[ExchangeCost]) -> float:
        alike = Counter(e.sent for e in exchanges).items()
        return sum(count * self._messages(operation, sent) for sent, count in alike)

    def _reduction(self, traffic: RankTraffic, sent: dict[str, Sent]) -> float:
        """Return the seconds of the messages that sum gradients over ranks, and of a node's barriers before sums."""
        rows = self._exchanges("exchange", traffic.reductions) + self._exchanges("gather", traffic.replications())
        times = 1
        if traffic.training.step.in_rounds:
            rounds = traffic.training.step.round_plan(traffic.grid).rounds
            times = len(rounds) * len(traffic.part.layout.units)
        return rows + self._purposes(sent, "ties") + times * self._barrier(traffic)

    def _parameter_messages(self, traffic: RankTraffic) -> float:
        """Return the seconds of messages that send parameters and gather units, and of one barrier of a node."""
        total = self._exchanges("gather", traffic.parameter_gathers()) if traffic.training.row.shard_optimizer else 0.0
        return total + self._exchanges("gather", traffic.gathers()) + self._barrier(traffic)

    def _barrier(self, traffic: RankTraffic) -> float:
        return self.machine.seconds("barrier", 0) if traffic.grid.node.size > 1 else 0.0

    def _bubble(self, traffic: RankTraffic) -> float:
        """Return the seconds in which this rank's stage is idle in the simulated pipeline."""
        simulation = self.plan.simulation
        if simulation is None:
            return 0.0
        return simulation.makespan - simulation.busy[traffic.part.partitioned.stage]
