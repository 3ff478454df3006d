"""Define the base class of data sources, and the sources of arrays in memory, of ``.npy`` files and of text.

A :class:`Source` gives samples by index, the same on every rank, and :func:`sample_order` shuffles them without a list
of all indices. :meth:`Source.split` divides a source into training and validation samples, each a :class:`Subset`.
:class:`TransformedSource` changes samples when they are read, at random or not, by a function of the user's.
:class:`ArraySource` and :func:`digits` have their arrays in memory. :class:`NpySource` and the sources of
:mod:`mpizero.data.files` map files into memory (:class:`MappedFile`); a :class:`MappedArray` asks the kernel to read
ahead around the rows that are used. :class:`TextSource` reads files, folders and globs as one long string of bytes, cut
into sequences.
"""

from __future__ import annotations

import errno
import faulthandler
import glob
import hashlib
import mmap
import os
import random
import resource
import stat
import sys
import sysconfig
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mpizero._util.checks import has_plain_bytes, native, number, require, takes_run, unmasked_samples, whole
from mpizero._util.fingerprint import Fingerprint
from mpizero._util.names import explains
from mpizero._util.numbers import crc32
from mpizero._util.pytree import SampleTree, join, leaves_of, map_arrays, map_leaves, paths_of
from mpizero.comm.startup import available_memory
from mpizero.errors import ConfigError, DataError
from mpizero.kernels import cpu
from mpizero.layout.fields import Box, Cut
from mpizero.types import EVALUATE, Array, Run

#: Share of the samples that :meth:`Source.split` takes for validation by default.
VALIDATION = 0.05

Indices = NDArray[np.int64]
Path = str | os.PathLike[str]


def sample_order(start: int, stop: int, length: int, seed: int) -> Indices:
    """Return the sample indices at positions ``start:stop`` of the endless shuffled order of ``length`` samples.

    Positions ``e * length`` to ``(e + 1) * length - 1`` are epoch e: a random permutation of all samples, computed from
    the seed and e. So every sample occurs exactly once in each epoch. The index at a position depends on the position,
    ``length`` and ``seed`` alone. The function allocates no array of ``length`` elements. Not collective.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.data.sample_order(0, 5, length=5, seed=1)  # the first epoch
    array([4, 1, 2, 0, 3])
    >>> mz.data.sample_order(5, 10, length=5, seed=1)  # the second
    array([1, 0, 2, 4, 3])
    >>> mz.data.sample_order(3, 7, length=5, seed=1)
    array([0, 3, 1, 0])
    """
    order = np.arange(start, stop, dtype=np.int64)
    for epoch, part in epochs(start, stop, length):
        order[part] -= epoch * length
        cpu.reduction.permutation(order[part], length, seed, epoch)
    return order


def epochs(start: int, stop: int, length: int) -> Iterator[tuple[int, slice]]:
    """Yield each epoch that has some of the positions ``start:stop``, and the slice of them that belongs to it."""
    done = start
    while done < stop:
        epoch = done // length
        end = min(stop, (epoch + 1) * length)
        yield epoch, slice(done - start, end - start)
        done = end


def epoch_words(seed: int, epoch: int, purpose: int) -> tuple[int, int]:
    """Return two numbers of 32 bits, by Philox, from which the random numbers of an epoch are made.

    ``purpose`` makes the two numbers differ from all other random numbers of the same seed; its value must never
    change.
    """
    words = np.empty(4, np.uint32)
    counter = np.array([epoch & 0xFFFFFFFF, epoch >> 32, purpose, 0], np.uint32)
    cpu.reduction.philox(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), words)
    return int(words[0]), int(words[1])


@dataclass(frozen=True)
class Slab:
    """Say which part of every field a rank gets: with a domain a box of the space, without one the whole field.

    An array is a field if each of its samples has at least as many axes as the domain; other arrays are not cut.

    Attributes
    ----------
    cut : Cut or None
        How the ranks share the space of fields; None without a domain.
    rank : int
        The number of the rank in the domain.
    """

    cut: Cut | None = None
    rank: int = 0

    def where(self, shape: tuple[int, ...]) -> Box:
        """Return this rank's slice of each axis of space of a sample of ``shape``; () if the sample is not cut."""
        axes = 0 if self.cut is None else len(self.cut.parts)
        return () if self.cut is None or len(shape) < axes else self.cut.box(shape[:axes], self.rank)

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> Any:
        """Return the index that selects this rank's part of the samples ``indices``; ``shape`` is one sample's."""
        where = self.where(shape)
        return (indices, *where) if where else indices

    def of(self, samples: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return this rank's part of whole samples ``(x, y)``, as contiguous arrays; without a domain, all of them."""
        if self.cut is None:
            return samples
        x, y = (map_arrays(self._cut, values) for values in samples)
        return x, y

    def _cut(self, values: Array) -> Array:
        return np.ascontiguousarray(values[(slice(None), *self.where(values.shape[1:]))])

    def samples(self, source: Source, indices: ArrayLike, run: Run | None = None) -> tuple[Any, Any]:
        """Return this rank's part of samples of a source; if its class overrides ``samples``, whole samples are cut."""
        keywords: dict[str, Any] = {} if run is None else {"run": run}
        if self.cut is not None and type(source).samples is Source.samples:
            return source.samples(indices, **keywords, slab=self)
        return self.of(source.samples(indices, **keywords))


#: The part of a rank that has whole samples.
WHOLE = Slab()


class Source(ABC):
    """Provide samples ``(x, y)`` by index, the same on every rank; each sample is read when it is requested.

    ``x`` and ``y`` are arrays with samples on the first axis, or trees of such arrays: tuples, lists, dictionaries and
    dataclasses, nested or not, of the same structure in every call.

    A source may change samples at random (augmentation). Then its :meth:`read` must have a parameter ``run``, a
    :class:`~mpizero.types.Run` with the attributes ``run.epoch``, ``run.step`` (the number of the global batch, from
    0), ``run.samples`` (the indices of the samples in the global batch), ``run.seed`` (the seed of the sample order),
    and ``run.training``. Compute the random numbers of each sample separately, for example from ``(run.seed, run.epoch,
    index)``, because the number of ranks determines which samples one call reads. Outside of
    :func:`~mpizero.data.batches`, ``run.training`` is False.

    ``default_validation`` is the share of the samples that :meth:`split` takes for validation by default. ``in_order``
    is True if neighbouring samples belong together, as in text: :meth:`split` then takes the last samples for
    validation. Otherwise it takes random samples.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> class Squares(mz.data.Source):
    ...     def __len__(self):
    ...         return 100
    ...     def read(self, indices):
    ...         return indices / 100, (indices / 100) ** 2
    ...     def describe(self):
    ...         return {"squares": 100}
    >>> training, validation = Squares().split(0.1)
    >>> len(training), len(validation)
    (90, 10)
    >>> Squares().samples([10])
    (array([0.1]), array([0.01]))
    """

    default_validation: float = VALIDATION
    in_order: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, which have been checked, in their order; there may be none."""

    def read_slab(self, indices: Indices, slab: Slab, **keywords: Any) -> tuple[Any, Any]:
        """Return this rank's part of the samples ``indices``, whose space a domain cuts (docs/domain.md).

        By default :meth:`read`, which also gets the ``keywords``, reads whole samples, which are then cut. The sources
        of files and arrays read no more than the part.
        """
        samples = self.read(indices, **keywords)
        self._checked_leaves(samples, len(indices))
        return slab.of(samples)

    def part_of_samples(self, indices: Indices, slab: Slab, **keywords: Any) -> tuple[Any, Any]:
        """Return the result of :meth:`read_slab`; if a subclass overrides :meth:`read` alone, cut whole samples."""
        kinds = type(self).__mro__
        reads, reads_slab = (next(kind for kind in kinds if name in vars(kind)) for name in ("read", "read_slab"))
        own = kinds.index(reads) < kinds.index(reads_slab)
        return Source.read_slab(self, indices, slab, **keywords) if own else self.read_slab(indices, slab, **keywords)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return values that identify the data, such as names, sizes and dtypes, without reading all of the data."""

    def contents(self) -> dict[str, Any]:
        """Return values by which a resumed run detects changed data, without reading all of the data.

        The item ``files`` has a name, a size in bytes and a time of change in nanoseconds for each file; all other
        items must be equal in the resumed run. By default nothing is returned, and a resumed run compares only some
        samples.
        """
        return {}

    def origin(self, indices: Indices) -> Indices:
        """Return the indices, in the original source before any split, of the samples ``indices`` of this source."""
        return indices

    def sample_order(self, start: int, stop: int, length: int, seed: int) -> Indices:
        """Return the indices at positions ``start:stop`` of the endless shuffled order of the first ``length`` samples.

        Positions ``e * length`` to ``(e + 1) * length - 1`` must be a permutation of these samples, the same on every
        rank. By default it is that of :func:`sample_order`.
        """
        return sample_order(start, stop, length, seed)

    @property
    def block_samples(self) -> int:
        """Number of neighbouring samples that are stored together, so that reading one costs as much as reading all."""
        return 1

    @property
    def in_page_cache(self) -> bool:
        """Tell whether samples that were read stay in the kernel's page cache, one copy a node."""
        return False

    @cached_property
    def takes_run(self) -> bool:  # used for every batch, and reading signatures is slow
        """True if :meth:`read` has a parameter ``run``."""
        return takes_run(self.read, f"{type(self).__name__}.read", "indices")

    def samples(self, indices: ArrayLike, *, run: Run | None = None, slab: Slab = WHOLE) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``.

        Every array has the samples on its first axis, in this machine's byte order. Indices may repeat. An empty list
        gives arrays without samples. ``run`` is passed to :meth:`read` if it has such a parameter. ``slab`` is the part
        of fields that is returned, by default all.

        Raises
        ------
        DataError
            If an index is not in ``range(len(source))``, or :meth:`read` returned a wrong number of samples.
        """
        wanted = np.asarray(indices)
        if wanted.size == 0:
            wanted = wanted.astype(np.int64)
        if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
            raise DataError(f"indices must be a list of whole numbers, got {wanted.dtype} of shape {wanted.shape}")
        wanted = wanted.astype(np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            bad = int(wanted.min() if wanted.min() < 0 else wanted.max())
            raise DataError(f"sample {bad} does not exist: there are {len(self)}")
        keywords: dict[str, Any] = {"run": run or Run(count=wanted.size)} if self.takes_run else {}
        reads = self.read if slab.cut is None else partial(self.part_of_samples, slab=slab)
        samples = reads(wanted, **keywords)
        leaves = self._checked_leaves(samples, len(wanted))
        if all(has_plain_bytes(leaf) for leaf in leaves if isinstance(leaf, np.ndarray)):
            return samples
        x, y = map_leaves(lambda leaf: native(leaf) if isinstance(leaf, np.ndarray) else leaf, samples)
        return x, y

    def _checked_leaves(self, pair: Any, count: int) -> list[Any]:
        """Return the arrays in ``pair``, a result of :meth:`read`; raise DataError if one has not ``count`` samples."""
        source: Source = self
        while isinstance(source, Subset):  # which reads from another source
            source = source.source
        kind = type(source).__name__
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = f"a {type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else type(pair).__name__
            raise DataError(f"{kind}.read must return the pair (x, y), it returned {got}")
        leaves = []
        for path, values in paths_of(**dict(zip("xy", pair, strict=True))):
            leaves.append(unmasked_samples(values, f"{kind}.read returned {path}, which"))
            shape = getattr(values, "shape", None)
            if shape is not None and (not shape or shape[0] != count):
                raise DataError(
                    f"{kind}.read was asked for {count} samples and returned {path} of shape {tuple(shape)}: expected "
                    "one sample for each index, in that order, on the first axis"
                )
        return leaves

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of :meth:`describe`; it must be equal on all ranks, because all must train on the same data."""
        return hashlib.sha256(repr(sorted(self.describe().items())).encode()).hexdigest()

    def split(self, validation: float | None = None) -> tuple[Source, Source]:
        """Divide the samples into ``(train, valid)``, in the same way in every run and on any number of ranks.

        ``round(validation * len(source))`` samples, but at least one, are taken for validation. They are the last
        samples if ``in_order`` is True. Otherwise they are a random choice that depends on the number of samples alone.
        If ``validation`` is 0, no sample is taken; None means ``default_validation``.

        Raises
        ------
        ConfigError
            If ``validation`` is outside [0, 1).
        DataError
            If no sample is left for training.
        """
        fraction = self.default_validation if validation is None else validation
        require("validation", fraction, number(below=1.0, what="a share of the samples"))
        count = max(1, round(fraction * len(self))) if fraction else 0
        if count >= len(self):
            raise DataError(
                f"validation={fraction} of {len(self)} samples holds {count} back and leaves none to train on: "
                "give more data or a smaller share"
            )
        return Subset(self, 0, len(self) - count), Subset(self, len(self) - count, len(self))


def check_source(source: Any, by: str, *, like: str = "") -> None:
    """Raise DataError if ``source`` is not a source of samples.

    The message names the caller ``by``, and has ``like`` after the word "samples".
    """
    if not isinstance(source, Source):
        raise DataError(f"{by}: expected a source of samples{like}, got {type(source).__name__}{source_for(source)}")


def source_for(data: Any) -> str:
    """Return the end of an error message: which source to use for an object that is no source; "" if unknown."""
    kinds = {kind.__name__ for kind in type(data).__mro__ if kind.__module__.startswith("torch.utils.data")}
    if "DataLoader" in kinds:
        return (
            "; give its dataset, mz.data.DatasetSource(loader.dataset): global_batch, seed and prefetch take the place "
            "of batch_size, shuffle and workers, and ranks share the samples without a sampler"
        )
    if "IterableDataset" in kinds:
        return "; its samples have no numbers: give them by mz.data.OnlineSource, or write a mz.data.Source"
    if kinds:
        return "; give mz.data.DatasetSource(dataset)"
    if hasattr(data, "__getitem__") or hasattr(data, "__iter__"):
        return "; of arrays or tensors make mz.data.ArraySource(x, y), of samples read one by one mz.data.DatasetSource"
    return ""


def check_unchanging(source: Source, by: str, fault: str) -> None:
    """Raise an error if a source changes samples (``fault`` says what to do), or has none; the message names ``by``."""
    if source.takes_run:
        raise ConfigError(f"{by}: {type(source).__name__} {fault}")
    if not len(source):
        raise DataError(f"{by}: the source has no samples")


def sample_block(source: Source, first: int, count: int, by: str, like: tuple[str, str] = ("", "")) -> SampleTree:
    """Return ``count`` neighbouring samples, fewer at the end of the source.

    Raises
    ------
    DataError
        If samples are no arrays, or their structure, shapes or types differ from those of earlier samples. ``like`` is
        (words for the earlier samples, :attr:`SampleTree.form` of these or ""). The message begins with ``by``.
    """
    x, y = source.samples(np.arange(first, min(first + count, len(source))))
    tree = SampleTree.of(x=x, y=y)
    if tree.uncut:
        raise DataError(f"{by} samples that are no arrays: {tree.uncut}")
    if like[1] and tree.form != like[1]:
        raise DataError(
            f"{by} samples {first} to {first + tree.count() - 1} are {tree.form}, {like[0]} {like[1]}: all must have "
            "the same shapes and types"
        )
    return tree


#: Key of the permutation that chooses validation samples; part of the format of a run, never to be changed.
SPLIT_SEED = 0x5EED


class WrappedSource(Source):
    """Provide the samples of another source; subclasses choose, change, keep or shuffle them."""

    def __init__(self, source: Source) -> None:
        check_source(source, type(self).__name__)
        self.source = source
        self.in_order, self.default_validation = source.in_order, source.default_validation

    def __len__(self) -> int:
        return len(self.source)

    def origin(self, indices: Indices) -> Indices:
        """Return the indices, in the original source before any split, of the samples ``indices`` of this source."""
        return self.source.origin(indices)

    def sample_order(self, start: int, stop: int, length: int, seed: int) -> Indices:
        """Return the indices at positions ``start:stop`` of the wrapped source's :meth:`sample_order`."""
        return self.source.sample_order(start, stop, length, seed)

    @property
    def block_samples(self) -> int:
        """Number of samples that the wrapped source stores together."""
        return self.source.block_samples

    def contents(self) -> dict[str, Any]:
        """Return the :meth:`contents` of the wrapped source."""
        return self.source.contents()


class Subset(WrappedSource):
    """Provide the samples at positions ``start:stop`` of a source.

    Positions are counted in the source's own order if ``in_order`` is true, otherwise in the order of a fixed random
    permutation of all its samples.

    Parameters
    ----------
    source : Source
        The source that holds the samples.
    start, stop : int
        Range of positions.

    Raises
    ------
    ConfigError
        If ``start`` and ``stop`` are no whole numbers with 0 <= ``start`` <= ``stop``.
    DataError
        If ``source`` is no :class:`Source`, or has fewer than ``stop`` samples.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(100.0), np.arange(100))
    >>> few = mz.data.Subset(source, 0, 10)  # ten random samples, the same in every run
    >>> len(few), len(set(few.samples(range(10))[1].tolist()))
    (10, 10)
    """

    def __init__(self, source: Source, start: int, stop: int) -> None:
        super().__init__(source)
        self.start = require("Subset: start", start, whole(0))
        self.stop = require("Subset: stop", stop, whole(self.start))
        if self.stop > len(source):
            raise DataError(f"Subset: stop={stop}: the source has {len(source)} samples")

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, indices: Indices, *, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        keywords: dict[str, Any] = {"run": run} if self.takes_run else {}
        return self.source.read(self._origin_positions(indices), **keywords)

    def read_slab(self, indices: Indices, slab: Slab, **keywords: Any) -> tuple[Any, Any]:
        """Return this rank's part of the samples ``indices``."""
        return self.source.part_of_samples(self._origin_positions(indices), slab, **keywords)

    @cached_property
    def takes_run(self) -> bool:
        """True if :meth:`read` of the source that holds the samples has a parameter ``run``."""
        return self.source.takes_run

    def origin(self, indices: Indices) -> Indices:
        """Return the indices, in the original source before any split, of the samples ``indices`` of this source."""
        return self.source.origin(self._origin_positions(indices))

    @property
    def in_page_cache(self) -> bool:
        """Tell whether the samples of the wrapped source stay in the kernel's page cache."""
        return self.source.in_page_cache

    def _origin_positions(self, indices: Indices) -> Indices:
        positions = indices + self.start
        if not self.in_order:
            cpu.reduction.permutation(positions, len(self.source), SPLIT_SEED, 0)
        return positions

    def describe(self) -> dict[str, Any]:
        """Return the range of positions and the fingerprint of the source that holds the samples."""
        return {"subset": (self.start, self.stop), "of": self.source.fingerprint}


#: Part of the key of the random numbers: see :func:`epoch_words`.
_PURPOSE = 0x7A45


class SampleRandom:
    """Draw the random numbers of one sample in one epoch, one after the other.

    The numbers are computed by Philox from the seed of the sample order, the epoch and the number of the sample in the
    data, so they do not depend on the ranks, the batch, or on what was drawn for other samples.

    Parameters
    ----------
    seed, epoch, sample : int
        Seed of the sample order, number of the epoch, and number of the sample in the data.

    Examples
    --------
    >>> import mpizero as mz
    >>> random = mz.data.SampleRandom(seed=0, epoch=2, sample=5)
    >>> angle, flip = random.uniform(0.0, 360.0), random.integer(2)
    >>> random.normal(0.1, (3,)).shape
    (3,)
    >>> bool(mz.data.SampleRandom(0, 2, 5).uniform(0.0, 360.0) == angle)  # the same sample and epoch
    True
    """

    def __init__(self, seed: int, epoch: int, sample: int) -> None:
        self._key = epoch_words(seed, epoch, _PURPOSE)
        self._sample, self._blocks = sample, 0

    def uniform(
        self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = (), dtype: DTypeLike = np.float64
    ) -> Array:
        """Return uniform random numbers on [low, high), float32 or float64."""
        out = np.empty(shape, dtype)
        bounds = (np.array([bound], out.dtype) for bound in (low, high))
        cpu.reduction.fill_uniform(*self._key, self._sample, self._advance(out), out.reshape(-1), *bounds)
        return out

    def normal(self, scale: float = 1.0, shape: tuple[int, ...] = (), dtype: DTypeLike = np.float64) -> Array:
        """Return normal random numbers of mean 0 and standard deviation ``scale``, float32 or float64."""
        out = np.empty(shape, dtype)
        scales = np.array([scale], out.dtype)
        cpu.reduction.fill_normal(*self._key, self._sample, self._advance(out), out.reshape(-1), scales)
        return out

    def integer(self, stop: int) -> int:
        """Return a random whole number from 0 to ``stop`` - 1."""
        return min(stop - 1, int(self.uniform() * stop))

    def _advance(self, out: Array) -> int:
        """Return the index of the next unused random number, and mark ``out.size`` numbers from there on as used.

        Two draws never share a block of Philox, which holds four numbers of float32 or two of float64.
        """
        if out.dtype not in (np.float32, np.float64):
            raise ConfigError(f"dtype={out.dtype}: expected float32 or float64")
        per = 16 // out.itemsize
        start = self._blocks * per
        self._blocks += -(-out.size // per)
        return start


@explains
class TransformedSource(WrappedSource):
    """Provide the samples of another source, changed by a user's function.

    Parameters
    ----------
    source : Source
        The samples; arrays, or trees of arrays.
    function : callable
        Called for each sample as ``function(x, y, random)``, where ``x`` and ``y`` have no axis of samples; returns the
        changed ``(x, y)``. ``random`` is the sample's :class:`SampleRandom` in training, and None outside of it, as in
        validation. The function must return the same shapes and types for all samples, and depend on its arguments
        alone.

    Raises
    ------
    ConfigError
        If ``function`` cannot be called.
    DataError
        If ``source`` is no :class:`Source`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def noisy(x, y, random):
    ...     return (x if random is None else x + random.normal(0.1, x.shape)), y
    >>> source = mz.data.TransformedSource(mz.data.ArraySource(np.zeros((4, 2)), np.arange(4)), noisy)
    >>> source.samples([0])[0]  # outside of training nothing is random
    array([[0., 0.]])
    >>> with mz.ShardingConfig(comm="self", micro_batch=2) as config:
    ...     (x, y), = mz.data.batches(source, config, global_batch=4, steps=1)
    >>> bool((x != 0).all())
    True
    """

    def __init__(self, source: Source, function: Callable[[Any, Any, SampleRandom | None], tuple[Any, Any]]) -> None:
        super().__init__(source)
        if not callable(function):
            raise ConfigError(f"function={function!r}: expected a function of x, y and random")
        self.function = function

    def read(self, indices: Indices, *, run: Run = EVALUATE) -> Any:
        """Return the changed samples ``(x, y)`` of ``indices``, in the order of ``indices``."""
        if not indices.size:  # the shapes of a changed sample are told by one
            return map_leaves(lambda leaf: leaf[:0], self.read(np.zeros(1, np.int64)))
        x, y = self.source.samples(indices, run=run)
        numbers = self.source.origin(indices).tolist()
        changed = []
        for position, sample in enumerate(numbers):
            random = SampleRandom(run.seed, run.epoch, sample) if run.training else None
            sample_x, sample_y = (map_leaves(itemgetter(position), tree) for tree in (x, y))
            changed.append(_pair(self.function(sample_x, sample_y, random), f"{self.name} must return", self.name))
        return _stacked(changed, numbers, self.name)

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def describe(self) -> dict[str, Any]:
        """Return the fingerprints of the function, with the variables that it uses, and of the wrapped source."""
        return {"transformed by": Fingerprint().digest(self.function).hex(), "of": self.source.fingerprint}


def _pair(sample: Any, must: str, name: str) -> tuple[Any, Any]:
    """Return one sample (x, y) with an axis of samples of length 1; raise DataError if it is no pair of arrays."""
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        what = f"a {type(sample).__name__}" + (f" of {len(sample)}" if isinstance(sample, tuple | list) else "")
        raise DataError(f"{must} the pair (x, y), it returned {what}; either may be a tree of arrays: x, (y, mask)")
    for path, leaf in paths_of(**dict(zip("xy", sample, strict=True))):
        unmasked_samples(leaf, f"{name} returned {path}, which")
    x, y = map_leaves(lambda leaf: np.asarray(leaf)[None], tuple(sample))
    return x, y


def _stacked(samples: Sequence[tuple[Any, Any]], numbers: Sequence[int], name: str) -> Any:
    """Join pairs of one sample each, from :func:`_pair`, into one pair (x, y); raise DataError if shapes differ."""
    try:
        return join(samples)
    except DataError as error:
        raise DataError(f"{name} returned different shapes for samples {numbers[:9]}: {error}") from None


@explains
class DatasetSource(Source):
    """Provide the samples of a map-style dataset, such as PyTorch's: it has ``len(dataset)`` and ``dataset[i]``.

    Parameters
    ----------
    dataset : object
        ``dataset[i]`` is the pair (x, y) of sample i: arrays, tensors or numbers, or trees of them, of the same shapes
        for all samples. ``dataset[i]`` must return the same sample in every call: random numbers drawn while reading
        would depend on the number of ranks, as the samples that a rank reads do. Change samples at random by a
        :class:`TransformedSource` of this source.

    Raises
    ------
    ConfigError
        If reading a sample draws random numbers, or gives another sample each time. Three samples are tried.
    DataError
        If the dataset has no length or no samples, or a sample is no pair.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> class Squares:
    ...     def __len__(self):
    ...         return 10
    ...     def __getitem__(self, i):
    ...         return np.array([i, i + 0.5]), i**2
    >>> x, y = mz.data.DatasetSource(Squares()).samples([3, 4])
    >>> x.tolist(), y.tolist()
    ([[3.0, 3.5], [4.0, 4.5]], [9, 16])
    """

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise DataError(f"DatasetSource: expected an object with len(dataset) and dataset[i]{source_for(dataset)}")
        if not len(dataset):
            raise DataError(f"DatasetSource: {type(dataset).__name__} has no samples")
        self.dataset = dataset
        for sample in sorted({0, len(dataset) // 2, len(dataset) - 1}):
            self._check_repeats(sample)

    def _check_repeats(self, sample: int) -> None:
        name, wanted = f"{type(self.dataset).__name__}[{sample}]", np.array([sample])
        before = _generators()
        first = Fingerprint().digest(self.read(wanted))
        drawn = _generators() != before
        if drawn or any(Fingerprint().digest(self.read(wanted)) != first for _ in range(3)):
            raise ConfigError(
                f"{name} {'draws random numbers' if drawn else 'is another sample each time it is read'}, which would "
                "depend on the number of ranks: leave the random part to mz.data.TransformedSource("
                "mz.data.DatasetSource(dataset), function), where function(x, y, random) gets the sample's own numbers"
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Indices) -> Any:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        numbers, name = indices.tolist(), type(self.dataset).__name__
        if not numbers:
            return map_leaves(lambda leaf: leaf[:0], self.read(np.zeros(1, np.int64)))
        samples = [_pair(self.dataset[number], f"{name}[{number}] must be", name) for number in numbers]
        return _stacked(samples, numbers, name)

    def describe(self) -> dict[str, Any]:
        """Return the dataset's class, and a fingerprint of its first and last sample."""
        ends = Fingerprint().digest(self.read(np.array([0, len(self) - 1]))).hex()
        return {"dataset": type(self.dataset).__qualname__, "samples": len(self), "first and last": ends}


def _generators() -> list[Any]:
    """Return the states of the process's global random generators: Python's, NumPy's and, if loaded, PyTorch's."""
    torch = sys.modules.get("torch")
    drawn = [random.getstate(), repr(np.random.get_state(legacy=False))]  # noqa: NPY002 - the user's dataset may use it
    return drawn if torch is None else [*drawn, torch.get_rng_state().numpy().tobytes()]


def check_samples(values: Array, name: str) -> Array:
    """Return ``values`` if they are numbers with a non-empty first axis, else raise DataError, naming ``name``."""
    if values.dtype.kind not in "fiubc":
        raise DataError(f"{name}: elements of type {values.dtype}; needed are numbers (float, integer, bool, complex)")
    check_shape(values.shape, name)
    return values


def check_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return the shape of an array if its first axis is not empty, else raise DataError, naming ``name``."""
    if not shape:
        raise DataError(f"{name}: a single number; needed is an array with samples on its first axis")
    if shape[0] == 0:
        raise DataError(f"{name}: shape {shape} has no samples")
    return shape


def check_lengths(x: Sized, x_name: str, y: Sized, y_name: str) -> None:
    """Raise DataError if the numbers of inputs ``x`` and of targets ``y`` differ."""
    if len(x) != len(y):
        raise DataError(f"{x_name} has {len(x)} samples and {y_name} has {len(y)}: needed is one target for each input")


def contiguous(values: Array) -> Array:
    """Return ``values`` contiguous and in this machine's byte order."""
    return np.ascontiguousarray(native(values))


@explains
class ArraySource(Source):
    """Read samples from arrays in memory; every rank must be given equal arrays.

    Parameters
    ----------
    x, y : array_like, or dictionary of array_like, or tuple or dataclass of arrays
        Inputs and targets, with samples on the first axis. If they are trees of arrays (nested or not), samples are
        trees too. A tuple of anything but NumPy arrays is one array, as a list is.

    Raises
    ------
    DataError
        If there are no samples, the arrays have different numbers of samples, or elements are not numbers; or if labels
        of samples or axes of pandas or xarray objects are not in the same order, because samples are paired by
        position.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(8.0).reshape(4, 2), {"label": [0, 1, 1, 0]})
    >>> len(source)
    4
    >>> x, y = source.samples([3, 1])
    >>> x.tolist(), y["label"].tolist()
    ([[6.0, 7.0], [2.0, 3.0]], [0, 1])
    >>> training, validation = source.split(0.25)
    >>> len(training), len(validation)
    (3, 1)
    """

    def __init__(self, x: Any, y: Any) -> None:
        _check_labels(x, y)
        self.x, self.y = _taken(x, "x"), _taken(y, "y")
        if isinstance(self.x, np.ndarray) and isinstance(self.y, np.ndarray):
            check_lengths(self.x, "x", self.y, "y")
        self._length = SampleTree.of(x=self.x, y=self.y).count()

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        return self.read_slab(indices, WHOLE)

    def read_slab(self, indices: Indices, slab: Slab, **_: Any) -> tuple[Any, Any]:
        """Return this rank's part of the samples ``indices``, without a copy of the rest."""
        x, y = (map_arrays(lambda a: a[slab.rows(indices, a.shape[1:])], values) for values in (self.x, self.y))
        return x, y

    def describe(self) -> dict[str, Any]:
        """Return the shape, dtype and CRC32 of each array, by its path such as ``x['mask']``."""
        description: dict[str, Any] = {"kind": "arrays"}
        for path, values in SampleTree.of(x=self.x, y=self.y).named:
            description[path] = (values.shape, values.dtype.str, crc32(values.data if values.size else b""))
        return description

    def contents(self) -> dict[str, Any]:
        """Return the checksums of the arrays."""
        return {"arrays": sorted(self.describe().items())}


def _check_labels(x: Any, y: Any) -> None:
    """Raise DataError if arrays with labels differ in the labels of their samples, or in the order of their axes.

    Objects of pandas have an ``index``, objects of xarray ``dims`` and ``indexes``.
    """
    known: list[tuple[str, tuple[str, ...], Any]] = []
    for path, leaf in paths_of(x=x, y=y):
        axes = tuple(map(str, leaf.dims)) if isinstance(getattr(leaf, "dims", None), tuple) else ()
        labels: Any = leaf.indexes.get(leaf.dims[0]) if axes else leaf.index if hasattr(leaf, "iloc") else None
        for other, other_axes, other_labels in known:
            for one, two, ours, theirs in ((path, other, axes, other_axes), (other, path, other_axes, axes)):
                if ours and ours[0] in theirs[1:]:
                    raise DataError(
                        f"{one} has samples along {ours[0]!r}, which is axis {theirs.index(ours[0])} of {two}: samples "
                        f"are on the first axis: {two}.transpose({ours[0]!r}, ...)"
                    )
            comparable = labels is not None and other_labels is not None and axes[:1] == other_axes[:1]
            if comparable and len(labels) == len(other_labels) and not labels.equals(other_labels):
                raise DataError(
                    f"{path} labels its samples otherwise than {other}, and samples are paired by their place: bring "
                    "them into one order (reindex, align), or give the numbers alone (.to_numpy())"
                )
        known.append((path, axes, labels))


def _taken(values: Any, name: str) -> Any:
    """Check an array, or a tree of arrays; return it with contiguous arrays in this machine's byte order.

    ``name`` names the array in error messages.
    """
    if _is_record(values):
        checked = iter([_taken(leaf, path) for path, leaf in paths_of(**{name: values})])
        return map_leaves(lambda leaf: next(checked), values)
    if not isinstance(values, Mapping):
        return contiguous(check_samples(_as_array(values, name), name))
    if not values:
        raise DataError(f"{name}: a dictionary without arrays")
    return {key: _taken(inside, f"{name}[{key!r}]") for key, inside in values.items()}


def _is_record(values: Any) -> bool:
    """Tell whether ``values`` is a tuple or dataclass, nested or not, of nothing but arrays with at least one axis."""
    if isinstance(values, Mapping | list | np.ndarray):
        return False
    leaves = leaves_of(values)
    arrays = all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves)
    return arrays and bool(leaves) and not any(leaf is values for leaf in leaves)


def _as_array(values: ArrayLike, name: str) -> Array:
    try:
        return np.asarray(unmasked_samples(values, name))
    except ValueError as error:
        raise DataError(f"{name}: not an array: {error}") from None


def digits() -> ArraySource:
    """Return scikit-learn's 1797 images of digits: x is float32 of shape (1797, 64) in [0, 1], y is int64 from 0 to 9.

    This function reads the data file of the scikit-learn package, because importing the package takes more than a
    second on every rank.

    Raises
    ------
    DataError
        If scikit-learn is not installed.

    Examples
    --------
    >>> import mpizero as mz
    >>> source = mz.data.digits()
    >>> x, y = source.samples([0, 1])
    >>> len(source), x.shape, y.tolist()
    (1797, (2, 64), [0, 1])
    """
    try:
        images, targets = _digits()
    except ImportError:
        raise DataError("digits: needs scikit-learn, which is not installed: pip install scikit-learn") from None
    return ArraySource(images.astype(np.float32) / np.float32(16), targets.astype(np.int64))


#: Path of the file of digits inside the scikit-learn package.
DIGITS = ("datasets", "data", "digits.csv.gz")


def _digits() -> tuple[Array, Array]:
    """Return the images and labels of scikit-learn's data file; import scikit-learn only if the file is not found."""
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        path = os.path.join(folder, *DIGITS)
        if os.path.isfile(path):
            rows = np.loadtxt(path, np.float32, delimiter=",")
            return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    return images, targets


def room_in_memory() -> int:
    """Return how many bytes of data may be kept in memory: half of the available memory. Not collective."""
    return (available_memory() or 0) // 2


def on_local_disk(path: str) -> bool:
    """Tell whether a file is on a local disk, whose pages the page cache drops only if memory is short. Not collective.

    File systems that are not on one block device (NFS, Lustre, tmpfs) have devices with the major number 0.
    """
    return os.major(os.stat(path).st_dev) != 0


T = TypeVar("T")


#: Largest limit of open files that is requested: with a larger one, programs that close all possible files take long.
MOST_FILES = 1 << 16


def with_more_files(path: str, opened: Callable[[], T]) -> T:
    """Call ``opened``, which opens ``path``, and return its result; raise the limit of open files if it is reached.

    Raises
    ------
    DataError
        If more files are open than the system lets this process have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    most = soft if soft == resource.RLIM_INFINITY else max(soft, wanted)
    for limit in (soft, most):
        if limit != soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            return opened()
        except (OSError, DataError) as error:
            if not _too_many(error):
                raise
    raise DataError(
        f"{path}: too many open files, this process may have {most}: raise the limit in the job's script (ulimit -n, "
        f"at most {'any number' if hard == resource.RLIM_INFINITY else hard} here), or join files"
    )


def _too_many(error: Exception) -> bool:
    return getattr(error, "errno", None) == errno.EMFILE or os.strerror(errno.EMFILE) in str(error)


class FileState(NamedTuple):
    """Hold a file's size and time of change; if one of them differs, the file counts as changed."""

    size: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Self | None:
        """Return the state of a file; None for a folder, whose files have states of their own, or a missing path."""
        try:
            status = os.stat(path)
        except OSError:  # which opening it will tell
            return None
        return None if stat.S_ISDIR(status.st_mode) else cls(status.st_size, status.st_mtime_ns)

    def __str__(self) -> str:
        """Return size and time as text."""
        return f"{self.size} bytes of {datetime.fromtimestamp(self.changed // 10**9):%Y-%m-%d %H:%M:%S}"


def file_states(paths: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each path that is a file. Not collective."""
    states = ((os.path.basename(path), FileState.of(path)) for path in paths)
    return [(name, *state) for name, state in states if state is not None]


def check_named_once(paths: Iterable[str]) -> None:
    """Raise DataError if two of the paths are one file, whose samples would be in training and in validation, too."""
    known: dict[str, str] = {}
    for path in paths:
        earlier = known.setdefault(os.path.realpath(path), path)
        if earlier is not path:
            also = f" (as {earlier})" if earlier != path else ""
            raise DataError(
                f"{path}{also}: the same file is given twice: its samples would count twice, and be in training and in "
                "validation; name it once"
            )


def check_unchanged(path: str, before: FileState | None) -> None:
    """Raise DataError if a file that is opened again has another state than ``before``."""
    now = FileState.of(path)
    if before is not None and now is not None and now != before:
        raise _changed(path, before, now)


def _changed(path: str, before: FileState, now: FileState) -> DataError:
    return DataError(
        f"{path}: it has changed since the source was made, from {before} to {now}: leave files alone while they "
        "are read, or write new ones under other names, and make the source again"
    )


#: Functions that read mapped pages; a block is copied, because slices alone would give a view.
_READERS = """
def rows(array, where): return array[where]
def block(array, where): return array[where].copy()
"""


class MappedFile:
    """Map a file into memory, read-only, once for all arrays in it.

    [Note: bus errors] If a mapped file is made shorter, reading a page that it no longer has ends the process by
    SIGBUS. So size and time of change are compared before every access. If the file becomes shorter after that check,
    faulthandler reports the crash, with the file's path: a function in the traceback has it as its name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = with_more_files(path, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self.size, self._state = status.st_size, FileState(status.st_size, status.st_mtime_ns)
        self.memory = with_more_files(path, lambda: mmap.mmap(self._file, self.size, access=mmap.ACCESS_READ))
        self.bytes: Array = np.frombuffer(self.memory, np.uint8)
        named: dict[str, Any] = {}
        exec(compile(_READERS, f"<mapped {path}>", "exec"), named)
        self._rows: Callable[[Array, Any], Array] = named["rows"]
        self._block: Callable[[Array, Any], Array] = named["block"]
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            with suppress(OSError, ValueError):  # without a standard error there is no report
                faulthandler.enable(sys.__stderr__)

    def read(self, array: Array, where: Any) -> Array:
        """Return a copy of some elements of an array in the file; raise DataError if the file has changed."""
        self.check()
        copied = isinstance(where[0] if isinstance(where, tuple) else where, np.ndarray)  # by NumPy
        return self._rows(array, where) if copied else self._block(array, where)

    def read_into(self, memory: Array, offset: int) -> None:
        """Fill ``memory``, an array of bytes, from byte ``offset`` of the file on, by system calls."""
        done = 0
        self.check()
        while done < memory.size:
            if not (read := os.preadv(self._file, [memory[done:].data], offset + done)):
                raise self._shorter()
            done += read

    def check(self) -> None:
        """Raise DataError if the file has changed since it was mapped, for example if another run writes it."""
        status = os.fstat(self._file)
        if status.st_size < self.size:
            raise self._shorter()
        if (now := FileState(status.st_size, status.st_mtime_ns)) != self._state:
            raise _changed(self.path, self._state, now)

    def _shorter(self) -> DataError:
        return DataError(
            f"{self.path}: it has become shorter while it was used: {os.fstat(self._file).st_size} bytes, {self.size} "
            "before; write new files and rename them, but leave alone what is read"
        )


#: Bytes that are read ahead together.
REGION = 4 << 20
#: Least number of bytes of neighbouring rows that are read by a system call, which costs no page fault per page.
READ_BYTES = 1 << 20


class MappedArray:
    """Read rows (indices of the first axis) and blocks (slices along all axes) of an array in a mapped file.

    [Note: read ahead] Shuffled rows are in pages at random offsets, which a disk reads many times slower than
    neighbouring pages. If the array fits into memory, all of it will be read in an epoch and kept by the page cache. So
    the first access to a region of 4 MiB asks the kernel to read the whole region.
    """

    def __init__(
        self, file: MappedFile, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], *, by_columns: bool = False
    ) -> None:
        self.file, self._offset = file, offset
        self.shape, self.dtype = shape, dtype
        self._array: Array = np.ndarray(shape, dtype, file.memory, offset, order="F" if by_columns else "C")
        self._page = offset - offset % mmap.ALLOCATIONGRANULARITY  # regions begin at a page
        self._first = offset - self._page
        self._row = self._array.nbytes // shape[0]
        end = self._first + self._array.nbytes
        by_rows = not by_columns or len(shape) == 1  # otherwise no row lies in one place
        self._contiguous = max(1, -(-READ_BYTES // max(1, self._row))) if by_rows else shape[0] + 1
        self._unread = np.full(-(-end // REGION), by_rows and end <= room_in_memory())

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.file.path

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: Any) -> Array:
        """Return rows (for an array of indices), parts of rows (indices and slices), or a block (slices alone)."""
        if isinstance(where, np.ndarray) and where.size >= self._contiguous and (np.diff(where) == 1).all():
            return self._read_contiguous(int(where[0]), where.size)
        if self._unread.any():
            rows = where[0] if isinstance(where, tuple) else where
            self._read_ahead(rows if isinstance(rows, np.ndarray) else np.arange(rows.start, rows.stop))
        return self.file.read(self._array, where)

    def _read_contiguous(self, first: int, count: int) -> Array:
        """Return ``count`` rows from row ``first`` on."""
        values = np.empty((count, *self.shape[1:]), self.dtype)
        self.file.read_into(values.reshape(-1).view(np.uint8), self._offset + first * self._row)
        return values

    def _read_ahead(self, rows: Indices) -> None:
        starts = self._first + rows * self._row
        touched = np.unique([starts // REGION, (starts + self._row - 1) // REGION])
        for region in touched[self._unread[touched]].tolist():
            size = min(REGION, self._first + self._array.nbytes - region * REGION)
            self.file.memory.madvise(mmap.MADV_WILLNEED, self._page + region * REGION, size)
            self._unread[region] = False


@explains
class NpySource(Source):
    """Read samples from two ``.npy`` files, which are memory-mapped.

    Parameters
    ----------
    x_path, y_path : path
        Files of the inputs and of the targets, with samples on the first axis.

    Raises
    ------
    DataError
        If a file is missing, damaged or empty, its array does not hold numbers, or the files have different numbers of
        samples.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(Path(folder, "x.npy"), np.arange(6.0).reshape(3, 2))
    ...     np.save(Path(folder, "y.npy"), np.arange(3))
    ...     source = mz.data.NpySource(Path(folder, "x.npy"), Path(folder, "y.npy"))
    ...     x, y = source.samples([2, 0])
    >>> x.tolist(), y.tolist()
    ([[4.0, 5.0], [0.0, 1.0]], [2, 0])
    """

    def __init__(self, x_path: str | os.PathLike[str], y_path: str | os.PathLike[str]) -> None:
        self.paths = (os.path.abspath(x_path), os.path.abspath(y_path))
        self.x, self.y = (_map_npy(path) for path in self.paths)
        check_lengths(self.x, self.paths[0], self.y, self.paths[1])

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: Indices) -> tuple[Array, Array]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        return self.read_slab(indices, WHOLE)

    def read_slab(self, indices: Indices, slab: Slab, **_: Any) -> tuple[Array, Array]:
        """Return this rank's part of the samples ``indices``, the only bytes of the files that are touched."""
        x, y = (contiguous(values[slab.rows(indices, values.shape[1:])]) for values in (self.x, self.y))
        return x, y

    def describe(self) -> dict[str, Any]:
        """Return the names of the files without their folders, and the shapes and dtypes of their arrays."""
        description: dict[str, Any] = {"kind": "npy"}
        for name, path, values in zip(("x", "y"), self.paths, (self.x, self.y), strict=True):
            description[name] = (os.path.basename(path), values.shape, values.dtype.str)
        return description

    def contents(self) -> dict[str, Any]:
        """Return names, sizes and times of the files."""
        return {"files": file_states(self.paths)}


def _map_npy(path: str) -> MappedArray:
    """Return the array of a ``.npy`` file, mapped into memory; raise DataError if it is no file of numbers."""
    from mpizero.checkpoint.npz import UNSOUND, read_header  # with h5py's packages

    if not os.path.isfile(path):
        raise DataError(f"{path}: {'not a regular file' if os.path.lexists(path) else 'does not exist'}")
    try:
        file = MappedFile(path)
        with open(path, "rb") as opened:
            if opened.read(2) == b"PK":
                raise DataError(f"{path}: an archive of arrays; needed is a single array in a .npy file")
            opened.seek(0)
            shape, by_columns, dtype = read_header(opened, os.path.basename(path), file.size)
            return MappedArray(file, dtype, opened.tell(), check_shape(shape, path), by_columns=by_columns)
    except (OSError, *UNSOUND) as error:
        if not os.path.getsize(path):
            raise DataError(f"{path}: the file is empty") from None
        raise DataError(f"{path}: not a readable .npy file of numbers: {error}") from None


#: Largest number of files that stay mapped into memory at a time; the others are mapped again when needed.
OPEN_FILES = 64


@explains
class TextSource(Source):
    """Provide text for next-byte prediction: the target of each byte of an input sequence is the next byte of the text.

    Sample i consists of the bytes from ``i * sequence`` to ``(i + 1) * sequence`` of the text, both included. ``x``
    holds its first ``sequence`` bytes and ``y`` its last ``sequence`` bytes. ``x`` and ``y`` are int64 of shape
    (samples, sequence), with values below 256. The text is the concatenation of all files, in the order given. A sample
    may begin in one file and end in the next. The text is not copied into memory: each file is memory-mapped when it is
    first read.

    Parameters
    ----------
    paths : path, sequence of paths, or "stdlib"
        A file; a folder (all files below it, sorted by path, without hidden ones); or a glob pattern (sorted; ``**``
        matches folders of any depth). "stdlib" is this Python's own standard library: its ``.py`` files without tests,
        in the order of the SHA-256 of their paths. So the last files, which are taken for validation, are a random
        choice.
    sequence : int
        Number of bytes of each input and of each target.
    validation : float
        Share of the samples that :meth:`split` takes for validation by default; these are the last samples.

    Raises
    ------
    DataError
        If a path matches nothing or cannot be read, a file given by its own name is empty, or the text has fewer than
        ``sequence + 1`` bytes.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = Path(folder, "text.txt").write_text("to be, or not to be")
    ...     source = mz.data.TextSource(f"{folder}/*.txt", sequence=5)
    ...     x, y = source.samples([0])
    >>> len(source), bytes(x[0].tolist()), bytes(y[0].tolist())
    (3, b'to be', b'o be,')
    """

    in_order = True

    def __init__(self, paths: Path | Sequence[Path], sequence: int, validation: float = VALIDATION) -> None:
        self.sequence = require("sequence", sequence, whole(1, of=" of bytes"))
        self.default_validation = validation
        listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not listed:
            raise DataError("no text: the list of paths is empty")
        files = [file for path in listed for file in _text_files(path if path == "stdlib" else os.path.abspath(path))]
        check_named_once(name for name, _ in files)
        self.files = tuple(name for name, size in files if size)
        self._ends = tuple(accumulate(size for _, size in files if size))
        self._map = lru_cache(maxsize=OPEN_FILES)(_map_file)
        names = ", ".join(str(path) for path in listed[:3]) + (", ..." if len(listed) > 3 else "")
        if not self.files:
            raise DataError(f"{names}: no text: {len(files)} files, all of them empty")
        if self.bytes <= sequence:
            raise DataError(
                f"{names}: {self.bytes} bytes of text; sequences of {sequence} need at least {sequence + 1} bytes"
            )

    @property
    def bytes(self) -> int:
        """Number of bytes of all text files together."""
        return self._ends[-1]

    def __len__(self) -> int:
        return (self.bytes - 1) // self.sequence

    def read(self, indices: Indices) -> tuple[Array, Array]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        text = np.empty((indices.size, self.sequence + 1), np.uint8)
        for row, index in zip(text, indices.tolist(), strict=True):
            self._fill(row, index * self.sequence)
        return text[:, :-1].astype(np.int64), text[:, 1:].astype(np.int64)

    def _fill(self, row: Array, start: int) -> None:
        """Fill the array ``row`` with the bytes of the text from byte ``start`` on, from as many files as needed."""
        done, file = 0, bisect_right(self._ends, start)
        while done < row.size:
            begin = self._ends[file - 1] if file else 0
            inside = start + done - begin
            count = min(row.size - done, self._ends[file] - begin - inside)
            mapped = self._map(self.files[file], self._ends[file] - begin)
            row[done : done + count] = mapped.read(mapped.bytes, slice(inside, inside + count))
            done, file = done + count, file + 1

    def describe(self) -> dict[str, Any]:
        """Return the names of the files without their folders, and the byte of the text at which each file ends."""
        names = [os.path.basename(name) for name in self.files]
        return {"kind": "text", "sequence": self.sequence, "files": names, "ends": self._ends}

    def contents(self) -> dict[str, Any]:
        """Return names, sizes and times of the files."""
        return {"files": file_states(self.files)}


def _map_file(path: str, size: int) -> MappedFile:
    try:
        mapped = MappedFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read any more: {error}") from None
    if mapped.size != size:
        raise DataError(f"{path}: {mapped.size} bytes now, {size} when training started: it must not change")
    return mapped


def _text_files(path: str) -> list[tuple[str, int]]:
    """Return the path and the size in bytes of each file that ``path`` stands for: a file, folder, glob or "stdlib"."""
    if path == "stdlib":
        return [(name, _text_size(name)) for name in _standard_library()]
    if os.path.isdir(path):
        files = [(name, _text_size(name)) for name in _files_below(path)]
        if not files:
            raise DataError(f"{path}: a folder without files")
        return files
    if os.path.lexists(path):
        if not (size := _text_size(path)):
            raise DataError(f"{path}: the file is empty")
        return [(path, size)]
    if not glob.has_magic(path):
        raise DataError(f"{path}: does not exist; needed is a text file, a folder, a pattern such as *.txt, or stdlib")
    matches = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
    if not matches:
        raise DataError(f"{path}: the pattern matches no file")
    return [(name, _text_size(name)) for name in matches]


#: The first bytes of files that a program has compressed.
COMPRESSED = {b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def _text_size(path: str) -> int:
    """Return the size of a file in bytes; raise DataError if it is compressed, no regular file or cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(file)
        start = os.read(file, 6) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(file)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file")
    if program := next((name for first, name in COMPRESSED.items() if start.startswith(first)), ""):
        raise DataError(f"{path}: compressed by {program}: unpack it, since text is read as it is stored")
    return status.st_size


def _files_below(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, sorted, without hidden files and folders."""
    with os.scandir(folder) as scanned:
        entries = sorted((entry for entry in scanned if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path)
        elif entry.is_file():
            yield entry.path


#: Folders of the standard library that are left out: installed packages, and tests, which hold text in odd encodings.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def _standard_library() -> list[str]:
    root = sysconfig.get_paths()["stdlib"]
    paths = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith(".py") and not os.path.islink(path):  # Debian's has a file that is a link to another
                paths[os.path.relpath(path, root)] = path
    if not paths:
        raise DataError(f"stdlib: no .py files below {root}; give text files instead")
    order = sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [paths[name] for name in order]
