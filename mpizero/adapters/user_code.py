"""Inspect user code: its state between calls, the cost of a grain (a fixed slice of the global batch), random seeds.

State that user code keeps from one pass to the next differs between ranks, and checkpoints do not contain it. So the
adapters run the first pass several times, and compare all values that the code can reach (:func:`hidden_state`):
attributes of its objects, closure variables and global variables of its functions, and random number generators.
:func:`line_that_changes` finds the line of code that changes such a value.

The time of a grain's forward and backward pass is about ``a + b n`` for ``n`` samples. ``a`` is the fixed cost of a
grain: calls of Python functions and of kernels, reading the parameters, adding their gradients; ``b`` is the cost of a
sample. The default size of a grain (:class:`EfficientSamples`) is computed from counted operations and bytes, never
from measured times, so that all ranks of all jobs get the same size. docs/measurements.md has the measurements of the
constants, which are times in nanoseconds on one CPU core. Times of the first passes (:class:`PassTimes`) are used only
in a notice to the user.

:func:`derived_seed` computes seeds for the random numbers of PyTorch and JAX, which then do not depend on the ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from enum import Enum
from functools import partial
from math import ceil
from time import perf_counter
from types import CellType, FrameType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.fingerprint import is_users as is_users_code
from mpizero._util.fingerprint import variables
from mpizero._util.pytree import leaves_of, map_leaves
from mpizero._util.text import Line, is_users
from mpizero.types import Run


def hidden_state(**roots: Any) -> dict[str, bytes]:
    """Return digests of all values that can be reached from the objects and functions ``roots``, by their paths.

    Parameters, buffers and training modes of PyTorch's modules are left out. Not collective.
    """
    walk = _Walk()
    for name, root in roots.items():
        walk.look(root, name, 0)
    return walk.digests


#: The random number generators that all code of the process shares, by name.
_SHARED: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy.random": np.random.get_state}


def shared_generators() -> dict[str, bytes]:
    """Return, by name, a digest of the state of each random generator in :data:`_SHARED`. Not collective."""
    return {name: _digest(state()) for name, state in _SHARED.items()}


def differing(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str | None:
    """Return the shortest path whose digest differs in two results of :func:`hidden_state`; None if they are equal.

    A path that only one of them has counts as different.

    If a value inside a list or dictionary differs, the path of the list or dictionary is returned.
    """
    odd = (
        re.split(r"\[|'s length|\.keys\(\)", path)[0]
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    )
    return min(odd, key=len, default=None)


def part_of(state: Mapping[str, bytes], path: str) -> dict[str, bytes]:
    """Return those digests of ``state``, a result of :func:`hidden_state`, whose paths begin with ``path``."""
    return {name: digest for name, digest in state.items() if name.startswith(path)}


def line_that_changes(state: Callable[[], Any], action: Callable[[], Any]) -> Line | None:
    """Run ``action``, and return the first line of user code that changes the value of ``state()``. Not collective.

    Return None if no line changes it. Exceptions of ``action`` are ignored.
    """
    before, last, line = state(), None, None

    def look() -> None:
        nonlocal line
        if line is None and last is not None and state() != before:
            line = last

    def followed(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last
        look()
        at = frame.f_back if event == "return" and frame.f_back is not None else frame  # the rest of its line runs
        if is_users(at.f_code.co_filename):
            last = Line(at.f_code.co_filename, at.f_lineno, at.f_code.co_name)
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
    look()
    return line


#: Most levels of nested objects, and most values, that a walk visits; largest array in bytes that is read completely.
_DEEPEST, _MOST, _MOST_BYTES = 16, 20_000, 1 << 24
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, range, itertools.count)


class _Walk:
    """Walk through objects, and collect digests of the values in them, by path (such as ``model.weight``)."""

    def __init__(self) -> None:
        self.digests: dict[str, bytes] = {}
        self._visited: dict[int, Any] = {}

    def look(self, value: Any, path: str, depth: int) -> None:
        """Collect the digests of ``value``, whose path is ``path``."""
        if isinstance(value, _PLAIN):
            self.digests[path] = repr(value).encode(errors="backslashreplace")
            return
        if id(value) in self._visited or depth > _DEEPEST or len(self.digests) > _MOST:
            return
        self._visited[id(value)] = value  # itself, too: an id is of a living object
        if (state := _state(value)) is not None:
            self.digests[path] = _digest(state)
            return
        for name, inner in _inner(value, path):
            self.look(inner, name, depth + 1)


def _state(value: Any) -> Any:
    """Return the contents of an array or tensor, or the state of a random generator; None for any other object."""
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
    """Yield (path, value) for the values that ``value`` holds; nothing for instances of other packages' classes."""
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
    elif hasattr(value, "named_modules") or isinstance(value, SimpleNamespace) or _is_users(type(value)):
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
        if _is_users(base):
            for name, item in vars(base).items():
                if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
                    yield f"{path}.{name}", getattr(item, "__func__", item)


#: Attributes of a PyTorch module that a walk skips: the adapter sets them, or they are checked separately.
_OF_TORCH = ("_parameters", "_buffers", "_flat_weights", "training")


def _of_object(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    of_torch = _OF_TORCH if hasattr(value, "named_modules") else ()
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    for name, item in list(attributes.items()):
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


def _is_users(kind: type) -> bool:
    """Tell whether a class is defined in the user's own code, not in an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ != "builtins" and is_users_code(file, kind.__module__)


def _digest(state: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, state)
    return digest.digest()


def _feed(digest: Any, state: Any) -> None:
    if isinstance(state, Mapping):
        state = tuple(state.items())
    if isinstance(state, tuple):
        for item in state:
            _feed(digest, item)
    elif isinstance(state, np.ndarray) and not state.dtype.hasobject:
        digest.update(f"{state.dtype} {state.shape}".encode())
        flat = np.ascontiguousarray(state).reshape(-1).view(np.uint8)
        digest.update(flat if flat.nbytes <= _MOST_BYTES else np.ascontiguousarray(flat[:: flat.nbytes // _MOST_BYTES]))
    else:
        digest.update(repr(state).encode(errors="backslashreplace"))


class PassWork(NamedTuple):
    """Count the work of a forward and backward pass.

    Attributes
    ----------
    calls, convolutions : int
        Number of kernel calls, and the number of these that are convolutions.
    operations : int
        Floating-point operations of products and convolutions.
    bytes : int
        Bytes that kernels read and write.
    """

    calls: int = 0
    convolutions: int = 0
    operations: int = 0
    bytes: int = 0

    def plus(self, other: PassWork) -> PassWork:
        """Return the sum of this work and ``other``."""
        return PassWork(*(a + b for a, b in zip(self, other, strict=True)))


#: Costs in nanoseconds: of a grain's calls between engine and model; of a kernel's call; of a convolution's call, in
#: addition, on few samples; of a parameter that is read, and whose gradient is written and added.
_GRAIN, _CALL, _CONVOLUTION, _PARAMETER = 300_000, 15_000, 130_000, 3.6
#: Costs in nanoseconds of a floating-point operation of a product, and of a byte that is read or written.
_OPERATION, _BYTE = 0.01, 1 / 12
#: Ratio of the work of a grain's samples to its fixed cost from which on the fixed cost counts as small.
_ENOUGH = 20
#: Numbers of samples with which a model is run to count its work. Batch norms refuse a single one, and kernels omit
#: copies for a single sample.
_FEW, _MORE = 2, 3


class EfficientSamples:
    """Compute, once per sample shape, how many samples make a grain's fixed cost a twentieth of their work.

    Parameters
    ----------
    work : callable
        ``work(x, y)`` returns the :class:`PassWork` of a forward and backward pass on ``x`` and ``y``, trees of
        samples.
    parameters : int
        Number of parameters.
    """

    def __init__(self, work: Callable[[Any, Any], PassWork], parameters: int) -> None:
        self._work, self._parameters = work, parameters
        self._counts: dict[Any, int | None] = {}

    def __call__(self, x: Any, y: Any) -> int | None:
        """Return the number of samples, a power of two; None if samples take no work, or their work cannot be counted.

        Kernels are slower for numbers that are no power of two: XLA's convolution of 7 samples takes longer than that
        of 8. Only the shapes and dtypes of ``x`` and ``y``, trees of samples, are used. Not collective.
        """
        kind = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves_of((x, y)))
        if kind not in self._counts:
            try:
                few, more = (self._work(*_zeros((x, y), samples)) for samples in (_FEW, _MORE))
            except Exception:  # code of the user's own, given zeros: what is wrong with it, its first pass tells
                self._counts[kind] = None
            else:
                self._counts[kind] = self._enough(few, more)
        return self._counts[kind]

    def _enough(self, few: PassWork, more: PassWork) -> int | None:
        operations, moved = more.operations - few.operations, more.bytes - few.bytes
        sample = (operations * _OPERATION + moved * _BYTE) / (_MORE - _FEW)
        fixed = _GRAIN + few.calls * _CALL + few.convolutions * _CONVOLUTION + self._parameters * _PARAMETER
        return 1 << (ceil(_ENOUGH * fixed / sample) - 1).bit_length() if sample > 0 else None


def _zeros(tree: Any, samples: int) -> Any:
    return map_leaves(lambda leaf: np.zeros((samples, *leaf.shape[1:]), leaf.dtype), tree)


class PassSeconds(NamedTuple):
    """Hold the shortest seconds of forward and backward pass: ``all`` of ``samples`` samples, ``one`` of one sample."""

    samples: int
    all: float
    one: float


#: Number of first passes of a block that are not timed because they also compile or allocate; passes timed after them.
_LEFT_OUT, _TIMED = 2, 3


class PassTimes:
    """Record the seconds of the first passes of each block, forward and backward together.

    The times serve for advice only and decide nothing, because they differ between ranks.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], int] = {}
        self._all: dict[tuple[int, int], float] = {}
        self._one: dict[int, float] = {}

    def add(self, block: int, samples: int, seconds: float, one: Callable[[], object]) -> None:
        """Add the time of a pass of block number ``block``; if this time is recorded, also call and time ``one``.

        Not recorded are the very first passes, which also compile and allocate, and those after enough were recorded.
        ``one`` runs a pass of a single sample. Its exceptions are ignored: not all code takes a single sample, and not
        every array has samples on its first axis.
        """
        key = block, samples
        if samples < 2 or self._passes.get(key, 0) >= _LEFT_OUT + _TIMED:
            return
        self._passes[key] = self._passes.get(key, 0) + 1
        if self._passes[key] > _LEFT_OUT:
            self._all[key] = min(seconds, self._all.get(key, seconds))
            with suppress(Exception):
                start = perf_counter()
                one()
                alone = perf_counter() - start
                self._one[block] = min(alone, self._one.get(block, alone))

    @property
    def seconds(self) -> PassSeconds | None:
        """The shortest times, summed over this rank's blocks; None until all blocks were timed."""
        enough = [key for key, count in self._passes.items() if count == _LEFT_OUT + _TIMED]
        samples = max((samples for _, samples in enough), default=0)
        blocks = {block for block, _ in self._passes}
        if not enough or not blocks == {block for block, timed in enough if timed == samples} == set(self._one):
            return None
        return PassSeconds(
            samples, sum(self._all[block, samples] for block in blocks), sum(self._one[block] for block in blocks)
        )


def derived_seed(run: Run, block: int) -> int:
    """Return a seed of 63 bits for one forward pass of one block. Not collective.

    The seed is a hash of the model's seed, the step, the index of the first sample within the global batch, and the
    number ``block`` of the block within the model. So a repeated forward pass draws the same numbers, and all other
    passes draw different numbers.
    """
    text = f"{run.seed}:{run.step}:{run.first_sample}:{block}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
