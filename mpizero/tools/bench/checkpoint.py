"""Time saving and loading a checkpoint, and compare with plain writes, reads and copies of the same number of bytes.

The command is ``mpizero bench checkpoint``. :func:`measure_checkpoint` times the operations that a
:class:`CheckpointRequest` describes, in interleaved repetitions, and returns :class:`CheckpointTimes`. An
:class:`OperationTime` compares one operation with another; :data:`COMPARED` has the pairs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mpizero import checkpoint
from mpizero._util.checks import whole
from mpizero._util.settings import check_option
from mpizero.checkpoint import LocalArray, SnapshotBuffer
from mpizero.checkpoint.format import Manifest
from mpizero.checkpoint.reader import FileByteSource, read_manifest
from mpizero.checkpoint.writer import check_backend
from mpizero.comm import Communicator
from mpizero.comm.agreement import from_rank_0
from mpizero.errors import ConfigError
from mpizero.layout import Partition, Span
from mpizero.tools.bench.machine import drop_cached, read_part, together, write_part
from mpizero.train.machine import peak_growth, proportional_growth, release_free_memory
from mpizero.types import Array

#: The checkpoint holds one array for each of ``LAYERS`` layers and each of ``GROUPS``: a parameter and two moments.
LAYERS, GROUPS = 16, ("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq")
_WIDTH = 1024
#: The least bytes of a checkpoint: one row of every array.
LEAST = 4 * _WIDTH * LAYERS * len(GROUPS)


@dataclass(frozen=True)
class CheckpointRequest:
    """Describe what to measure.

    Attributes
    ----------
    nbytes : int
        Bytes of all arrays of the checkpoint, of all ranks together.
    backends : tuple of str
        The back ends that save; the checkpoint of the first one is also loaded.
    repeat : int
        Number of repetitions of every measurement.
    folder : str
        An existing folder, in which a temporary folder is made for the files.
    """

    nbytes: int
    backends: tuple[str, ...]
    repeat: int
    folder: str

    @classmethod
    def parse(cls, nbytes: float, backend: str, repeat: int, folder: str, comm: Communicator) -> CheckpointRequest:
        """Check the options of the command line, and return them as a request.

        The back end "all" selects every back end that this installation can write with. Not collective.
        """
        if not math.isfinite(nbytes) or not LEAST <= nbytes <= 1e13:
            raise ConfigError(f"--bytes {nbytes}: must be from {LEAST} to 1e13")
        check_option("--repeat", repeat, whole(1))
        if not os.path.isdir(folder):
            raise ConfigError(f"--folder {folder}: is no folder")
        if backend == "all":
            return cls(int(nbytes), tuple(_available(comm)), repeat, folder)
        check_backend(comm, backend)
        return cls(int(nbytes), (backend,), repeat, folder)


def _available(comm: Communicator) -> list[str]:
    result = []
    for backend in ("direct", "mpio"):
        with suppress(ConfigError):
            check_backend(comm, backend)
            result.append(backend)
    return result


@dataclass(frozen=True)
class OperationTime:
    """Hold the seconds that one operation takes on the slowest rank, compared with another operation's seconds.

    Attributes
    ----------
    name : str
        Name of the operation, such as "save direct" or "raw read".
    seconds, least, most : float
        The median, the least and the greatest over the repetitions.
    against : str
        Name of the operation to compare with, which was timed in the same repetitions; "" for none.
    ratio : float
        The median of this operation's seconds divided by the median of the other operation's; 1 if ``against`` is "".
    """

    name: str
    seconds: float
    least: float
    most: float
    against: str
    ratio: float


@dataclass(frozen=True)
class CheckpointTimes:
    """Hold the measured times, and the memory that a save and a load needed in addition to the arrays.

    Attributes
    ----------
    ranks, nbytes, repeat : int
        Number of ranks, bytes of the whole checkpoint's arrays, and number of repetitions.
    shard : int
        Bytes of this rank's shard of the arrays.
    timings : list of OperationTime
        The times of every operation.
    peaks : dict of str to tuple of int
        For a save and for a load, by name, the peaks in bytes, each the largest over the ranks, of three quantities:
        the memory counted by Python's ``tracemalloc``, the growth of the resident size, and the growth of the
        proportional set size.
    """

    ranks: int
    nbytes: int
    repeat: int
    shard: int
    timings: list[OperationTime]
    peaks: dict[str, tuple[int, int, int]]


#: Name of an operation -> name of the operation that it is compared with.
COMPARED: Mapping[str, str] = {
    "save direct": "raw write",
    "save mpio": "raw write",
    "asynchronous stall": "plain copy",
    "load": "raw read",
    "load unverified": "raw read",
    "verification": "load",
    "cold load": "cold raw read",
    "cold load unverified": "cold raw read",
    "cold verification": "cold load",
}


class _Bench:
    """Hold this rank's shard of the arrays, and time every operation on it."""

    def __init__(self, request: CheckpointRequest, comm: Communicator, folder: Path) -> None:
        self.request, self.comm, self.folder = request, comm, folder
        self.rows = max(1, request.nbytes // LEAST)
        size = self.rows * _WIDTH
        shard = Partition(size, comm.size).shard(comm.rank)
        span = Span(shard.start, shard.stop)
        random = np.random.default_rng(comm.rank)
        self.shard: Array = random.random((span.size * LAYERS * len(GROUPS),), np.float32)
        self.copy: Array = np.zeros_like(self.shard)
        self.arrays, self.wanted = (self._arrays(values, span.start, span.size) for values in (self.shard, self.copy))
        self.total = 4 * size * LAYERS * len(GROUPS)
        self.start = 4 * span.start * LAYERS * len(GROUPS)
        self.buffer = SnapshotBuffer()
        self.buffer.reserve(self.arrays)
        self.seconds = partial(together, comm)
        self.pending: checkpoint.PendingSave
        self.manifest: Manifest

    def _arrays(self, values: Array, start: int, size: int) -> list[LocalArray]:
        names = [f"{group}/blocks.{layer}.weight" for group in GROUPS for layer in range(LAYERS)]
        pieces = values.reshape(len(names), size)
        return [
            LocalArray(name, (self.rows, _WIDTH), values.dtype, ((start, piece),))
            for name, piece in zip(names, pieces, strict=True)
        ]

    def raw_write(self) -> None:
        """Write this rank's shard into the file that all ranks share, and flush it to the disk."""
        write_part(self.folder / "raw", self.shard.view(np.uint8).data, self.start)

    def raw_read(self) -> None:
        """Read this rank's shard from the file of :meth:`raw_write` into memory that is already allocated."""
        read_part(self.folder / "raw", self.copy.view(np.uint8).data, self.start)

    def plain_copy(self) -> None:
        """Copy this rank's shard from memory to memory."""
        self.copy[:] = self.shard

    def save(self, backend: str) -> None:
        """Save a checkpoint with ``backend``, as training does: with checksums, flushed to the disk and committed."""
        checkpoint.write(self.folder / backend, self.arrays, {}, self.comm, backend)

    def load(self) -> None:
        """Load this rank's shard from the checkpoint of the first back end, and verify its checksums."""
        with checkpoint.open_checkpoint(self.folder / self.request.backends[0], self.comm) as reader:
            reader.read(self.wanted)

    def load_unverified(self) -> None:
        """Open the checkpoint and read the same bytes as :meth:`load`, without computing checksums."""
        folder = self.folder / self.request.backends[0]
        with checkpoint.open_checkpoint(folder, self.comm):
            source = FileByteSource(str(folder / "state.h5"), self.manifest.state_bytes)
            for array in self.wanted:
                for first, values in array.pieces:
                    source.read_into(self.manifest.arrays[array.path].offset + 4 * first, values.view(np.uint8).data)
            source.close()

    def forget(self, name: str) -> None:
        """Wait for all ranks, then drop a file from the system's page cache, so that the next read is from the disk.

        ``name`` is the file's path inside the benchmark's folder. The file must be flushed to the disk already:
        pages that are not written yet stay in the cache.
        """
        self.comm.barrier("bench checkpoint")
        if self.comm.rank == 0:
            drop_cached(self.folder / name)

    def begin(self) -> None:
        """Start an asynchronous save of this rank's shard, which :meth:`finish` completes."""
        self.pending = checkpoint.begin(self.folder / "begun", self.arrays, {}, self.comm, buffer=self.buffer)

    def finish(self) -> None:
        """Complete the save that :meth:`begin` started, and remove its checkpoint."""
        self.pending.commit()
        self.remove("begun")

    def remove(self, name: str) -> None:
        """Wait for all ranks, then remove the file or folder ``name`` from the benchmark's folder."""
        self.comm.barrier("bench checkpoint")
        if self.comm.rank == 0:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.comm.barrier("bench checkpoint")

    def round(self, number: int) -> dict[str, float]:
        """Time every operation once, remove the files, and return the seconds by the operation's name.

        Rounds with an odd ``number`` run in reverse order, so that each of two compared operations is timed first in
        half of the rounds. Only one file or checkpoint exists at a time: the page cache may be slower for a second
        file, and a disk may be fast only until its own buffer is full.
        """
        turn = -1 if number % 2 else 1
        seconds: dict[str, float] = {}
        for part in (self._copies, self._raw, self._checkpoints)[::turn]:
            seconds |= part(turn)
        return seconds

    def _copies(self, turn: int) -> dict[str, float]:
        if "direct" not in self.request.backends:
            return {}
        works = {"plain copy": self.plain_copy, "asynchronous stall": self.begin}
        seconds = {name: self.seconds(works[name]) for name in list(works)[::turn]}
        self.finish()
        return seconds

    def _raw(self, turn: int) -> dict[str, float]:
        seconds = {"raw write": self.seconds(self.raw_write), "raw read": self.seconds(self.raw_read)}
        self.forget("raw")
        seconds["cold raw read"] = self.seconds(self.raw_read)
        self.remove("raw")
        return seconds

    def _checkpoints(self, turn: int) -> dict[str, float]:
        seconds = {}
        for backend in self.request.backends:
            seconds[f"save {backend}"] = self.seconds(lambda name=backend: self.save(name))  # type: ignore[misc]
            if backend == self.request.backends[0]:
                _, self.manifest = read_manifest(str(self.folder / backend))
                self.load_unverified()  # the first to read new pages is slower
                seconds |= self._loads("", turn) | self._loads("cold ", turn)
            self.remove(backend)
        return seconds

    def _loads(self, cold: str, turn: int) -> dict[str, float]:
        """Time a load with and one without verification, and return the seconds by the operation's name.

        ``cold`` is the prefix of these names: with "" the loads read from the page cache, with "cold " from the disk.
        ``turn`` is 1 or, for the reverse order, -1. The entry "verification" is the difference of the two loads.
        """
        works = {"load": self.load, "load unverified": self.load_unverified}
        seconds = {}
        for name in list(works)[::turn]:
            if cold:
                self.forget(f"{self.request.backends[0]}/state.h5")
            seconds[cold + name] = self.seconds(works[name])
        return seconds | {f"{cold}verification": seconds[f"{cold}load"] - seconds[f"{cold}load unverified"]}

    def peaks(self) -> dict[str, tuple[int, int, int]]:
        """Return the peak bytes that a save and a load need in addition to the arrays, by name of the operation.

        The three numbers are the memory counted by ``tracemalloc``, the growth of the resident size, and the growth of
        the proportional set size, each the largest over the ranks.
        """
        result = {}
        backend = self.request.backends[0]
        # The first save loads libraries, once.
        checkpoint.write(self.folder / "first", self.arrays[:1], {}, self.comm, backend)
        self.remove("first")
        for name, work in ((f"save {backend}", lambda: self.save(backend)), ("load", self.load)):
            release_free_memory()
            tracemalloc.start()
            with peak_growth() as resident, proportional_growth() as proportional:
                self.seconds(work)
            counted = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            every = self.comm.allgather_object((counted, resident[0], proportional[0]), "bench checkpoint")
            first, second, third = map(max, zip(*every, strict=True))
            result[name] = (first, second, third)
        self.remove(backend)
        return result


def measure_checkpoint(
    request: CheckpointRequest, comm: Communicator, tell: Callable[[str], None] = lambda line: None
) -> CheckpointTimes:
    """Time checkpoints, plain files and plain copies in interleaved repetitions, and return the times.

    Collective over ``comm``. On rank 0, ``tell`` is called with a line of text before each repetition.
    """
    made = from_rank_0(comm, lambda: tempfile.mkdtemp(prefix=".bench-checkpoint-", dir=request.folder))
    folder = Path(made)
    try:
        bench = _Bench(request, comm, folder)
        peaks = bench.peaks()  # also warms up
        rounds = []
        for number in range(request.repeat):
            if comm.rank == 0:
                tell(f"repetition {number + 1} of {request.repeat}")
            rounds.append(bench.round(number))
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    timings = [_timing(name, rounds) for name in rounds[0]]
    return CheckpointTimes(comm.size, bench.total, request.repeat, bench.shard.nbytes, timings, peaks)


def _timing(name: str, rounds: list[dict[str, float]]) -> OperationTime:
    against = COMPARED.get(name, "")
    seconds = [one_round[name] for one_round in rounds]
    typical = statistics.median(seconds)
    ratio = typical / statistics.median(one_round[against] for one_round in rounds) if against else 1.0
    return OperationTime(name, typical, min(seconds), max(seconds), against, ratio)


def report(times: CheckpointTimes) -> str:
    """Return the times as a table for people.

    Not collective.
    """
    lines = [
        f"{times.nbytes / 1e9:.2f} GB from {times.ranks} ranks, median of {times.repeat} repetitions",
        f"{'':21}{'ms':>9}{'least':>9}{'most':>9}{'GB/s':>8}  against",
    ]
    for timing in times.timings:
        has_speed = not timing.name.endswith("verification")
        speed = f"{times.nbytes / timing.seconds / 1e9:8.2f}" if has_speed else f"{'':8}"
        compared = f"  {timing.ratio:.2f} x the time of: {timing.against}" if timing.against else ""
        spans = "".join(f"{value * 1e3:9.1f}" for value in (timing.seconds, timing.least, timing.most))
        lines.append(f"{timing.name:21}{spans}{speed}{compared}")
    for name, (counted, resident, proportional) in times.peaks.items():
        lines.append(
            f"memory of {name} beside the shard of {times.shard / 1e6:.1f} MB: {counted / 1e6:.1f} MB counted, "
            f"{resident / 1e6:.1f} MB resident, {proportional / 1e6:.1f} MB PSS"
        )
    return "\n".join(lines)


def as_json(times: CheckpointTimes) -> str:
    """Return the times as JSON, for programs.

    Not collective.
    """
    return json.dumps({"benchmark": "checkpoint", **asdict(times)})
