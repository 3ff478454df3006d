"""Select names by shell patterns; a pattern that selects nothing is an error, because it is probably misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from mpizero.errors import ConfigError
from mpizero.names import nearest


def fits(name: str, pattern: str) -> bool:
    """Tell whether a name matches a shell pattern, or equals the pattern.

    The second case is needed because names such as ``w[0]`` look like patterns.
    """
    return name == pattern or fnmatchcase(name, pattern)


def as_patterns(where: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return patterns as a tuple: one text is one pattern, None is none.

    Raises :class:`ConfigError` if something else is given; ``where`` is the argument's name for the message.
    """
    if given is None:
        return ()
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if odd := [pattern for pattern in patterns if not isinstance(pattern, str) or not pattern]:
        raise ConfigError(f'{where}={odd[0]!r:.80}: expected patterns of names, such as ["encoder.*", "*.bias"]')
    return patterns


def selected(names: Sequence[str], where: str, patterns: Sequence[str], what: str = "parameter") -> list[str]:
    """Return the names that fit one of the patterns, in their order.

    Raises
    ------
    ConfigError
        A pattern fits no name. The message has ``where`` (the argument's name), the pattern, and a name that is like
        it; ``what`` says what the names are of.
    """
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            below = [name for name in names if name.startswith(f"{pattern}.")]
            hint = f" (did you mean {pattern + '.*'!r}?)" if below else nearest(pattern, names)
            shown = "" if hint else f"; there are {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            raise ConfigError(f"{where}: {pattern!r} fits the name of no {what}{hint}{shown}")
    return [name for name in names if any(fits(name, pattern) for pattern in patterns)]
