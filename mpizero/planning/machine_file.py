"""Read and write the machine file: measured speeds of a machine, as a small JSON document."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from mpizero.checkpoint.format.strict_json import parse
from mpizero.errors import DataError
from mpizero.measurement import Measurement
from mpizero.text import printable
from mpizero.validation import Check, Unexpected, flag, positive, whole

#: What the file calls itself, and the only version of its form so far.
FORMAT, VERSION = "mpizero-machine", 1
_LIMIT = 1 << 20
_REMEDY = "measure it again: mpiexec -n N python -m mpizero bench machine"

T = TypeVar("T")


@dataclass(frozen=True)
class MemoryPass:
    """Hold the seconds of a pass over memory: plain, and by the library's own kernel of the same mix.

    Attributes
    ----------
    name : str
        For example "sum + AdamW".
    reads, writes : int
        Arrays that a pass reads and writes.
    elements, itemsize : int
        Of each array.
    one, every : Measurement
        Seconds of the plain pass: of one rank alone, and of the slowest of all ranks at once.
    own_one, own_every : Measurement
        Seconds of the library's kernel.
    ratio_one, ratio_every : Measurement
        Its seconds by those of the plain pass, taken in each repetition.
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
        """Bytes that a pass of one rank moves."""
        return (self.reads + self.writes) * self.elements * self.itemsize


@dataclass(frozen=True)
class MatrixProduct:
    """Hold the seconds of a matrix product at a shape of the model, in one of the forms that a step needs.

    Attributes
    ----------
    name, form : str
        For example "expand" and "weights".
    batch, rows, inner, columns : int
        ``batch`` products of (rows, inner) and (inner, columns).
    linear : bool
        Whether it is one of the products with a parameter that make up a block, from which :attr:`Machine.rate` comes.
    one, every : Measurement
        Seconds: of one rank alone, and of the slowest of all ranks at once.
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
        """Floating-point operations."""
        return 2 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class MessageSpeed:
    """Hold the seconds of a collective, or of a message from one rank to one other.

    Attributes
    ----------
    operation : str
        "exchange", "gather", "allreduce", "one to one" or "barrier".
    where : str
        "all ranks"; for messages from one to one "inside a node" or "between nodes".
    nbytes : int
        What a rank has to give: the whole vector of an exchange or allreduce, its own block of a gather.
    sent : int
        Of these and their copies, what a rank sends to others.
    seconds : Measurement
        Of the slowest rank.
    """

    operation: str
    where: str
    nbytes: int
    sent: int
    seconds: Measurement


@dataclass(frozen=True)
class FileSpeed:
    """Hold the seconds of a file that all ranks write or read, each its own part.

    Attributes
    ----------
    operation : str
        "write with fsync", "read" (what the system had to fetch again) or "read from memory".
    nbytes : int
        Of all ranks.
    seconds : Measurement
        Of the slowest rank.
    """

    operation: str
    nbytes: int
    seconds: Measurement


@dataclass(frozen=True)
class Machine:
    """Hold the measurements of a machine, with their place, date and software.

    Attributes
    ----------
    host, date, cpu, blas : str
        Name of the first rank's node, when the measurement ended (UTC), kind of core, BLAS of NumPy.
    libraries : dict of str to str
        Versions of Python, mpizero and what they stand on, MPI among them.
    ranks, nodes, ranks_per_node, threads : int
        Who measured together; the most ranks of a node; BLAS threads of a rank.
    dtype : str
        Of the products.
    repeat : int
        Repetitions, interleaved.
    streams, products, messages, files : tuple
        The figures.
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
        """Return the floating-point operations a second of one of so many ranks of a node. Not collective.

        It is that of the linear products of a block together, each form of each product once. [Note: limits] Limits are
        taken from the fastest repetition: others had to share the machine with something else. [Note: other numbers of
        ranks] Measured are one rank alone and all of them. Of fewer ranks than were measured none is faster than one
        alone nor gets less than its share of what all had; more ranks share what all had.
        """
        chosen = [product for product in self.products if product.linear]
        work = sum(product.operations for product in chosen)
        one = work / sum(product.one.least for product in chosen)
        every = work / sum(product.every.least for product in chosen)
        return _shared(one, every, self.ranks_per_node, ranks_per_node)

    def bandwidth(self, name: str, ranks_per_node: int) -> float:
        """Return the bytes a second that the plain pass ``name`` moves for one of so many ranks of a node.

        Not collective. See [Note: limits] and [Note: other numbers of ranks].
        """
        stream = next(stream for stream in self.streams if stream.name == name)
        one, every = stream.nbytes / stream.one.least, stream.nbytes / stream.every.least
        return _shared(one, every, self.ranks_per_node, ranks_per_node)

    def pass_seconds(self, read: int, written: int, ranks_per_node: int) -> float:
        """Return how long a pass takes one of so many ranks of a node, which reads and writes so many bytes.

        Not collective. The bandwidth is that of the pass measured whose share of writes is nearest.
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
        """Return where messages from one of so many ranks to one other go at most, as far as was measured.

        Not collective.
        """
        return "between nodes" if self.nodes > 1 and ranks > ranks_per_node else "inside a node"

    def seconds(self, operation: str, sent: float, where: str = "all ranks") -> float:
        """Return how long a collective takes in which a rank sends so many bytes, between those measured.

        Not collective. Linear from size to size; beyond the largest by its bandwidth. 0 where nothing was measured: on
        one rank. See [Note: limits].
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
    """Return a rank's part of what a node gives to ``wanted`` ranks, from one rank's and from ``measured`` ranks'."""
    return min(one, every * measured / wanted)


def write_machine(path: str, machine: Machine) -> None:
    """Store a machine file; an older one of this name is replaced at once or stays as it is. Not collective."""
    target = Path(path)
    document = {"format": FORMAT, "version": VERSION, **asdict(machine)}
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(target)


def read_machine(path: str) -> Machine:
    """Return what a machine file says. Not collective.

    Raises
    ------
    DataError
        The file is missing, foreign, of another version, or damaged; names the file, the place and the reason.
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


#: The passes that a machine file must have.
NEEDED = ("read", "copy", "sum of 2", "sum of 4", "AdamW", "sum + AdamW")


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as a ``kind``; ValueError names the place where it is none."""
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
