"""Call functions written in JAX: fix XLA's threads, name parameters, convert samples, trace programs, and check losses.

:class:`TracedFunction` is a user's function of JAX arrays; it explains the errors that the function raises while JAX
traces it. :class:`ParameterTree` names the arrays of a pytree of parameters. :class:`FlatProgram` holds a program of
JAX (a jaxpr): it evaluates some of the equations, and finds the equations that given outputs need. :class:`FirstGrains`
checks on the first samples that a loss is a sum over samples, and that tracing the loss again gives the same program.
:func:`check_rows` checks that a block computes each sample by itself.

[Note: threads of XLA] JAX starts its CPU client when it first computes, and the environment variable ``PJRT_NPROC``
then sets the client's number of threads; without it, the client of every rank has as many threads as the process may
use cores. Neither ``OMP_NUM_THREADS`` nor the ``intra_op_parallelism_threads`` of ``XLA_FLAGS`` changes that. The
computing threads are named ``tf_XLAEigen``; on Linux, :func:`running_threads` counts them by this name.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mpizero._util.checks import named
from mpizero._util.names import shown
from mpizero._util.text import users_line
from mpizero.adapters.user_code import derived_seed, hidden_state, line_that_changes, shared_generators
from mpizero.errors import ConfigError, DataError, LayoutError, UnsupportedError
from mpizero.types import Array, Run

_SETTING, _NAME = "PJRT_NPROC", "tf_XLAEigen"


def fix_threads(threads: int | None = None) -> None:
    """Let XLA start with this number of threads, unless it has started. Not collective.

    If ``threads`` is None, the value of ``PJRT_NPROC`` or else of ``OMP_NUM_THREADS`` is used, or else 1.
    """
    if threads is None:
        setting = os.environ.get(_SETTING) or os.environ.get("OMP_NUM_THREADS", "1")
        threads = int(setting) if setting.isdecimal() and int(setting) else 1
    if not running_threads():
        os.environ[_SETTING] = str(threads)


def running_threads() -> int:
    """Return how many threads XLA computes with; 0 if it has not started, or on systems other than Linux."""
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            count += task.read_text(encoding="utf-8").strip() == _NAME
        except OSError:  # the thread has ended
            continue
    return count


def require_threads(threads: int) -> None:
    """Let XLA start with ``threads`` threads, or raise an error if it has started with more. Not collective.

    Raises
    ------
    ConfigError
        If XLA runs with more threads.
    """
    running = running_threads()
    if not running:
        fix_threads(threads)
    elif running > threads:
        raise ConfigError(
            f"JAX has started with {running} threads on this rank, the configuration has threads={threads}: import "
            f"mpizero.adapters.jax before JAX computes anything, or set {_SETTING}={threads} for the job"
        )


def key_data(run: Run, number: int) -> Array:
    """Return two integers of 32 bits from which :func:`make_key` makes the key of block ``number``. Not collective.

    The integers depend on the seed, the step and the first sample of ``run``. They are passed to the compiled function
    as an argument, so that it need not be compiled again for other keys. There are two integers, because JAX would cut
    a single one of 64 bits to 32 bits unless ``jax_enable_x64`` is set.
    """
    seed = derived_seed(run, number)
    return np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)


def make_key(data: Any) -> Any:
    """Return a key of ``jax.random`` made from what :func:`key_data` returned; None for None. Not collective."""
    return None if data is None else jax.random.fold_in(jax.random.key(data[0]), data[1])


@dataclass(frozen=True)
class ParameterTree:
    """Hold the structure of a pytree and the dotted names of its leaves, in JAX's order.

    Attributes
    ----------
    names : tuple of str
        The path of every leaf: ``dense.kernel``, ``layers.0.weight``; ``value`` where the tree is one array.
    """

    names: tuple[str, ...]
    _structure: Any

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the pytree with the given leaves, in the order of :attr:`names`."""
        return jax.tree_util.tree_unflatten(self._structure, leaves)


def named_leaves(tree: Any, where: str) -> tuple[ParameterTree, list[Any]]:
    """Return the names and structure of a pytree of parameters, and its leaves.

    ``where`` names the tree in error messages.

    Raises
    ------
    ConfigError
        If there are no leaves, a leaf is no array of float32, float64, complex64 or complex128, or two leaves have the
        same name.
    """
    try:
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    except (TypeError, ValueError) as error:  # of keys that cannot be sorted
        raise ConfigError(f"{where} are no pytree: {error}; let the keys of a dictionary be strings") from error
    if not paths:
        raise ConfigError(f"{where} hold no arrays: give a pytree of them, such as {{'dense': {{'kernel': array}}}}")
    names: dict[str, str] = {}
    for path, leaf in paths:
        name, text = dotted(path), jax.tree_util.keystr(path)
        if name in names:
            raise ConfigError(f"{where}: {names[name]} and {text} would both be named {name!r}; rename one of the keys")
        names[name] = text
        _check_leaf(leaf, f"{where}: {name!r}")
    return ParameterTree(tuple(names), structure), [leaf for _, leaf in paths]


#: Name of the parameter where the tree is a single array.
SINGLE = "value"


def dotted(path: Sequence[Any]) -> str:
    """Return the name for a path in a pytree: its keys, indices and attributes, joined by dots."""
    steps = (
        next((getattr(step, name) for name in ("key", "idx", "name") if hasattr(step, name)), str(step).strip(".[]'\""))
        for step in path
    )
    return ".".join(map(str, steps)) or SINGLE


def _check_leaf(leaf: Any, what: str) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise ConfigError(f"{what} is a traced value: make the model outside of jit, grad and vmap")
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        way = "numpy.asarray(value, 'float32') makes an array; close over what is no parameter"
        raise ConfigError(f"{what} is {shown(leaf)} ({type(leaf).__name__}), not an array: {way}")
    if not isinstance(dtype, np.dtype) or dtype not in (np.float32, np.float64, np.complex64, np.complex128):
        way = "close over integers and other constants" if getattr(dtype, "kind", "") in "biu" else "convert it"
        raise ConfigError(f"{what} is of type {dtype}: parameters are float32, float64, complex64 or complex128; {way}")


def require_precision(dtypes: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` if a parameter has 64 bits, and JAX would round it to 32. Not collective."""
    wide = next((name for name, dtype in dtypes.items() if np.dtype(dtype).name in ("float64", "complex128")), None)
    if wide is not None and not jax.config.jax_enable_x64:
        raise ConfigError(
            f"{where}: {wide!r} is {dtypes[wide]}, but JAX would compute in 32 bits: call "
            'jax.config.update("jax_enable_x64", True) before JAX is used, or give parameters of 32 bits'
        )


def samples(tree: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Return a pytree of samples whose arrays have dtypes that JAX does not change. Not collective.

    Floating-point arrays that are wider than ``dtype``, the dtype of the parameters, are converted to its precision, so
    that float32 stays float32 whether or not JAX has 64 bits. Without 64 bits, integers of 64 bits are converted to 32.

    Raises
    ------
    DataError
        If a leaf is no array of numbers, or an integer does not fit into JAX's 32 bits. The message names the leaf by
        ``what`` and its path.
    """
    if type(tree) is np.ndarray:
        return _sample(tree, dtype, lambda: what)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _sample(leaf, dtype, lambda: what + jax.tree_util.keystr(path)), tree
    )


def _sample(leaf: Any, dtype: np.dtype[Any], what: Any) -> Any:
    leaf_dtype = getattr(leaf, "dtype", None)
    kind = getattr(leaf_dtype, "kind", "")
    if leaf_dtype is None or kind not in "biufcV" or not hasattr(leaf, "shape"):
        described = f"an array of {leaf_dtype}" if leaf_dtype is not None else f"a {type(leaf).__name__}"
        raise DataError(
            f"{what()} is {described}, which JAX does not take: give arrays of numbers, alone or in tuples, lists, "
            "dictionaries and classes that jax.tree_util.register_dataclass knows"
        )
    size = dtype.itemsize * (2 if kind == "c" else 1)
    if kind in "fc" and leaf_dtype.itemsize > size:
        return np.asarray(leaf).astype(f"{kind}{size}")
    if kind in "iu" and leaf_dtype.itemsize == 8 and not jax.config.jax_enable_x64:
        narrow = np.dtype(f"{kind}4")
        bounds, array = np.iinfo(narrow), np.asarray(leaf)
        if array.size and (array.min() < bounds.min or array.max() > bounds.max):
            raise DataError(
                f"{what()} holds {int(array.max())} or {int(array.min())}, which JAX would cut to 32 bits: call "
                'jax.config.update("jax_enable_x64", True) before JAX is used'
            )
        return array.astype(narrow)
    return leaf


def count(*trees: Any) -> int:
    """Return the number of samples: the length of the first array that has an axis; 1 if there is none."""
    return next((len(leaf) for leaf in jax.tree_util.tree_leaves(trees) if getattr(leaf, "ndim", 0)), 1)


def descending(gradient: Any) -> Any:
    """Return a gradient such that ``w -= lr * gradient`` descends: the conjugate of JAX's for complex parameters."""
    return jax.numpy.conj(gradient) if jax.numpy.iscomplexobj(gradient) else gradient


def real_type(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of the real part of a complex dtype; return a real dtype itself. Not collective."""
    return np.dtype(np.finfo(dtype).dtype)


@dataclass(frozen=True)
class FlatProgram:
    """Hold a program of JAX (a jaxpr) in which the calls of inner programs are inlined.

    Attributes
    ----------
    inputs, outputs : list
        Input and output variables of the program; an output may also be a literal.
    equations : list
        Equations of the program, in the order in which they run.
    constants : dict
        Values of the program's constants, by variable.
    """

    inputs: list[Any]
    outputs: list[Any]
    equations: list[Any]
    constants: dict[Any, Any]
    _jaxpr: Any

    def evaluated(self, equations: list[Any], known: Mapping[Any, Any], outputs: Sequence[Any]) -> list[Any]:
        """Evaluate some of the equations, given the values ``known`` by variable; return the values of ``outputs``."""
        return _evaluated(self._jaxpr, equations, self.constants | dict(known), outputs)

    def needed(self, outputs: Iterable[Any]) -> list[Any]:
        """Return the equations that the variables ``outputs`` depend on, in the order in which they run."""
        wanted, equations = {v for v in outputs if is_variable(v)}, []
        for equation in reversed(self.equations):
            if wanted.intersection(equation.outvars):
                equations.append(equation)
                wanted.update(v for v in filter(is_variable, equation.invars))
        return equations[::-1]

    def following(self, inputs: Iterable[Any]) -> set[Any]:
        """Return the set of the variables ``inputs`` and of all variables that depend on them."""
        variables = set(inputs)
        for equation in self.equations:
            if any(v in variables for v in filter(is_variable, equation.invars)):
                variables.update(equation.outvars)
        return variables


def is_variable(value: Any) -> bool:
    """Tell whether an input or output of an equation is a variable, not a literal."""
    return not isinstance(value, Literal)


def flat_program(function: Callable[..., Any], *examples: Any) -> FlatProgram:
    """Trace a function for arguments like ``examples``, and return its program."""
    closed = jax.make_jaxpr(function)(*examples)
    flat = jax.make_jaxpr(lambda *inputs: _inlined(closed.jaxpr, closed.consts, inputs))(*closed.in_avals)
    program = flat.jaxpr
    constants = dict(zip(program.constvars, flat.consts, strict=True))
    return FlatProgram(program.invars, program.outvars, program.eqns, constants, program)


#: Primitives that call a program and compute nothing themselves; ``jaxpr`` among their parameters is the program.
_CALLS = ("jit", "pjit", "closed_call", "core_call")


def _inlined(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Run a program of JAX (a jaxpr) equation by equation, including the programs that it calls."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr") if equation.primitive.name in _CALLS else None
        if inner is None:
            results = _evaluated(jaxpr, [equation], values, equation.outvars)
        else:
            inputs = [values[v] if is_variable(v) else v.val for v in equation.invars]
            results = _inlined(inner.jaxpr, inner.consts, inputs)
        values.update(zip(equation.outvars, results, strict=True))
    return [values[v] if is_variable(v) else v.val for v in jaxpr.outvars]


def _evaluated(jaxpr: Any, equations: list[Any], known: Mapping[Any, Any], outputs: Sequence[Any]) -> list[Any]:
    """Evaluate ``equations`` of a jaxpr, given the values ``known`` by variable; return the values of ``outputs``."""
    needed = {v for equation in equations for v in equation.invars if is_variable(v)}
    needed.update(filter(is_variable, outputs))
    inputs = [v for v in known if v in needed]
    part = jaxpr.replace(constvars=[], invars=inputs, outvars=list(outputs), eqns=list(equations))
    results: list[Any] = jax.core.eval_jaxpr(part, (), *[known[v] for v in inputs])
    return results


#: What to write in place of Python's own constructs, by the errors of JAX that these raise.
_INSTEAD = (
    (jax.errors.TracerArrayConversionError, "compute with jax.numpy in place of numpy"),
    (jax.errors.TracerBoolConversionError, "choose by jax.numpy.where or jax.lax.cond in place of if and while"),
    (jax.errors.TracerIntegerConversionError, "take a size or an index from a shape, or use jax.lax.dynamic_slice"),
    (jax.errors.NonConcreteBooleanIndexError, "multiply by the mask, or use jax.numpy.where with three arguments"),
    (jax.errors.UnexpectedTracerError, "return what is computed, in place of keeping it in a variable outside"),
    (jax.errors.ConcretizationTypeError, "keep values as arrays: return them without float() and int()"),
)
#: Part of the note that JAX adds to every error, which says only that lines were left out.
_FILTERED = "JAX has removed its internal frames"


class TracedFunction:
    """Hold a user's function, and whether it takes a random key after its other arguments.

    Parameters
    ----------
    function : callable
        The function. It takes a key if it has a parameter ``key``, or one positional parameter more than ``arguments``
        names.
    name : str
        Name of the argument of :class:`JaxModel` by which the user has given the function, for messages.
    arguments : str
        Names of the arguments with which the function is called.

    Raises
    ------
    ConfigError
        If ``function`` is not callable, or cannot be called with these arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str, *arguments: str) -> None:
        if not callable(function):
            raise ConfigError(f"{name} must be a function {name}({', '.join(arguments)}), got {function!r:.80}")
        self.function, self.name = function, name
        self._by_name, self._by_position = _takes_key(function, name, arguments)

    @property
    def takes_key(self) -> bool:
        """Tell whether the function takes a key."""
        return self._by_name or self._by_position

    @property
    def label(self) -> str:
        """The function's name, file and line, for messages."""
        return named(self.function, self.name)

    def __call__(self, *arguments: Any, key: Any) -> Any:
        """Return what the function returns; ``key`` is passed on if the function takes a key."""
        if self._by_name:
            return self.function(*arguments, key=key)
        return self.function(*arguments, key) if self._by_position else self.function(*arguments)

    @contextmanager
    def traced(self, *, without_key: bool = False) -> Iterator[None]:
        """Explain the errors that JAX raises for the function inside of the context.

        ``without_key`` says that the function's key is None, as in ``evaluate``.

        Raises
        ------
        UnsupportedError
            If the function does something that JAX cannot trace. The message names the line, and what to write instead.
        """
        try:
            yield
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            line, reason = users_line(error.__traceback__), str(error).strip().split("\n")[0]
            instead = next((way for kind, way in _INSTEAD if isinstance(error, kind)), "see the error's own text")
            where = "" if line is None else f", {line}"
            reason = reason.rstrip(".")
            raise UnsupportedError(f"{self.label}{where}: JAX cannot trace it: {reason}; {instead}") from error
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if _FILTERED not in note]
            if without_key and self.takes_key:
                error.add_note(f"{self.name}'s key is None in evaluate and predict: let it leave dropout out then")
            raise


def _takes_key(function: Callable[..., Any], name: str, names: tuple[str, ...]) -> tuple[bool, bool]:
    """Return whether a function takes a random key as keyword ``key``, and whether as its last positional argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False, False
    key = signature.parameters.get("key")
    calls: list[tuple[tuple[str, ...], dict[str, Any]]] = [(names, {}), ((*names, "key"), {})]
    if key is not None and key.kind in (key.KEYWORD_ONLY, key.POSITIONAL_OR_KEYWORD):
        calls.insert(0, (names, {"key": None}))
    for arguments, keywords in calls:
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as mismatch:
            error = mismatch
        else:
            return bool(keywords), len(arguments) > len(names)
    called = getattr(function, "__qualname__", name).rpartition("<locals>.")[2]
    raise ConfigError(
        f"{name} is called as {name}({', '.join(names)}), or with key= as well where it takes that, but it is "
        f"{called}{signature}: {error}"
    )


#: Largest relative difference of the sum of two halves' losses from the whole's loss, by bits of the parameters.
_APART = {16: 3e-2, 32: 1e-3, 64: 1e-8}
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
        If the sum or the weight is not one real number.
    """
    pair = isinstance(returned, tuple | list)
    if pair and len(returned) != 2:
        raise LayoutError(f"{loss.label} returned {len(returned)} values: {_ADVICE}")
    value, weight = returned if pair else (returned, None)
    if (fault := _no_number(value, "f")) is not None:
        way = "; jax.numpy.sum(losses) adds them up" if "shape" in fault else ""
        raise LayoutError(f"{loss.label} returned {fault} as the loss: {_ADVICE}{way}")
    if weight is not None and (fault := _no_number(weight, "biuf")) is not None:
        raise LayoutError(
            f"{loss.label} returned {fault} as the weight: expected one real number, how much the samples count, for a "
            "plain mean their number"
        )
    return jnp.asarray(value), weight


def _no_number(value: Any, kinds: str) -> str | None:
    """Return a description of ``value``, or None if it is one number whose kind of dtype is in ``kinds``."""
    if not isinstance(value, int | float | complex) and not hasattr(value, "dtype"):
        return "None" if value is None else f"a {type(value).__name__}"
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape:
        return f"an array of {dtype} of shape {shape}"
    return None if dtype.kind in kinds or dtype == jnp.bfloat16 else f"a number of type {dtype}"


#: How many grains are checked: in one grain the losses of parts may add up although the loss is no sum, for example if
#: no sample of the grain is masked.
_MOST_GRAINS = 4


#: Like _APART, for parameters of 32 bits that were converted to 64, of which the function may convert some back.
_DOUBLED = 1e-6


@dataclass
class FirstGrains:
    """Compare the loss of each of the first grains with the losses of two parts of the grain.

    Attributes
    ----------
    loss : TracedFunction
        The loss.
    value, computed : callable
        ``value`` is the function to be compiled. It takes the parameters, the pytrees of a batch, and the key data if
        the loss takes a key. ``computed`` also returns the gradient with respect to the first argument.
    grains : int
        Number of grains that were checked.
    half_precision : bool
        Whether the loss computes in 16 bits.
    """

    loss: TracedFunction
    value: Callable[..., tuple[Any, Any]]
    computed: Callable[..., Any]
    grains: int = 0
    half_precision: bool = False

    def check(self, parameters: tuple[Any, ...], batch: tuple[Any, Any], key: tuple[Any, ...] = ()) -> None:
        """Check a grain and count it, if it can be cut into parts; do nothing once enough grains were checked.

        Raises
        ------
        UnsupportedError
            If two traces of the loss differ: it drew random numbers or used a variable that changes.
        LayoutError
            If the loss, the weight or the gradient is not a sum over the samples.
        """
        if self.grains >= _MOST_GRAINS:
            return
        if not self.grains:
            self.half_precision = check_traces(self.loss, self.value, (*parameters, *batch, *key))
        samples = count(*batch)
        if any(jnp.shape(leaf)[:1] != (samples,) for leaf in jax.tree_util.tree_leaves(batch)):
            return
        self.grains += 1
        trees = parts_of(batch, samples)
        bits = jnp.finfo(jax.tree_util.tree_leaves((parameters, batch))[0].dtype).bits
        try:  # in double precision, a small term is no rounding
            with jax.enable_x64(True):
                results = _evaluate(self.computed, _doubled(parameters), map(_doubled, trees), key)
            within = _APART[64] if bits == 64 else _DOUBLED
        except Exception:
            try:
                results, within = _evaluate(self.computed, parameters, trees, key), _APART[bits]
            except Exception:
                if self.loss.takes_key:
                    return  # it needs its key, and draws other numbers for other samples
                raise
        within = _APART[16] if self.half_precision else within
        numbers = [np.array([one.loss, one.weight]) for one in results]
        self._check_sums(numbers[0], numbers[1:], samples, within)
        self._check_gradients(results, samples, within, add=bool(parameters))

    def _check_sums(self, full: Array, halves: list[Array], samples: int, within: float) -> None:
        if not np.isfinite([full, *halves]).all():
            return  # told by the step itself, with the tensor
        apart = abs(full - sum(halves))
        allowed = within * np.maximum(abs(full), sum(map(abs, halves)))
        of, samples = "halves" if samples > 1 else "parts", max(samples, 2)
        for at, what in enumerate(("loss", "weight")):
            if apart[at] <= allowed[at] or not allowed[at]:
                continue
            a, b = halves[0][at], halves[1][at]
            why = _TERM
            if what == "weight":
                why = "a weight that does not grow with the samples: return their number"
            elif min(a, b) - allowed[at] <= full[at] <= max(a, b) + allowed[at]:  # also of one with a mask or weights
                why = "a mean over the samples: return their sum, jax.numpy.sum(losses)"
            raise LayoutError(
                f"{self.loss.label}: the {what} of the first {samples} samples is {full[at]:.6g}, of their two {of} "
                f"{a:.6g} + {b:.6g}; probably {why}"
            )

    def _check_gradients(self, results: list[_Result], samples: int, within: float, *, add: bool) -> None:
        """Raise ``LayoutError`` if the gradients of the two parts do not give the gradient of all samples.

        If ``add`` is true, the gradients of the parts must add up to the gradient of all samples; otherwise their
        concatenation must be equal to it.
        """
        full, first, second = (one.gradient for one in results)
        largest = max((float(np.max(np.abs(leaf), initial=0)) for leaf in full), default=0.0)
        for a, b, c in zip(full, first, second, strict=True):
            other = b + c if add else np.concatenate([b, c])
            size = max(float(np.max(np.abs(a), initial=0)), 1e-2 * largest)
            if not (np.isfinite(a).all() and np.isfinite(other).all()):
                continue
            if (apart := float(np.max(np.abs(a - other), initial=0))) > 10 * within * size:
                raise LayoutError(
                    f"{self.loss.label}: the gradient for the first {max(samples, 2)} samples and that for two parts "
                    f"of them differ by {apart:.3g}, its largest element is {size:.3g}; probably {_TERM}"
                )


def parts_of(tree: Any, samples: int) -> list[Any]:
    """Return a tree of samples and its two halves; to a single sample, a changed copy of it is first appended."""
    cut = jax.tree_util.tree_map
    if samples > 1:
        half = samples // 2
        return [tree, cut(lambda leaf: leaf[:half], tree), cut(lambda leaf: leaf[half:], tree)]
    other = cut(lambda leaf: leaf * leaf.dtype.type(0.5) if leaf.dtype.kind in "fc" else leaf, tree)
    return [cut(lambda *both: np.concatenate(both), tree, other), tree, other]


class _Result(NamedTuple):
    """Hold the loss of some samples, its weight, and the arrays of its gradient."""

    loss: float
    weight: float
    gradient: list[np.ndarray[Any, Any]]


def _evaluate(computed: Any, parameters: tuple[Any, ...], trees: Iterable[Any], key: tuple[Any, ...]) -> list[_Result]:
    results = []
    for tree in trees:
        (loss, weight), gradient = computed(*parameters, *tree, *[None for _ in key])
        leaves = [leaf for leaf in jax.tree_util.tree_leaves(gradient) if leaf.dtype != jax.dtypes.float0]
        weight = count(*tree) if weight is None else weight
        results.append(_Result(float(loss), float(weight), list(map(np.asarray, leaves))))
    return results


def _doubled(tree: Any) -> Any:
    kinds = {"float32": "float64", "complex64": "complex128"}
    return jax.tree_util.tree_map(lambda leaf: np.asarray(leaf, kinds.get(str(leaf.dtype), leaf.dtype)), tree)


def check_rows(apply: TracedFunction, computed: Callable[[Any], Any], x: Any) -> bool:
    """Check that a block computes each sample by itself; return whether the check is done.

    ``computed`` applies the block to samples ``x``. The result is False if ``x`` cannot be cut into samples: then other
    samples are to be checked.

    Raises
    ------
    LayoutError
        If the output for a part of the samples differs from this part of the output for all samples.
    """
    samples = count(x)
    if any(jnp.shape(leaf)[:1] != (samples,) for leaf in jax.tree_util.tree_leaves(x)):
        return False
    trees = parts_of(x, samples)
    try:
        with apply.traced(without_key=True):
            full, *parts = map(computed, trees)
            half_precision = _uses_half_precision(jax.make_jaxpr(computed)(x))
    except Exception:
        if apply.takes_key:
            return True  # it needs its key
        raise
    samples = max(samples, 2)
    for a, *rest in zip(*map(jax.tree_util.tree_leaves, (full, *parts)), strict=True):
        if jnp.shape(a)[:1] != (samples,) or any(jnp.shape(b) != (count(b), *jnp.shape(a)[1:]) for b in rest):
            raise LayoutError(
                f"{apply.label} returned an array of shape {jnp.shape(a)} for {samples} samples: the first axis of "
                "every array counts samples"
            )
        b = np.concatenate(rest)
        if a.dtype.kind != "f" or not (np.isfinite(a).all() and np.isfinite(b).all()):
            continue
        apart, size = float(np.max(np.abs(a - b), initial=0)), float(np.max(np.abs(a), initial=0))
        if apart > _APART[16 if half_precision else jnp.finfo(a.dtype).bits] * size:
            raise LayoutError(
                f"{apply.label}: rows of its output depend on other samples: for the first {samples} samples together "
                f"and in two parts they differ by {apart:.3g}; compute each sample by itself: grains have another "
                "number of samples"
            )
    return True


def check_traces(function: TracedFunction, value: Callable[..., Any], examples: tuple[Any, ...]) -> bool:
    """Raise ``UnsupportedError`` if two traces of ``value``, which calls ``function``, differ. Not collective.

    Return whether ``value`` computes in 16 bits.
    """

    def traced() -> Any:
        return jax.make_jaxpr(lambda *arguments: value(*arguments))(*examples)

    first, second = traced(), traced()
    if str(first) != str(second) or not all(map(_same, first.consts, second.consts)):
        line = line_that_changes(lambda: (shared_generators(), hidden_state(function=function.function)), traced)
        at = "" if line is None else f", {line}"
        raise UnsupportedError(
            f"{function.label}{at}: computes something else when it is traced again: it draws numbers from "
            "numpy.random or random, or uses a variable that changes, and JAX would keep what it was at first: "
            "compute from the arguments, and random numbers from an argument key"
        )
    return _uses_half_precision(first)


def _uses_half_precision(jaxpr: Any) -> bool:
    """Tell whether a program of JAX (a jaxpr) computes floating-point numbers of 16 bits."""
    return any(f":{kind}[" in str(jaxpr) for kind in ("bf16", "f16"))


def _same(a: Any, b: Any) -> bool:
    return a is b or (np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes())
