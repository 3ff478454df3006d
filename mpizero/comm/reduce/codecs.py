"""Send float32 values in fewer bytes: 16 bits, 8 bits with a scale a block, or the largest of them alone.

[Note: error feedback] Eight bits and top-k leave much of a gradient unsent. What a message has left out stays with the
sender and is added to its next message, so that everything is sent in the end (Seide et al. 2014, *1-bit stochastic
gradient descent*; Karimireddy et al. 2019, *Error feedback fixes SignSGD*; for the largest values Stich et al. 2018,
*Sparsified SGD with memory*, Alistarh et al. 2018, *The convergence of sparsified gradient methods*). To rounding, the
sum of all that was sent and of what is kept is the sum of all that was to be sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpizero import kernels
from mpizero.errors import ConfigError
from mpizero.kernels.formulas.compression import BLOCK
from mpizero.types import Array

#: Bytes of a value and its index among the largest, and the most of them that are still fewer than all values' bytes.
_PICKED, _MOST = 8, 0.5
#: Counters of the kernel that finds the largest values.
_COUNTERS = 2048


class Codec(ABC):
    """Pack float32 values; the packed bytes of ``count`` values depend on ``count`` alone.

    Attributes
    ----------
    feedback : bool
        Whether :meth:`encode` needs a residual.
    """

    feedback: ClassVar[bool] = True

    @property
    def overflows(self) -> bool:
        """True if finite values may become infinite in a message."""
        return False

    @abstractmethod
    def packed(self, count: int) -> int:
        """Return the bytes of ``count`` values: a multiple of two, of four with feedback."""

    @abstractmethod
    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Pack ``values + residual``; what is not packed becomes the residual.

        Parameters
        ----------
        values : 1-D float32 array
            What is to be sent.
        residual : 1-D float32 array
            What earlier messages have left out; as long as ``values``, or empty without feedback.
        message : 1-D uint8 array
            Receives ``packed(values.size)`` bytes.
        """

    @abstractmethod
    def decode(self, message: Array, out: Array) -> None:
        """Write what was packed into ``message``."""


@dataclass(frozen=True)
class HalfPrecision(Codec):
    """Values rounded to 16 bits, without feedback.

    Attributes
    ----------
    name : {"bfloat16", "float16"}
        The format.
    """

    name: str
    feedback: ClassVar[bool] = False

    @property
    def overflows(self) -> bool:
        """True if the largest values become infinite."""
        return self.name == "float16"

    def packed(self, count: int) -> int:
        """Two bytes a value."""
        return 2 * count

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Round to nearest even."""
        getattr(kernels.backend(values).copy, f"to_{self.name}")(values, message.view(np.uint16))

    def decode(self, message: Array, out: Array) -> None:
        """Widen, which is exact."""
        getattr(kernels.backend(out).copy, f"from_{self.name}")(message.view(np.uint16), out)


@dataclass(frozen=True)
class EightBits(Codec):
    """Eight bits a value, with a float32 scale for each block of 256 values."""

    def packed(self, count: int) -> int:
        """Four bytes a block, one a value, and up to three that fill the last four."""
        return 4 * (-(-count // BLOCK) + -(-count // 4))

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Scale by the largest magnitude of each block and round to nearest even."""
        scales, codes = self._parts(message, values.size)
        message[scales.nbytes + codes.size :] = 0  # nothing travels that was never written
        kernels.backend(values).compression.int8_encode(values, residual, scales, codes)

    def decode(self, message: Array, out: Array) -> None:
        """Multiply codes by scales."""
        kernels.backend(out).compression.int8_decode(*self._parts(message, out.size), out)

    @staticmethod
    def _parts(message: Array, count: int) -> tuple[Array, Array]:
        end = 4 * -(-count // BLOCK)
        return message[:end].view(np.float32), message[end : end + count].view(np.int8)


@dataclass(frozen=True)
class TopK(Codec):
    """The values of largest magnitude, exactly, with their indices; nothing of the others.

    Attributes
    ----------
    share : float
        How many of a message's values travel, rounded up; less than 1/2, from where on all of them would be shorter.
    """

    share: float

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        if not 0 < self.share < _MOST:
            raise ConfigError(
                f"gradient_compression='topk:{self.share:g}': expected a share above 0 and below {_MOST:g} of "
                "the values; from there on a value with its index takes more bytes than all values do"
            )

    def kept(self, count: int) -> int:
        """Return how many of ``count`` values travel."""
        return math.ceil(count * self.share)

    def packed(self, count: int) -> int:
        """Eight bytes for each of them."""
        return _PICKED * self.kept(count)

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Move the largest values out of the sum."""
        indices, largest = self._parts(message)
        counters = np.empty(_COUNTERS, np.int64)
        kernels.backend(values).compression.top_encode(values, residual, counters, indices, largest)

    def decode(self, message: Array, out: Array) -> None:
        """Put them at their places among zeros."""
        kernels.backend(out).compression.top_decode(*self._parts(message), out)

    @staticmethod
    def _parts(message: Array) -> tuple[Array, Array]:
        half = message.size // 2
        return message[:half].view(np.int32), message[half:].view(np.float32)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def codec_of(name: str | None) -> Codec | None:
    """Return what ``ShardingConfig.gradient_compression`` names.

    Raises
    ------
    ConfigError
        If there is no such compression.
    """
    if name is None:
        return None
    known = {"bf16": HalfPrecision("bfloat16"), "fp16": HalfPrecision("float16"), "int8": EightBits()}
    if name in known:
        return known[name]
    kind, _, share = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind == "topk" and (number := _number(share)) is not None:
        return TopK(number)
    raise ConfigError(
        f"gradient_compression={name!r}: expected None, 'bf16', 'fp16', 'int8', or 'topk:SHARE' with the share of the "
        "values that is sent, such as 'topk:0.01'"
    )
