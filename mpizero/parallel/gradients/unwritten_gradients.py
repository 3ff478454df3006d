"""Find layers that leave a part of their gradients unwritten, or add to the old values instead of overwriting them.

[Note: marks] Gradients are written into memory that every step uses again. An element that a layer does not write keeps
the value of an earlier step. Therefore, in the first step of a model, every element is first set to one fixed NaN, the
mark. No arithmetic on other numbers results in its bits. When a block's backward pass has ended, the check looks for
these bits. Adding to the mark gives the mark again, so the check also finds layers that add to the old values. A NaN
with other bits was computed by the layer. Only the first step in which a rank computes is checked, or all steps if
``MPIZERO_DEBUG=gradients`` is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpizero.errors import LayoutError
from mpizero.kernels import to_host
from mpizero.layout.flat import joined
from mpizero.names import nearest
from mpizero.nn.layer import Layer
from mpizero.parallel.parameters.store import flat_names
from mpizero.parallel.return_checks import named

#: By bytes of an element: the unsigned integer type of that size, and the mark, a quiet NaN with an arbitrary payload.
_MARKS: dict[int, tuple[Any, int]] = {4: (np.uint32, 0x7FCA5C3E), 8: (np.uint64, 0x7FFA5C3E9B71D42F)}


class GradientDict(dict[str, Any]):
    """Hold nested views that gradients are written to, by name; assigning another array to a name raises an error."""

    __slots__ = ()

    def __init__(self, views: Mapping[str, Any]) -> None:
        super().__init__({name: GradientDict(v) if isinstance(v, Mapping) else v for name, v in views.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        """Raise ``LayoutError`` if ``value`` is not the view with that name.

        ``grads[name] += ...`` assigns the same view again, and is allowed.
        """
        if name not in self:
            raise LayoutError(f"this layer has no parameter {name!r}{nearest(name, self)}: it has {sorted(self)}")
        if value is not self[name]:
            raise LayoutError(
                f"grads[{name!r}] = ... binds a name to another array, which nobody reads: write into the array that "
                f"is there, grads[{name!r}][...] = value"
            )

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Raise ``LayoutError`` if one of the given values is not the view with its name."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Make pickling and copying return a plain ``dict``."""
        return dict, (dict(self),)


class WriteCheck:
    """Mark gradients before layers write them, and look for marks that are left (see the module's [Note: marks]).

    Parameters
    ----------
    layers : mapping of str to layer
        The blocks of this rank's part of the model, by name.
    frozen : frozenset of str
        Full names of the frozen parameters, whose gradients are not checked.
    always : bool
        Whether to check every step, not only the first one in which this rank computes.
    """

    def __init__(self, layers: Mapping[str, Any], frozen: frozenset[str], *, always: bool) -> None:
        self.layers, self.frozen, self.always = layers, frozen, always
        self.on = True
        self._looked = self._found = False

    def mark(self, views: Mapping[str, Any]) -> None:
        """Write the mark to all elements of a unit's gradients; ``views`` are nested views by block. Not collective."""
        for block, tree in views.items():
            for _, view in self._trained(block, tree):
                bits, mark = _MARKS[view.dtype.itemsize]
                view.view(bits)[...] = mark
        self._looked = True

    def missed(self, block: str, views: Any) -> LayoutError | None:
        """Return an error to raise if marks are left in the gradients of ``block``; None if there are none.

        Not collective. ``views`` are the nested views of the block's gradients.
        """
        for name, view in self._trained(block, views):
            host = to_host(view)
            bits, mark = _MARKS[host.dtype.itemsize]
            if left := int((host.view(bits) == mark).sum()):
                self._found = True
                return _unwritten(self.layers[block], block, name, (left, host.size))
        return None

    def end(self, *, failed: bool) -> None:
        """End a step; if its gradients were checked, no layer raised and no mark was left, check no later step.

        Not collective. ``failed`` tells whether a layer has raised.
        """
        if self._looked and not (self._found or failed):
            self.on = self.always
        self._looked = self._found = False

    def _trained(self, block: str, tree: Any) -> Iterator[tuple[str, Any]]:
        return ((name, view) for name, view in flat_names(tree) if joined(block, name) not in self.frozen)


def _unwritten(layer: Any, block: str, name: str, counts: tuple[int, int]) -> LayoutError:
    owner, own = _owner(layer, name)
    left, size = counts
    what = "has not written" if left == size else f"has not written {left} of the {size} elements of"
    return LayoutError(
        f"block {block!r}, {type(owner).__name__}: the backward pass {what} the gradient of {own!r}, or has added to "
        f"what stood there ({_method(owner)}): a layer overwrites all of its gradient in every call, unused rows "
        f"included, grads[{own!r}][...] = value"
    )


def _owner(layer: Any, name: str) -> tuple[Any, str]:
    """Return the innermost layer that has the parameter ``name`` of ``layer``, and the parameter's name in it."""
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
