"""What a save is going to write, agreed by all ranks from names, shapes and ranges before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpizero.checkpoint.failures import agreed
from mpizero.checkpoint.manifest import canonical_json
from mpizero.checkpoint.skeleton import ALIGNMENT, Skeleton, build, check_alignment
from mpizero.checkpoint.table import Claim, LocalArray, Table, check_array, merge
from mpizero.comm.communicator import Communicator
from mpizero.crc import crc32
from mpizero.errors import CheckpointError


@dataclass(frozen=True)
class SavePlan:
    """One save: where to, this rank's pieces, what all ranks' pieces make up.

    ``skeleton`` is the file without its values; rank 0 alone has it.
    """

    target: str
    local: list[LocalArray]
    table: Table
    attributes: Mapping[str, Any]
    skeleton: Skeleton | None

    @property
    def prefix(self) -> str:
        """How the message of a failed save begins."""
        return _prefix(self.target)


@dataclass
class KnownLayout:
    """What a save has agreed on, for the next one of the same arrays: it need not be worked out again."""

    claims: list[Claim] | None = None
    alignment: int = ALIGNMENT
    table: Table = field(default_factory=dict)
    skeleton: Skeleton | None = None


def _prefix(target: str) -> str:
    return f"checkpoint {target} was not written"


def make_plan(
    comm: Communicator,
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    alignment: int = ALIGNMENT,
    known: KnownLayout | None = None,
) -> SavePlan:
    """Agree on what is to be written, and lay out the file on rank 0.

    Collective over ``comm``; all ranks raise the same error or none. Where ``known`` is of the same arrays on every
    rank, what it knows is taken; else it is filled.
    """
    where = os.path.realpath(os.fspath(folder)) if comm.rank == 0 else None
    target = comm.broadcast_object(where, tag="checkpoint")
    prefix = _prefix(target)
    known = KnownLayout() if known is None else known
    if known.alignment != alignment:
        known.claims = None
    local, table = agree_on_arrays(comm, arrays, attributes, prefix, known)
    if table is not known.table:
        with agreed(comm, prefix):
            check_alignment(alignment)
            skeleton = build(table, alignment) if comm.rank == 0 else None
            known.claims, known.alignment = list(map(Claim.of, local)), alignment
            known.table, known.skeleton = table, skeleton
    return SavePlan(target, local, table, attributes, known.skeleton)


def agree_on_arrays(
    comm: Communicator,
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    prefix: str,
    known: KnownLayout | None = None,
) -> tuple[list[LocalArray], Table]:
    """Check what every rank wants to save, and return this rank's arrays and the table of all.

    Collective over ``comm``; all ranks raise the same error or none. The table is that of ``known`` if every rank has
    the arrays of which it is.
    """
    with agreed(comm, prefix):
        local = [check_array(array) for array in arrays]
        if not isinstance(attributes, dict):
            raise CheckpointError(f"attributes must be a dict, got {type(attributes).__name__}")
        text = canonical_json(attributes, "attributes")
    own = [Claim.of(array) for array in local]
    as_before = known is not None and known.claims == own
    told = comm.allgather_object((None if as_before else own, crc32(text.encode())), "checkpoint")
    claims = [listed for listed, _ in told]
    some_as_before = None in claims and any(listed is not None for listed in claims)
    if some_as_before:
        claims = comm.allgather_object(own, "checkpoint")
    with agreed(comm, prefix):
        for rank, (_, crc) in enumerate(told):
            if crc != told[0][1]:
                raise CheckpointError(f"attributes of rank {rank} differ from those of rank 0")
        table = known.table if known is not None and None in claims else merge(claims)
    return local, table
