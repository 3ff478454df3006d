"""What a save is going to write, agreed by all ranks from names, shapes and ranges before a checkpoint is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpizero.checkpoint.failures import Attempt, agreed, on_root, raise_first
from mpizero.checkpoint.format.manifest import canonical_json
from mpizero.checkpoint.format.regular_files import path_of
from mpizero.checkpoint.format.skeleton import ALIGNMENT, Skeleton, build, check_alignment
from mpizero.checkpoint.format.table import Claim, LocalArray, Table, check_array, merge
from mpizero.comm.communicator import Communicator
from mpizero.crc import crc32
from mpizero.errors import CheckpointError


@dataclass(frozen=True)
class SavePlan:
    """One save: where to, this rank's pieces, what all ranks' pieces make up, and where each array begins in the file.

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
        """How the message of a failed save begins."""
        return _prefix(self.target)


@dataclass
class KnownLayout:
    """What a save has agreed on, for the next one of the same arrays: it need not be worked out again.

    ``number`` stands for the claims of all ranks in their order, and ``place`` is this rank's number and that of ranks:
    where all places are as before, and all numbers are the same, the claims of all ranks are those of then.
    """

    claims: list[Claim] | None = None
    number: int = 0
    place: tuple[int, int] = (0, 0)
    alignment: int = ALIGNMENT
    table: Table = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    skeleton: Skeleton | None = None


class Again(NamedTuple):
    """What a rank has saved last, and how it starts where it saves the same again.

    Attributes
    ----------
    layout : KnownLayout
        Filled by every save, for the next one.
    start : function
        Is called ahead of the agreement, with the target, which rank 0 alone knows ("" elsewhere), and the rank's
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
    again: Again | None = None,
) -> SavePlan:
    """Agree on what is to be written, and lay out the file on rank 0.

    Collective over ``comm``; all ranks raise the same error or none. Where the layout of ``again`` is of the same
    arrays on every rank, what it knows is taken, in one exchange; else it is filled.
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


class _Wish(NamedTuple):
    """What a rank wants to save.

    Its claims, or None for those of the save that ``number`` stands for; and the CRC32 of the attributes.
    """

    claims: list[Claim] | None
    number: int
    attributes: int


class Agreement(NamedTuple):
    """What :func:`agree_on_arrays` comes to.

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
        Stands for the arrays of all ranks, as in :class:`KnownLayout`.
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
    """A rank's arrays, what it claims by them, and the attributes as JSON."""

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
    again: Again | None = None,
) -> Agreement:
    """Check what every rank wants to save, and tell every rank.

    Collective over ``comm``: one exchange, and another where some ranks save what they saved last and others do not.
    All ranks raise the same error or none, which begins with ``prefix`` of rank 0's ``where``. The table is the known
    one if every rank has the arrays of which it is. A rank that has them calls its ``again.start`` before the exchange;
    what goes wrong there counts too. Folders that rank 0 makes above a target then stay, whatever comes of it.
    """
    known = KnownLayout() if again is None else again.layout
    checked, wish, opened = _Checked([], [], ""), None, None
    with Attempt() as own:
        checked = _check(arrays, attributes)
        as_before = known.claims == checked.claims and known.place == (comm.rank, comm.size)
        wish = _Wish(None if as_before else checked.claims, known.number, crc32(checked.attributes.encode()))
        if as_before and again is not None:
            opened = again.start(where, checked.local)
    told = comm.allgather_object((where, own.outcome, wish, opened), tag="checkpoint")
    target = told[0][0]
    raise_first([outcome for _, outcome, _, _ in told], prefix(target), own.failure)
    wishes = [wish for _, _, wish, _ in told]
    differing = [rank for rank, wish in enumerate(wishes) if wish.attributes != wishes[0].attributes]
    if differing:
        raise CheckpointError(f"{prefix(target)}: attributes of rank {differing[0]} differ from those of rank 0")
    copied = json.loads(checked.attributes)
    if all(wish.claims is None for wish in wishes) and len({wish.number for wish in wishes}) == 1:
        return Agreement(target, checked.local, known.table, copied, known.number, told[0][3])
    claims = [wish.claims for wish in wishes]
    if None in claims:
        claims = comm.allgather_object(checked.claims, "checkpoint")
    with agreed(comm, prefix(target)):
        table = merge(claims)
    return Agreement(target, checked.local, table, copied, crc32(repr(claims).encode()), None)
