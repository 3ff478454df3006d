"""Check what a user's function or loss layer returns; errors name the function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from mpizero.errors import DataError, LayoutError
from mpizero.names import nearest, shown
from mpizero.signatures import named
from mpizero.types import Array, Run
from mpizero.validation import unmasked

#: The ``dtype.kind`` codes that a number may have: float, int, unsigned, and void, which JAX's bfloat16 has.
_NUMBERS = "fiuV"
_WEIGHT = "how much the samples count, for a plain mean their number; 0 for those that shall not"


def samples_text(run: Run) -> str:
    """Return a text for messages: which samples of the global batch ``run`` covers. Not collective."""
    first, last = run.first_sample, run.first_sample + run.count - 1
    return f"samples {first} to {last} of the global batch" if run.count > 1 else f"sample {first}"


def loss_and_weight(
    function: Callable[..., Any], loss: Any, weight: Any, given: Run | None = None, name: str = "loss_and_grad"
) -> tuple[float, float]:
    """Check the loss sum and the weight that ``function`` returned, and return them as floats. Not collective.

    ``given`` tells for which samples the function was called, for error messages. ``name`` is the function's name in
    them; a loss layer's ``forward`` is named by the layer's class instead. Infinities and NaN are accepted here: the
    training step is skipped later and the user is told why.

    Raises
    ------
    LayoutError
        If the loss or the weight is not a real number.
    DataError
        If the weight is negative.
    """
    if type(loss) is float and type(weight) is float and weight >= 0:  # as usual: every micro-batch comes here
        return loss, weight
    found_loss, found_weight = _number(loss), _number(weight)
    at = "" if given is None else f" of {samples_text(given)}"
    if getattr(function, "__name__", "") == "forward":
        name = f"{type(getattr(function, '__self__', None)).__name__}.forward"
    if found_loss is None:
        raise LayoutError(
            f"{named(function, name)} returned {_described(loss)} as the loss{at}: expected one real number, the sum "
            "of the samples' losses"
        )
    if found_weight is None:
        raise LayoutError(
            f"{named(function, name)} returned {_described(weight)} as the weight{at}: expected one real number, "
            f"{_WEIGHT}"
        )
    if found_weight < 0:
        raise DataError(
            f"{named(function, name)} returned {found_weight:g} as the weight{at}: expected a number >= 0, {_WEIGHT}"
        )
    return found_loss, found_weight


def _number(value: Any) -> float | None:
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if value is not None and not isinstance(value, bool | str | bytes | bytearray | complex) and kind in _NUMBERS:
        try:
            whole = getattr(value, "shape", ()) and math.prod(value.shape) == 1
            return float(value.reshape(()) if whole else value)
        except (TypeError, ValueError):
            pass
    return None


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"an array of {value.dtype} of shape {tuple(shape)}" if shape else f"{shown(value)} ({value.dtype})"
    return "None" if value is None else f"{shown(value)} ({type(value).__name__})"


def check_names(function: Callable[..., Any], grads: Mapping[str, Any], trained: Set[str], frozen: Set[str]) -> None:
    """Check the names of the gradients that a user's function returned. Not collective.

    There must be a gradient for each name in ``trained``. Those for names in ``frozen`` are ignored.

    Raises
    ------
    LayoutError
        If a gradient is missing, or one has a name that is in neither set.
    """
    if grads.keys() == trained:
        return
    for name in grads:
        if name not in trained and name not in frozen:
            raise LayoutError(
                f"{named(function, 'loss_and_grad')} returned a gradient for {shown(name)}, which is no parameter"
                f"{nearest(name, trained)}: the parameters are {_some(trained)}"
            )
    for name in trained:
        if name not in grads:
            raise LayoutError(
                f"{named(function, 'loss_and_grad')} returned no gradient for {name!r}; it returned {_some(grads)}"
            )


def _some(names: Any, most: int = 8) -> str:
    listed = sorted(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{listed[:most]}{more}"


def gradient(function: Callable[..., Any], name: str, value: Any, view: Array, given: Run) -> Array:
    """Check one gradient that a user's function returned, and return it as an array. Not collective.

    ``value`` is the gradient of the parameter ``name`` for the samples of ``given``. It must have the shape of
    ``view``, the array to which the caller copies it.

    Raises
    ------
    LayoutError
        If it has another shape, or is not float32 or float64; of a complex parameter, complex64 or complex128.
    """
    array = np.asarray(unmasked(value, f"{named(function, 'loss_and_grad')} returned a gradient of {name!r} that"))
    if array.dtype.kind != view.dtype.kind or array.real.itemsize < 4:
        expected = "complex64 or complex128" if view.dtype.kind == "c" else "float32 or float64"
        raise LayoutError(
            f"{named(function, 'loss_and_grad')} returned {_described(array)} as the gradient of {name!r} by "
            f"{samples_text(given)}: expected {expected}; {_way_out(array, view)}"
        )
    if array.shape != view.shape:
        raise LayoutError(
            f"{named(function, 'loss_and_grad')}: the gradient of {name!r} has shape {array.shape}, its parameter has "
            f"{view.shape}, by {samples_text(given)}"
        )
    return array


def take_integers(function: Callable[..., Any], name: str, value: Any, view: Array, given: Run) -> None:
    """Copy ``value``, the new value that a user's function returned for an integer array, to ``view``. Not collective.

    ``name`` is the array's name; ``given`` tells for which samples the function was called.

    Raises
    ------
    LayoutError
        If it has another shape, or values that the array's dtype cannot hold.
    """
    array = np.asarray(unmasked(value, f"{named(function, 'loss_and_grad')} returned a value of {name!r} that"))
    if array.shape == view.shape and array.dtype.kind in "iub":
        view[...] = array
        if (view == array).all():
            return
    raise LayoutError(
        f"{named(function, 'loss_and_grad')} returned {_described(array)} as the new value of integer array {name!r} "
        f"by {samples_text(given)}: expected {view.dtype} of shape {view.shape}"
    )


def _way_out(array: Array, view: Array) -> str:
    if array.dtype.kind == "c":
        return "the gradient of a real loss by a real parameter is real: return its real part"
    if view.dtype.kind == "c" and array.dtype.kind == "f":
        return "the parameter is complex, so its gradient is dL/dRe + i dL/dIm"
    if array.dtype.kind == "f" or array.itemsize == 2:
        return "sums of many samples lose digits in 16 bits: compute it in float32"
    if array.dtype.kind == "O":
        return "numbers of different kinds, or things that are no numbers, stand in it"
    return "if these are the right values, convert them: value.astype(numpy.float32)"
