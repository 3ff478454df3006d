"""Find out what a user's code keeps from call to call, and which line changes it.

What a pass leaves behind for the next one depends on the rank that runs it, and no checkpoint has it. So the adapters
run the first pass several times, and compare all that such code can reach: the attributes of its objects, what its
functions close over, the global variables that they read, and every generator of random numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum
from functools import partial
from types import CellType, FrameType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

from mpizero._util.fingerprint import is_users as is_users_code
from mpizero._util.fingerprint import variables
from mpizero._util.text import Line, is_users

#: Most levels of objects inside of objects, and most values, that are looked at; bytes of an array that are all read.
_DEEPEST, _MOST, _WHOLE = 16, 20_000, 1 << 24
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, range, itertools.count)
#: Attributes of a module of PyTorch that hold what the adapter puts there, or what is looked at by itself.
_OF_TORCH = ("_parameters", "_buffers", "_flat_weights", "training")
#: The generators that all code of the process shares, by name.
_SHARED: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy.random": np.random.get_state}


def hidden_state(**roots: Any) -> dict[str, bytes]:
    """Return a digest of every value that can be reached from some objects and functions, by its path.

    Parameters, buffers and modes of PyTorch's modules are left out. Not collective.
    """
    walk = _Walk()
    for name, root in roots.items():
        walk.look(root, name, 0)
    return walk.found


def shared_generators() -> dict[str, bytes]:
    """Return a digest of the state of each generator that all code of the process shares, by name. Not collective."""
    return {name: _digest(state()) for name, state in _SHARED.items()}


def differing(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str | None:
    """Return the shortest path of what differs between two states, or is in one only; None if nothing does.

    Of what changes inside of a list or dictionary, it is the path of that.
    """
    odd = (
        re.split(r"\[|'s length|\.keys\(\)", path)[0]
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    )
    return min(odd, key=len, default=None)


def part_of(state: Mapping[str, bytes], path: str) -> dict[str, bytes]:
    """Return of a state what has a path that begins with ``path``."""
    return {name: digest for name, digest in state.items() if name.startswith(path)}


def line_that_changes(state: Callable[[], Any], action: Callable[[], Any]) -> Line | None:
    """Run ``action``, and return the first line of the user's code after which ``state()`` is another. Not collective.

    None stands for no such line. Errors of ``action`` are ignored.
    """
    before, found = state(), list[Line]()
    last: list[Line | None] = [None]

    def followed(frame: FrameType, event: str, argument: Any) -> Any:
        if not found:
            if last[0] is not None and state() != before:
                found.append(last[0])
            at = frame.f_back if event == "return" and frame.f_back is not None else frame  # the rest of its line runs
            if is_users(at.f_code.co_filename):
                last[0] = Line(at.f_code.co_filename, at.f_lineno, at.f_code.co_name)
        return followed

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        return followed(frame, event, argument) if is_users(frame.f_code.co_filename) else None

    tracer = sys.gettrace()
    sys.settrace(entered)
    try:
        action()
    except Exception:  # the caller knows it, or has it again
        pass
    finally:
        sys.settrace(tracer)
    if not found and last[0] is not None and state() != before:
        found.append(last[0])
    return next(iter(found), None)


class _Walk:
    """Walk through objects, and collect digests of the values in them."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}
        self._seen: dict[int, Any] = {}

    def look(self, value: Any, path: str, depth: int) -> None:
        """Collect the digests of ``value``, whose path is ``path``."""
        if isinstance(value, _PLAIN):
            self.found[path] = repr(value).encode(errors="backslashreplace")
            return
        if id(value) in self._seen or depth > _DEEPEST or len(self.found) > _MOST:
            return
        self._seen[id(value)] = value  # itself, too: an id is of a living object
        if (state := _state(value)) is not None:
            self.found[path] = _digest(state)
            return
        for name, inner in _inner(value, path):
            self.look(inner, name, depth + 1)


def _state(value: Any) -> Any:
    """Return what tells one value of an array, a tensor or a generator from another; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Generator):
        return value.get_state().numpy()
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_meta:
            return "without values"
        try:
            return value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
        except RuntimeError:  # of a tensor without elements side by side, such as a sparse one
            return repr(value)
    return None


def _inner(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of what ``value`` holds; nothing of objects of other packages, which may hold anything."""
    if isinstance(value, Mapping):
        yield f"{path}.keys()", " ".join(map(repr, value))[:1000]
        yield from ((f"{path}[{key!r:.40}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield f"{path}'s length", len(value)
        yield from ((f"{path}[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, Set):
        yield path, " ".join(sorted(f"{item!r:.80}" for item in value))
    elif isinstance(value, FunctionType):
        yield from _of_function(value, path)
    elif isinstance(value, MethodType):
        yield from ((path, value.__self__), (path, value.__func__))
    elif isinstance(value, partial):
        yield from ((path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
    elif isinstance(value, type):
        yield from _of_class(value, path)
    elif hasattr(value, "named_modules") or isinstance(value, SimpleNamespace) or _is_own(type(value)):
        yield from _of_object(value, path)


def _of_function(function: FunctionType, path: str) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    if not is_users_code(code.co_filename, function.__module__ or ""):
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():
            yield f"{path}: {name}", cell.cell_contents
    yield f"{path}'s defaults", (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    read, changed = variables(code)
    for name in sorted(read | changed):
        if name in function.__globals__:
            yield f"{path}: the global {name}", function.__globals__[name]
    if vars(function):
        yield path, vars(function)


def _of_class(kind: type, path: str) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if _is_own(base):
            for name, item in vars(base).items():
                if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
                    yield f"{path}.{name}", getattr(item, "__func__", item)


def _of_object(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    of_torch = _OF_TORCH if hasattr(value, "named_modules") else ()
    held = vars(value) if hasattr(value, "__dict__") else {}
    for name, item in list(held.items()):
        if name == "_modules" and of_torch:
            yield from ((f"{path}.{child}" if path else child, module) for child, module in item.items())
        elif name not in of_torch:
            yield f"{path}.{name}" if path else name, item
    slots = (name for base in type(value).__mro__ for name in _slots(base) if hasattr(value, name))
    yield from ((f"{path}.{name}", getattr(value, name)) for name in slots)
    yield f"{path}.{type(value).__name__}" if path else type(value).__name__, type(value)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_own(kind: type) -> bool:
    """Tell whether a class is the user's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ != "builtins" and is_users_code(file, kind.__module__)


def _digest(state: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    _feed(found, state)
    return found.digest()


def _feed(found: Any, state: Any) -> None:
    if isinstance(state, Mapping):
        state = tuple(state.items())
    if isinstance(state, tuple):
        for item in state:
            _feed(found, item)
    elif isinstance(state, np.ndarray) and not state.dtype.hasobject:
        found.update(f"{state.dtype} {state.shape}".encode())
        flat = np.ascontiguousarray(state).reshape(-1).view(np.uint8)
        found.update(flat if flat.nbytes <= _WHOLE else np.ascontiguousarray(flat[:: flat.nbytes // _WHOLE]))
    else:
        found.update(repr(state).encode(errors="backslashreplace"))
