"""Add the name of the block or layer in which an error occurred to the error's message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.errors import CollectiveError, MpizeroError, PeerFailure


def call_located(kind: str, name: str, method: Callable[..., Any], *args: Any) -> Any:
    """Call ``method(*args)`` and add the block's or layer's name to any error that it raises.

    ``kind`` is "block" or "layer", and ``name`` is its name in the model. Collective where the method is.
    """
    try:
        return method(*args)
    except Exception as error:
        add_location(error, kind, name, method)
        raise


def add_location(error: Exception, kind: str, name: str, method: Callable[..., Any]) -> None:
    """Add the name of the block or layer in which an error occurred to the error itself.

    An error class of mpizero begins its message with the name; any other exception gets a note (``add_note``). Errors
    of communication (:class:`CollectiveError`, :class:`PeerFailure`) stay as they are, because no layer caused them.
    Not collective. Call this function in an ``except`` clause where a call of :func:`call_located` for every layer of
    every micro-batch would cost too much: a ``try`` statement that meets no error costs nothing.
    """
    if isinstance(error, CollectiveError | PeerFailure):
        return
    if isinstance(error, MpizeroError):
        error.place = ", ".join(filter(None, [f"{kind} {name!r}", error.place]))
    else:
        layer = type(getattr(method, "__self__", None)).__name__
        error.add_note(f"In {kind} {name!r}: {layer}.{getattr(method, '__name__', '')}")
