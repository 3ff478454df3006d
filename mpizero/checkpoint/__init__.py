"""Save and load named arrays on any number of ranks; a checkpoint is one HDF5 file of whole arrays and a manifest."""

from typing import TYPE_CHECKING

from mpizero.checkpoint.atomic_folder import remove_leftovers
from mpizero.checkpoint.folders import (
    BEST,
    RemovalFailure,
    StepFolder,
    mark_best,
    marked_best,
    newest,
    prune,
    sound,
    step_folder,
    step_of,
    survey,
)
from mpizero.checkpoint.format.skeleton import ALIGNMENT, ALIGNMENT_LIMIT
from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.full_check import verify
from mpizero.checkpoint.image import from_bytes, to_bytes
from mpizero.checkpoint.pending import PendingSave, begin
from mpizero.checkpoint.reader import Reader, open_checkpoint
from mpizero.checkpoint.snapshot import SnapshotBuffer
from mpizero.checkpoint.writer import check_backend, write
from mpizero.errors import (
    CheckpointDamagedError,
    CheckpointIOError,
    CheckpointMissingError,
    CheckpointVersionError,
)
from mpizero.names import unknown_names

__all__ = [
    "ALIGNMENT",
    "ALIGNMENT_LIMIT",
    "BEST",
    "CheckpointDamagedError",
    "CheckpointIOError",
    "CheckpointMissingError",
    "CheckpointVersionError",
    "StepFolder",
    "RemovalFailure",
    "LocalArray",
    "PendingSave",
    "Reader",
    "SnapshotBuffer",
    "begin",
    "check_backend",
    "from_bytes",
    "mark_best",
    "marked_best",
    "newest",
    "open_checkpoint",
    "prune",
    "remove_leftovers",
    "sound",
    "step_folder",
    "step_of",
    "survey",
    "to_bytes",
    "verify",
    "write",
]

if not TYPE_CHECKING:  # a checker of types would take any name for known
    __getattr__ = unknown_names(__name__, __all__)
