"""Call a module with the input of a block, and say in plain words what PyTorch refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpizero._util.pytree import leaves_of
from mpizero._util.text import users_line
from mpizero.errors import DataError

#: What PyTorch says where a derivative is asked for without a graph.
UNDIFFERENTIATED = ("does not require grad", "not have been used in the graph")


def called(module: torch.nn.Module, x: Any) -> Any:
    """Call a module: a tuple becomes several arguments, a dictionary keyword arguments. Not collective.

    Raises
    ------
    DataError
        Where PyTorch says in words of its own that samples are of another dtype, or too few for a batch norm.
    """
    args, named = arguments_of(x)
    try:
        return module(*args, **named)
    except (RuntimeError, ValueError, TypeError) as error:
        if (found := _in_words(error, module, x)) is None:
            raise
        line = users_line(error.__traceback__)
        raise DataError(f"{type(module).__name__}: {found}{'' if line is None else f' ({line})'}") from error


def _in_words(error: Exception, module: torch.nn.Module, x: Any) -> str | None:
    """Return what an error of PyTorch means and how to avoid it, if that is known."""
    tensors = [leaf for leaf in leaves_of(x) if isinstance(leaf, torch.Tensor)]
    if isinstance(error, TypeError):
        return _of_arguments(str(error), module, x)
    if any(words in str(error) for words in UNDIFFERENTIATED) and not torch.is_grad_enabled():
        return (
            f"its forward differentiates ({error}), but evaluate and predict run it without a graph, as PyTorch does "
            "under no_grad: put with torch.enable_grad(): around what it differentiates"
        )
    if "Expected more than 1 value per channel" in str(error):
        return (
            f"a batch norm has one sample in a micro-batch of {len(tensors[0]) if tensors else 1}, which has no "
            "variance: choose a larger micro_batch, and a global batch that leaves no rest of one sample"
        )
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    given = next((t.dtype for t in tensors if t.is_floating_point() and t.dtype != own), None)
    if own is not None and given is not None and "type" in str(error):
        kinds = [str(dtype).removeprefix("torch.") for dtype in (given, own)]
        return f"its input is {kinds[0]}, its parameters are {kinds[1]}: convert the samples, x.astype(np.{kinds[1]})"
    return None


def _of_arguments(told: str, module: torch.nn.Module, x: Any) -> str | None:
    """Return what becomes of an input whose arguments the module does not take."""
    if not told.startswith(f"{type(module).__qualname__}.forward() "):
        return None
    if isinstance(x, tuple):
        return f"{told}: a tuple of {len(x)} becomes {len(x)} arguments; a list or a dataclass is one"
    if isinstance(x, Mapping):
        return f"{told}: a dictionary becomes keyword arguments, {', '.join(map(str, x))}"
    return f"{told}: it is given one argument, {type(x).__name__}; a tuple becomes several, a dictionary keywords"


def arguments_of(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that an input becomes: a tuple several, a dictionary keyword arguments. Not collective."""
    if isinstance(x, tuple):
        return x, {}
    return ((), dict(x)) if isinstance(x, Mapping) else ((x,), {})
