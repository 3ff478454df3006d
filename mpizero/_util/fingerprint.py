"""Compute a digest of any Python object; the digest is equal on all ranks that hold an equal object.

A :class:`Fingerprint` takes a value apart level by level, each time with a function that the value's type determines.
For functions and objects of a user it inspects code, to find which variables are read and which fields are changed.
Where digests differ, :func:`words` names the part of a value that differs, and :func:`shown` describes that part, for
the error message.

[Note: what is compared] The digest of an object covers its class and its fields. The digest of a function covers its
name, code, default arguments, and the global and enclosing variables that it reads and does not change. The digest does
not depend on the process: addresses, string hashes, lines and paths of source files, and the order of sets and
dictionaries (but for an ``OrderedDict``) are not part of it. Values stored by a ``cached_property`` are not part of it.
For an object of a user's class, fields that the class's methods change when mpizero calls these methods are not part of
it either. For modules, and for classes of installed packages, only the name is compared; for a function of an installed
package the name, the default arguments and the enclosing variables, but no code and no global variables. Digests are
saved with runs, so names of mpizero's own classes and functions leave out their modules, which may change between
versions; the module of a user's class is part of its name. Three kinds of things are left out:

- fields and variables whose name says that they may differ between ranks: names that begin with an underscore, are
  ``rank``, ``myrank`` or ``device``, or end in ``_rank`` or ``_device``, in lower or upper case. This does not apply to
  keys of dictionaries;
- communicators, and mpizero's own sharded models;
- objects whose content cannot be read: open files, locks, random generators, progress bars, objects of compiled code,
  and arrays of more than 64 MiB. Such objects are listed in :attr:`Fingerprint.left_out`.

If a class has a property ``fingerprint``, or a method ``fingerprint`` without arguments, then the property's value, or
what the method returns, is compared in place of the fields of the class's objects.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import functools
import hashlib
import inspect
import io
import os
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.text import PACKAGE

PLAIN = frozenset({bool, int, float, complex, str, bytes, bytearray, type(None), type(Ellipsis), type(NotImplemented)})
#: Classes of modules that this module does not import, which would take 5 ms: a value of them exists only if the module
#: is loaded.
_RARE = (("decimal", "Decimal"), ("fractions", "Fraction"), ("uuid", "UUID"))


class _Rare(type):
    def __instancecheck__(cls, value: object) -> bool:
        return any(isinstance(value, getattr(sys.modules.get(module), name, ())) for module, name in _RARE)


class Rare(metaclass=_Rare):
    """Match instances of some classes of Python's library (by ``isinstance``) without importing their modules."""


BY_REPR = (range, slice, Rare, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)


#: Most bytes of an array that is compared: whole data sets would take seconds to read.
LARGEST_ARRAY = 1 << 26
#: Most levels of objects inside of objects that are compared; deeper ones are left out.
DEEPEST = 60

#: Packages whose objects only report progress to people.
_TELLERS = ("alive_progress", "progressbar", "rich", "tensorboardX", "tqdm", "wandb")
_TENSORS = ("torch", "jax", "jaxlib")
_BY_RANK = ("rank", "myrank", "device")
_LIKE_PYTHON = (np.bool, np.integer, np.float64, np.complex128, np.str_, np.bytes_)
_COMMUNICATORS = ("mpi4py", "mpizero.comm", "mpizero.guard", "mpizero.sharding")


class Parts(NamedTuple):
    """Hold the decomposition of a value by one level: its kind, and either its parts or its content as bytes.

    Attributes
    ----------
    kind : str
        The class of the value, and properties such as shape or length that must be equal before parts can be compared.
    items : mapping of str to object
        The parts, by the expression that leads to them: ``.name``, ``[0]``, ``['key']``.
    content : bytes
        The content of a value that has no parts.
    left_out : str or None
        None if the value is compared, "" if it is left out without notice, otherwise a description of the value for a
        notice to the user.
    """

    kind: str
    items: Mapping[str, Any] = types.MappingProxyType({})
    content: bytes = b""
    left_out: str | None = None


class Fingerprint:
    """Compute digests of values. Digests are cached by object, so use a new instance for each comparison.

    Attributes
    ----------
    left_out : dict of str to str
        The values that were not compared: for the path of each value (``sampler of model``) a description of it.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._open: dict[int, int] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._ignored: dict[type, frozenset[str]] = {}
        self._hidden: dict[type, bool] = {}
        self._rules: dict[type, Callable[[Fingerprint, Any], Parts]] = {}
        self._subject, self._steps = "", list[str]()

    def digest(self, value: Any) -> bytes:
        """Return bytes that are equal, in every process, for equal values; see [Note: what is compared]."""
        value = _python(value)
        if type(value) in PLAIN:
            return _plain(value)
        key = id(value)
        if key in self._known:
            return self._known[key][1]
        if key in self._open:
            return b"around %d" % (len(self._open) - self._open[key])
        self._open[key] = len(self._open)
        parts = self.parts(value) if len(self._open) <= DEEPEST else Parts("", left_out="nested too deeply")
        if parts.left_out:
            self.left_out.setdefault(words(self._subject, self._steps), parts.left_out)
        pieces = [_sized(parts.kind.encode(errors="backslashreplace")), _sized(parts.content)]
        for step in sorted(parts.items):
            item = parts.items[step]
            if type(item) in PLAIN:
                pieces += (_label(step), _sized(_plain(item)))
                continue
            self._steps.append(step)
            pieces += (_label(step), _sized(self.digest(item)))
            self._steps.pop()
        del self._open[key]
        digest = hashlib.sha256(b"".join(pieces)).digest()
        self._known[key] = value, digest  # the value, too: an id is of a living object
        return digest

    def digest_named(self, values: Mapping[str, Any]) -> bytes:
        """Return one digest of several named values; the keys of :attr:`left_out` contain the names."""
        digest = hashlib.sha256()
        for self._subject, value in values.items():
            digest.update(_sized(self._subject.encode()))
            digest.update(_sized(self.digest(value)))
        return digest.digest()

    def parts(self, value: Any) -> Parts:
        """Decompose a value by one level into its kind and its parts or content."""
        value = _python(value)
        if type(value) in PLAIN:
            return Parts(type(value).__name__, content=_plain(value))
        rule = self._rules.get(type(value))
        if rule is None:
            rule = _rule(value)
            if value.__class__ is type(value):  # proxies of one class may stand for objects of several
                self._rules[type(value)] = rule
        return rule(self, value)

    def members(self, kind: type) -> dict[str, Any]:
        """Return the members of a class that are compared, in a dict with keys of the form ``.name``.

        Only members that are defined in the user's own code are compared, be it by the class itself or by a base class.
        """
        if kind not in self._classes:
            members: dict[str, Any] = {}
            for base in reversed(kind.__mro__):
                if is_users(getattr(sys.modules.get(base.__module__), "__file__", None), base.__module__):
                    members |= {f".{name}": item for name, item in vars(base).items() if _is_member(name, item)}
            self._classes[kind] = members
        return self._classes[kind]

    def ignored(self, kind: type) -> frozenset[str]:
        """Return the names of the fields that are not compared: caches, and fields that methods change in training."""
        if kind not in self._ignored:
            cached = _caches_of(kind)
            users = is_users(getattr(sys.modules.get(kind.__module__), "__file__", None), kind.__module__)
            self._ignored[kind] = cached | changed_fields(kind) if users else cached
        return self._ignored[kind]

    def hides_fields(self, kind: type) -> bool:
        """Tell whether objects of a class are not compared.

        That is so if Python code cannot see their fields, or if the class is defined in Python's standard library or in
        a module without a source file; but dataclasses and namespaces with visible fields are always compared.
        """
        if kind not in self._hidden:
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            bare = not kind.__dictoffset__ and not any("__slots__" in vars(base) for base in kind.__mro__)
            namespace = getattr(sys.modules.get("argparse"), "Namespace", types.SimpleNamespace)
            record = is_dataclass(kind) or issubclass(kind, types.SimpleNamespace | namespace)
            self._hidden[kind] = bare or ((file is None or is_standard(file)) and not record)
        return self._hidden[kind]


# Rules take a value apart by one level. They are listed in `_RULES`; the first one for the value's type is used.


def _plain(value: Any) -> bytes:
    return f"{type(value).__name__} {value!r}".encode(errors="backslashreplace")


def _python(value: Any) -> Any:
    """Convert a NumPy scalar to the equivalent Python one, so that ``np.float64(1)`` and ``1.0`` count as equal."""
    return value.item() if isinstance(value, _LIKE_PYTHON) else value


def _array(_: Fingerprint, value: Any) -> Parts:
    if value.dtype.hasobject:
        return Parts(f"array {value.shape}", {"": value.reshape(-1).tolist()})
    if value.nbytes > LARGEST_ARRAY:
        return Parts("array", left_out=f"an array of {value.nbytes >> 20} MiB")
    kind = f"array {value.dtype.descr if value.dtype.names else value.dtype.str} {value.shape}"
    memory = np.ascontiguousarray(value).view(np.ndarray).reshape(-1).view(np.uint8)
    return Parts(kind, content=hashlib.sha256(memory.data).digest())


def _tensor(fingerprint: Fingerprint, value: Any) -> Parts:
    if getattr(value, "is_meta", False):
        return Parts(f"tensor {value.dtype} {tuple(value.shape)} without values")
    try:
        return _array(fingerprint, np.asarray(value.detach().cpu() if hasattr(value, "detach") else value))
    except (TypeError, ValueError, RuntimeError):  # of a type that NumPy does not know, or without values yet
        return Parts("left out", left_out=type(value).__qualname__)


def _mapping(fingerprint: Fingerprint, value: Any) -> Parts:
    entries = list(value.items())
    keys = [repr(k) if type(k) in PLAIN else shown(k) + fingerprint.digest(k).hex()[:8] for k, _ in entries]
    ordered = f" in the order {keys}" if isinstance(value, OrderedDict) else ""
    kind = "mapping" if type(value) in (dict, types.MappingProxyType) else qualified_name(type(value))
    return Parts(kind + ordered, {f"[{key}]": item for key, (_, item) in zip(keys, entries, strict=True)})


def _sequence(_: Fingerprint, value: Any) -> Parts:
    kind, items = qualified_name(type(value)), [_python(item) for item in value]
    if all_plain(items):
        return Parts(kind, content=repr(items).encode(errors="backslashreplace"))
    if hasattr(value, "_fields"):
        return Parts(kind, dict(zip((f".{name}" for name in value._fields), value, strict=True)))
    if all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in value):
        named = {f"[{name!r}]": item for name, item in value}
        if len(named) == len(value):
            return Parts(f"{kind} of {list(named)}", named)
    return Parts(f"{kind} of {len(value)}", {f"[{i}]": item for i, item in enumerate(value)})


def _set(fingerprint: Fingerprint, value: Any) -> Parts:
    return Parts(qualified_name(type(value)), content=b"".join(map(_sized, sorted(map(fingerprint.digest, value)))))


def _code(_: Fingerprint, value: types.CodeType) -> Parts:
    numbers = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
    content = repr((numbers, value.co_name, value.co_code, value.co_exceptiontable)).encode()
    names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
    return Parts("code", {".constants": value.co_consts, ".names": sum(names, ())}, content)


def _function(_: Fingerprint, value: Any) -> Parts:
    code, items, named = value.__code__, dict[str, Any](), list[tuple[str, Any]]()
    read, changed = variables(code)
    if is_users(code.co_filename, value.__module__):
        items[".code"] = code
        named += [(name, value.__globals__[name]) for name in sorted(read) if name in value.__globals__]
    arguments, defaults = code.co_varnames[: code.co_argcount], value.__defaults__ or ()
    named += zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    named += (value.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            named.append((name, cell.cell_contents))
    items |= {f".{name}": item for name, item in named if _is_compared(name) and name not in changed}
    return Parts(f"function {qualified_name(value)}", items)


def _object(fingerprint: Fingerprint, value: Any) -> Parts:
    """Decompose an object into its fields; used for objects whose type fits no entry of :data:`_RULES`.

    The object is left out of the comparison if Python cannot see its fields.
    """
    kind = type(value)
    name, package = qualified_name(kind), kind.__module__.split(".")[0]
    if kind.__module__.startswith(_COMMUNICATORS) and not is_dataclass(value):
        return Parts("left out", left_out="")
    if package in _TELLERS:
        return Parts("left out", left_out=kind.__qualname__)
    if package in _TENSORS and hasattr(value, "dtype") and hasattr(value, "__array__"):
        return _tensor(fingerprint, value)
    if _has_wrapped(value):  # what caches or compiles a function
        return Parts(name, {"": value.__wrapped__})
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return Parts(f"function {getattr(value, '__module__', '')}.{value.__name__}")
    if fingerprint.hides_fields(kind):
        return Parts("left out", left_out=f"{kind.__qualname__}")
    items = fingerprint.members(kind) | {f".{name}": item for name, item in _fields(value, fingerprint.ignored(kind))}
    if callable(getattr(kind, "extra_repr", None)) and callable(getattr(kind, "named_children", None)):  # of torch
        items |= {".settings": value.extra_repr(), **{f".{part}": child for part, child in value.named_children()}}
    return Parts(name, items)


_RULES: tuple[tuple[Any, Callable[[Fingerprint, Any], Parts]], ...] = (
    (Enum, lambda _, value: Parts(qualified_name(type(value)), content=value.name.encode())),
    (np.generic, lambda _, value: Parts(str(value.dtype), content=value.tobytes())),
    (np.ndarray, _array),
    (np.dtype, lambda _, value: Parts("dtype", content=repr(value.descr if value.names else value.str).encode())),
    ((dict, types.MappingProxyType), _mapping),
    ((list, tuple, deque), _sequence),
    ((set, frozenset), _set),
    (PurePath, lambda _, value: Parts("path", content=str(value).encode(errors="backslashreplace"))),
    (
        (str, bytes, int, float, complex, *BY_REPR),
        lambda _, value: Parts(qualified_name(type(value)), content=_bare(value)),
    ),
    (type, lambda fingerprint, value: Parts(f"class {qualified_name(value)}", fingerprint.members(value))),
    (types.ModuleType, lambda _, value: Parts(f"module {value.__name__}")),
    (types.FunctionType, _function),
    (types.MethodType, lambda _, value: Parts("method", {"": value.__func__, ".self": value.__self__})),
    (types.CodeType, _code),
    (functools.partial, lambda _, v: Parts("partial", {"": v.func, ".args": v.args, ".keywords": _named(v.keywords)})),
    (property, lambda _, value: Parts("property", {"": value.fget})),
    (type(Parts.kind), lambda _, value: Parts("field of a named tuple", {"": value.__reduce__()[1][0]})),
    ((staticmethod, classmethod), lambda _, value: Parts(qualified_name(type(value)), {"": value.__func__})),
    (io.IOBase, lambda _, value: Parts("left out", left_out=type(value).__qualname__)),
    (functools.cached_property, lambda _, value: Parts("property", {"": value.func})),
)


def _bare(value: Any) -> bytes:
    """Return the ``repr`` of a value as bytes; an instance of a subclass of str, say, has that of a plain str."""
    for kind in (str, bytes, int, float, complex):
        if isinstance(value, kind):
            return kind.__repr__(value).encode(errors="backslashreplace")
    return repr(value).encode(errors="backslashreplace")


def _sized(content: bytes) -> bytes:
    return len(content).to_bytes(8) + content


@functools.lru_cache(maxsize=4096)
def _label(step: str) -> bytes:
    """Return the name of a part with its length, as bytes that precede the part's digest; cached, as names recur."""
    return _sized(step.encode(errors="backslashreplace"))


@functools.lru_cache(maxsize=4096)
def _is_compared(name: str) -> bool:
    small = name.lower()
    return not small.startswith("_") and small not in _BY_RANK and not small.endswith(("_rank", "_device"))


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in values.items() if _is_compared(name)}


def _rule(value: Any) -> Callable[[Fingerprint, Any], Parts]:
    """Return the function that decomposes objects of the value's type."""
    if not isinstance(value, type) and _offers(type(value)):
        return _by_fingerprint
    return next((rule for kinds, rule in _RULES if isinstance(value, kinds)), _object)


def _by_fingerprint(_: Fingerprint, value: Any) -> Parts:
    """Decompose an object into the value of its own property or method ``fingerprint``."""
    fingerprint = value.fingerprint
    return Parts(qualified_name(type(value)), {".fingerprint": fingerprint() if callable(fingerprint) else fingerprint})


def _has_wrapped(value: Any) -> bool:
    """Tell whether an object has an attribute ``__wrapped__``, without calling ``__getattr__``."""
    attributes = value.__dict__ if type(value).__dictoffset__ else {}
    return attributes.get("__wrapped__") is not None or any("__wrapped__" in vars(base) for base in type(value).__mro__)


def _offers(kind: type) -> bool:
    """Tell whether a class defines ``fingerprint``, as a property or as a method without arguments."""
    if not hasattr(kind, "fingerprint"):
        return False
    with contextlib.suppress(TypeError, ValueError):
        attribute = inspect.getattr_static(kind, "fingerprint")
        if isinstance(attribute, types.FunctionType):
            inspect.signature(attribute).bind(None)
        return True
    return False


def _is_member(name: str, item: Any) -> bool:
    """Tell whether an attribute of a class is compared.

    Descriptors of slots are not compared, and ``__call__`` is. For other attributes the name decides; see [Note: what
    is compared].
    """
    if isinstance(item, types.MemberDescriptorType | types.GetSetDescriptorType):
        return False
    return name == "__call__" or _is_compared(name)


def _fields(value: Any, ignored: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field of an object, except those named in ``ignored``."""
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ignored and _is_compared(name) and hasattr(value, name):
                yield name, getattr(value, name)
    for name, item in list(value.__dict__.items()) if type(value).__dictoffset__ else ():
        if name not in ignored and _is_compared(name):
            yield name, item


@functools.lru_cache(maxsize=256)
def _caches_of(kind: type) -> frozenset[str]:
    """Return the names of the attributes that are a ``cached_property`` of a class."""
    members = (member for base in kind.__mro__ for member in vars(base).items())
    return frozenset(name for name, item in members if isinstance(item, functools.cached_property))


def words(subject: str, steps: Iterable[str]) -> str:
    """Return the name of a part of a value for a message, such as "dropout of block 'encoder.2'".

    ``subject`` is the name of the whole value ("block 'encoder.2'"). ``steps`` are the expressions that lead from it to
    the part (".dropout").
    """
    first, *rest = [step for step in steps if step and step != ".fingerprint"] or [""]
    if first.startswith("['"):
        first = first[2:-2]
    path = first.removeprefix(".") + "".join(rest)
    if path == "lr":
        return "learning rate"
    return f"{path} of {subject}" if path else subject


_SHOWN = 120


def shown(value: Any) -> str:
    """Return a short text that describes a value in a message; unlike ``repr`` it never contains a memory address."""
    if isinstance(value, np.ndarray):
        first = ", ".join(f"{v:.7g}" if isinstance(v, float) else str(v) for v in value.flat[:3].tolist())
        return f"{value.dtype} array of shape {value.shape} [{first}{', ...' if value.size > 3 else ''}]"
    if isinstance(value, functools.partial):
        return f"partial of {shown(value.func)}"
    if isinstance(value, types.MethodType):
        return shown(value.__func__)
    if isinstance(value, types.FunctionType | types.CodeType):
        code = value if isinstance(value, types.CodeType) else value.__code__
        return f"{code.co_qualname} at {Path(code.co_filename).name}:{code.co_firstlineno}"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, set | frozenset):
        text = "{" + ", ".join(sorted(map(shown, value))) + "}"
    elif isinstance(value, np.generic):
        text = repr(value.item())
    elif type(value) in PLAIN or isinstance(value, (*BY_REPR, PurePath, np.dtype, Enum)) or all_plain(value):
        text = repr(value)
    elif type(value) in (list, tuple):
        inner = ", ".join(type(item).__qualname__ if isinstance(item, list | tuple) else shown(item) for item in value)
        text = f"[{inner}]" if isinstance(value, list) else f"({inner})"
    else:
        return type(value).__qualname__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def qualified_name(value: Any) -> str:
    """Return the name of a class or function with its module, or with ``mpizero`` alone if it is this library's."""
    module = value.__module__
    return f"{'mpizero' if str(module).startswith('mpizero.') else module}.{value.__qualname__}"


def all_plain(value: Any) -> bool:
    """Tell whether a value is a list, tuple or deque that contains only numbers, strings and other simple constants."""
    return isinstance(value, list | tuple | deque) and PLAIN.issuperset(map(type, value))


_STANDARD = str(Path(os.__file__).parent) + os.sep
#: Methods that change the object they are called on. A variable that a function changes in this way is its own memory
#: (a counter, a cache) and is not compared between ranks.
_CHANGES = (
    "add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "setdefault", "update", "write",
)  # fmt: skip

#: Methods of models, layers, losses, optimizers and schedules that the library calls during training.
_CALLED = ("__call__", "backward", "forward", "loss", "loss_and_grad", "predict", "update")


def is_standard(file: str) -> bool:
    """Tell whether a source file belongs to Python's standard library."""
    return file.startswith(_STANDARD) and "-packages" + os.sep not in file


def is_users(file: str | None, module: str) -> bool:
    """Tell whether code is the user's own: in a file outside of Python and installed packages, or typed interactively.

    ``file`` is the path of the source file, or None; ``module`` is the name of the module.
    """
    if file is None or file.startswith("<"):
        return module == "__main__"
    return not (file.startswith((*PACKAGE, _STANDARD)) or "-packages" + os.sep in file)


def variables(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return two sets of names: the global variables that a code object reads, and the variables that it changes.

    Functions defined inside of the code are included. Only assignments and calls of the methods in :data:`_CHANGES` are
    recognized as changes.
    """
    read, changed = set[str](), set[str]()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            nested = variables(inner)
            read, changed = read | nested[0], changed | nested[1]
    steps = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    for (operation, name), *later in zip(steps, steps[1:], steps[2:], strict=False):
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(name)
        stored = any(following == "STORE_SUBSCR" for following, _ in later) or later[1] == ("COPY", 2)  # a[i] += 1
        if operation in ("STORE_GLOBAL", "STORE_DEREF") or (
            operation.startswith("LOAD_") and isinstance(name, str) and (stored or later[0][1] in _CHANGES)
        ):
            changed.add(name)
    return read, changed


def changed_fields(kind: type) -> set[str]:
    """Return the names of the fields that methods of a class change when mpizero calls these methods.

    The methods that are inspected are the ones in :data:`_CALLED`, and the methods that they call in turn. Only the
    changes that :func:`variables` recognizes, and assignments to attributes, are found.
    """
    changed, left, visited = set[str](), list(_CALLED), set[str]()
    while left:
        name = left.pop()
        method = inspect.getattr_static(kind, name, None)
        if name in visited or not isinstance(method, types.FunctionType):
            continue
        visited.add(name)
        left += method.__code__.co_names
        changed |= variables(method.__code__)[1] | _stored(method.__code__)
    return changed


def _stored(code: types.CodeType) -> set[str]:
    """Return the attributes of its first argument (``self``) that a function assigns, for example by ``=`` or ``+=``.

    Attributes that the function multiplies or divides in place (``*=``, ``/=``) are left out. Such attributes are taken
    for settings, such as a decaying learning rate, which must be compared between ranks. Counters need not be compared.
    """
    steps = [(each.opname, each.argval, each.argrepr) for each in dis.get_instructions(code)]
    read, first = {name for operation, name, _ in steps if operation == "LOAD_ATTR"}, code.co_varnames[:1]
    stored = set[str]()
    for (*_, sign), (before, value, _), (operation, name, _) in zip(steps, steps[1:], steps[2:], strict=False):
        of_self = before == "SWAP" or (value[-1:] if isinstance(value, tuple) else (value,)) == first
        if operation == "STORE_ATTR" and of_self and not (name in read and sign.strip("=") in ("*", "/", "**")):
            stored.add(name)
    return stored
