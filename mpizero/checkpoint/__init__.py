"""Checkpoints: global named arrays in one HDF5 file and a manifest, written and read on any number of ranks."""

from mpizero.checkpoint.failures import CheckpointIOError, CheckpointMissingError
from mpizero.checkpoint.folders import newest, prune, sound, step_folder, step_of
from mpizero.checkpoint.image import from_bytes, to_bytes
from mpizero.checkpoint.pending import PendingSave, begin
from mpizero.checkpoint.reader import Reader, open_checkpoint
from mpizero.checkpoint.snapshot import SnapshotBuffer
from mpizero.checkpoint.table import LocalArray
from mpizero.checkpoint.verify import verify
from mpizero.checkpoint.writer import write

__all__ = [
    "CheckpointIOError",
    "CheckpointMissingError",
    "LocalArray",
    "PendingSave",
    "Reader",
    "SnapshotBuffer",
    "begin",
    "from_bytes",
    "newest",
    "open_checkpoint",
    "prune",
    "sound",
    "step_folder",
    "step_of",
    "to_bytes",
    "verify",
    "write",
]
