"""Check what a user's loss returns, and once, on the first samples, that it is a sum that a trace holds whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpizero.adapters.hidden_state import hidden_state, line_that_changes, shared_generators
from mpizero.adapters.jax.parameter_tree import count
from mpizero.adapters.jax.traced_function import TracedFunction
from mpizero.errors import LayoutError, UnsupportedError

#: How far the losses of two halves may be from that of the whole, relative to their size, by bits of the parameters.
_APART = {16: 3e-2, 32: 1e-3, 64: 1e-8}
#: The same for parameters of 32 bits that were converted to 64, of which a function may convert some back.
_DOUBLED = 1e-6
#: How many grains are looked at: a loss of one may add up by chance, as where all its masks are full.
_MOST_GRAINS = 4
_TERM = (
    "a term that does not depend on the samples, such as a penalty on the parameters: multiply it by len(x); or "
    "samples that see each other, as in batch normalization"
)
_ADVICE = "expected one real number, the sum of the samples' losses, or that with their weight: (loss_sum, weight)"


def sum_and_weight(loss: TracedFunction, returned: Any) -> tuple[Any, Any]:
    """Return the traced sum of losses that ``loss`` returned, and the weight, None where it returned only the sum.

    Raises
    ------
    LayoutError
        If one of both is no real number.
    """
    pair = isinstance(returned, tuple | list)
    if pair and len(returned) != 2:
        raise LayoutError(f"{loss.shown} returned {len(returned)} values: {_ADVICE}")
    found, weight = returned if pair else (returned, None)
    if (told := _no_number(found, "f")) is not None:
        way = "; jax.numpy.sum(losses) adds them up" if "shape" in told else ""
        raise LayoutError(f"{loss.shown} returned {told} as the loss: {_ADVICE}{way}")
    if weight is not None and (told := _no_number(weight, "biuf")) is not None:
        raise LayoutError(
            f"{loss.shown} returned {told} as the weight: expected one real number, how much the samples count, for a "
            "plain mean their number"
        )
    return jnp.asarray(found), weight


def _no_number(value: Any, kinds: str) -> str | None:
    """Return what ``value`` is, where it is no number of one of the ``kinds`` of dtypes; None where it is one."""
    if not isinstance(value, int | float | complex) and not hasattr(value, "dtype"):
        return "None" if value is None else f"a {type(value).__name__}"
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape:
        return f"an array of {dtype} of shape {shape}"
    return None if dtype.kind in kinds or dtype == jnp.bfloat16 else f"a number of type {dtype}"


@dataclass
class CheckedGrains:
    """Hold how many grains of a loss have been checked, and whether it computes in 16 bits."""

    grains: int = 0
    half_precision: bool = False

    @property
    def enough(self) -> bool:
        """Tell whether no further grain is to be checked."""
        return self.grains >= _MOST_GRAINS


def check_grain(
    checked: CheckedGrains,
    loss: TracedFunction,
    value: Callable[..., tuple[Any, Any]],
    computed: Callable[..., Any],
    *,
    parameters: tuple[Any, ...],
    batch: tuple[Any, Any],
    key: tuple[Any, ...] = (),
) -> None:
    """Check a loss on one of its first grains, together and in two parts, and count it where that was possible.

    ``value`` is the function that is compiled. It takes ``parameters``, the trees of samples of ``batch``, and what
    makes a key, if there is one; ``computed`` returns also its gradient, that of the first of these trees.

    Raises
    ------
    UnsupportedError
        If two traces of the loss differ: it drew random numbers or used a variable that changes.
    LayoutError
        If loss, weight or gradient are not the sums over the samples.
    """
    if not checked.grains:
        checked.half_precision = check_traces(loss, value, (*parameters, *batch, *key))
    samples = count(*batch)
    if any(jnp.shape(leaf)[:1] != (samples,) for leaf in jax.tree_util.tree_leaves(batch)):
        return
    checked.grains += 1
    trees = parts_of(batch, samples)
    bits = jnp.finfo(jax.tree_util.tree_leaves((parameters, batch))[0].dtype).bits
    try:  # in double precision, a small term is no rounding
        with jax.enable_x64(True):
            found = _found(computed, _doubled(parameters), map(_doubled, trees), key)
        within = _APART[64] if bits == 64 else _DOUBLED
    except Exception:
        try:
            found, within = _found(computed, parameters, trees, key), _APART[bits]
        except Exception:
            if loss.takes_key:
                return  # it needs its key, and draws other numbers for other samples
            raise
    within = _APART[16] if checked.half_precision else within
    numbers = [np.array([one.loss, one.weight]) for one in found]
    _check_sums(loss, numbers[0], numbers[1:], samples, within)
    _check_gradients(loss, found, samples, within, add=bool(parameters))


def parts_of(tree: Any, samples: int) -> list[Any]:
    """Return a tree of samples, and two parts of it: its halves; a single sample is taken beside a changed one."""
    cut = jax.tree_util.tree_map
    if samples > 1:
        half = samples // 2
        return [tree, cut(lambda leaf: leaf[:half], tree), cut(lambda leaf: leaf[half:], tree)]
    other = cut(lambda leaf: leaf * leaf.dtype.type(0.5) if leaf.dtype.kind in "fc" else leaf, tree)
    return [cut(lambda *both: np.concatenate(both), tree, other), tree, other]


class _Found(NamedTuple):
    """Hold the loss of samples, its weight, and the arrays of its gradient."""

    loss: float
    weight: float
    gradient: list[np.ndarray[Any, Any]]


def _found(computed: Any, parameters: tuple[Any, ...], trees: Iterable[Any], key: tuple[Any, ...]) -> list[_Found]:
    found = []
    for tree in trees:
        (loss, weight), gradient = computed(*parameters, *tree, *[None for _ in key])
        leaves = [leaf for leaf in jax.tree_util.tree_leaves(gradient) if leaf.dtype != jax.dtypes.float0]
        weight = count(*tree) if weight is None else weight
        found.append(_Found(float(loss), float(weight), list(map(np.asarray, leaves))))
    return found


def _doubled(tree: Any) -> Any:
    kinds = {"float32": "float64", "complex64": "complex128"}
    return jax.tree_util.tree_map(lambda leaf: np.asarray(leaf, kinds.get(str(leaf.dtype), leaf.dtype)), tree)


def check_rows(apply: TracedFunction, computed: Callable[[Any], Any], x: Any) -> bool:
    """Check a block on its first samples; return whether it was possible.

    ``computed`` applies the block to samples ``x``.

    Raises
    ------
    LayoutError
        If the output for parts of the samples is not a part of the output.
    """
    samples = count(x)
    if any(jnp.shape(leaf)[:1] != (samples,) for leaf in jax.tree_util.tree_leaves(x)):
        return False
    trees = parts_of(x, samples)
    try:
        with apply.traced(without_key=True):
            whole, *parts = map(computed, trees)
            half_precision = _uses_half_precision(jax.make_jaxpr(computed)(x))
    except Exception:
        if apply.takes_key:
            return True  # it needs its key
        raise
    samples = max(samples, 2)
    for a, *rest in zip(*map(jax.tree_util.tree_leaves, (whole, *parts)), strict=True):
        if jnp.shape(a)[:1] != (samples,) or any(jnp.shape(b) != (count(b), *jnp.shape(a)[1:]) for b in rest):
            raise LayoutError(
                f"{apply.shown} returned an array of shape {jnp.shape(a)} for {samples} samples: the first axis of "
                "every array counts samples"
            )
        b = np.concatenate(rest)
        if a.dtype.kind != "f" or not (np.isfinite(a).all() and np.isfinite(b).all()):
            continue
        apart, size = float(np.max(np.abs(a - b), initial=0)), float(np.max(np.abs(a), initial=0))
        if apart > _APART[16 if half_precision else jnp.finfo(a.dtype).bits] * size:
            raise LayoutError(
                f"{apply.shown}: rows of its output depend on other samples: for the first {samples} samples together "
                f"and in two parts they differ by {apart:.3g}; compute each sample by itself: grains have another "
                "number of samples"
            )
    return True


def _check_sums(
    loss: TracedFunction, whole: np.ndarray[Any, Any], halves: list[np.ndarray[Any, Any]], samples: int, within: float
) -> None:
    if not np.isfinite([whole, *halves]).all():
        return  # told by the step itself, with the tensor
    apart = abs(whole - sum(halves))
    allowed = within * np.maximum(abs(whole), sum(map(abs, halves)))
    of, samples = "halves" if samples > 1 else "parts", max(samples, 2)
    for at, what in enumerate(("loss", "weight")):
        if apart[at] <= allowed[at] or not allowed[at]:
            continue
        a, b = halves[0][at], halves[1][at]
        why = _TERM
        if what == "weight":
            why = "a weight that does not grow with the samples: return their number"
        elif min(a, b) - allowed[at] <= whole[at] <= max(a, b) + allowed[at]:  # also of one with a mask or weights
            why = "a mean over the samples: return their sum, jax.numpy.sum(losses)"
        raise LayoutError(
            f"{loss.shown}: the {what} of the first {samples} samples is {whole[at]:.6g}, of their two {of} "
            f"{a:.6g} + {b:.6g}; probably {why}"
        )


def _check_gradients(loss: TracedFunction, found: list[_Found], samples: int, within: float, *, add: bool) -> None:
    """Raise ``LayoutError`` if gradients of the parts do not ``add`` up, or are not those of rows, to the whole one."""
    whole, first, second = (one.gradient for one in found)
    largest = max((float(np.max(np.abs(leaf), initial=0)) for leaf in whole), default=0.0)
    for a, b, c in zip(whole, first, second, strict=True):
        other = b + c if add else np.concatenate([b, c])
        size = max(float(np.max(np.abs(a), initial=0)), 1e-2 * largest)
        if not (np.isfinite(a).all() and np.isfinite(other).all()):
            continue
        if (apart := float(np.max(np.abs(a - other), initial=0))) > 10 * within * size:
            raise LayoutError(
                f"{loss.shown}: the gradient for the first {max(samples, 2)} samples and that for two parts of them "
                f"differ by {apart:.3g}, its largest element is {size:.3g}; probably {_TERM}"
            )


def check_traces(function: TracedFunction, value: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    """Raise ``UnsupportedError`` if two traces of ``value``, which calls ``function``, differ. Not collective.

    Returns whether it computes in 16 bits.
    """

    def traced() -> Any:
        return jax.make_jaxpr(lambda *arguments: value(*arguments))(*given)

    first, second = traced(), traced()
    if str(first) != str(second) or not all(map(_same, first.consts, second.consts)):

        def state() -> Any:
            return shared_generators(), hidden_state(function=function.function)

        line = line_that_changes(state, traced)
        at = "" if line is None else f", {line}"
        raise UnsupportedError(
            f"{function.shown}{at}: computes something else when it is traced again: it draws numbers from "
            "numpy.random or random, or uses a variable that changes, and JAX would keep what it was at first: "
            "compute from the arguments, and random numbers from an argument key"
        )
    return _uses_half_precision(first)


def _uses_half_precision(jaxpr: Any) -> bool:
    """Tell whether numbers of 16 bits are among what is computed."""
    return any(f":{kind}[" in str(jaxpr) for kind in ("bf16", "f16"))


def _same(a: Any, b: Any) -> bool:
    return a is b or (np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes())
