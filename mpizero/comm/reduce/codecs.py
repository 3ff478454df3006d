"""Compress float32 values for messages: to 16 bits, to 8 bits with one scale for each block, or by top-k.

[Note: error feedback] With eight bits or top-k a message leaves out much of a gradient. The sender keeps the difference
(the residual) and adds it to its next message, so that every part is sent in the end (Seide et al. 2014, *1-bit
stochastic gradient descent*; Karimireddy et al. 2019, *Error feedback fixes SignSGD*; for top-k Stich et al. 2018,
*Sparsified SGD with memory*, Alistarh et al. 2018, *The convergence of sparsified gradient methods*). Up to rounding,
the sum of all messages plus the residual equals the sum of all gradients.
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

#: Bytes of one value of a top-k message with its index, and the share of values from which on top-k saves no bytes.
_PICKED, _MOST = 8, 0.5
#: Number of counters that the kernel needs to find the largest values.
_COUNTERS = 2048


class Codec(ABC):
    """Compress float32 values for messages; the number of bytes depends only on the number of values.

    Attributes
    ----------
    feedback : bool
        Whether :meth:`encode` needs a residual.
    """

    feedback: ClassVar[bool] = True

    @property
    def overflows(self) -> bool:
        """True if :meth:`encode` can turn large finite values into infinities."""
        return False

    @abstractmethod
    def packed(self, count: int) -> int:
        """Return the number of bytes of a message of ``count`` values: a multiple of 2, or of 4 if ``feedback``."""

    @abstractmethod
    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Write ``values + residual``, compressed, to ``message``; store the part that is left out in ``residual``.

        Parameters
        ----------
        values : 1-D float32 array
            The values to send.
        residual : 1-D float32 array
            The part that earlier messages have left out; as long as ``values``, or empty without feedback. Overwritten.
        message : 1-D uint8 array
            Receives ``packed(values.size)`` bytes.
        """

    @abstractmethod
    def decode(self, message: Array, out: Array) -> None:
        """Write the values of ``message`` to ``out``, a float32 array with one element for each value."""


@dataclass(frozen=True)
class HalfPrecision(Codec):
    """Round values to 16 bits, without feedback.

    Attributes
    ----------
    name : {"bfloat16", "float16"}
        The 16-bit format.
    """

    name: str
    feedback: ClassVar[bool] = False

    @property
    def overflows(self) -> bool:
        """True for float16, in which values of magnitude 65,520 and more become infinite."""
        return self.name == "float16"

    def packed(self, count: int) -> int:
        """Return the number of bytes of a message of ``count`` values: two for each."""
        return 2 * count

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Round each value to the nearest 16-bit number, ties to even; ``residual`` is not used."""
        getattr(kernels.backend(values).copy, f"to_{self.name}")(values, message.view(np.uint16))

    def decode(self, message: Array, out: Array) -> None:
        """Convert the 16-bit numbers to float32, which is exact."""
        getattr(kernels.backend(out).copy, f"from_{self.name}")(message.view(np.uint16), out)


@dataclass(frozen=True)
class EightBits(Codec):
    """Round values to 8-bit integers, with one float32 scale for each block of 256 values."""

    def packed(self, count: int) -> int:
        """Return the bytes of a message of ``count`` values: 4 a block and 1 a value, rounded up to a multiple of 4."""
        return 4 * (-(-count // BLOCK) + -(-count // 4))

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Divide each block of ``values + residual`` by a scale, and round to the nearest integer, ties to even.

        The scale is computed from the largest magnitude in the block. The rounding errors are stored in ``residual``.
        """
        scales, codes = self._parts(message, values.size)
        message[scales.nbytes + codes.size :] = 0  # never send uninitialized bytes
        kernels.backend(values).compression.int8_encode(values, residual, scales, codes)

    def decode(self, message: Array, out: Array) -> None:
        """Multiply the integers in ``message`` by the scales of their blocks, and write the products to ``out``."""
        kernels.backend(out).compression.int8_decode(*self._parts(message, out.size), out)

    @staticmethod
    def _parts(message: Array, count: int) -> tuple[Array, Array]:
        end = 4 * -(-count // BLOCK)
        return message[:end].view(np.float32), message[end : end + count].view(np.int8)


@dataclass(frozen=True)
class TopK(Codec):
    """Send only the values of largest magnitude, exactly, with their indices.

    Attributes
    ----------
    share : float
        The share of the values that is sent, rounded up to a whole number of values. It must be less than 1/2: with a
        larger share, the values and their indices take more bytes than all values without indices.
    """

    share: float

    def __post_init__(self) -> None:
        """Raise ConfigError if ``share`` is not above 0 and below 1/2."""
        if not 0 < self.share < _MOST:
            raise ConfigError(
                f"gradient_compression='topk:{self.share:g}': expected a share above 0 and below {_MOST:g} of "
                "the values; from there on a value with its index takes more bytes than all values do"
            )

    def kept(self, count: int) -> int:
        """Return how many of ``count`` values are sent."""
        return math.ceil(count * self.share)

    def packed(self, count: int) -> int:
        """Return the number of bytes of a message of ``count`` values: eight for each value that is sent."""
        return _PICKED * self.kept(count)

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Write the values of largest magnitude of ``values + residual`` to ``message``, the others to ``residual``."""
        indices, largest = self._parts(message)
        counters = np.empty(_COUNTERS, np.int64)
        kernels.backend(values).compression.top_encode(values, residual, counters, indices, largest)

    def decode(self, message: Array, out: Array) -> None:
        """Write the values of ``message`` to ``out`` at their indices, and zeros to all other elements of ``out``."""
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
    """Return the codec for a value of ``ShardingConfig.gradient_compression``; None, no compression, for None.

    Raises
    ------
    ConfigError
        If ``name`` is not a known compression.
    """
    if name is None:
        return None
    known = {"bf16": HalfPrecision("bfloat16"), "fp16": HalfPrecision("float16"), "int8": EightBits()}
    text = name if isinstance(name, str) else ""
    if text in known:
        return known[text]
    kind, _, share = text.partition(":")
    if kind == "topk" and (number := _number(share)) is not None:
        return TopK(number)
    raise ConfigError(
        f"gradient_compression={name!r}: expected None, 'bf16', 'fp16', 'int8', or 'topk:SHARE' with the share of the "
        "values that is sent, such as 'topk:0.01'"
    )
