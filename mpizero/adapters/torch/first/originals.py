"""Refuse modules whose copy would not compute what they compute, because it still refers to the original.

``TorchModel`` trains a copy (``copy.deepcopy``) of the module that it is given. Functions are not copied: what they
refer to stays the original, with its start values.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Mapping
from dis import get_instructions
from types import CellType, FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpizero.errors import ConfigError


def check_parameters(module: torch.nn.Module) -> None:
    """Raise :class:`ConfigError` for uses of parameters that a copy of the module would not have. Not collective."""
    parameters = {id(p): name for name, p in module.named_parameters()}
    if hooked := next(
        (name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks), None
    ):
        raise ConfigError(
            f"TorchModel: parameter {hooked!r} has a hook on its gradient, which would not be called: register it on "
            "the layer's output, or change the loss"
        )
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            listed = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if (
                key not in ("_parameters", "_flat_weights")
                and (found := next((one for one in listed if id(one) in parameters), None)) is not None
            ):
                raise ConfigError(
                    f"TorchModel: {f'{path}.{key}' if path else key} holds parameter {parameters[id(found)]!r} beside "
                    "the module's own parameters, where it would have no values: take it from its layer when it is used"
                )


def check_functions(module: torch.nn.Module) -> None:
    """Raise :class:`ConfigError` for functions that refer to the module, which its copy would have, too."""
    names = {id(inner): name for name, inner in reversed(list(module.named_modules(remove_duplicate=False)))}
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,):
                if (found := next((v for v in _referred(one) if id(v) in names), None)) is not None:
                    told = names[id(found)]
                    raise ConfigError(
                        f"TorchModel: {f'{path}.{key}' if path else key} holds the function {one.__qualname__}, which "
                        f"refers to {f'submodule {told!r}' if told else 'the module'}: the module is copied, its "
                        "functions are not, so it would compute with the start values for ever; make it a method, or "
                        "let it take the module as an argument, as hooks do"
                    )


def _referred(function: Any) -> list[Any]:
    """Return the modules that a function refers to."""
    return [value for value in values_of(function) if isinstance(value, torch.nn.Module)]


def values_of(function: Any) -> list[Any]:
    """Return what a function refers to by closure, default values and global names. Not collective."""
    if not isinstance(function, FunctionType):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = {one.argval for one in get_instructions(function) if one.opname == "LOAD_GLOBAL"}
    return values + [function.__globals__.get(name) for name in names]


def mentions_data(module: torch.nn.Module) -> bool:
    """Tell whether the source of a module's classes mentions ``.data``, or cannot be read. Not collective."""
    names = {cls.__module__ for inner in module.modules() for cls in type(inner).__mro__}
    for name in sorted(names - {"builtins"}):
        if not name.startswith("torch."):
            try:
                text = inspect.getsource(sys.modules[name])
            except (OSError, TypeError, KeyError):
                return True
            if re.search(r"(?<!\bmz)(?<!\bmpizero)(?<!\butils)\.data\b", text):
                return True
    return False


class Originals:
    """Know the tensors of a module that was given, as long as something else keeps them."""

    def __init__(self, module: torch.nn.Module) -> None:
        #: Whether a copy of the module has been trained.
        self.trained = False
        tensors = (*module.named_parameters(), *module.named_buffers())
        self._references = [(name, weakref.ref(tensor)) for name, tensor in tensors]

    def reads(self) -> Reads:
        """Return a context that finds out which of the tensors are used in it. Not collective."""
        kept = [(name, reference()) for name, reference in self._references]
        return Reads({_address(tensor): name for name, tensor in kept if tensor is not None})


class Reads(TorchDispatchMode):  # type: ignore[misc]
    """Note the first operation on one of some tensors, whose names are given by their addresses."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names, self.found = {address: name for address, name in names.items() if address}, ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch's compiler out of :meth:`__torch_dispatch__` only if it is imported, which takes seconds."""
        return "torch._dynamo" in sys.modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        used = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.found = self.found or next((name for leaf in used if (name := self._names.get(_address(leaf)))), "")
        return func(*args, **(kwargs or {}))


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins; 0 for one that has none."""
    try:
        address: int = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
    return address
