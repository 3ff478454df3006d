"""Read and write the machine file: measured speeds of a machine, as a small JSON document."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from mpizero._util.checks import Check, Unexpected, flag, positive, whole
from mpizero._util.text import Measurement, printable
from mpizero.checkpoint.format import parse
from mpizero.errors import DataError

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
        For example "sum + AdamW".
    reads, writes : int
        Number of arrays that a pass reads, and number that it writes.
    elements, itemsize : int
        Number of elements of each array, and bytes of an element.
    one, every : Measurement
        Seconds of the plain pass: of one rank alone, and of the slowest of all ranks at once.
    own_one, own_every : Measurement
        Seconds of mpizero's kernel: of one rank alone, and of the slowest of all ranks at once.
    ratio_one, ratio_every : Measurement
        Seconds of the kernel divided by those of the plain pass in the same repetition: of one rank alone, and of the
        slowest of all ranks at once.
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
    """Hold the seconds of a matrix product with shapes of the measured model, in one of a step's forms.

    Attributes
    ----------
    name, form : str
        The layer, "expand" for example, and the form: "weights", for example, for the product of a weight's gradient.
    batch, rows, inner, columns : int
        The measured work is ``batch`` products of matrices (rows, inner) and (inner, columns).
    linear : bool
        Whether it is a product of a block's linear layers. :meth:`Machine.rate` uses only those.
    one, every : Measurement
        Seconds of one rank alone, and of the slowest of all ranks at once.
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
    """Hold the seconds of a collective, or of a message from one rank to one other.

    Attributes
    ----------
    operation : str
        "exchange", "gather", "allreduce", "one to one" or "barrier".
    where : str
        "all ranks"; for operation "one to one", "inside a node" or "between nodes".
    nbytes : int
        Bytes of a rank's input: the whole vector of an exchange or allreduce, the rank's own part of a gather.
    sent : int
        Bytes that a rank sends to all others together.
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
        Number of ranks and of nodes that measured together, largest number of ranks on a node, and BLAS threads of a
        rank.
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

        It is the number of operations of all measured linear products, divided by the sum of their seconds.

        [Note: limits] Of each measurement only the fastest repetition is used, because in slower ones something else
        used the machine as well.

        [Note: other numbers of ranks] One rank alone and all ranks at once were measured. For another number of ranks
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

        The rank is on a node of ``ranks_per_node`` ranks. Not collective. The bandwidth is that of the measured pass
        whose share of writes among all its bytes is nearest.
        """
        if not read + written:
            return 0.0
        share = written / (read + written)
        name = min(NEEDED, key=lambda name: abs(self._share(name) - share))
        return (read + written) / self.bandwidth(name, ranks_per_node)

    def _share(self, name: str) -> float:
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
        measured, as on one rank. Not collective. See [Note: limits] at :meth:`rate`.
        """
        known = sorted((m.sent, m.seconds.least) for m in self.messages if (m.operation, m.where) == (operation, where))
        if not known:
            return 0.0
        before, (last, longest) = known[0], known[-1]
        if sent >= last:
            return longest * sent / last if last else longest
        for size, taken in known:
            if sent <= size:
                share = (sent - before[0]) / (size - before[0]) if size > before[0] else 1.0
                return before[1] + max(0.0, share) * (taken - before[1])
            before = size, taken
        return longest


def _shared(one: float, every: float, measured: int, wanted: int) -> float:
    """Return one rank's rate on a node of ``wanted`` ranks: see [Note: other numbers of ranks] at :meth:`Machine.rate`.

    ``one`` is the rate of one rank alone, ``every`` the rate of each rank when ``measured`` ranks run at once.
    """
    return min(one, every * measured / wanted)


def write_machine(path: str, machine: Machine) -> None:
    """Write a machine file; an older file of this name is replaced atomically. Not collective."""
    target = Path(path)
    document = {"format": FORMAT, "version": VERSION, **asdict(machine)}
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(target)


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
