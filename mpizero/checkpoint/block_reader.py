"""Read ranges of elements of stored arrays, and verify them by the checksums of the blocks that contain them.

Each array has one checksum for each block of 4 MiB (``format/checksum.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mpizero._util.faults import inject
from mpizero._util.text import crc32
from mpizero.checkpoint.backends.direct import as_bytes
from mpizero.checkpoint.byte_source import ByteSource
from mpizero.checkpoint.format.checksum import BLOCK, cut, in_cache, judge
from mpizero.checkpoint.format.manifest import STATE_NAME, StoredArray
from mpizero.checkpoint.format.table import LocalArray
from mpizero.errors import CheckpointDamagedError


class BlockPart(NamedTuple):
    """Describe what a rank has read of one checksummed block: bytes ``start:stop`` of the array, and their CRC32."""

    path: str
    start: int
    stop: int
    crc: int


class BlockReader:
    """Read ranges of elements of stored arrays, and verify every checksummed block that contains some of them.

    If several ranks each read a part of one block, the block is verified from the checksums of the parts. No method
    communicates: :class:`~mpizero.checkpoint.reader.Reader` gathers the :class:`BlockPart` objects of all ranks.
    """

    def __init__(self, source: ByteSource, arrays: Mapping[str, StoredArray]) -> None:
        self._source, self._arrays = source, arrays

    def fill(self, request: LocalArray, advance: Callable[[int], object]) -> list[BlockPart]:
        """Fill ``request.pieces`` from the file; verify blocks that were read whole, return the parts of other blocks.

        The returned parts of blocks are verified later, together with the parts that other ranks have read. ``advance``
        is called with the number of bytes after each read. Raises :class:`CheckpointDamagedError` if a checksum is
        wrong.
        """
        stored, parts = self._arrays[request.path], []
        for first, values in request.pieces:
            data, begin = as_bytes(values), first * values.itemsize
            for start, stop in cut(begin, begin + len(data)):
                view = data[start - begin : stop - begin]
                inject("load.read")
                part = BlockPart(request.path, start, stop, self._read_block(stored.offset + start, view, advance))
                if stop - start < _block_length(stored, start):
                    parts.append(part)
                elif part.crc != stored.checksums[start // BLOCK]:
                    raise self._mismatch(part)
        return parts

    def _read_block(self, offset: int, block: memoryview, advance: Callable[[int], object]) -> int:
        """Fill ``block`` with the bytes of the file from ``offset`` on; return their CRC32.

        The checksum is computed while the bytes are in the cache. ``advance`` is called with the number of bytes after
        each read.
        """
        crc = 0
        for place, piece in in_cache(block):
            self._source.read_into(offset + place, piece)
            crc = crc32(piece, crc)
            advance(len(piece))
        return crc

    def unproven(self, gathered: Sequence[Sequence[BlockPart]], own_rank: int) -> list[BlockPart]:
        """Verify blocks from the parts that all ranks have read; return this rank's parts that this cannot verify.

        A part can be verified if it and other parts follow each other without a gap from the start to the end of the
        block. ``gathered`` holds the parts that each rank has read, by rank. Each rank verifies only blocks of which it
        has read a part. Raises :class:`CheckpointDamagedError` if a checksum is wrong.
        """
        own = {(part.path, part.start // BLOCK) for part in gathered[own_rank]}
        blocks: dict[tuple[str, int], list[tuple[int, BlockPart]]] = {key: [] for key in own}
        for rank, parts in enumerate(gathered):
            for part in parts:
                if (key := (part.path, part.start // BLOCK)) in own:
                    blocks[key].append((rank, part))
        alone = []
        for (path, index), listed in sorted(blocks.items()):
            stored, origin = self._arrays[path], index * BLOCK
            segments = [(part.start - origin, part.stop - origin, part.crc) for _, part in listed]
            verdicts = judge(_block_length(stored, origin), stored.checksums[index], segments)
            for (rank, part), verdict in zip(listed, verdicts, strict=True):
                if verdict is False:
                    raise self._mismatch(part)
                if verdict is None and rank == own_rank:
                    alone.append(part)
        return alone

    def prove_alone(self, part: BlockPart) -> None:
        """Read the rest of the block that contains ``part``, and compare the block's checksum with the stored one.

        Raises :class:`CheckpointDamagedError` if the checksums differ.
        """
        stored = self._arrays[part.path]
        origin = part.start // BLOCK * BLOCK
        end = origin + _block_length(stored, origin)
        head, tail = bytearray(part.start - origin), bytearray(end - part.stop)
        self._source.read_into(stored.offset + origin, memoryview(head))
        self._source.read_into(stored.offset + part.stop, memoryview(tail))
        segments = [(0, len(head), crc32(head)), (part.start - origin, part.stop - origin, part.crc)]
        segments.append((part.stop - origin, end - origin, crc32(tail)))
        verdicts = judge(end - origin, stored.checksums[origin // BLOCK], [s for s in segments if s[0] < s[1]])
        if not all(verdicts):
            raise self._mismatch(part)

    def _mismatch(self, part: BlockPart) -> CheckpointDamagedError:
        origin = part.start // BLOCK * BLOCK
        end = origin + _block_length(self._arrays[part.path], origin)
        return CheckpointDamagedError(
            f"{STATE_NAME}: array {part.path!r}: checksum mismatch in its bytes {origin} to {end - 1}: damaged"
        )


def _block_length(stored: StoredArray, start: int) -> int:
    """Return the length in bytes of the checksummed block that contains byte ``start`` of an array."""
    origin = start // BLOCK * BLOCK
    return min(origin + BLOCK, stored.nbytes) - origin
