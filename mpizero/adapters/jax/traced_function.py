"""Call a user's function of JAX arrays, and explain the errors that it raises while JAX traces it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from mpizero._util.text import users_line
from mpizero.errors import ConfigError, UnsupportedError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
#: What to write in place of Python's own constructs, by the errors of JAX that these raise.
_INSTEAD = (
    (jax.errors.TracerArrayConversionError, "compute with jax.numpy in place of numpy"),
    (jax.errors.TracerBoolConversionError, "choose by jax.numpy.where or jax.lax.cond in place of if and while"),
    (jax.errors.TracerIntegerConversionError, "take a size or an index from a shape, or use jax.lax.dynamic_slice"),
    (jax.errors.NonConcreteBooleanIndexError, "multiply by the mask, or use jax.numpy.where with three arguments"),
    (jax.errors.UnexpectedTracerError, "return what is computed, in place of keeping it in a variable outside"),
    (jax.errors.ConcretizationTypeError, "keep values as arrays: return them without float() and int()"),
)
#: Part of the note that JAX adds to every error, which tells no more than that it left lines out.
_FILTERED = "JAX has removed its internal frames"


class TracedFunction:
    """Hold a user's function, and whether it takes a random key after its other arguments.

    Parameters
    ----------
    function : callable
        The function. It takes a key if it has a parameter ``key``, or one positional parameter more than ``given``
        names.
    name : str
        Name of the argument that the user gave it as, for messages.
    given : str
        Names of the arguments that it is called with.

    Raises
    ------
    ConfigError
        If it is not callable, or cannot be called with these arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str, *given: str) -> None:
        if not callable(function):
            raise ConfigError(f"{name} must be a function {name}({', '.join(given)}), got {function!r:.80}")
        self.function, self.name = function, name
        self._by_name, self._by_place = _takes_key(function, name, given)

    @property
    def takes_key(self) -> bool:
        """Tell whether the function takes a key."""
        return self._by_name or self._by_place

    @property
    def shown(self) -> str:
        """The function's name, file and line, for messages."""
        function = inspect.unwrap(getattr(self.function, "func", self.function))
        code = getattr(function, "__code__", None)
        if code is None:
            return self.name
        own = getattr(function, "__qualname__", self.name).rpartition("<locals>.")[2]
        place = f"{own} at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
        return place if own == self.name else f"{self.name} ({place})"

    def __call__(self, *arguments: Any, key: Any) -> Any:
        """Return what the function returns; ``key`` is passed on if it takes one."""
        if self._by_name:
            return self.function(*arguments, key=key)
        return self.function(*arguments, key) if self._by_place else self.function(*arguments)

    @contextmanager
    def traced(self, *, without_key: bool = False) -> Iterator[None]:
        """Explain the errors that JAX raises for the function inside of the context.

        ``without_key`` tells that the function is given None for its key, as in ``evaluate``.

        Raises
        ------
        UnsupportedError
            If the function does something that JAX cannot trace. The message names the line and the way out.
        """
        try:
            yield
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            line, told = users_line(error.__traceback__), str(error).strip().split("\n")[0]
            instead = next((way for kind, way in _INSTEAD if isinstance(error, kind)), "see the error's own text")
            where = "" if line is None else f", {line}"
            told = told.rstrip(".")
            raise UnsupportedError(f"{self.shown}{where}: JAX cannot trace it: {told}; {instead}") from error
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if _FILTERED not in note]
            if without_key and self.takes_key:
                error.add_note(f"{self.name}'s key is None in evaluate and predict: let it leave dropout out then")
            raise


def _takes_key(function: Callable[..., Any], name: str, given: tuple[str, ...]) -> tuple[bool, bool]:
    """Return whether a function takes a key by its name, and whether as its last positional argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False, False
    own = signature.parameters.get("key")
    calls: list[tuple[tuple[str, ...], dict[str, Any]]] = [(given, {}), ((*given, "key"), {})]
    if own is not None and own.kind in (own.KEYWORD_ONLY, own.POSITIONAL_OR_KEYWORD):
        calls.insert(0, (given, {"key": None}))
    for arguments, keywords in calls:
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as found:
            error = found
        else:
            return bool(keywords), len(arguments) > len(given)
    called = getattr(function, "__qualname__", name).rpartition("<locals>.")[2]
    raise ConfigError(
        f"{name} is called as {name}({', '.join(given)}), or with key= as well where it takes that, but it is "
        f"{called}{signature}: {error}"
    )
