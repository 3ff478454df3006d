"""Call layers such that an error names its place in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.errors import CollectiveError, MpizeroError, PeerFailure


def call_located(kind: str, name: str, method: Callable[..., Any], *args: Any) -> Any:
    """Return ``method(*args)``; an error of a layer says in which "block" or "layer", the kind, of that name.

    Collective where the layer is.
    """
    try:
        return method(*args)
    except Exception as error:
        add_location(error, kind, name, method)
        raise


def add_location(error: Exception, kind: str, name: str, method: Callable[..., Any]) -> None:
    """Note the place of an error in it: one of this package begins with the place, any other gets a note.

    Not collective. Errors of the ranks, not of the model, stay as they are. Use it where :func:`call_located` would run
    for every layer of every micro-batch: a ``try`` that meets no error costs nothing.
    """
    if isinstance(error, CollectiveError | PeerFailure):
        return
    if isinstance(error, MpizeroError):
        error.place = ", ".join(filter(None, [f"{kind} {name!r}", error.place]))
    else:
        layer = type(getattr(method, "__self__", None)).__name__
        error.add_note(f"In {kind} {name!r}: {layer}.{getattr(method, '__name__', '')}")
