"""Find models that leave a part of their gradients unwritten, or add to the old values instead of overwriting them.

[Note: marks] Gradients are written into memory that every step uses again. An element that a layer does not write keeps
the value of an earlier step. Therefore, in the first step of a model, every element is first set to one fixed NaN, the
mark. No arithmetic on other numbers results in its bits. When a block's backward pass has ended, the check looks for
these bits. Adding to the mark gives the mark again, so the check also finds layers that add to the old values. A NaN
with other bits was computed by the layer. Only the first step in which a rank computes is checked, or all steps if
``MPIZERO_DEBUG=gradients`` is set. A function that writes its gradients in place is checked in every step, but after
the first only the first and the last element of each gradient are set to the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mpizero._util.checks import named
from mpizero._util.names import nearest
from mpizero.errors import LayoutError
from mpizero.kernels import to_host
from mpizero.layout.flat import joined
from mpizero.nn.layer import Layer
from mpizero.parallel.parameters.store import flat_names
from mpizero.types import as_reals

#: By bytes of an element: the unsigned integer type of that size, and the mark, a quiet NaN with an arbitrary payload.
_MARKS: dict[int, tuple[Any, int]] = {4: (np.uint32, 0x7FCA5C3E), 8: (np.uint64, 0x7FFA5C3E9B71D42F)}


def mark(view: Any) -> None:
    """Set all elements of a gradient, an array of the host or of a GPU, to the mark. Not collective."""
    reals = as_reals(view)
    bits, value = _MARKS[reals.dtype.itemsize]
    reals.view(bits)[...] = value


def mark_ends(view: Any) -> None:
    """Set the first and the last element of a gradient to the mark. Not collective."""
    reals = as_reals(view)
    bits, value = _MARKS[reals.dtype.itemsize]
    reals.view(bits)[:: max(1, reals.size - 1)] = value


def marks_left(view: Any) -> int:
    """Return how many elements of a gradient are marked, in one of their parts if complex. Not collective."""
    host = as_reals(to_host(view))
    bits, value = _MARKS[host.dtype.itemsize]
    return int((host.view(bits) == value).reshape(view.size, -1).any(axis=1).sum()) if view.size else 0


class GradientDict(dict[str, Any]):
    """Hold nested views that gradients are written to, by name; assigning another array to a name raises an error."""

    __slots__ = ()
    #: The name of the argument, and whose parameters they are, as errors say it.
    argument, owner = "grads", "this layer"

    def __init__(self, views: Mapping[str, Any]) -> None:
        super().__init__({name: GradientDict(v) if isinstance(v, dict) else v for name, v in views.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        """Raise ``LayoutError`` if ``value`` is not the view with that name.

        ``grads[name] += ...`` assigns the same view again, and is allowed.
        """
        if name not in self:
            raise LayoutError(f"{self.owner} has no parameter {name!r}{nearest(name, self)}: it has {sorted(self)}")
        if value is not self[name]:
            raise LayoutError(
                f"{self.argument}[{name!r}] = ... binds a name to another array, which nobody reads: write into the "
                f"array that is there, {self.argument}[{name!r}][...] = value"
            )

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Raise ``LayoutError`` if one of the given values is not the view with its name."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Make pickling and copying return a plain ``dict``."""
        return dict, (dict(self),)


class FunctionGradients(GradientDict):
    """Hold the views that a function writes its gradients to, by the names of the parameters."""

    __slots__ = ()
    argument, owner = "gradients", "the model"


class WriteCheck:
    """Mark gradients before they are written, and look for marks that are left (see the module's [Note: marks]).

    Parameters
    ----------
    unwritten : callable
        Takes the name of a block, the name of a parameter in it, how many elements of its gradient are marked, and how
        many there are; returns the error to raise.
    frozen : frozenset of str
        Full names of the frozen parameters, whose gradients are not checked.
    always : bool
        Whether to check every step, not only the first one in which this rank computes.
    ends : bool
        Whether to mark the first and the last element of each gradient in the steps that are not checked otherwise.
    """

    def __init__(
        self,
        unwritten: Callable[[str, str, int, int], LayoutError],
        frozen: frozenset[str],
        *,
        always: bool,
        ends: bool = False,
    ) -> None:
        self.unwritten, self.frozen, self.always, self.ends = unwritten, frozen, always, ends
        self._first = True
        self._looked = self._found = False

    @property
    def on(self) -> bool:
        """Tell whether gradients are to be marked in this step. Not collective."""
        return self._first or self.ends

    def mark(self, views: Mapping[str, Any]) -> None:
        """Mark the gradients of a unit; ``views`` are nested views by block. Not collective."""
        for block, tree in views.items():
            for _, view in self._trained(block, tree):
                (mark if self._first else mark_ends)(view)
        self._looked = True

    def missed(self, block: str, views: Any) -> LayoutError | None:
        """Return an error to raise if marks are left in the gradients of ``block``; None if there are none.

        Not collective. ``views`` are the nested views of the block's gradients.
        """
        for name, view in self._trained(block, views):
            if left := marks_left(view):
                self._found = True
                return self.unwritten(block, name, left, view.size)
        return None

    def end(self, *, failed: bool) -> None:
        """End a step; if its gradients were checked, no layer raised and no mark was left, check no later step.

        Not collective. ``failed`` tells whether a layer has raised.
        """
        if self._looked and not (self._found or failed):
            self._first = self.always
        self._looked = self._found = False

    def _trained(self, block: str, tree: Any) -> Iterator[tuple[str, Any]]:
        views = ((name, view) for name, view in flat_names(tree) if view.dtype.kind not in "iub")
        return ((name, view) for name, view in views if joined(block, name) not in self.frozen)


def check_layers(layers: Mapping[str, Any], frozen: frozenset[str], *, always: bool) -> WriteCheck:
    """Return a check of the gradients that ``layers``, the blocks of this rank by name, write. Not collective."""

    def unwritten(block: str, name: str, left: int, size: int) -> LayoutError:
        owner, own = _owner(layers[block], name)
        return LayoutError(
            f"block {block!r}, {type(owner).__name__}: the backward pass {_what(left, size)} the gradient of {own!r}, "
            f"or has added to what stood there ({_method(owner)}): a layer overwrites all of its gradient in every "
            f"call, unused rows included, grads[{own!r}][...] = value"
        )

    return WriteCheck(unwritten, frozen, always=always)


def check_function(function: Callable[..., Any], frozen: frozenset[str], *, always: bool) -> WriteCheck:
    """Return a check of the gradients that ``function``, a black box, writes in place. Not collective."""

    def unwritten(block: str, name: str, left: int, size: int) -> LayoutError:
        own = joined(block, name)
        return LayoutError(
            f"{named(function, 'loss_and_grad')} {_what(left, size)} the gradient of {own!r}, or has added to what "
            f"stood there: it overwrites all of each gradient in every call, zeros included, and in the arrays of this "
            f"call, gradients[{own!r}][...] = value"
        )

    return WriteCheck(unwritten, frozen, always=always, ends=True)


def _what(left: int, size: int) -> str:
    return "has not written" if left == size else f"has not written {left} of the {size} elements of"


def _owner(layer: Any, name: str) -> tuple[Any, str]:
    """Return the innermost layer that has the parameter ``name`` of ``layer``, and the parameter's name in it."""
    layer = getattr(layer, "stands_for", layer)
    while True:
        children = layer.children() if hasattr(layer, "children") else {}
        child = next((child for child in children if name.startswith(f"{child}.")), None)
        if child is not None:
            layer, name = children[child], name[len(child) + 1 :]
        elif hasattr(getattr(layer, "layer", None), "specs"):  # Checkpointed and its like keep the names
            layer = layer.layer
        else:
            return layer, name


def _method(layer: Any) -> str:
    """Return the name of the method that writes the layer's gradients, with the method's file and line."""
    for kind in type(layer).__mro__:
        for method in ("backward_weights", "backward"):
            if method not in vars(kind):
                continue
            if kind is Layer:
                return f"{type(layer).__name__} defines no backward_weights"
            return named(vars(kind)[method], f"{kind.__name__}.{method}")
    return f"{type(layer).__name__}.backward"
