"""Checkpoints changed by somebody who knows the format, and hashes that tell whether files have changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


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
