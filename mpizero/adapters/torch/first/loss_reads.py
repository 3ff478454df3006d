"""Refuse losses that read what the given module keeps of a pass, as an auxiliary loss: its copy makes the passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dis import get_instructions
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from mpizero._util.checks import named
from mpizero._util.text import is_users
from mpizero.adapters.torch.first.originals import values_of
from mpizero.errors import ConfigError


def check_loss(function: Any, module: torch.nn.Module) -> None:
    """Raise :class:`ConfigError` for a loss that reads an attribute which a forward pass of the module sets.

    The code is looked at: the loss and what it calls of the user's functions, and the module's ``forward`` with the
    methods and hooks that it calls. An attribute that only the program sets, such as a weight of a term, may be read.
    """
    inside = {id(inner) for inner in module.modules()}
    values = _reached(function)
    if not any(id(value) in inside for value in values):
        return
    methods: dict[str, list[FunctionType]] = {}
    for inner in module.modules():
        for cls in type(inner).__mro__:
            for name, one in vars(cls).items():
                if isinstance(one, FunctionType) and is_users(one.__code__.co_filename):
                    methods.setdefault(name, []).append(one)
    hooks = [hook for inner in module.modules() for hook in inner._forward_hooks.values()]
    passes = _called([*methods.get("forward", ()), *filter(_is_own, hooks)], methods)
    kept = {name for one in passes for name in _names(one, ("STORE_ATTR",))}
    losses = _called([value for value in values if _is_own(value)], methods)
    if read := sorted(kept & {name for one in losses for name in _names(one, ("LOAD_ATTR", "LOAD_METHOD"))}):
        raise ConfigError(
            f"TorchModel: {named(function, 'loss')} reads {read[0]!r} of the module that was given, where no pass of "
            "the copy that is trained leaves it: let the module return it beside its output, or let the loss have a "
            "parameter module, loss(prediction, target, module), which is given the module that is trained"
        )


def _reached(function: Any) -> list[Any]:
    """Return a loss, what it holds and refers to, and so on through the user's functions."""
    found: list[Any] = []
    waiting = [function, getattr(type(function), "__call__", None)]  # noqa: B004 - the function itself
    while waiting:
        one = waiting.pop()
        if any(one is known for known in found):
            continue
        found.append(one)
        if isinstance(one, MethodType):
            waiting += [one.__func__, one.__self__]
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif one is function and not isinstance(one, FunctionType):
            waiting += getattr(one, "__dict__", {}).values()
        elif _is_own(one):
            waiting += values_of(one)
    return found


def _is_own(one: Any) -> bool:
    return isinstance(one, FunctionType) and is_users(one.__code__.co_filename)


def _called(begin: Iterable[FunctionType], methods: dict[str, list[FunctionType]]) -> list[FunctionType]:
    """Return functions, and the methods that they name, and so on."""
    found, waiting = [], list(begin)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.append(one)
            waiting += [m for name in _names(one, ("LOAD_ATTR", "LOAD_METHOD")) for m in methods.get(name, ())]
    return found


def _names(function: FunctionType, operations: Sequence[str]) -> set[str]:
    """Return the names with which a function, or one defined in it, does one of some operations of Python."""
    codes, found = [function.__code__], set()
    while codes:
        code = codes.pop()
        found |= {str(one.argval) for one in get_instructions(code) if one.opname in operations}
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found
