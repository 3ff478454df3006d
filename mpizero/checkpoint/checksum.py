"""CRC32 of pieces, and how the CRCs of neighbouring pieces give the CRC of the whole without seeing the bytes again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpizero.crc import crc32_combine
from mpizero.types import Array

#: Bytes of one checksummed block of an array; a multiple of every element size.
BLOCK = 4 * 1024 * 1024

#: Bytes that a core's cache holds beside other things.
_CACHED = 256 * 1024

_POLYNOMIAL = 0xEDB88320  # CRC-32 of IEEE 802.3, bit-reversed: bit 31 is x**0
_ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2) modulo the CRC polynomial."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _squares() -> tuple[int, ...]:
    power, table = _ONE >> 1, []  # x**1
    for _ in range(32):
        table.append(power)
        power = _multiply(power, power)
    return tuple(table)  # x**(2**k); x**(2**32) is x again, so k counts modulo 32


_X_TO_POWER_OF_TWO = _squares()


def crc32_shifted(crcs: Array, lengths: Array) -> Array:
    """Return what many CRC32 become where ``lengths`` bytes follow; the CRC of a whole is the XOR of its parts' so.

    Not collective. The CRC of ``a + b`` is ``crc(a) * x**(8 * len(b)) + crc(b)`` modulo the CRC polynomial; the power
    is built from repeated squares (the method of zlib's ``crc32_combine``, Mark Adler), here for all parts at once: a
    slice of columns comes in hundreds of thousands of short parts.

    Parameters
    ----------
    crcs, lengths : array of int64
        The CRC32 of each part, and the bytes behind it.

    Returns
    -------
    array of uint32
    """
    shifted, left = crcs.astype(np.uint32), lengths.astype(np.int64)
    k = 3
    while left.any():
        odd = np.flatnonzero(left & 1)
        shifted[odd] = _multiply_all(shifted[odd], _X_TO_POWER_OF_TWO[k & 31])
        left >>= 1
        k += 1
    return shifted


def _multiply_all(values: Array, factor: int) -> Array:
    """Multiply many polynomials by one."""
    product, power = np.zeros_like(values), values.copy()
    for bit in range(31, -1, -1):
        if factor >> bit & 1:
            product ^= power
        power = (power >> np.uint32(1)) ^ np.where(power & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0))
    return product


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut bytes ``start:stop`` of an array at its block borders, in order."""
    while start < stop:
        end = min(stop, (start // BLOCK + 1) * BLOCK)
        yield start, end
        start = end


def in_cache(part: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the place and bytes of pieces of a block that stay in a core's cache between two uses, in order."""
    for start in range(0, len(part), _CACHED):
        yield start, part[start : start + _CACHED]


def block_count(nbytes: int) -> int:
    """Return the number of blocks of an array of ``nbytes`` bytes."""
    return -(-nbytes // BLOCK)


def judge(length: int, stored: int, segments: Sequence[tuple[int, int, int]]) -> list[bool | None]:
    """Tell for each segment of one block whether some tiling of the block by the segments proves it.

    Not collective. Readers cut a block anywhere and may read the same bytes twice, so a segment is proven when a
    chain of segments from the block's start, the segment itself and a chain to the block's end have together the
    stored CRC.

    Parameters
    ----------
    length : int
        Bytes of the block.
    stored : int
        CRC32 of the block as written.
    segments : sequence of (start, stop, crc)
        What was read, in bytes from the block's start.

    Returns
    -------
    list of bool or None
        True: proven; False: the CRC differs; None: no tiling goes through this segment.
    """
    before = {0: 0}
    for start, stop, crc in sorted(segments):
        if start in before and stop not in before:
            before[stop] = crc32_combine(before[start], crc, stop - start)
    after = {length: 0}
    for start, stop, crc in sorted(segments, key=lambda segment: segment[1], reverse=True):
        if stop in after and start not in after:
            after[start] = crc32_combine(crc, after[stop], length - stop)
    verdicts: list[bool | None] = []
    for start, stop, crc in segments:
        if start in before and stop in after:
            whole = crc32_combine(crc32_combine(before[start], crc, stop - start), after[stop], length - stop)
            verdicts.append(whole == stored)
        else:
            verdicts.append(None)
    return verdicts
