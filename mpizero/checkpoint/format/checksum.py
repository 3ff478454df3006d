"""Cut arrays into checksummed blocks, and compute the CRC32 of a block from the CRC32s of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpizero._util.text import crc32_combine

#: Bytes of one checksummed block of an array; a multiple of every element size.
BLOCK = 4 * 1024 * 1024

#: Bytes of a piece that stays in a core's cache from reading to checksumming. With pieces of 256 KiB loading takes 5 to
#: 12 % longer, because of the number of calls; larger pieces are not faster.
_CACHED = 1024 * 1024


def crc32_shifted(crc: int, length: int) -> int:
    """Return what bytes with CRC32 ``crc``, followed by ``length`` other bytes, contribute to the CRC32 of the whole.

    The CRC32 of the whole is the XOR of the contributions of its parts.
    """
    return crc32_combine(crc, 0, length)


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut bytes ``start:stop`` of an array at the boundaries of blocks; yield (start, stop) of each part in order."""
    while start < stop:
        end = min(stop, (start // BLOCK + 1) * BLOCK)
        yield start, end
        start = end


def in_cache(part: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Cut a block into pieces that fit a core's cache; yield the offset in the block and a view of each piece."""
    for start in range(0, len(part), _CACHED):
        yield start, part[start : start + _CACHED]


def block_count(nbytes: int) -> int:
    """Return the number of checksummed blocks of an array of ``nbytes`` bytes."""
    return -(-nbytes // BLOCK)


def judge(length: int, stored: int, segments: Sequence[tuple[int, int, int]]) -> list[bool | None]:
    """Verify the segments (ranges of bytes) of one block that ranks have read by the CRC32 of the block.

    Ranks may cut a block anywhere, and several ranks may read the same bytes. A segment can be verified if it belongs
    to a sequence of segments that follow each other without a gap and cover the block. It is correct if the CRC32 of
    that sequence is ``stored``.

    Parameters
    ----------
    length : int
        Size of the block in bytes.
    stored : int
        CRC32 of the block as it was written.
    segments : sequence of (start, stop, crc)
        First byte and end of each segment, counted from the start of the block, and the CRC32 of the bytes that were
        read.

    Returns
    -------
    list of bool or None
        For each segment True if it is correct, False if the CRC32 of its sequence is not ``stored``, and None if it
        cannot be verified.
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
