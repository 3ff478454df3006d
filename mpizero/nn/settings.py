"""Check the settings that layers are made with."""

from __future__ import annotations

from typing import Any

from mpizero._util.checks import fraction, require, whole
from mpizero.errors import ConfigError
from mpizero.types import Init


def require_layer(where: str, layer: Any) -> None:
    """Raise :class:`ConfigError` unless ``layer`` is an instance (not a class) with a method ``specs``.

    ``where`` is the caller's name in the message.
    """
    if isinstance(layer, type) or not callable(getattr(layer, "specs", None)):
        raise ConfigError(f"{where} takes a layer, got {layer!r:.80}")


def require_init(where: str, init: Any) -> None:
    """Raise :class:`ConfigError` unless ``init`` is None or an :class:`~mpizero.types.Init`.

    ``where`` is the caller's name in the message.
    """
    if init is not None and not isinstance(init, Init):
        raise ConfigError(f'{where}: init={init!r} must be None or an mpizero.types.Init, such as Init("normal", 0.02)')


def require_positive(where: str, **values: int) -> None:
    """Raise :class:`ConfigError` for the first of ``values`` that is not a positive integer.

    The message names the caller (``where``) and the value's keyword.
    """
    for name, value in values.items():
        require(f"{where}: {name}", value, whole(1))


def require_rate(where: str, rate: float) -> None:
    """Raise :class:`ConfigError` unless 0 <= ``rate`` < 1, as a dropout rate must be; ``where`` names the caller."""
    require(f"{where}: dropout rate", rate, fraction)
