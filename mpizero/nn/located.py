"""Calls of layers whose errors say where in the model they arose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.errors import CollectiveError, MpizeroError, PeerFailure


def located(kind: str, name: str, method: Callable[..., Any], *args: Any) -> Any:
    """Return ``method(*args)``; an error of a layer says in which "block" or "layer", the kind, of that name.

    An error of this package begins with it, any other gets a note. Collective where the layer is.
    """
    try:
        return method(*args)
    except (CollectiveError, PeerFailure):  # of the ranks, not of the model
        raise
    except MpizeroError as error:
        error.place = ", ".join(filter(None, [f"{kind} {name!r}", error.place]))
        raise
    except Exception as error:
        layer = type(getattr(method, "__self__", None)).__name__
        error.add_note(f"In {kind} {name!r}: {layer}.{getattr(method, '__name__', '')}")
        raise
