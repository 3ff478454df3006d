"""Check the settings that all models share."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from mpizero.errors import ConfigError


def model_dtype(where: str, dtype: Any) -> np.dtype[Any]:
    """Return ``dtype`` as a NumPy dtype; :class:`ConfigError` unless it is float32 or float64."""
    for known in (np.dtype(np.float32), np.dtype(np.float64)):
        with contextlib.suppress(TypeError):  # NumPy's answer to names that it does not know
            if np.dtype(dtype) == known:
                return known
    raise ConfigError(f'{where}: dtype={dtype!r} is not supported; choose "float32" or "float64"')
