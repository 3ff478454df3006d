"""Define the base class of data sources, and split a source into training and validation samples."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sized
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpizero._util.checks import has_plain_bytes, native, number, require, takes_run, unmasked_samples
from mpizero._util.pytree import map_leaves, paths_of
from mpizero.errors import DataError
from mpizero.kernels import cpu
from mpizero.types import EVALUATE, Array, Run

#: Share of the samples that :meth:`Source.split` takes for validation by default.
VALIDATION = 0.05
#: Key of the permutation that chooses validation samples; part of the format of a run, never to be changed.
SPLIT_SEED = 0x5EED

Indices = NDArray[np.int64]


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
    done = 0
    while done < order.size:
        epoch, inside = divmod(start + done, length)
        count = min(order.size - done, length - inside)
        part = order[done : done + count]
        part -= epoch * length
        cpu.random.permutation(part, length, seed, epoch)
        done += count
    return order


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
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return values that identify the data, such as names, sizes and dtypes, without reading all of the data."""

    def contents(self) -> dict[str, Any]:
        """Return what tells these data from changed ones, for a run that goes on later, without reading all of them.

        ``files`` has a name, a size in bytes and a time of change in nanoseconds for each file; anything else must be
        equal then. Here it is nothing: some samples are compared only.
        """
        return {}

    def origin(self, indices: Indices) -> Indices:
        """Return the indices, in the original source before any split, of the samples ``indices`` of this source."""
        return indices

    def sample_order(self, start: int, stop: int, length: int, seed: int) -> Indices:
        """Return the indices at positions ``start:stop`` of the endless shuffled order of the first ``length`` samples.

        Positions ``e * length`` to ``(e + 1) * length - 1`` must be a permutation of these samples, the same on every
        rank. Here it is that of :func:`sample_order`.
        """
        return sample_order(start, stop, length, seed)

    @property
    def block_samples(self) -> int:
        """Number of neighbouring samples that are stored together, so that reading one costs as much as reading all."""
        return 1

    @property
    def in_page_cache(self) -> bool:
        """Tell whether the kernel keeps the samples that were read in memory anyway, one copy a node."""
        return False

    @cached_property
    def takes_run(self) -> bool:  # used for every batch, and reading signatures is slow
        """True if :meth:`read` has a parameter ``run``."""
        return takes_run(self.read, f"{type(self).__name__}.read", "indices")

    def samples(self, indices: ArrayLike, *, run: Run | None = None) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``.

        Every array has the samples on its first axis, in this machine's byte order. Indices may repeat. An empty list
        gives arrays without samples. ``run`` is passed to :meth:`read` if it has such a parameter.

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
        keywords = {"run": run or Run(count=wanted.size)} if self.takes_run else {}
        found = self.read(wanted, **keywords)
        leaves = self._checked_leaves(found, len(wanted))
        if all(has_plain_bytes(leaf) for leaf in leaves if isinstance(leaf, np.ndarray)):
            return found
        x, y = map_leaves(lambda leaf: native(leaf) if isinstance(leaf, np.ndarray) else leaf, found)
        return x, y

    def _checked_leaves(self, found: Any, count: int) -> list[Any]:
        """Return the leaves of what :meth:`read` returned, which must be a pair of trees of ``count`` samples."""
        source: Source = self
        while isinstance(source, Subset):  # which reads from another source
            source = source.source
        kind = type(source).__name__
        if not isinstance(found, tuple | list) or len(found) != 2:
            got = (
                f"a {type(found).__name__} of {len(found)}" if isinstance(found, tuple | list) else type(found).__name__
            )
            raise DataError(f"{kind}.read must return the pair (x, y), it returned {got}")
        leaves = []
        for path, values in paths_of(**dict(zip("xy", found, strict=True))):
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
        share = self.default_validation if validation is None else validation
        require("validation", share, number(below=1.0, what="a share of the samples"))
        held = max(1, round(share * len(self))) if share else 0
        if held >= len(self):
            raise DataError(
                f"validation={share} of {len(self)} samples holds {held} back and leaves none to train on: "
                "give more data or a smaller share"
            )
        return Subset(self, 0, len(self) - held), Subset(self, len(self) - held, len(self))


class Subset(Source):
    """Provide the samples at positions ``start:stop`` of a source.

    Positions are counted in the source's own order if ``in_order`` is true, otherwise in the order of a fixed random
    permutation of all its samples.

    Parameters
    ----------
    source : Source
        The source that holds the samples.
    start, stop : int
        Range of positions.

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
        self.source = source
        self.start = start
        self.stop = stop
        self.in_order = source.in_order
        self.default_validation = source.default_validation

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, indices: Indices, *, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        keywords: dict[str, Any] = {"run": run} if self.takes_run else {}
        return self.source.read(self._places(indices), **keywords)

    @cached_property
    def takes_run(self) -> bool:
        """True if :meth:`read` of the source that holds the samples has a parameter ``run``."""
        return self.source.takes_run

    def origin(self, indices: Indices) -> Indices:
        """Return the indices, in the original source before any split, of the samples ``indices`` of this source."""
        return self.source.origin(self._places(indices))

    def sample_order(self, start: int, stop: int, length: int, seed: int) -> Indices:
        """Return the indices at positions ``start:stop`` of the order that the other source has for so many samples."""
        return self.source.sample_order(start, stop, length, seed)

    @property
    def block_samples(self) -> int:
        """Number of samples that the other source stores together."""
        return self.source.block_samples

    @property
    def in_page_cache(self) -> bool:
        """Tell whether the kernel keeps the samples of the other source in memory."""
        return self.source.in_page_cache

    def _places(self, indices: Indices) -> Indices:
        places = indices + self.start
        if not self.in_order:
            cpu.random.permutation(places, len(self.source), SPLIT_SEED, 0)
        return places

    def describe(self) -> dict[str, Any]:
        """Return the range of positions and the fingerprint of the source that holds the samples."""
        return {"subset": (self.start, self.stop), "of": self.source.fingerprint}

    def contents(self) -> dict[str, Any]:
        """Return what identifies the contents of the other source."""
        return self.source.contents()


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
