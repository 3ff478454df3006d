"""Parse signatures of kernels such as ``"void(const T[:,::1], T[::1], i8)"``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_PARAMETER = re.compile(r"\s*(const\s+)?(T|[iuf][1248])(\[\s*(?::\s*,\s*)*:(?::1)?\s*\])?\s*")
_SIGNATURE = re.compile(r"\s*(void|bool|i8|f8)\s*\((.*)\)\s*", re.DOTALL)
_SCALARS = ("i8", "u8", "i4", "u4", "f8", "f4")


@dataclass(frozen=True)
class Parameter:
    """Describe one parameter of a kernel: a scalar or an array.

    Attributes
    ----------
    dtype : str
        Type of the scalar or of the elements, such as "f4" or "i8", or "T" for float32 or float64.
    ndim : int
        Number of axes; 0 for a scalar.
    readonly : bool
        Whether the kernel only reads the array.
    strided : bool
        Whether the array may have any strides; otherwise it must be C-contiguous.
    """

    dtype: str
    ndim: int
    readonly: bool
    strided: bool = False

    def resolve(self, template: str) -> Parameter:
        """Return this parameter with dtype ``template`` if its dtype is "T", otherwise unchanged."""
        return replace(self, dtype=template) if self.dtype == "T" else self

    def accepts(self, value: Any) -> bool:
        """Tell whether ``value`` can be passed for this parameter, whose dtype must not be "T"."""
        if self.ndim == 0:
            whole = isinstance(value, (int, np.integer))
            return whole or (self.dtype[0] == "f" and isinstance(value, (float, np.floating)))
        if not isinstance(value, np.ndarray) or value.dtype != np.dtype(self.dtype) or value.ndim != self.ndim:
            return False
        flags = value.flags
        ordered = self.strided or flags.c_contiguous
        return ordered and flags.aligned and (self.readonly or flags.writeable)

    def __str__(self) -> str:
        if self.ndim == 0:
            return f"a scalar of type {self.dtype}"
        words = ([] if self.strided else ["C-contiguous"]) + ([] if self.readonly else ["writable"])
        return f"a {' '.join(words)} {np.dtype(self.dtype).name} array of {self.ndim} dimension(s)"


@dataclass(frozen=True)
class Signature:
    """Hold the type of a kernel's result ("void", "bool", "i8" or "f8") and its parameters."""

    result: str
    parameters: tuple[Parameter, ...]

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Parse the text of a signature; raise ValueError if it is malformed.

        ``T`` in the text stands for float32 or float64; ``const`` marks arrays that the kernel only reads. ``T[:,:]``
        may have any strides, ``T[:,::1]`` is C-contiguous.
        """
        if (whole := _SIGNATURE.fullmatch(text)) is None:
            raise ValueError(f"kernel signature {text!r}: expected 'void(const T[::1], T[:,::1], i8, ...)'")
        parameters = []
        for part in re.split(r",(?![^\[]*\])", whole[2]) if whole[2].strip() else []:
            if (match := _PARAMETER.fullmatch(part)) is None:
                raise ValueError(f"kernel signature {text!r}: cannot read parameter {part.strip()!r}")
            const, dtype, brackets = match.groups()
            ndim = brackets.count(",") + 1 if brackets else 0
            if ndim == 0 and dtype not in _SCALARS:
                raise ValueError(f"kernel signature {text!r}: scalars are one of {', '.join(_SCALARS)}, not {dtype!r}")
            parameters.append(Parameter(dtype, ndim, const is not None, ndim > 0 and "::1" not in brackets))
        return cls(whole[1], tuple(parameters))

    @property
    def template(self) -> int | None:
        """Index of the first parameter of type "T"; None if there is none."""
        return next((i for i, p in enumerate(self.parameters) if p.dtype == "T"), None)

    def resolve(self, dtype: str) -> Signature:
        """Return this signature with ``dtype`` in place of "T"."""
        return Signature(self.result, tuple(p.resolve(dtype) for p in self.parameters))
