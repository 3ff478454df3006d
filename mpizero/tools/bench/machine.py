"""Measure how fast a machine multiplies, moves memory, sends messages and writes files: ``mpizero bench machine``.

:func:`alone` and :func:`together` time the same work on one rank alone and on all ranks together.
:class:`ProductBenchmark` measures the rate of matrix products with the shapes that a transformer's layers have.
:class:`PassBenchmark` measures memory bandwidth for the reads and writes of a training step, with plain loops and the
library's kernels. :class:`MessageBenchmark` times the collectives that the library uses, and messages between two
ranks, for several sizes. :class:`FileBenchmark` times one file, of which every rank writes and reads its own part.
:func:`measure_machine` runs these benchmarks with the sizes in a :class:`MachineRequest`; :func:`report` and
:func:`as_json` format the measurements.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count, cycle, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from mpizero import optim
from mpizero._util.checks import whole
from mpizero._util.numbers import Measurement
from mpizero._util.settings import check_option, shown
from mpizero._util.text import amount, columns
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, from_rank_0
from mpizero.comm.reduce import program_array
from mpizero.comm.startup import mpi_facts, versions
from mpizero.errors import ConfigError
from mpizero.kernels import cpu, memory
from mpizero.kernels.matmul import library, matmul
from mpizero.layout import Partition
from mpizero.nn import GPT
from mpizero.nn.arrays import keep_freed_memory
from mpizero.sharding.config import Config
from mpizero.tools.bench.strategies import require_room
from mpizero.tools.doctor import counted
from mpizero.tools.plan.time import FileSpeed, Machine, MatrixProduct, MemoryPass, MessageSpeed, write_machine
from mpizero.train import machine as facts
from mpizero.train.config.build import build_source, with_batch
from mpizero.train.config.schema import RunConfig
from mpizero.train.config.sections import GptSection
from mpizero.types import Array

#: Seconds that a waiting rank sleeps between two tests: it must not keep a core busy while another rank is measured.
_NAP = 2e-4


def alone(comm: Communicator, work: Callable[[], object]) -> float:
    """Time ``work`` on rank 0 while the other ranks sleep, and return the seconds on every rank.

    Collective over ``comm``; ``work`` is called on rank 0 only.
    """
    comm.barrier("bench")
    took = np.zeros(1)
    if comm.rank == 0:
        started = time.perf_counter()
        work()
        took[0] = time.perf_counter() - started
    ended = comm.ibarrier("bench")
    while not ended.test():
        time.sleep(_NAP)
    comm.broadcast(took, 0, "bench")
    return float(took[0])


def together(comm: Communicator, work: Callable[[], object]) -> float:
    """Time ``work`` on all ranks together, and return the slowest rank's seconds on every rank.

    Collective over ``comm``. If ``work`` raises on one rank, all ranks raise.
    """
    comm.barrier("bench")
    started = time.perf_counter()
    with all_ranks(comm, "bench"):
        work()
        took = time.perf_counter() - started
    return slowest(comm, took)


def slowest(comm: Communicator, seconds: float) -> float:
    """Return the largest of all ranks' ``seconds`` on every rank. Collective over ``comm``."""
    took = np.array([seconds])
    comm.allreduce(took, "max", "bench")
    return float(took[0])


def node_leaders(comm: Communicator) -> list[int]:
    """Return, for each rank, the first rank on its node. Collective over ``comm``."""
    with comm.split_node(name="bench") as node:
        leader = node.broadcast_object(comm.rank, tag="bench")
    leaders: list[int] = comm.allgather_object(leader, "bench")
    return leaders


def ranks_per_node(leaders: Sequence[int]) -> int | None:
    """Return the number of ranks on a node, from :func:`node_leaders`; None if nodes differ. Not collective."""
    alike = {leaders.count(leader) for leader in leaders}
    return alike.pop() if len(alike) == 1 else None


#: Queries in one product of attention; :mod:`mpizero.nn.transformer` cuts them into blocks of this size.
_QUERIES = 64
_VOCABULARY = 256
#: A product is repeated until about ``_OPERATIONS`` operations are done, at most ``_MOST_PRODUCTS`` times: a single
#: small product is too short to time.
_OPERATIONS, _MOST_PRODUCTS = 2e8, 100


@dataclass(frozen=True)
class ProductShapes:
    """Hold the sizes of a transformer that determine the shapes of its matrix products.

    Attributes
    ----------
    dim, heads, sequence, batch : int
        Number of features, of attention heads, of tokens in a sample, and of samples in a micro-batch.
    dtype : str
        "float32" or "float64".
    """

    dim: int = 256
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes below 1, and if the number of heads does not divide the number of features."""
        for name in ("dim", "heads", "sequence", "batch"):
            check_option(f"--{name}", getattr(self, name), whole(1))
        if self.dim % self.heads:
            raise ConfigError(f"--heads {self.heads}: must divide --dim {self.dim}")

    @classmethod
    def of(cls, config: RunConfig) -> ProductShapes:
        """Return the sizes of a configuration's transformer and its micro-batches. Not collective.

        The data are opened only for a full-batch method, whose batch is the whole data set.

        Raises
        ------
        ConfigError
            If the configuration's model is not a transformer.
        """
        section, train = config.model, config.train
        if not isinstance(section, GptSection):
            advice = 'bench machine takes the shapes of a "gpt"; give --dim'
            raise ConfigError(f"the model is {shown(section.described)}: {advice}")
        gpt = GPT(section.dim, section.layers, section.heads, section.sequence, vocabulary=_VOCABULARY)
        rule = Config(micro_batch=train.micro_batch, accumulate=train.accumulate).grain_rule(gpt)
        if config.optimizer.kind.needs_vectors:
            train = with_batch(config, build_source(config)[0]).train
        batch = rule.micro_size(train.global_batch)
        return cls(section.dim, section.heads, section.sequence, batch, section.dtype)

    def linear(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, number of inputs and number of outputs of each linear map of a block. Not collective."""
        yield "qkv", self.dim, 3 * self.dim
        yield "projection", self.dim, self.dim
        yield "expand", self.dim, 4 * self.dim
        yield "contract", 4 * self.dim, self.dim


@dataclass
class _TimedProduct:
    """Time one matrix product: hold its description, the call that computes it, and the seconds measured so far."""

    facts: dict[str, Any]
    operations: int
    call: Callable[[], object]
    one: list[float] = field(default_factory=list)
    every: list[float] = field(default_factory=list)

    @property
    def times(self) -> int:
        """Return how often one measurement computes the product; small products are computed more often."""
        return max(1, min(_MOST_PRODUCTS, round(_OPERATIONS / self.operations)))

    def work(self) -> None:
        """Compute the product :attr:`times` times. Not collective."""
        for _ in range(self.times):
            self.call()

    def measurement(self) -> MatrixProduct:
        """Return the measured seconds of computing the product once. Not collective."""
        one, every = (Measurement.of([s / self.times for s in values]) for values in (self.one, self.every))
        return MatrixProduct(**self.facts, one=one, every=every)


class ProductBenchmark:
    """Time the matrix products of one transformer block and of the output head, as the layers compute them.

    For linear maps these are the products of the forward pass, of the gradients of inputs and of the gradients of
    weights; for attention, only the products of the forward pass.

    Construction is not collective; :meth:`measure` is.
    """

    def __init__(self, comm: Communicator, shapes: ProductShapes) -> None:
        self.comm, self.shapes = comm, shapes
        self.dtype = np.dtype(shapes.dtype)
        self.random = np.random.default_rng(comm.rank)
        self.timed: Sequence[_TimedProduct] = (*self._linear(), *self._attention())

    def _array(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(self.dtype)

    def _linear(self) -> Iterator[_TimedProduct]:
        rows = self.shapes.batch * self.shapes.sequence
        for name, inputs, outputs in (*self.shapes.linear(), ("head", self.shapes.dim, _VOCABULARY)):
            x, weight, dy = self._array(rows, inputs), self._array(inputs, outputs), self._array(rows, outputs)
            facts = {"name": name, "batch": 1, "linear": name != "head"}
            forms = {
                "forward": (x, weight, np.empty_like(dy)),
                "input": (dy, weight.T, np.empty_like(x)),
                "weights": (x.T, dy, np.empty_like(weight)),
            }
            for form, arrays in forms.items():
                yield self._one({**facts, "form": form}, *arrays)

    def _attention(self) -> Iterator[_TimedProduct]:
        """Yield timers of the two batched matrix products of attention, for one block of queries.

        These are the product of queries and keys, and the product of attention weights and values.
        """
        batch, width = self.shapes.batch * self.shapes.heads, self.shapes.dim // self.shapes.heads
        queries, length = min(_QUERIES, self.shapes.sequence), self.shapes.sequence
        q, k = self._array(batch, queries, width), self._array(batch, length, width)
        scores, mixed = np.empty((batch, queries, length), self.dtype), np.empty((batch, queries, width), self.dtype)
        facts = {"form": "forward", "linear": False}
        yield self._one({**facts, "name": "scores", "batch": batch}, q, k.swapaxes(1, 2), scores)
        yield self._one({**facts, "name": "mixing", "batch": batch}, self._array(*scores.shape), k, mixed)

    @staticmethod
    def _one(facts: dict[str, Any], a: Array, b: Array, out: Array) -> _TimedProduct:
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        sizes = {"rows": rows, "inner": inner, "columns": columns}
        return _TimedProduct(facts | sizes, 2 * facts["batch"] * rows * inner * columns, lambda: matmul(a, b, out))

    def measure(self, turn: int, *, keep: bool) -> None:
        """Time every product on one rank and on all ranks, in reverse order if ``turn`` is -1.

        Collective. The seconds are stored only with ``keep``. Make the first call without ``keep``, to warm up.
        """
        for timed in self.timed[::turn]:
            for how, values in ((alone, timed.one), (together, timed.every))[::turn]:
                took = how(self.comm, timed.work)
                values.extend([took] * keep)

    def measurements(self) -> tuple[MatrixProduct, ...]:
        """Return the stored seconds of every product. Not collective."""
        return tuple(timed.measurement() for timed in self.timed)


#: Arrays that the passes need at the same time.
ARRAYS = 7
#: Programs of ``tree_sum`` that add two and four rows; a row is one array of gradients.
_TWO, _FOUR = (0, -3), (0, -3, 2, -5, -1)

Work = Callable[[], object]


@dataclass
class _Pass:
    """Time one pass over memory, a loop that reads each of ``reads`` arrays and writes each of ``writes`` arrays once.

    The pass is computed by a plain loop and by the library's kernel, on one rank alone and on all ranks. ``values``
    has four lists of seconds: plain loop on one rank, plain loop on all, kernel on one rank, kernel on all.
    """

    name: str
    reads: int
    writes: int
    plain: Work
    kernel: Work
    values: tuple[list[float], ...] = field(default_factory=lambda: ([], [], [], []))

    def measure(self, comm: Communicator, turn: int, *, keep: bool) -> None:
        """Time all four cases once, in reverse order if ``turn`` is -1; store the seconds if ``keep``. Collective."""
        works = ((self.plain, alone), (self.plain, together), (self.kernel, alone), (self.kernel, together))
        for case in (0, 2, 1, 3)[::turn]:
            work, how = works[case]
            took = how(comm, work)
            self.values[case].extend([took] * keep)

    def measurement(self, elements: int, itemsize: int) -> MemoryPass:
        """Return the seconds of all four cases, and the ratios of kernel to plain loop. Not collective.

        ``elements`` is the number of elements of each array, ``itemsize`` the bytes of an element.
        """
        measured = [Measurement.of(values) for values in self.values]
        ratios = [Measurement.of_ratios(ours, plain) for plain, ours in zip(self.values, self.values[2:], strict=False)]
        return MemoryPass(self.name, self.reads, self.writes, elements, itemsize, *measured, *ratios)


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
        two_arrays, four_arrays = self.arrays[:2], self.arrays[:4]
        size, one = self.elements, np.ones(1, np.float32)
        hyper = optim.AdamW().hyper(1, 1, np.float32)
        two, four = program_array(_TWO), program_array(_FOUR)
        starts, sizes, total, bits = np.array([0]), np.array([size]), np.empty(1), a.view(np.int64)
        adamw, fused, reduction = cpu.update.adamw, cpu.update, cpu.reduction

        def tree_sum(arrays: Array, program: Array) -> Work:
            return lambda: fused.tree_sum(arrays, 0, arrays, 0, program, one, w, 0, size)

        def sum_and_update() -> None:
            fused.adamw_tree(two_arrays, 0, two, one, w, m, v, hyper, 0, size)

        return (
            _Pass("read", 1, 0, lambda: memory.read(bits), lambda: reduction.all_finite(a)),
            _Pass("norm", 1, 0, lambda: memory.read(bits), lambda: reduction.tree_square_sums(a, starts, sizes, total)),
            _Pass("copy", 1, 1, lambda: memory.copy(a, b), lambda: cpu.layers.pack(a, starts, sizes, b)),
            _Pass("sum of 2", 2, 1, lambda: memory.add_two(a, b, w), tree_sum(two_arrays, two)),
            _Pass("sum of 4", 4, 1, lambda: memory.add_four(a, b, c, d, w), tree_sum(four_arrays, four)),
            _Pass("AdamW", 4, 3, lambda: memory.update(a, w, m, v), lambda: adamw(w, a, m, v, hyper, 0, size)),
            _Pass("sum + AdamW", 5, 3, lambda: memory.add_and_update(a, b, w, m, v), sum_and_update),
        )

    def measure(self, turn: int, *, keep: bool) -> None:
        """Time every pass once, in reverse order if ``turn`` is -1, and store the seconds if ``keep``.

        Collective. Make the first call without ``keep``, to warm up.
        """
        for entry in self.passes[::turn]:
            self.arrays[:] = 1  # else sums of sums would grow, and averages become subnormal, which is slow
            entry.measure(self.comm, turn, keep=keep)

    def measurements(self) -> tuple[MemoryPass, ...]:
        """Return the stored seconds of all passes. Not collective."""
        return tuple(entry.measurement(self.elements, self.arrays.itemsize) for entry in self.passes)


#: Bytes of the smallest message, and the factor from one size to the next.
_SMALLEST, _FACTOR = 8, 16
#: A collective is repeated until about ``_BYTES`` bytes have moved, at most ``_MOST_MESSAGES`` times: a single short
#: collective could not be timed.
_BYTES, _MOST_MESSAGES = 1 << 21, 50


def sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes of the messages that are timed, in bytes: 8, 128, 2048 ... and ``largest``. Not collective."""
    smaller = takewhile(lambda nbytes: nbytes < largest, (_SMALLEST * _FACTOR**k for k in count()))
    return (*smaller, largest)


@dataclass
class _TimedMessage:
    """Time a collective or a message between two ranks, for one size of message.

    ``nbytes`` is the size of the message, ``sent`` the number of bytes that this rank sends in one call, and ``values``
    the seconds of a call, one entry for each repetition.
    """

    operation: str
    where: str
    nbytes: int
    sent: int
    call: Callable[[], object]
    values: list[float] = field(default_factory=list)

    def measure(self, comm: Communicator, *, keep: bool) -> None:
        """Repeat the call, and store the slowest rank's mean seconds per call if ``keep``. Collective."""
        times = max(1, min(_MOST_MESSAGES, _BYTES // max(1, self.nbytes)))
        self.call()
        comm.barrier("bench")
        started = time.perf_counter()
        for _ in range(times):
            self.call()
        self.values.extend([slowest(comm, (time.perf_counter() - started) / times)] * keep)


class MessageBenchmark:
    """Time collectives and messages between two ranks over ``comm``; on a single rank there is nothing to time.

    Construction and :meth:`measure` are collective over ``comm``.
    """

    def __init__(self, comm: Communicator, largest: int) -> None:
        self.comm, self.leaders = comm, node_leaders(comm)
        self.timed: Sequence[_TimedMessage] = tuple(self._timed(largest)) if comm.size > 1 else ()

    def _timed(self, largest: int) -> Iterator[_TimedMessage]:
        comm = self.comm
        yield _TimedMessage("barrier", "all ranks", 0, 0, lambda: comm.barrier("bench"))
        pairs = {"inside a node": self._pair(same=True), "between nodes": self._pair(same=False)}
        for nbytes in sizes(largest):
            full, other = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
            yield self._exchange(full, other)
            yield self._gather(full)
            vector = np.ones(nbytes // 8)  # every MPI library can reduce float64
            sent = 2 * vector.nbytes * (comm.size - 1) // comm.size
            reduce = partial(comm.allreduce, vector, "max", "bench")
            yield _TimedMessage("allreduce", "all ranks", nbytes, sent, reduce)
            for where, pair in pairs.items():
                if pair is not None:
                    yield _TimedMessage("one to one", where, nbytes, nbytes, self._ping(pair, full, other))

    def _exchange(self, send: np.ndarray, recv: np.ndarray) -> _TimedMessage:
        """Return the timer of an all-to-all, as for sharded gradients: a rank gets its slice of every rank's vector."""
        comm, counts = self.comm, Partition(send.size, self.comm.size).sizes()
        count = counts[comm.rank]
        arrived = np.empty(count * comm.size, np.uint8) if count * comm.size > recv.size else recv[: count * comm.size]
        exchange = partial(comm.alltoallv, send, counts, arrived, [count] * comm.size, "bench")
        return _TimedMessage("exchange", "all ranks", send.size, send.size - count, exchange)

    def _gather(self, full: np.ndarray) -> _TimedMessage:
        """Return the timer of an allgather, as for updated parameters: every rank gets the slices of all ranks."""
        comm, counts = self.comm, Partition(full.size, self.comm.size).sizes()
        part, recv = np.ones(counts[comm.rank], np.uint8), np.empty_like(full)
        sent, gather = part.size * (comm.size - 1), partial(comm.allgatherv, part, recv, counts, "bench")
        return _TimedMessage("gather", "all ranks", full.size, sent, gather)

    def _pair(self, *, same: bool) -> tuple[int, int] | None:
        """Return two ranks of one node if ``same``, else two ranks of different nodes; None if there are none."""
        ranks = range(self.comm.size)
        pairs = ((a, b) for a in ranks for b in ranks[a + 1 :] if (self.leaders[a] == self.leaders[b]) is same)
        return next(pairs, None)

    def _ping(self, pair: tuple[int, int], send: np.ndarray, recv: np.ndarray) -> Callable[[], object]:
        """Return a function that sends ``send`` to the second rank of ``pair``, and back in every second call."""
        comm, turns = self.comm, cycle((pair, pair[::-1]))

        def send_once() -> None:
            source, target = next(turns)
            if comm.rank == source:
                comm.send(send, target)
            elif comm.rank == target:
                comm.recv(recv, source)

        return send_once

    def measure(self, turn: int, *, keep: bool) -> None:
        """Time every message once, in reverse order if ``turn`` is -1; store the seconds if ``keep``. Collective."""
        for timed in self.timed[::turn]:
            timed.measure(self.comm, keep=keep)

    def measurements(self) -> tuple[MessageSpeed, ...]:
        """Return the seconds of each operation and size, with the bytes that this rank sends. Not collective."""
        return tuple(MessageSpeed(t.operation, t.where, t.nbytes, t.sent, Measurement.of(t.values)) for t in self.timed)


#: Most bytes that one call of the system writes or reads.
_PIECE = 64 * 1024 * 1024
_WRITE, _READ, _AGAIN = "write with fsync", "read", "read from memory"


def write_part(path: Path, data: memoryview, start: int) -> None:
    """Write ``data`` into a file at byte offset ``start``, and flush it to the disk. Not collective."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
        done = 0
        while done < len(data):
            done += os.pwrite(file.fileno(), data[done : done + _PIECE], start + done)
        os.fsync(file)


def read_part(path: Path, buffer: memoryview, start: int) -> None:
    """Fill the buffer ``buffer`` with the bytes of a file from byte offset ``start`` on. Not collective."""
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(buffer):
            if not (count := os.preadv(file.fileno(), [buffer[done : done + _PIECE]], start + done)):
                raise OSError(f"{path} ends before the {start + len(buffer)} bytes that are read")
            done += count


def drop_cached(path: Path) -> None:
    """Ask the system to remove a file, which must be flushed to the disk, from the page cache. Not collective."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class FileBenchmark:
    """Time writing and reading one file of ``nbytes`` bytes, of which every rank writes and reads its own part.

    The file lies in a new folder inside ``folder``, and is removed after every repetition. Construction and
    :meth:`measure` are collective over ``comm``.
    """

    def __init__(self, comm: Communicator, nbytes: int, folder: str) -> None:
        self.comm, self.nbytes = comm, nbytes
        self.folder = Path(from_rank_0(comm, lambda: tempfile.mkdtemp(prefix=".bench-machine-", dir=folder), "bench"))
        self.path = self.folder / "file"
        part = Partition(nbytes, comm.size).shard(comm.rank)
        self.start = part.start
        self.data = np.random.default_rng(comm.rank).bytes(part.stop - part.start)
        self.buffer = bytearray(len(self.data))
        self.values: dict[str, list[float]] = {_WRITE: [], _READ: [], _AGAIN: []}

    def measure(self) -> None:
        """Time one write, one read from the disk and one read from the page cache, and remove the file. Collective."""
        write = partial(write_part, self.path, memoryview(self.data), self.start)
        read = partial(read_part, self.path, memoryview(self.buffer), self.start)
        for name, work in ((_WRITE, write), (_READ, read), (_AGAIN, read)):
            if name == _READ:
                with all_ranks(self.comm):
                    drop_cached(self.path)
            self.values[name].append(together(self.comm, work))
        if self.comm.rank == 0:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the benchmark's folder on rank 0. Not collective, so it may be called after an error."""
        if self.comm.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def measurements(self) -> tuple[FileSpeed, ...]:
        """Return the measured seconds of the write and of both reads. Not collective."""
        return tuple(FileSpeed(name, self.nbytes, Measurement.of(values)) for name, values in self.values.items())


@dataclass(frozen=True)
class MachineRequest:
    """Describe the sizes and repetitions to measure.

    Attributes
    ----------
    shapes : ProductShapes
        Shapes of the matrix products.
    elements : int
        Number of float32 elements of each array that the memory benchmark reads or writes. The arrays together
        should be larger than all caches of the processor.
    largest : int
        Bytes of the largest message that is timed.
    file_bytes : int
        Bytes of the file that all ranks write together; 0 measures no file.
    folder, output : str
        Folder for the file that is timed; path of the machine file, to which the results are written.
    repeat : int
        Repetitions of every measurement.
    threads : int
        BLAS threads of each rank.
    """

    shapes: ProductShapes = field(default_factory=ProductShapes)
    elements: int = 1 << 24
    largest: int = 1 << 23
    file_bytes: int = 128_000_000
    folder: str = "."
    output: str = "machine.json"
    repeat: int = 7
    threads: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that are too small, an odd number of elements, and folders that do not exist."""
        least = {"elements": 2, "largest": 8, "file_bytes": 0, "repeat": 1}
        for name, bound in least.items():
            check_option(f"--{name.replace('_', '-')}", getattr(self, name), whole(bound))
        if self.elements % 2:
            raise ConfigError(f"--elements {self.elements}: must be even")
        for option, folder in (("--folder", self.folder), ("--output", str(Path(self.output).parent))):
            if not os.path.isdir(folder):
                raise ConfigError(f"{option}: {folder} is no folder")


def measure_machine(
    request: MachineRequest, comm: Communicator, tell: Callable[[str], None] = lambda line: None
) -> Machine:
    """Measure memory, matrix products, messages and a file in interleaved repetitions, and return the results.

    All ranks get the same results, and rank 0 writes them to the machine file. Collective over ``comm``. On rank 0,
    ``tell`` is called with a line of text before each repetition.
    """
    with all_ranks(comm):
        require_room(request.elements, 4 * ARRAYS * request.elements * comm.size, comm.size, "--elements")
        library()  # load it now: the limit of threads below reaches loaded libraries only
    keep_freed_memory()
    files = FileBenchmark(comm, request.file_bytes, request.folder) if request.file_bytes else None
    with nullcontext() if files is None else closing(files), threadpool_limits(request.threads, user_api="blas"):
        streams, products = PassBenchmark(comm, request.elements), ProductBenchmark(comm, request.shapes)
        messages = MessageBenchmark(comm, request.largest)
        for number in range(request.repeat + 1):  # the first one warms up
            if comm.rank == 0:
                tell(f"repetition {number} of {request.repeat}" if number else "warm-up")
            turn = -1 if number % 2 else 1
            for part in (streams, products, messages)[::turn]:
                part.measure(turn, keep=number > 0)
            if files is not None and number:
                files.measure()
    return _machine(request, comm, (streams, products, messages, files))


def _machine(
    request: MachineRequest,
    comm: Communicator,
    parts: tuple[PassBenchmark, ProductBenchmark, MessageBenchmark, FileBenchmark | None],
) -> Machine:
    streams, products, messages, files = parts
    mpi = mpi_facts() if comm.size > 1 else None
    libraries = dict(versions()) | ({} if mpi is None else {"MPI": f"{mpi.vendor} {mpi.version}"})
    nodes = [messages.leaders.count(leader) for leader in sorted(set(messages.leaders))]
    made = Machine(
        host=facts.host(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu=facts.processor(),
        blas=facts.blas(),
        libraries=libraries,
        ranks=comm.size,
        nodes=len(nodes),
        ranks_per_node=max(nodes),
        threads=request.threads,
        dtype=request.shapes.dtype,
        repeat=request.repeat,
        streams=streams.measurements(),
        products=products.measurements(),
        messages=messages.measurements(),
        files=() if files is None else files.measurements(),
    )
    machine: Machine = comm.broadcast_object(made, tag="bench")
    with all_ranks(comm):
        if comm.rank == 0:
            write_machine(request.output, machine)
    return machine


def report(machine: Machine) -> str:
    """Return all measurements of a machine as tables, for people."""
    parts = [_head(machine), _streams(machine), _products(machine)]
    if machine.messages:
        parts.append(_messages(machine))
    if machine.files:
        parts.append(_files(machine))
    return "\n\n".join(parts)


def as_json(machine: Machine) -> str:
    """Return all measurements of a machine as one line of JSON."""
    return json.dumps({"benchmark": "machine", **asdict(machine)}, allow_nan=False)


def _head(machine: Machine) -> str:
    where = f"{counted(machine.ranks, 'rank')} on {counted(machine.nodes, 'node')}"
    return (
        f"{machine.host} ({machine.cpu}): {where}, {counted(machine.threads, 'thread')} each, "
        f"{machine.blas}; medians of {machine.repeat} interleaved repetitions, with the range"
    )


def _range(measured: Measurement, scale: float) -> str:
    return f"{measured.least * scale:.3g}-{measured.most * scale:.3g}"


def _rates(work: float, measured: Measurement, unit: float) -> list[str]:
    """Format two cells of a table: ``work`` divided by the median of the seconds, and the range of such rates.

    ``work`` is the number of bytes or operations done in the measured seconds. Rates are printed in multiples of
    ``unit``, 1e9 for GB/s.
    """
    slow, typical, fast = (work / seconds / unit for seconds in (measured.most, measured.median, measured.least))
    return [f"{typical:.1f}", f"{slow:.1f}-{fast:.1f}"]


def _streams(machine: Machine) -> str:
    size = machine.streams[0].elements * machine.streams[0].itemsize
    rows = [["", "reads", "writes", "one rank", "", "each of all", "", "own kernel", "x plain", ""]]
    for s in machine.streams:
        kernel = f"{s.nbytes / s.own_every.median / 1e9:.1f}"
        ratio = [f"{s.ratio_every.median:.2f}", _range(s.ratio_every, 1)]
        cells = [*_rates(s.nbytes, s.one, 1e9), *_rates(s.nbytes, s.every, 1e9)]
        rows.append([s.name, str(s.reads), str(s.writes), *cells, kernel, *ratio])
    return (
        f"passes over memory, arrays of {amount(size)}B, GB/s of a rank: plain ones, alone and at once; the library's "
        f"kernel at once, and its time by the plain pass's\n{columns(rows)}"
    )


def _products(machine: Machine) -> str:
    rows = [["", "", "batch", "rows", "inner", "columns", "one rank", "", "each of all", ""]]
    for p in machine.products:
        cells = [*_rates(p.operations, p.one, 1e9), *_rates(p.operations, p.every, 1e9)]
        sizes = [str(n) for n in (p.batch, p.rows, p.inner, p.columns)]
        rows.append([p.name, p.form, *sizes, *cells])
    one, every = machine.rate(1) / 1e9, machine.rate(machine.ranks_per_node) / 1e9
    return (
        f"{machine.dtype} products, GFLOP/s of a rank\n{columns(rows, (0, 1))}\nGEMM rate, the four linear maps of a "
        f"block with their gradients at their fastest: {one:.1f} for one rank, {every:.1f} for each of all"
    )


def _messages(machine: Machine) -> str:
    rows = [["", "", "bytes", "sent", "µs", "range", "MB/s"]]
    rows += [
        [m.operation, m.where, f"{m.nbytes:,}", f"{m.sent:,}", f"{m.seconds.median * 1e6:.1f}", *_speed(m)]
        for m in sorted(machine.messages, key=lambda m: (m.operation, m.where))
    ]
    return f"messages, the slowest rank's time\n{columns(rows, (0, 1))}"


def _speed(message: MessageSpeed) -> Iterator[str]:
    yield _range(message.seconds, 1e6)
    yield f"{message.sent / message.seconds.median / 1e6:.1f}" if message.sent else ""


def _files(machine: Machine) -> str:
    rows = [["", "bytes", "ms", "range", "MB/s"]]
    for f in machine.files:
        speed = f"{f.nbytes / f.seconds.median / 1e6:.0f}"
        rows.append([f.operation, f"{f.nbytes:,}", f"{f.seconds.median * 1e3:.1f}", _range(f.seconds, 1e3), speed])
    return f"one file by all ranks\n{columns(rows)}"
