"""Read stored blocks of samples once: keep a copy of all samples on each node, or shuffle samples by blocks.

:func:`cached` keeps one copy of all samples a node, in memory that its ranks share. Where this memory is too small,
:class:`BlockShuffledSource` shuffles blocks of neighbouring samples, so that a compressed chunk is decompressed once an
epoch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Self

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero._util.pytree import SampleTree
from mpizero._util.text import notice
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.comm.model_group import BlockLocks
from mpizero.data.batches import RankedModel, Ranks, ranks_of
from mpizero.data.source import (
    WHOLE,
    Indices,
    Slab,
    Source,
    WrappedSource,
    check_source,
    check_unchanging,
    epoch_words,
    epochs,
    room_in_memory,
    sample_block,
)
from mpizero.errors import StateError
from mpizero.kernels import cpu
from mpizero.types import Array

#: Least number of bytes of samples that are read at once, which is much faster than reading sample by sample.
BLOCK_BYTES = 4 << 20
_ALIGNMENT = 64


class CachedSource(WrappedSource):
    """Provide the samples of another source from a copy in the node's shared memory; made by :func:`cached`.

    A block of neighbouring samples (at least one chunk of a file) is read by the rank of the node that needs one of its
    samples first. Reading is not collective and sends no message, so a background thread may do it.

    Attributes
    ----------
    source : Source
        The source of the samples.
    nbytes : int
        Size of the node's copy; 0 if there is no copy, because it does not fit or the kernel's page cache serves as
        one: every rank then reads from ``source``.
    blocks_read : int
        Number of blocks that this rank has read.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(8.0).reshape(4, 2), np.arange(4))
    >>> with mz.Mesh("self") as mesh, mz.data.cached(source, mesh) as copy:
    ...     print(copy.blocks_read)
    ...     x, y = copy.samples([2, 3])
    ...     print(type(copy).__name__, copy.blocks_read)
    0
    CachedSource 1
    """

    def __init__(self, source: Source, comm: Communicator, limit: int | None) -> None:
        super().__init__(source)
        self.blocks_read = self.nbytes = 0
        self._node = comm.split_node(name="cache")
        self._closed, self._window = False, None
        self._mutex = threading.Lock()
        with all_ranks(comm, "cache"):
            self._tree = sample_block(source, 0, 1, f"cached: {type(source).__name__} has")
            stored_together = max(1, source.block_samples)
            enough = -(-BLOCK_BYTES // max(1, sum(leaf.nbytes for leaf in self._tree.leaves)))
            self._block = -(-enough // stored_together) * stored_together
            blocks = -(-len(source) // self._block)
            sizes = [leaf.nbytes * len(source) for leaf in self._tree.leaves]
            needed = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes) + blocks
            room = min(n for n in (room_in_memory(), self._node.shared_space(), limit) if n is not None)
            votes = np.array([needed <= room, source.in_page_cache], np.int8)
        comm.allreduce(votes, "min", tag="cache")
        fits, cached_by_kernel = votes.tolist()
        if cached_by_kernel:  # another copy would take as much memory again, and time
            return
        if fits:
            with all_ranks(comm, "cache"):  # on all ranks of a node together, or on none
                self._window = self._node.allocate_shared(needed, "cache")
            self._locks = BlockLocks(self._node)
            self.nbytes = needed
            self._arrays, self._ready = self._views(self._window.buffer, blocks)
            self._filled = np.zeros(blocks, bool)
        elif comm.rank == 0:
            notice(f"cached: {needed} bytes of samples, a node has room for {room}: every rank reads the files itself")

    def _views(self, memory: Array, blocks: int) -> tuple[list[Array], Array]:
        """Return the arrays of all samples in ``memory``, and one byte for each block, 1 when it has been read."""
        arrays, start = [], 0
        for leaf in self._tree.leaves:
            size = leaf.nbytes * len(self.source)
            arrays.append(memory[start : start + size].view(leaf.dtype).reshape(len(self.source), *leaf.shape[1:]))
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
        return arrays, memory[start : start + blocks]

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        return self.read_slab(indices, WHOLE)

    def read_slab(self, indices: Indices, slab: Slab, **_: Any) -> tuple[Any, Any]:
        """Return this rank's part of the samples ``indices``; the node's copy has whole samples."""
        if self._closed:
            raise StateError("samples are read from a cache that is closed")
        if self._window is None:
            return self.source.part_of_samples(indices, slab)
        blocks = np.unique(indices // self._block)
        for block in blocks[~self._filled[blocks]].tolist():
            self._fill(block)
        x, y = self._tree.build(array[slab.rows(indices, array.shape[1:])] for array in self._arrays)
        return x, y

    def _fill(self, block: int) -> None:
        """Read a block into the node's memory, unless another rank has done so.

        The ranks of a node share a lock for each block. Taking this lock also makes sure that this rank sees all that
        the rank that has read the block has written.
        """
        with self._mutex, self._locks.hold(block):
            if not self._ready[block]:
                first, like = block * self._block, ("sample 0 is", self._tree.form)
                samples = sample_block(self.source, first, self._block, "cached:", like)
                filled = slice(first, first + samples.count())
                for array, leaf in zip(self._arrays, samples.leaves, strict=True):
                    array[filled] = leaf
                self._ready[block] = 1
                self.blocks_read += 1
            self._filled[block] = True

    @property
    def block_samples(self) -> int:
        """Number of samples that must be read together: 1 if the node has a copy, else ``source.block_samples``."""
        return 1 if self._window is not None else self.source.block_samples

    def describe(self) -> dict[str, Any]:
        """Return the description of the source, because a copy has the same data."""
        return self.source.describe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the cache, unless the ``with`` block has raised an error, which may be an error of this rank alone."""
        if error is None:
            self.close()

    def close(self) -> None:
        """Free the node's memory; a second call does nothing. Collective over the ranks of :func:`cached`."""
        if self._closed:
            return
        self._closed, self._arrays, self._ready = True, [], np.empty(0, np.uint8)
        if self._window is not None:
            self._locks.close()
            self._window.close()
        self._node.close()


@explains
def cached(source: Source, ranks: Ranks | RankedModel, limit: int | None = None) -> CachedSource:
    """Return a source with the same samples, of which each node keeps one copy in shared memory.

    Collective over ``ranks``. The memory for all samples is allocated now; samples are read from ``source``, and
    decompressed, when a rank of the node needs them first. If the copy does not fit, rank 0 prints a notice, and every
    rank reads from ``source``. Without a notice every rank also reads from ``source`` if all data are contiguous
    datasets on the node's own disk: they are memory-mapped, and the kernel's page cache already is one copy a node.
    Split the returned source, not ``source``, because neighbouring samples are read together. Close the returned source
    on all ranks together, or use it as a context manager.

    Parameters
    ----------
    source : Source
        The samples, the same on every rank; arrays, or trees of arrays, of one shape.
    ranks : sharded model, Mesh or ShardingConfig
        The ranks.
    limit : int or None
        Largest number of bytes of a node's copy; None sets no limit. In both cases the copy must fit into the free
        shared memory, and into half of the available memory.

    Raises
    ------
    ConfigError
        If ``source`` changes samples at random (transform a cached source instead), or ranks have different data.
    DataError
        If ``source`` is no :class:`Source`, has no samples, or samples that are no arrays.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(8.0).reshape(4, 2), np.arange(4))
    >>> with mz.Mesh("self") as mesh, mz.data.cached(source, mesh) as copy:
    ...     training, validation = copy.split(0.25)  # split the copy, not its source
    ...     print(copy.samples([2])[0], copy.nbytes >= 8 * (8 + 4))
    [[4. 5.]] True
    """
    comm, _ = ranks_of(ranks, None)
    with all_ranks(comm, "cache"):
        check_source(source, "cached", like=" such as Hdf5Source")
        if limit is not None:
            require("limit", limit, whole(0, of=" of bytes"))
        check_unchanging(source, "cached", "makes other samples in every epoch: cache the source below it")
    agree_equal(comm, lambda: {"the arguments of cached": {**source.describe(), "limit": limit}}, "agree cache")
    return CachedSource(source, comm, limit)


@explains
class BlockShuffledSource(WrappedSource):
    """Provide another source's samples, to be shuffled by blocks in batches; a rank holds a few blocks in memory.

    In each epoch the blocks of neighbouring samples come in a random order, and the samples of ``blocks`` successive
    blocks are shuffled together. The order is the same on any ranks; it changes with ``blocks`` and ``block``. A rank
    that needs a sample of a block reads the whole block and holds the last ``blocks`` blocks that it used; so it reads,
    and decompresses, each block about once an epoch.

    Neighbouring samples of ``source`` remain near each other in the order of an epoch. :meth:`split` takes the last
    samples for validation.

    Parameters
    ----------
    source : Source
        The samples; arrays, or trees of arrays, of one shape. Split the shuffled source, not ``source``.
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

    def __init__(self, source: Source, blocks: int = 16, block: int | None = None) -> None:
        super().__init__(source)
        fault = "makes other samples in every epoch: shuffle the source below it"
        check_unchanging(source, "BlockShuffledSource", fault)
        self.in_order, self.blocks_read = True, 0
        self.blocks = require("blocks", blocks, whole(1))
        self.block = source.block_samples if block is None else require("block", block, whole(1))
        self._cached: OrderedDict[int, SampleTree] = OrderedDict()
        self._form = ""
        self._mutex = threading.Lock()

    @property
    def block_samples(self) -> int:
        """Number of samples that must be read together: 1, because this source keeps whole blocks in memory."""
        return 1

    def sample_order(self, start: int, stop: int, length: int, seed: int) -> Indices:
        """Return the indices at positions ``start:stop`` of the order that :func:`block_order` defines."""
        return block_order(start, stop, length, seed, block=self.block, blocks=self.blocks)

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        if not indices.size:
            x, y = self.source.samples(indices)
            return x, y
        numbers = indices // self.block
        gathered: list[Array] = []
        with self._mutex:
            # Blocks that are in memory come first, before other blocks replace them.
            for number in sorted(np.unique(numbers).tolist(), key=lambda number: number not in self._cached):
                tree = self._take(number)
                gathered = gathered or [np.empty((indices.size, *leaf.shape[1:]), leaf.dtype) for leaf in tree.leaves]
                in_block = np.flatnonzero(numbers == number)
                rows = indices[in_block] - number * self.block
                for values, leaf in zip(gathered, tree.leaves, strict=True):
                    values[in_block] = leaf[rows]
        x, y = tree.build(iter(gathered))
        return x, y

    def _take(self, number: int) -> SampleTree:
        """Return block ``number``; read it if it is not in memory."""
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        while len(self._cached) >= self.blocks:
            self._cached.popitem(last=False)
        first = number * self.block
        like = "samples read before are", self._form
        tree = sample_block(self.source, first, self.block, "BlockShuffledSource:", like)
        self._form = tree.form
        self.blocks_read += 1
        self._cached[number] = tree
        return tree

    def describe(self) -> dict[str, Any]:
        """Return the sizes that determine the order, and the fingerprint of the source that is shuffled."""
        return {"shuffled by blocks": (self.block, self.blocks), "of": self.source.fingerprint}


def block_order(start: int, stop: int, length: int, seed: int, *, block: int, blocks: int) -> Indices:
    """Return the sample indices at positions ``start:stop`` of the endless order of ``length`` samples by blocks.

    Positions ``e * length`` to ``(e + 1) * length - 1`` are epoch e. In each epoch the blocks of ``block`` neighbouring
    samples, of which the last may be short, are put in a random order, and then the samples of each ``blocks``
    successive blocks of that order are shuffled together. So every sample occurs exactly once in each epoch. The index
    at a position depends on the position, ``length``, ``seed``, ``block`` and ``blocks`` alone. The function allocates
    no array of ``length`` elements. Not collective.
    """
    order = np.arange(start, stop, dtype=np.int64)
    for epoch, part in epochs(start, stop, length):
        order[part] -= epoch * length
        low, high = epoch_words(seed, epoch, _PURPOSE)
        _permute(order[part], length, low | high << 32, block, blocks)
    return order


#: Part of the key of the random numbers: see :func:`mpizero.data.source.epoch_words`.
_PURPOSE = 0xB10C


def _permute(positions: Indices, length: int, key: int, block: int, blocks: int) -> None:
    """Replace successive positions in an epoch by the indices of their samples, in place.

    [Note: the last block] The last block is the only one that may be short. It gets a random place in the order of
    blocks, and the other blocks get the remaining places. If the ``gap`` samples that the last block lacks are counted,
    too, all blocks have equal sizes; so a division gives the place of a position's block, without a search.
    """
    count = -(-length // block)
    gap = count * block - length
    last = np.zeros(1, np.int64)
    cpu.reduction.permutation(last, count, key, 0)
    at = int(last[0])
    done = 0
    while done < positions.size:
        first = int(positions[done])
        group = (first if first < (at + 1) * block - gap else first + gap) // (block * blocks)
        begin, end = (min(g * blocks, count) * block - (gap if g * blocks > at else 0) for g in (group, group + 1))
        part = positions[done : done + end - first]
        part -= begin
        cpu.reduction.permutation(part, end - begin, key, 2 + group)
        part += begin
        part[part >= (at + 1) * block - gap] += gap
        number, offset = np.divmod(part, block)
        others = number != at
        number -= number > at
        number[~others] = count - 1
        if others.any():
            moved = number[others]
            cpu.reduction.permutation(moved, count - 1, key, 1)
            number[others] = moved
        part[:] = number * block + offset
        done += part.size
