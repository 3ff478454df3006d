"""Check that a user's own model can be trained, and raise an error that names what is missing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from mpizero._util.checks import require, seed
from mpizero.comm import Communicator, InMemoryCommunicator
from mpizero.errors import ArgumentError, ConfigError
from mpizero.types import BlackBoxModel, BlockModel

_LAYER = ("specs", "forward", "backward")


def check_model(model: Any) -> None:
    """Raise an error if ``model`` is neither a model of blocks nor a black box, or has an attribute of a wrong type.

    Not collective.

    Raises
    ------
    TypeError
        If ``model``, one of its blocks or its loss is wrong. The error says what it is and what it must be.
    ConfigError
        If the data type of the parameters, or the seed, cannot be used.
    """
    name = type(model).__name__
    if isinstance(model, type):
        raise ArgumentError(f"{model.__name__} is a class, not a model: call it to make one")
    if isinstance(model, BlockModel):
        if not isinstance(model.blocks, Mapping) or not model.blocks:
            raise ArgumentError(
                f"{name}.blocks must be layers by name, {{'encoder': layer}}, at least one; got {model.blocks!r:.60}"
            )
        for block, layer in model.blocks.items():
            _check_part(f"block {block!r} of {name}", "a layer", layer, _LAYER)
        _check_part(f"the loss of {name}", "a loss", model.loss, ("forward", "backward"))
        require(f"{name}.seed", model.seed, seed)
    elif not isinstance(model, BlackBoxModel):
        raise ArgumentError(
            f"{name} is not a model: it needs 'blocks', 'loss', 'dtype' and 'seed' (a sequence of layers), or "
            "'parameters' and 'loss_and_grad' (a function; wrap it in mpizero.FunctionModel)"
        )
    dtype = getattr(model, "dtype", None)
    try:
        known = np.dtype(dtype) in (np.float32, np.float64)
    except TypeError:  # NumPy's answer to names that it does not know
        known = False
    if not known or dtype is None:
        raise ConfigError(f"parameters of type {dtype!r} are not supported ({name}.dtype): use float32 or float64")


def check_own_modules(comm: Communicator, model: Any) -> None:
    """Raise an error if several ranks that are threads of one process train the same PyTorch module.

    Collective over ``comm``. These ranks would write to the same gradients at once.

    Raises
    ------
    ConfigError
        On all ranks, if two ranks train the same module. The error names the module's class and the two ranks.
    """
    if comm.size == 1 or not isinstance(comm, InMemoryCommunicator) or isinstance(model, BlockModel):
        return
    found = comm.allgather_object(_trained_modules(model.loss_and_grad), "modules")
    for rank, modules in enumerate(found):
        for other in range(rank):
            if common := sorted(modules.items() & found[other].items()):
                raise ConfigError(
                    f"ranks {other} and {rank} are threads of one process and train the same PyTorch module, a "
                    f"{common[0][1]}: both would write to its gradients at once; let every rank make its own, for "
                    "example by copy.deepcopy in the function that run_in_threads calls"
                )


def _trained_modules(function: Any) -> dict[int, str]:
    """Return the class names, by ``id``, of the PyTorch modules with trainable parameters that a function refers to."""
    torch = sys.modules.get("torch")
    found: dict[int, str] = {}
    left = [function] if torch is not None else []
    seen: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):  # type: ignore[union-attr]
            if any(parameter.requires_grad for parameter in value.parameters()):
                found[id(value)] = type(value).__name__
        elif isinstance(value, partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            left += [value.__func__, value.__self__, *vars(value.__self__).values()]
        elif isinstance(value, FunctionType):
            used = inspect.getclosurevars(value)
            left += [*used.nonlocals.values(), *used.globals.values()]
    return found


def _check_part(what: str, kind: str, part: Any, methods: tuple[str, ...]) -> None:
    if isinstance(part, type):
        raise ArgumentError(f"{what} is the class {part.__name__}, not {kind}: call it to make one")
    if lacking := [method for method in methods if not callable(getattr(part, method, None))]:
        raise ArgumentError(f"{what} is {part!r:.80}, not {kind}: it has no method {', '.join(lacking)}")
