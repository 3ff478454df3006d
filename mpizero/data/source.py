"""Define the base class of sources of samples, and the split that keeps samples for validation."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpizero.errors import DataError
from mpizero.kernels import cpu
from mpizero.sampletree import paths_of
from mpizero.signatures import takes_run
from mpizero.types import EVALUATE, Array, Run
from mpizero.validation import number, require

#: Share of the samples that :meth:`Source.split` keeps back by default.
VALIDATION = 0.05
#: Key of the permutation that chooses validation samples; part of the format of a run, never to be changed.
SPLIT_SEED = 0x5EED

Indices = NDArray[np.int64]


class Source(ABC):
    """Provide numbered samples ``(x, y)``, the same on every rank; they are read when they are requested.

    ``x`` and ``y`` are arrays with samples on the first axis, or trees of such arrays: tuples, lists, dictionaries and
    dataclasses, nested or not, of the same structure in every call.

    A source whose :meth:`read` has a parameter ``run`` gets by that keyword what samples are read for, so that it may
    change them at random, the same on any ranks: ``run.epoch``, ``run.step`` (the number of the global batch),
    ``run.samples`` (their indices in the global batch), ``run.seed`` (that of the sample order), and ``run.training``.
    Key random numbers by sample, for example by ``(run.seed, run.epoch, index)``, not by call: ranks read other parts.
    Outside of :func:`~mpizero.data.batches`, ``run.training`` is False.

    ``default_validation`` is the share that :meth:`split` keeps back without an argument. ``in_order`` says that
    neighbouring samples belong together (text), so that a split takes the last samples and not a random choice.
    """

    default_validation: float = VALIDATION
    in_order: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples of valid indices, in that order. Not collective."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what distinguishes this data from other data (names, sizes, types), unread. Not collective."""

    def origin(self, indices: Indices) -> Indices:
        """Return the numbers that samples have in the data as they were given, before any split. Not collective."""
        return indices

    @cached_property
    def takes_run(self) -> bool:  # used for every batch, and reading signatures is slow
        """True if :meth:`read` has a parameter ``run``."""
        return takes_run(self.read, f"{type(self).__name__}.read", "indices")

    def samples(self, indices: ArrayLike, *, run: Run | None = None) -> tuple[Any, Any]:
        """Return the samples of ``indices``, in that order: ``(x, y)``, every array with samples on its first axis.

        Not collective. Indices may repeat; an empty list gives arrays with no samples.

        Raises
        ------
        DataError
            An index that is not in ``range(len(source))``, or :meth:`read` returns another number of samples.
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
        self._check_read(found, len(wanted))
        return found

    def _check_read(self, found: Any, count: int) -> None:
        source: Source = self
        while isinstance(source, Subset):  # which reads from another source
            source = source.source
        kind = type(source).__name__
        if not isinstance(found, tuple | list) or len(found) != 2:
            got = (
                f"a {type(found).__name__} of {len(found)}" if isinstance(found, tuple | list) else type(found).__name__
            )
            raise DataError(f"{kind}.read must return the pair (x, y), it returned {got}")
        for path, values in paths_of(**dict(zip("xy", found, strict=True))):
            shape = getattr(values, "shape", None)
            if shape is not None and (not shape or shape[0] != count):
                raise DataError(
                    f"{kind}.read was asked for {count} samples and returned {path} of shape {tuple(shape)}: expected "
                    "one sample for each index, in that order, on the first axis"
                )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of :meth:`describe`: equal on all ranks, or they would train on different data."""
        return hashlib.sha256(repr(sorted(self.describe().items())).encode()).hexdigest()

    def split(self, validation: float | None = None) -> tuple[Source, Source]:
        """Return ``(train, valid)``: disjoint, together everything, and the same in every run on any ranks.

        Not collective. ``round(validation * len(source))`` samples are kept back, at least one: the last ones where
        neighbours belong together (text), otherwise a choice that depends on the number of samples alone. A share of 0
        keeps nothing back.

        Raises
        ------
        ConfigError
            A share outside [0, 1).
        DataError
            Too few samples to leave one on both sides.
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
    """Select the samples ``start:stop`` of a source, in its own order or in the order of the split's permutation.

    Parameters
    ----------
    source : Source
        The source of the samples.
    start, stop : int
        Range of places in that order.
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
        """Return the samples of valid indices, in that order. Not collective."""
        keywords: dict[str, Any] = {"run": run} if self.takes_run else {}
        return self.source.read(self._places(indices), **keywords)

    @cached_property
    def takes_run(self) -> bool:
        """True if the source that this is a part of takes ``run``."""
        return self.source.takes_run

    def origin(self, indices: Indices) -> Indices:
        """Return the numbers that samples have in the data as they were given. Not collective."""
        return self.source.origin(self._places(indices))

    def _places(self, indices: Indices) -> Indices:
        places = indices + self.start
        if not self.in_order:
            cpu.random.permutation(places, len(self.source), SPLIT_SEED, 0)
        return places

    def describe(self) -> dict[str, Any]:
        """Return what distinguishes this data from other data. Not collective."""
        return {"subset": (self.start, self.stop), "of": self.source.fingerprint}


def check_samples(values: Array, name: str) -> Array:
    """Return ``values`` if they can be samples: numbers, the first axis not empty; ``name`` goes into the error."""
    if values.dtype.kind not in "fiub":
        raise DataError(f"{name}: elements of type {values.dtype}; needed are real numbers (float, integer or bool)")
    if values.ndim == 0:
        raise DataError(f"{name}: a single number; needed is an array with samples on its first axis")
    if values.shape[0] == 0:
        raise DataError(f"{name}: shape {values.shape} has no samples")
    return values


def check_lengths(x: Array, x_name: str, y: Array, y_name: str) -> None:
    """Reject inputs and targets of different number."""
    if len(x) != len(y):
        raise DataError(f"{x_name} has {len(x)} samples and {y_name} has {len(y)}: needed is one target for each input")


def native(values: Array) -> Array:
    """Return ``values`` contiguous and in this machine's byte order."""
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
