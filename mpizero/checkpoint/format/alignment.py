"""Choose where the arrays of a checkpoint begin in its file."""

from __future__ import annotations

from mpizero.errors import ConfigError

#: Every object of the file starts at a multiple of this many bytes, so that arrays can be mapped into memory.
ALIGNMENT = 64
#: The largest alignment that can be chosen: a page. The gaps that alignment leaves between arrays are checksummed too.
ALIGNMENT_LIMIT = 4096


def check_alignment(alignment: int) -> None:
    """Raise :class:`ConfigError` unless ``alignment`` is a power of two from 64 to 4096, in bytes."""
    if not ALIGNMENT <= alignment <= ALIGNMENT_LIMIT or alignment & (alignment - 1):
        raise ConfigError(f"alignment must be a power of two from {ALIGNMENT} to {ALIGNMENT_LIMIT}, got {alignment}")
