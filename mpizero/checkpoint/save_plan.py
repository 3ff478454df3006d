"""Plan a save: agree on its names, shapes and ranges on all ranks, before a checkpoint is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpizero.checkpoint.failures import CapturedError, agreed, on_root, raise_first
from mpizero.checkpoint.format.manifest import canonical_json
from mpizero.checkpoint.format.regular_files import path_of
from mpizero.checkpoint.format.skeleton import ALIGNMENT, Skeleton, build, check_alignment
from mpizero.checkpoint.format.table import Claim, LocalArray, Table, check_array, merge
from mpizero.comm.communicator import Communicator
from mpizero.crc import crc32
from mpizero.errors import CheckpointError


@dataclass(frozen=True)
class SavePlan:
    """Describe one save: its target, this rank's pieces, the arrays of all ranks, and their first bytes in the file.

    ``skeleton`` is the file without its values; rank 0 alone has it. ``opened`` is as in
    :class:`Agreement`.
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
        """The beginning of the message of a failed save."""
        return _prefix(self.target)


@dataclass
class KnownLayout:
    """Keep what a save has agreed on, for the next save of the same arrays.

    ``number`` is a checksum of the claims of all ranks in their order, and ``place`` is this rank's number and that of
    all ranks. Where all places are as before, and all numbers the same, the claims of all ranks are the same, too.
    """

    claims: list[Claim] | None = None
    number: int = 0
    place: tuple[int, int] = (0, 0)
    alignment: int = ALIGNMENT
    table: Table = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    skeleton: Skeleton | None = None


class RepeatedSave(NamedTuple):
    """Hold what a rank has saved last, and the function that starts a save of the same arrays.

    Attributes
    ----------
    layout : KnownLayout
        Filled by every save, for the next one.
    start : function
        Called ahead of the agreement, with the target, which rank 0 alone knows ("" on the others), and the rank's
        arrays. Rank 0's opens the state file and returns its path.
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
    """Agree on what is to be written, and lay out the file on rank 0.

    Collective over ``comm``; all ranks raise the same error or none. Where the layout of ``again`` is of the same
    arrays on every rank, the known layout is used, in one exchange; else it is filled.
    """
    path = path_of(folder)  # all ranks refuse what is none
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
    """Describe what a rank wants to save.

    Its claims, or None for those of the save that ``number`` stands for; and the CRC32 of the attributes.
    """

    claims: list[Claim] | None
    number: int
    attributes: int


class Agreement(NamedTuple):
    """Hold the result of :func:`agree_on_arrays`.

    Attributes
    ----------
    where : str
        Rank 0's.
    local : list of LocalArray
        This rank's arrays, checked.
    table : Table
        The arrays of all ranks.
    attributes : dict
        A copy of what was given.
    number : int
        Checksum of the claims of all ranks, as in :class:`KnownLayout`.
    opened : str or None
        Path of the state file that rank 0 opened ahead of the agreement; None where it is still to be opened.
    """

    where: str
    local: list[LocalArray]
    table: Table
    attributes: Mapping[str, Any]
    number: int
    opened: str | None


class _Checked(NamedTuple):
    """Hold a rank's arrays, its claims, and the attributes as JSON."""

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
    """Check what every rank wants to save, and agree on it.

    Collective over ``comm``: one exchange, and another where some ranks save what they saved last and others do not.
    All ranks raise the same error or none, which begins with ``prefix`` of rank 0's ``where``. The table is the known
    one if every rank has the same arrays as then. Such a rank calls its ``again.start`` before the exchange; a failure
    there counts too. Folders that rank 0 makes above a target then stay, even if the save fails.
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
