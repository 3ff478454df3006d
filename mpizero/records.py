"""Make frozen dataclasses whose comparison, hash and text are shared: each is compiled once and not for every class.

Before Python 3.13 ``dataclasses`` compiles each method of each class by itself. Of the 80 classes that a rank needs to
start, these three methods took a tenth of the time that mpizero adds to the start of Python. What is made is a
dataclass, from which users can derive dataclasses; fields with ``hash=`` are not known.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(kind: type | None = None, /, **options: Any) -> Any:
        """Make a class a dataclass, with the options of :func:`dataclasses.dataclass`."""
        if kind is None:
            return lambda kind: dataclass(kind, **options)
        if not options.get("frozen") or options.keys() - {"frozen", "kw_only"}:
            return dataclasses.dataclass(kind, **options)
        own = {name for name, value in vars(kind).items() if value is not None}
        made = dataclasses.dataclass(kind, **options | {"eq": False, "repr": False})
        names = [field.name for field in dataclasses.fields(made) if field.compare]
        # attrgetter makes a tuple of several fields only
        few = staticmethod(lambda self: tuple(getattr(self, name) for name in names))
        made._compared = attrgetter(*names) if len(names) > 1 else few
        for name, method in (("__eq__", _equal), ("__hash__", _hash), ("__repr__", _text)):
            if name not in own:
                setattr(made, name, method)
        return made


def _equal(self: Any, other: Any) -> bool:
    return self._compared(self) == other._compared(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))


@recursive_repr()
def _text(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"
