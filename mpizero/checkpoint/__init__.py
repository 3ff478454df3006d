"""Save and load named arrays on any number of ranks; a checkpoint is a folder of an HDF5 file and a manifest."""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.checkpoint.asynchronous import PendingSave as PendingSave
    from mpizero.checkpoint.asynchronous import SnapshotBuffer as SnapshotBuffer
    from mpizero.checkpoint.asynchronous import begin as begin
    from mpizero.checkpoint.format import LocalArray as LocalArray
    from mpizero.checkpoint.manager import RemovalFailure as RemovalFailure
    from mpizero.checkpoint.manager import StepFolder as StepFolder
    from mpizero.checkpoint.manager import latest as latest
    from mpizero.checkpoint.manager import list_steps as list_steps
    from mpizero.checkpoint.manager import list_valid as list_valid
    from mpizero.checkpoint.manager import mark_best as mark_best
    from mpizero.checkpoint.manager import marked_best as marked_best
    from mpizero.checkpoint.manager import prune as prune
    from mpizero.checkpoint.manager import step_folder as step_folder
    from mpizero.checkpoint.manager import step_of as step_of
    from mpizero.checkpoint.reader import Reader as Reader
    from mpizero.checkpoint.reader import open_checkpoint as open_checkpoint
    from mpizero.checkpoint.reader import verify as verify
    from mpizero.checkpoint.writer import from_bytes as from_bytes
    from mpizero.checkpoint.writer import to_bytes as to_bytes
    from mpizero.checkpoint.writer import write as write
    from mpizero.errors import CheckpointDamagedError as CheckpointDamagedError
    from mpizero.errors import CheckpointIOError as CheckpointIOError
    from mpizero.errors import CheckpointMissingError as CheckpointMissingError
    from mpizero.errors import CheckpointVersionError as CheckpointVersionError
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
