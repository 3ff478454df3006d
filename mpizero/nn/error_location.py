"""Add the name of the block or layer in which an error occurred to the error's message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.errors import CollectiveError, MpizeroError, PeerFailure


def call_located(kind: str, name: str, method: Callable[..., Any], *args: Any) -> Any:
    """Return ``method(*args)``, and add the block's or layer's name to any error that it raises.

    ``kind`` is "block" or "layer", and ``name`` is its name in the model. Collective where the method is.
    """
    try:
        return method(*args)
    except Exception as error:
        add_location(error, kind, name, method)
        raise


def add_location(error: Exception, kind: str, name: str, method: Callable[..., Any]) -> None:
    """Add the name of the block or layer in which an error occurred to the error itself.

    The message of an mpizero error then begins with the name; any other exception gets a note (``add_note``). Errors of
    communication (:class:`CollectiveError`, :class:`PeerFailure`) are not changed, because no layer caused them. Not
    collective. Call this function in an ``except`` clause where it would cost too much to call :func:`call_located` for
    every layer of every micro-batch; a ``try`` statement without an error costs nothing.
    """
    if isinstance(error, CollectiveError | PeerFailure):
        return
    place = f"{kind} {name!r}" if name else ""  # a model of one block may give it no name
    if isinstance(error, MpizeroError):
        error.place = ", ".join(filter(None, [place, error.place]))
    else:
        owner = getattr(method, "__self__", None)
        layer = type(getattr(owner, "stands_for", owner)).__name__
        error.add_note(f"In {place or 'the model'}: {layer}.{getattr(method, '__name__', '')}")
