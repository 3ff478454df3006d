"""Checkpoints damaged, or changed by somebody who knows the format, and hashes that tell whether files have changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def first_byte(folder: Path, array: str) -> int:
    """Where the values of an array begin in the state file."""
    with h5py.File(folder / "state.h5") as file:
        return int(file[array].id.get_offset())


def seal(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest as an attacker would: with a matching checksum.

    ``change`` edits the decoded manifest in place, or returns the bytes to be written in its place.
    """
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes().splitlines()[0])
    line = change(body)
    if not isinstance(line, bytes):
        line = json.dumps(body).encode()
    line += b"\n"
    path.write_bytes(line + f'{{"sha256":"{hashlib.sha256(line).hexdigest()}"}}\n'.encode())
