"""What a save is going to write, agreed by all ranks from names, shapes and ranges before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpizero.checkpoint.checksum import crc32
from mpizero.checkpoint.failures import agreed
from mpizero.checkpoint.manifest import canonical_json
from mpizero.checkpoint.skeleton import ALIGNMENT, Skeleton, build, check_alignment
from mpizero.checkpoint.table import Claim, LocalArray, Table, check_array, merge
from mpizero.comm.communicator import Communicator
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


def _prefix(target: str) -> str:
    return f"checkpoint {target} was not written"


def make_plan(
    comm: Communicator,
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    alignment: int = ALIGNMENT,
) -> SavePlan:
    """Agree on what is to be written, and lay out the file on rank 0.

    Collective over ``comm``; all ranks raise the same error or none.
    """
    where = os.path.realpath(os.fspath(folder)) if comm.rank == 0 else None
    target = comm.broadcast_object(where, tag="checkpoint")
    prefix = _prefix(target)
    local, table = agree_on_arrays(comm, arrays, attributes, prefix)
    with agreed(comm, prefix):
        check_alignment(alignment)
        skeleton = build(table, alignment) if comm.rank == 0 else None
    return SavePlan(target, local, table, attributes, skeleton)


def agree_on_arrays(
    comm: Communicator, arrays: Sequence[LocalArray], attributes: Mapping[str, Any], prefix: str
) -> tuple[list[LocalArray], Table]:
    """Check what every rank wants to save, and return this rank's arrays and the table of all.

    Collective over ``comm``; all ranks raise the same error or none.
    """
    with agreed(comm, prefix):
        local = [check_array(array) for array in arrays]
        if not isinstance(attributes, dict):
            raise CheckpointError(f"attributes must be a dict, got {type(attributes).__name__}")
        text = canonical_json(attributes, "attributes")
    claims = comm.allgather_object(([Claim.of(array) for array in local], crc32(text.encode())), "checkpoint")
    with agreed(comm, prefix):
        for rank, (_, crc) in enumerate(claims):
            if crc != claims[0][1]:
                raise CheckpointError(f"attributes of rank {rank} differ from those of rank 0")
        table = merge([listed for listed, _ in claims])
    return local, table
