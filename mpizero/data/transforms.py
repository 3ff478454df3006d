"""Change samples when they are read, at random or not, by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpizero._util.checks import unmasked_samples
from mpizero._util.fingerprint import Fingerprint
from mpizero._util.names import explains
from mpizero._util.pytree import join, map_leaves, paths_of
from mpizero.data.source import Indices, Source
from mpizero.errors import ConfigError, DataError
from mpizero.kernels import cpu
from mpizero.types import EVALUATE, Array, Run

#: Part of the key of the random numbers, so that they differ from all others of the same seed; never to be changed.
_PURPOSE = 0x7A45


class SampleRandom:
    """Draw the random numbers of one sample in one epoch, one after the other.

    They are computed by Philox from the seed of the sample order, the epoch and the number of the sample in the data,
    so they do not depend on the ranks, the batch, or on what was drawn for other samples.

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
        words = np.empty(4, np.uint32)
        counter = np.array([epoch & 0xFFFFFFFF, epoch >> 32, _PURPOSE, 0], np.uint32)
        cpu.random.philox(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), words)
        self._key = (int(words[0]), int(words[1]))
        self._sample, self._blocks = sample, 0

    def uniform(
        self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = (), dtype: DTypeLike = np.float64
    ) -> Array:
        """Return uniform random numbers on [low, high), float32 or float64."""
        out = np.empty(shape, dtype)
        bounds = (np.array([bound], out.dtype) for bound in (low, high))
        cpu.random.fill_uniform(*self._key, self._sample, self._advance(out), out.reshape(-1), *bounds)
        return out

    def normal(self, scale: float = 1.0, shape: tuple[int, ...] = (), dtype: DTypeLike = np.float64) -> Array:
        """Return normal random numbers of mean 0 and standard deviation ``scale``, float32 or float64."""
        out = np.empty(shape, dtype)
        scales = np.array([scale], out.dtype)
        cpu.random.fill_normal(*self._key, self._sample, self._advance(out), out.reshape(-1), scales)
        return out

    def integer(self, stop: int) -> int:
        """Return a random whole number from 0 to ``stop`` - 1."""
        return min(stop - 1, int(self.uniform() * stop))

    def _advance(self, out: Array) -> int:
        """Return the place in the sequence of the next unused number, and count the numbers of ``out`` as used.

        Two draws never share a block of Philox, which holds four numbers of float32 or two of float64.
        """
        if out.dtype not in (np.float32, np.float64):
            raise ConfigError(f"dtype={out.dtype}: expected float32 or float64")
        per = 16 // out.itemsize
        start = self._blocks * per
        self._blocks += -(-out.size // per)
        return start


@explains
class TransformedSource(Source):
    """Provide the samples of another source, changed by a function.

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
        if not isinstance(source, Source):
            raise DataError(f"TransformedSource: expected a source of samples, got {type(source).__name__}")
        if not callable(function):
            raise ConfigError(f"function={function!r}: expected a function of x, y and random")
        self.source, self.function = source, function
        self.in_order, self.default_validation = source.in_order, source.default_validation

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Indices, *, run: Run = EVALUATE) -> Any:
        """Return the changed samples ``(x, y)`` of ``indices``, in the order of ``indices``."""
        if not indices.size:  # the shapes of a changed sample are told by one
            return map_leaves(lambda leaf: leaf[:0], self.read(np.zeros(1, np.int64)))
        x, y = self.source.samples(indices, run=run)
        numbers = self.source.origin(indices).tolist()
        changed = []
        for place, number in enumerate(numbers):
            random = SampleRandom(run.seed, run.epoch, number) if run.training else None
            own_x, own_y = (map_leaves(itemgetter(place), tree) for tree in (x, y))
            one = self.function(own_x, own_y, random)
            if not isinstance(one, tuple | list) or len(one) != 2:
                raise DataError(f"{self.name} must return the pair (x, y), it returned a {type(one).__name__}")
            for path, leaf in paths_of(**dict(zip("xy", one, strict=True))):
                unmasked_samples(leaf, f"{self.name} returned {path}, which")
            changed.append(map_leaves(lambda leaf: np.asarray(leaf)[None], tuple(one)))
        try:
            return join(changed)
        except DataError as error:
            raise DataError(f"{self.name} returned different shapes for samples {numbers[:9]}: {error}") from None

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def origin(self, indices: Indices) -> Indices:
        """Return the indices, in the original source before any split, of the samples ``indices`` of this source."""
        return self.source.origin(indices)

    def sample_order(self, start: int, stop: int, length: int, seed: int) -> Indices:
        """Return the indices at positions ``start:stop`` of the order of the other source."""
        return self.source.sample_order(start, stop, length, seed)

    @property
    def block_samples(self) -> int:
        """Number of samples that the other source stores together."""
        return self.source.block_samples

    def describe(self) -> dict[str, Any]:
        """Return the fingerprints of the function, with the values that it uses, and of the other source."""
        return {"transformed by": Fingerprint().digest(self.function).hex(), "of": self.source.fingerprint}

    def contents(self) -> dict[str, Any]:
        """Return what identifies the contents of the other source."""
        return self.source.contents()
