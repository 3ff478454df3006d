"""Describe one sample of a simulation, and check, pack and unpack samples by this description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero._util.checks import native, unmasked_samples
from mpizero.data.source import check_samples
from mpizero.errors import ArgumentError, DataError
from mpizero.types import Array


@dataclass(frozen=True)
class Sample:
    """Hold one sample, and where it comes from.

    Attributes
    ----------
    producer : str
        The producer's rank or name.
    number : int
        Number of the sample among those of its producer; it ascends.
    x, y : numpy.ndarray
        Input and target, without an axis of samples.
    """

    producer: str
    number: int
    x: Array
    y: Array


@dataclass(frozen=True)
class SampleForm:
    """Hold shape and dtype of the input and the target of one sample.

    Attributes
    ----------
    x_shape, y_shape : tuple of int
        Shapes without an axis of samples.
    x_dtype, y_dtype : str
        NumPy's names of the dtypes.
    """

    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    x_dtype: str
    y_dtype: str

    @classmethod
    def like(cls, example: Any) -> SampleForm:
        """Return the form of ``example``, a pair ``(x, y)`` of arrays: one sample, of any values."""
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise ArgumentError(
                f"like={example!r:.80}: expected one sample, the pair (x, y) of arrays without an axis "
                "of samples, such as (np.zeros(3, np.float32), np.zeros(1, np.float32))"
            )
        x, y = _taken(example[0], "like: x"), _taken(example[1], "like: y")
        for name, part in (("x", x), ("y", y)):
            check_samples(part[None], f"like: {name}")
        return cls(x.shape, y.shape, x.dtype.str, y.dtype.str)

    @property
    def nbytes(self) -> int:
        """Number of bytes of one packed sample."""
        return sum(part.nbytes for part in self._empty())

    def _empty(self, count: int | None = None) -> tuple[Array, Array]:
        head = () if count is None else (count,)
        return np.empty(head + self.x_shape, self.x_dtype), np.empty(head + self.y_shape, self.y_dtype)

    def checked(self, x: Any, y: Any, where: str) -> tuple[Array, Array]:
        """Return ``x`` and ``y`` as contiguous arrays; raise DataError, which names ``where``, if they are wrong."""
        x, y = _taken(x, f"{where}: x"), _taken(y, f"{where}: y")
        for name, part, shape, dtype in ("x", x, self.x_shape, self.x_dtype), ("y", y, self.y_shape, self.y_dtype):
            if part.shape != shape or part.dtype != np.dtype(dtype):
                raise DataError(
                    f"{where}: {name} is {part.dtype} of shape {part.shape}; the samples of this run are "
                    f"{np.dtype(dtype)} of shape {shape}: convert it, or give all ranks another `like`"
                )
        return np.ascontiguousarray(x), np.ascontiguousarray(y)

    def pack(self, x: Array, y: Array, into: Array) -> None:
        """Write the bytes of a checked sample to the start of ``into``, an array of uint8."""
        data = x.tobytes() + y.tobytes()
        into[: len(data)] = np.frombuffer(data, np.uint8)

    def unpack(self, data: Array) -> tuple[Array, Array]:
        """Return a copy of the sample whose bytes are at the start of ``data``."""
        x, y = self._empty()
        raw = data.tobytes()
        x[...] = np.frombuffer(raw, x.dtype, x.size).reshape(x.shape)
        y[...] = np.frombuffer(raw, y.dtype, y.size, offset=x.nbytes).reshape(y.shape)
        return x, y

    def stack(self, samples: list[Sample], count: int) -> tuple[Array, Array]:
        """Return arrays of ``count`` samples on the first axis, with the values of ``samples`` if there are any."""
        x, y = self._empty(count)
        for place, sample in enumerate(samples):
            x[place], y[place] = sample.x, sample.y
        return x, y


def _taken(values: Any, what: str) -> Array:
    return native(np.asarray(unmasked_samples(values, what)))
