"""Shuffle samples by blocks of neighbours, so that a compressed chunk is decompressed once an epoch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero._util.pytree import SampleTree
from mpizero.data.source import Indices, Source
from mpizero.errors import ConfigError, DataError
from mpizero.kernels import cpu
from mpizero.types import Array

#: Part of the key of the random numbers, so that they differ from all others of the same seed; never to be changed.
_PURPOSE = 0xB10C


def block_order(start: int, stop: int, length: int, seed: int, *, block: int, blocks: int) -> Indices:
    """Return the sample indices at positions ``start:stop`` of the endless order of ``length`` samples by blocks.

    Positions ``e * length`` to ``(e + 1) * length - 1`` are epoch e. In each epoch the blocks of ``block`` neighbouring
    samples, of which the last may be short, are put in a random order, and the samples of each ``blocks`` blocks that
    follow one another in it are put in a random order together. So every sample occurs exactly once in each epoch. The
    index at a position depends on the position and the last four arguments alone. The function allocates no array of
    ``length`` elements. Not collective.
    """
    order = np.arange(start, stop, dtype=np.int64)
    done = 0
    while done < order.size:
        epoch, inside = divmod(start + done, length)
        epoch_stop = min(order.size, done + length - inside)
        order[done:epoch_stop] -= epoch * length
        _permute(order[done:epoch_stop], length, _key(seed, epoch), block, blocks)
        done = epoch_stop
    return order


def _key(seed: int, epoch: int) -> int:
    """Return the seed of all permutations of an epoch."""
    words = np.empty(4, np.uint32)
    counter = np.array([epoch & 0xFFFFFFFF, epoch >> 32, _PURPOSE, 0], np.uint32)
    cpu.random.philox(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), words)
    return int(words[0]) | int(words[1]) << 32


def _permute(places: Indices, length: int, key: int, block: int, blocks: int) -> None:
    """Replace successive positions in an epoch by the indices of their samples, in place.

    [Note: the last block] The last block is the only one that may be short. It takes a random place among the blocks,
    and the others take the remaining places. Counted as if it were whole, by ``gap`` samples more, all blocks have
    equal sizes; so no position needs a search.
    """
    count = -(-length // block)
    gap = count * block - length
    last = np.zeros(1, np.int64)
    cpu.random.permutation(last, count, key, 0)
    at = int(last[0])
    done = 0
    while done < places.size:
        first = int(places[done])
        group = (first if first < (at + 1) * block - gap else first + gap) // (block * blocks)
        begin, end = (min(g * blocks, count) * block - (gap if g * blocks > at else 0) for g in (group, group + 1))
        part = places[done : done + end - first]
        part -= begin
        cpu.random.permutation(part, end - begin, key, 2 + group)
        part += begin
        part[part >= (at + 1) * block - gap] += gap
        number, offset = np.divmod(part, block)
        others = number != at
        number -= number > at
        number[~others] = count - 1
        if others.any():
            moved = number[others]
            cpu.random.permutation(moved, count - 1, key, 1)
            number[others] = moved
        part[:] = number * block + offset
        done += part.size


@explains
class BlockShuffledSource(Source):
    """Provide the samples of another source, which batches shuffle by blocks; a rank holds a few blocks in memory.

    In each epoch the blocks of neighbouring samples come in a random order, and the samples of ``blocks`` successive
    blocks are shuffled together. The order does not depend on the ranks, but on ``blocks`` and ``block``. A rank that
    needs a sample of a block reads the whole block and holds the last ``blocks`` blocks that it used; so it reads, and
    decompresses, each block about once an epoch.

    Neighbouring samples come near to each other in an epoch. :meth:`split` takes the last samples for validation.

    Parameters
    ----------
    source : Source
        The samples; arrays, or trees of arrays, of one shape. Split what this class returns, not ``source``.
    blocks : int
        Number of blocks whose samples are shuffled together, and that a rank holds in memory.
    block : int or None
        Number of samples of a block; None means the number that ``source`` stores together, the rows of a chunk.

    Attributes
    ----------
    blocks_read : int
        Number of blocks that this rank has read.

    Raises
    ------
    ConfigError
        If ``blocks`` or ``block`` is out of range, or ``source`` changes samples at random (transform the samples of
        this class instead).
    DataError
        If ``source`` is no :class:`Source`, or has no samples.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(12.0), np.arange(12))
    >>> shuffled = mz.data.BlockShuffledSource(source, blocks=2, block=3)
    >>> shuffled.sample_order(0, 6, 12, seed=0)  # two blocks of three neighbours, shuffled together
    array([8, 0, 1, 6, 7, 2])
    >>> shuffled.samples([5, 3])[1], shuffled.blocks_read
    (array([5, 3]), 1)
    """

    in_order = True

    def __init__(self, source: Source, blocks: int = 16, block: int | None = None) -> None:
        if not isinstance(source, Source):
            raise DataError(f"BlockShuffledSource: expected a source of samples, got {type(source).__name__}")
        if source.takes_run:
            raise ConfigError(
                f"BlockShuffledSource: {type(source).__name__} makes other samples in every epoch: shuffle the source "
                "below it"
            )
        if not len(source):
            raise DataError("BlockShuffledSource: the source has no samples")
        self.source, self.blocks_read = source, 0
        self.blocks = require("blocks", blocks, whole(1))
        self.block = source.block_samples if block is None else require("block", block, whole(1))
        self.default_validation = source.default_validation
        self._held: OrderedDict[int, SampleTree] = OrderedDict()
        self._form = ""
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self.source)

    def sample_order(self, start: int, stop: int, length: int, seed: int) -> Indices:
        """Return the indices at positions ``start:stop`` of :func:`block_order`."""
        return block_order(start, stop, length, seed, block=self.block, blocks=self.blocks)

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        if not indices.size:
            x, y = self.source.samples(indices)
            return x, y
        numbers = indices // self.block
        found: list[Array] = []
        with self._mutex:
            # Blocks that are held come first, before others take their place.
            for number in sorted(np.unique(numbers).tolist(), key=lambda number: number not in self._held):
                tree = self._take(number)
                found = found or [np.empty((indices.size, *leaf.shape[1:]), leaf.dtype) for leaf in tree.leaves]
                own = np.flatnonzero(numbers == number)
                rows = indices[own] - number * self.block
                for values, leaf in zip(found, tree.leaves, strict=True):
                    values[own] = leaf[rows]
        x, y = tree.build(iter(found))
        return x, y

    def _take(self, number: int) -> SampleTree:
        """Return a block; read it if it is not held."""
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number]
        while len(self._held) >= self.blocks:
            self._held.popitem(last=False)
        first = number * self.block
        rows = np.arange(first, min(first + self.block, len(self.source)))
        tree = SampleTree.of(**dict(zip("xy", self.source.samples(rows), strict=True)))
        if tree.uncut:
            raise DataError(f"BlockShuffledSource: samples that are no arrays: {tree.uncut}")
        self._form = self._form or tree.form
        if tree.form != self._form:
            raise DataError(
                f"BlockShuffledSource: samples {first} to {int(rows[-1])} are {tree.form}, samples read before are "
                f"{self._form}: all must have the same shapes and types"
            )
        self.blocks_read += 1
        self._held[number] = tree
        return tree

    def origin(self, indices: Indices) -> Indices:
        """Return the indices, in the original source before any split, of the samples ``indices`` of this source."""
        return self.source.origin(indices)

    def describe(self) -> dict[str, Any]:
        """Return the sizes that determine the order, and the fingerprint of the other source."""
        return {"shuffled by blocks": (self.block, self.blocks), "of": self.source.fingerprint}

    def contents(self) -> dict[str, Any]:
        """Return what identifies the contents of the other source."""
        return self.source.contents()
