"""Save and load named arrays on any number of ranks; a checkpoint is one HDF5 file of whole arrays and a manifest."""

from typing import TYPE_CHECKING

from mpizero.names_on_use import names_on_use

if TYPE_CHECKING:
    from mpizero.checkpoint.best_link import mark_best, marked_best
    from mpizero.checkpoint.folders import (
        RemovalFailure,
        StepFolder,
        newest,
        prune,
        sound,
        step_folder,
        step_of,
        survey,
    )
    from mpizero.checkpoint.format.table import LocalArray
    from mpizero.checkpoint.full_check import verify
    from mpizero.checkpoint.image import from_bytes, to_bytes
    from mpizero.checkpoint.pending import PendingSave, begin
    from mpizero.checkpoint.reader import Reader, open_checkpoint
    from mpizero.checkpoint.snapshot import SnapshotBuffer
    from mpizero.checkpoint.writer import write
    from mpizero.errors import (
        CheckpointDamagedError,
        CheckpointIOError,
        CheckpointMissingError,
        CheckpointVersionError,
    )

__all__ = [
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
    "from_bytes",
    "mark_best",
    "marked_best",
    "newest",
    "open_checkpoint",
    "prune",
    "sound",
    "step_folder",
    "step_of",
    "survey",
    "to_bytes",
    "verify",
    "write",
]

if not TYPE_CHECKING:  # a checker of types would take any name for known
    __getattr__ = names_on_use(__name__, __all__)
