"""Make frozen dataclasses whose methods are shared: of each class only ``__init__`` is compiled, in one short function.

Before Python 3.13 ``dataclasses`` compiles each method of each class by itself. For the 80 classes that a rank needs to
start, that took a fifth of the time that mpizero adds to the start of Python. What is made is a dataclass, from which
users can derive dataclasses. Not supported: fields with ``hash=``, of type ``InitVar``, or named ``object``.
"""

from __future__ import annotations

import dataclasses
import sys
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
        # Python must make what derives from a frozen dataclass, and it knows default factories
        by_python = dataclasses.is_dataclass(kind) or any(isinstance(v, dataclasses.Field) for v in vars(kind).values())
        shared = {"eq": False, "repr": False, "init": by_python, "frozen": by_python}
        made = dataclasses.dataclass(kind, **options | shared)
        if not by_python:
            _freeze(made)
        names = [field.name for field in dataclasses.fields(made) if field.compare]
        # attrgetter makes a tuple of several fields only
        few = staticmethod(lambda self: tuple(getattr(self, name) for name in names))
        made._compared = attrgetter(*names) if len(names) > 1 else few
        methods = {"__eq__": _equal, "__hash__": lambda self: hash(self._compared(self)), "__repr__": _text}
        methods |= {} if by_python else {"__init__": _initializer(made)}
        for name in methods.keys() - own:
            setattr(made, name, methods[name])
        return made


def _freeze(kind: Any) -> None:
    """Make the objects of a dataclass refuse new values of their fields."""

    def checked(action: str, method: str) -> Any:
        def call(self: Any, name: str, *value: Any) -> None:
            if type(self) is kind or name in kind.__dataclass_fields__:
                raise dataclasses.FrozenInstanceError(f"cannot {action} field {name!r}")
            getattr(super(kind, self), method)(name, *value)

        return call

    kind.__setattr__, kind.__delattr__ = checked("assign to", "__setattr__"), checked("delete", "__delattr__")
    kind.__dataclass_params__.frozen = kind.__dataclass_params__.init = True


def _initializer(kind: type) -> Any:
    """Compile ``__init__`` of a dataclass whose fields are all its parameters."""
    fields = sorted(dataclasses.fields(kind), key=attrgetter("kw_only"))
    first = len(fields) - sum(bool(field.kw_only) for field in fields)  # the first one that is given by its name only
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    parameters = [f"{field.name}=None" if field.name in defaults else field.name for field in fields]
    parameters[first:first] = ["*"] if first < len(fields) else []
    statements = [f"object.__setattr__(self, {field.name!r}, {field.name})" for field in fields]
    statements += ["self.__post_init__()"] if hasattr(kind, "__post_init__") else []
    source = f"def __init__(self, {', '.join(parameters)}):\n {'; '.join(statements) or 'pass'}"
    namespace: dict[str, Any] = {}
    exec(source, vars(sys.modules[kind.__module__]), namespace)
    function = namespace["__init__"]
    function.__defaults__ = tuple(defaults[field.name] for field in fields[:first] if field.name in defaults)
    function.__kwdefaults__ = {field.name: defaults[field.name] for field in fields[first:] if field.name in defaults}
    function.__annotations__ = {field.name: field.type for field in fields} | {"return": None}
    function.__qualname__ = f"{kind.__qualname__}.__init__"
    return function


def _equal(self: Any, other: Any) -> bool:
    return self._compared(self) == other._compared(other) if other.__class__ is self.__class__ else NotImplemented


@recursive_repr()
def _text(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"
