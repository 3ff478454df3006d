"""Compute CRC32 checksums with the values of ``zlib.crc32``, about as fast as memory can be read."""

from __future__ import annotations

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["crc32", "crc32_combine"]
