"""Plan a save: all ranks agree on names and shapes of arrays, and on who writes which elements, before they write.

[Note: words] A *claim* lists the ranges of elements of one array that one rank writes (``format/table.py``). The
*table* holds the shape and element type of every array. The *pieces* of an array are the ranges of its elements, with
their values, that one rank writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpizero._util.text import crc32
from mpizero.checkpoint.failures import CapturedError, agreed, on_root, raise_first
from mpizero.checkpoint.format.alignment import ALIGNMENT, check_alignment
from mpizero.checkpoint.format.manifest import canonical_json
from mpizero.checkpoint.format.regular_files import path_of
from mpizero.checkpoint.format.skeleton import Skeleton, build
from mpizero.checkpoint.format.table import Claim, LocalArray, Table, check_array, merge
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointError


@dataclass(frozen=True)
class SavePlan:
    """Describe one save on which all ranks have agreed.

    Attributes
    ----------
    target : str
        Absolute path of the checkpoint.
    local : list of LocalArray
        The arrays of which this rank writes elements, with these elements as their pieces.
    table : Table
        Shape and element type of every array that any rank writes, by path.
    attributes : dict
        JSON values for the manifest.
    offsets : dict
        Offset in bytes of each array in the state file, by path.
    skeleton : Skeleton or None
        The state file without the values of arrays, on rank 0; None on other ranks.
    opened : str or None
        Path of the state file, if rank 0 has opened it before the ranks agreed; else None.
    """

    target: str
    local: list[LocalArray]
    table: Table
    attributes: Mapping[str, Any]
    offsets: Mapping[str, int]
    skeleton: Skeleton | None
    opened: str | None = None

    @property
    def prefix(self) -> str:
        """The text with which all error messages about this save begin."""
        return _prefix(self.target)


@dataclass
class KnownLayout:
    """Keep the file layout of the last save, so that the next save of the same arrays needs fewer messages.

    ``claims`` lists the ranges of elements that this rank wrote. ``number`` is a checksum of the claims of all ranks.
    ``place`` is (rank, number of ranks). The layout can be used again if every rank has the same place and claims as in
    the last save, and all ranks have the same ``number``.
    """

    claims: list[Claim] | None = None
    number: int = 0
    place: tuple[int, int] = (0, 0)
    alignment: int = ALIGNMENT
    table: Table = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    skeleton: Skeleton | None = None


class RepeatedSave(NamedTuple):
    """Hold the file layout of the last save on this rank, and a function that starts another save of the same arrays.

    Attributes
    ----------
    layout : KnownLayout
        The layout of the last save. Every save updates it.
    start : function
        Called, before the ranks agree, with the target ("" on ranks other than 0) and the arrays of this rank. On rank
        0 it makes the state file and returns its path; on other ranks it returns "".
    """

    layout: KnownLayout
    start: Callable[[str, list[LocalArray]], str]


def _prefix(target: str) -> str:
    return f"checkpoint {target} was not written"


def make_plan(
    comm: Communicator,
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    alignment: int = ALIGNMENT,
    again: RepeatedSave | None = None,
) -> SavePlan:
    """Agree with all ranks on the arrays to be written, lay out the state file on rank 0, and return the plan.

    Collective over ``comm``; all ranks raise the same error or none. If every rank saves the same arrays as in its last
    save, whose layout is ``again.layout``, that layout is used, and the ranks exchange messages only once. Otherwise
    ``again.layout`` is replaced by the new layout.
    """
    path = path_of(folder)  # every rank raises if this is not a path
    where = os.path.realpath(path) if comm.rank == 0 else ""
    known = KnownLayout() if again is None else again.layout
    same = again if known.alignment == alignment else None
    target, local, table, attributes, number, opened = agree_on_arrays(comm, arrays, attributes, _prefix, where, same)
    if table is not known.table:
        skeleton: Skeleton | None = None

        def lay_out() -> dict[str, int]:
            nonlocal skeleton
            skeleton = build(table, alignment)
            return skeleton.offsets

        known.offsets = on_root(comm, _prefix(target), lay_out, lambda: check_alignment(alignment))
        known.claims, known.number, known.alignment = list(map(Claim.of, local)), number, alignment
        known.place = comm.rank, comm.size
        known.table, known.skeleton = table, skeleton
    return SavePlan(target, local, table, attributes, known.offsets, known.skeleton, opened)


class _SaveRequest(NamedTuple):
    """Describe what one rank saves; it is part of the message that all ranks exchange.

    ``claims`` lists the ranges of elements that the rank writes; it is None if they are the same as in the rank's last
    save. ``number`` is the checksum of the claims of all ranks in that last save. ``attributes`` is the CRC32 of the
    attributes.
    """

    claims: list[Claim] | None
    number: int
    attributes: int


class Agreement(NamedTuple):
    """Hold the result of :func:`agree_on_arrays`.

    Attributes
    ----------
    where : str
        The argument ``where`` of rank 0: the path of the checkpoint.
    local : list of LocalArray
        The arrays of this rank after checking, with normalized shapes and types.
    table : Table
        Shape and element type of every array that any rank writes, by path.
    attributes : dict
        A copy of the argument ``attributes``.
    number : int
        Checksum of the ranges of elements that all ranks write, as in :class:`KnownLayout`.
    opened : str or None
        Path of the state file, if rank 0 has opened it before the ranks agreed; else None.
    """

    where: str
    local: list[LocalArray]
    table: Table
    attributes: Mapping[str, Any]
    number: int
    opened: str | None


class _Checked(NamedTuple):
    """Hold the checked arrays of a rank, the claims made from them, and the attributes as JSON text."""

    local: list[LocalArray]
    claims: list[Claim]
    attributes: str


def _check(arrays: Sequence[LocalArray], attributes: object) -> _Checked:
    local = [check_array(array) for array in arrays]
    if not isinstance(attributes, dict):
        raise CheckpointError(f"attributes must be a dict, got {type(attributes).__name__}")
    return _Checked(local, [Claim.of(array) for array in local], canonical_json(attributes, "attributes"))


def agree_on_arrays(
    comm: Communicator,
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    prefix: Callable[[str], str],
    where: str = "",
    again: RepeatedSave | None = None,
) -> Agreement:
    """Check the arrays that this rank saves, and agree with all ranks on one table of arrays.

    Collective over ``comm``. The ranks exchange messages once, or twice if some, but not all, of the ranks save the
    same arrays as in their last save. A rank that saves the same arrays as in its last save calls ``again.start``
    before the first exchange. If all ranks do so, the result has the table of the last save. All ranks raise the same
    error or none, including errors of ``again.start``. The message begins with ``prefix(where)`` of rank 0. Parent
    folders that rank 0 has made remain, even if the save fails.
    """
    known = KnownLayout() if again is None else again.layout
    checked, request, opened = _Checked([], [], ""), None, None
    with CapturedError() as own:
        checked = _check(arrays, attributes)
        as_before = known.claims == checked.claims and known.place == (comm.rank, comm.size)
        request = _SaveRequest(None if as_before else checked.claims, known.number, crc32(checked.attributes.encode()))
        if as_before and again is not None:
            opened = again.start(where, checked.local)
    gathered = comm.allgather_object((where, own.portable, request, opened), tag="checkpoint")
    target = gathered[0][0]
    raise_first([error for _, error, _, _ in gathered], prefix(target), own.error)
    requests = [request for _, _, request, _ in gathered]
    differing = [rank for rank, request in enumerate(requests) if request.attributes != requests[0].attributes]
    if differing:
        raise CheckpointError(f"{prefix(target)}: attributes of rank {differing[0]} differ from those of rank 0")
    copied = json.loads(checked.attributes)
    if all(request.claims is None for request in requests) and len({request.number for request in requests}) == 1:
        return Agreement(target, checked.local, known.table, copied, known.number, gathered[0][3])
    claims = [request.claims for request in requests]
    if None in claims:
        claims = comm.allgather_object(checked.claims, "checkpoint")
    with agreed(comm, prefix(target)):
        table = merge(claims)
    return Agreement(target, checked.local, table, copied, crc32(repr(claims).encode()), None)
