"""Find the two files of a checkpoint; check its manifest, and the bytes of ``state.h5`` outside the arrays."""

from __future__ import annotations

import errno
import os
import stat
from glob import escape, glob

from mpizero._util.text import crc32
from mpizero.checkpoint.byte_source import ByteSource, FileByteSource
from mpizero.checkpoint.format.checksum import cut
from mpizero.checkpoint.format.manifest import MANIFEST_LIMIT, MANIFEST_NAME, STATE_NAME, Manifest, decode
from mpizero.checkpoint.format.regular_files import open_regular
from mpizero.errors import CheckpointDamagedError, CheckpointError, CheckpointMissingError


def read_manifest(folder: str) -> tuple[bytes, Manifest]:
    """Read and check the manifest of a checkpoint; return the bytes of ``manifest.json`` and the parsed manifest.

    The size of ``state.h5`` and the checksum of its HDF5 structure are checked, too. libhdf5 never parses ``state.h5``,
    because the manifest says where the arrays are. So crafted HDF5 structures (links to other files, external storage,
    virtual datasets, huge shapes) have no effect.

    Raises
    ------
    CheckpointMissingError
        If the folder or one of its files does not exist.
    CheckpointDamagedError
        If a checksum or a size shows that bytes have changed since they were written.
    CheckpointVersionError
        If the checkpoint has a version of the format that this mpizero does not know.
    CheckpointError
        If anything else is wrong with the checkpoint. The message names the file.
    OSError
        If the system does not allow access, or reading fails.
    """
    path = os.path.join(folder, MANIFEST_NAME)
    _check_folder(folder)
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(min(MANIFEST_LIMIT, os.fstat(file.fileno()).st_size) + 1)
    try:
        manifest = decode(data)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None
    state = os.path.join(folder, STATE_NAME)
    source = FileByteSource(state, manifest.state_bytes)
    try:
        check_structure(source, manifest, state)
    finally:
        source.close()
    return data, manifest


def _check_folder(folder: str) -> None:
    """Raise CheckpointError unless ``folder`` has the files of a checkpoint, or OSError if it cannot be inspected."""
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        what = "a link to nothing" if os.path.islink(folder) else "does not exist"
        raise CheckpointMissingError(f"{folder}: {what}") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        is_folder = False
    if not is_folder:
        raise CheckpointError(f"{folder}: not an mpizero checkpoint, which is a folder with {MANIFEST_NAME}")
    for name in (MANIFEST_NAME, STATE_NAME):
        try:
            os.lstat(os.path.join(folder, name))
        except FileNotFoundError:
            raise CheckpointMissingError(
                f"{folder}: not a complete mpizero checkpoint: {name} is missing{_within(folder)}"
            ) from None


def _within(folder: str) -> str:
    """Return a hint for the error message if ``folder`` is a run's folder or contains checkpoints; "" otherwise."""
    for deeper in (folder, os.path.join(folder, "checkpoints")):
        if found := glob(os.path.join(escape(deeper), "step_*", MANIFEST_NAME)):
            return f"; {len(found)} checkpoint(s) lie in {deeper}: mpizero.checkpoint.newest(folder) gives the newest"
    return ""


def check_structure(source: ByteSource, manifest: Manifest, where: str) -> None:
    """Verify the checksum of all bytes of ``state.h5`` outside the arrays; raise CheckpointDamagedError if it is wrong.

    ``where`` names the file in the message.
    """
    crc = 0
    for start, length in manifest.structure_ranges:
        for begin, end in cut(0, length):
            part = bytearray(end - begin)
            source.read_into(start + begin, memoryview(part))
            crc = crc32(part, crc)
    if crc != manifest.structure:
        raise CheckpointDamagedError(
            f"{where}: checksum mismatch in the HDF5 structure (outside all arrays): "
            f"stored {manifest.structure:08x}, found {crc:08x}"
        )
