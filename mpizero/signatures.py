"""Find out which arguments a user's function is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpizero.errors import ConfigError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def writes_in_place(model: Any) -> bool:
    """Tell whether a black box writes its gradients into arrays that it is given, instead of returning them."""
    return getattr(model, "in_place", False) is True


def loss_arguments(*, in_place: bool) -> tuple[str, ...]:
    """Return the names of the positional arguments that a black box's ``loss_and_grad`` is called with."""
    return ("parameters", "batch", "gradients") if in_place else ("parameters", "batch")


def takes_run(function: Callable[..., Any], name: str, *given: str) -> bool:
    """Tell whether a function called with positional arguments named ``given`` also accepts the keyword ``run``.

    ``run`` is a :class:`mpizero.types.Run`.

    ``name`` is the name of the function in error messages. The result is False for a function without a readable
    signature (compiled code). For a decorated function it is True only if both the function itself and the decorator's
    wrapper accept ``run``.

    Raises
    ------
    ConfigError
        If the function cannot be called with as many positional arguments as ``given`` names.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    outer = signature
    with suppress(TypeError, ValueError):  # of a decorator in compiled code
        outer = inspect.signature(function, follow_wrapped=False)
    found = list(signature.parameters.values())
    first = [parameter.name for parameter in found[: len(given)] if parameter.kind in _POSITIONAL]
    own = signature.parameters.get("run")
    takes = own is not None and own.kind in (own.KEYWORD_ONLY, own.POSITIONAL_OR_KEYWORD) and "run" not in first
    if takes:
        with suppress(TypeError):
            outer.bind(*given, run=None)
            return True
    try:
        outer.bind(*given)
    except TypeError as error:
        called = getattr(function, "__qualname__", name).rpartition("<locals>.")[2]
        raise ConfigError(
            f"{name} is called as {name}({', '.join(given)}), or with run=... as well where it takes that, but it is "
            f"{called}{outer}: {error}"
        ) from None
    return False


def named(function: Any, name: str) -> str:
    """Return ``name``, followed by the function's own name, file and line if they are known. Not collective."""
    function = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial, or decorated
    code, own = getattr(function, "__code__", None), getattr(function, "__qualname__", name)
    if code is None:
        return name
    own = own.rpartition("<locals>.")[2]
    place = f"{own} at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return place if own == name else f"{name} ({place})"
