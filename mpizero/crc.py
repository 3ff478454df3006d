"""Compute CRC32 with zlib's values, as fast as memory is read."""

from __future__ import annotations

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["crc32", "crc32_combine"]
