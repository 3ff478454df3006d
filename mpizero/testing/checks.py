"""Test code that computes gradients, communicates, or is split over ranks.

:func:`taylor_test` tests gradients by their Taylor remainder, and :func:`adjoint_test` communication by its adjoint.
:func:`parallel_assert` fails on all ranks together, so that no rank is left waiting for one that failed.
:func:`assert_same_as_serial` checks that a function returns the same bits on any number of ranks, and that training a
model or layer that is split into tiles (see docs/concepts.md) gives the bits of one process on groups of several sizes
(:class:`SplitTraining`). Before groups train, it compares forward and backward passes of each block that is split into
tiles with those of the whole block in one process (:class:`SplitPasses`), so that an error names the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from mpizero import nn, optim
from mpizero._util.numbers import Rounding, largest
from mpizero._util.pytree import leaves_of, map_leaves, paths_of
from mpizero._util.text import is_users
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup import communicator_of, one_process
from mpizero.comm.threads import run_in_threads
from mpizero.errors import ArgumentError, ConfigError
from mpizero.layout.flat import nested, value_at
from mpizero.nn.layer import fresh_integers
from mpizero.nn.models import run_on
from mpizero.nn.virtual_ranks import TiledBlock, tiled_model
from mpizero.sharding import Model, ShardingConfig
from mpizero.sharding.partition import TILED_AXES, ParallelLayout, can_host
from mpizero.types import Array, BlockModel, Group, Layer, Loss, ParameterSpec, Run

Point = Array | Mapping[str, Array]


def _flat(value: Point) -> Array:
    parts = list(value.values()) if isinstance(value, Mapping) else [value]
    return np.concatenate([np.asarray(p).reshape(-1) for p in parts])


def _like(flat: Array, value: Point) -> Point:
    if not isinstance(value, Mapping):
        return flat.reshape(np.shape(value))
    stops = np.cumsum([np.size(v) for v in value.values()])
    parts = np.split(flat, stops[:-1])
    return {name: p.reshape(np.shape(v)) for (name, v), p in zip(value.items(), parts, strict=True)}


def _gradient_at(x: Point, gradient: Point | Callable[[Any], Point]) -> Array:
    start = _flat(x)
    if start.dtype != np.float64:
        raise TypeError(f"taylor_test needs float64, got {start.dtype}: rounding would hide the slope")
    slope_at_x = _flat(gradient(x) if callable(gradient) else gradient)
    if slope_at_x.size != start.size:
        raise ValueError(f"the gradient has {slope_at_x.size} elements, x has {start.size}")
    return slope_at_x


def taylor_test(
    f: Callable[[Any], float],
    gradient: Point | Callable[[Any], Point],
    x: Point,
    *,
    step: float = 1e-3,
    seed: int = 0,
    tolerance: float = 0.05,
) -> float:
    """Check that ``gradient`` is the gradient of ``f`` at ``x``: the Taylor remainder must fall with the step squared.

    The remainder ``|f(x + h p) - f(x) - h <g, p>|``, with the gradient ``g`` and a random direction ``p``, is computed
    for nine values of ``h``, each half of the one before. The slope is the power of ``h`` to which the remainder is
    proportional: 2 for the right gradient, 1 for a wrong one, also for one that is wrong by a constant factor only.
    Collective if ``f`` is collective; all ranks use the same direction.

    Parameters
    ----------
    f : callable
        Function that takes an argument of the form of ``x`` and returns a number. It must be smooth near ``x``.
    gradient : array, mapping or callable
        Gradient at ``x``, or a function that is called with ``x`` and returns the gradient there.
    x : array or mapping of arrays
        The point at which the gradient is tested, in float64.
    step : float
        The first, largest ``h``. The length of ``p`` is the norm of ``x``, but at least 1.
    seed : int
        Seed of the random direction.
    tolerance : float
        Largest allowed distance of the slope from 2.

    Returns
    -------
    float
        The slope; ``inf`` if all remainders are rounding errors, as for an ``f`` that is linear along ``p``.

    Raises
    ------
    AssertionError
        If the slope differs from 2 by more than ``tolerance``. The message contains the slope for each halving of
        ``h``.
    TypeError
        If ``x`` is not float64, because rounding would hide the slope.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero.testing import taylor_test
    >>> x = np.random.default_rng(0).normal(size=5)
    >>> round(taylor_test(lambda x: float(np.sin(x).sum()), np.cos, x), 1)
    2.0
    """
    rest, slopes = _remainders(f, _gradient_at(x, gradient), x, step, seed)
    if slopes is None:
        return math.inf
    slope = float(np.median(slopes[-3:])) if slopes else math.nan
    if not abs(slope - 2.0) <= tolerance:
        raise AssertionError(
            f"Taylor slope {slope:.3f}, expected 2.00 +- {tolerance}: slopes {[round(s, 3) for s in slopes]}, "
            f"remainders {[f'{r:.2e}' for r in rest]} for steps from {step}"
        )
    return slope


def _remainders(
    f: Callable[[Any], float], gradient: Array, x: Point, step: float, seed: int
) -> tuple[list[float], list[float] | None]:
    """Return the Taylor remainders for nine steps, and a slope for each halving of the step.

    Halvings are left out if one of their two remainders is a rounding error. Instead of the list of slopes, None is
    returned if no remainder is above rounding error.
    """
    start = _flat(x)
    direction = np.random.default_rng(seed).standard_normal(start.size)
    direction *= max(1.0, float(np.linalg.norm(start))) / max(float(np.linalg.norm(direction)), 1e-300)
    at_x, along = float(f(x)), float(gradient @ direction)
    steps = [step / 2**k for k in range(9)]
    along_steps = [float(f(_like(start + h * direction, x))) for h in steps]
    rest = [abs(value - at_x - h * along) for h, value in zip(steps, along_steps, strict=True)]
    floor = 1e3 * np.finfo(np.float64).eps * max(abs(at_x), *map(abs, along_steps), abs(along) * step)
    above = [not r <= floor for r in rest]  # keeps NaN
    pairs = [(rest[k], rest[k + 1]) for k in range(len(rest) - 1) if above[k] and above[k + 1]]
    return rest, [math.log2(a / b) for a, b in pairs] if any(above) else None


def adjoint_test(
    forward: Callable[[Array], Array],
    adjoint: Callable[[Array], Array],
    x: Array,
    y: Array,
    comm: Any = None,
    *,
    rtol: float = 1e-12,
) -> float:
    """Check that ``adjoint`` is the adjoint of the linear function ``forward``.

    With F for ``forward`` and F* for ``adjoint``, this means that ``<F x, y> = <x, F* y>``, where both scalar products
    are summed over the ranks.

    Collective over ``comm``, which may be anything that :class:`~mpizero.ShardingConfig` accepts as ``comm``. ``x`` and
    ``y`` are this rank's parts of two vectors; ``y`` has the shape of ``forward(x)``, and both may be empty. Every
    linear communication has an adjoint: scatter is the adjoint of gather, and a sum is the adjoint of a broadcast. The
    real part of the scalar product of complex vectors is compared, as if each number were a pair of real ones.

    Returns
    -------
    float
        Difference of the two scalar products, relative to ``|F x| |y| + |x| |F* y|``; these products of norms, too, are
        summed over the ranks.

    Raises
    ------
    AssertionError
        On every rank, if the relative difference is greater than ``rtol``. The message contains both scalar products.
    ValueError
        If ``forward(x)`` has not the shape of ``y``, or ``adjoint(y)`` not that of ``x``; the other ranks raise
        ``RemoteError``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import adjoint_test
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=5), rng.normal(size=5)
    >>> adjoint_test(np.cumsum, lambda y: np.cumsum(y[::-1])[::-1], x, y, comm="self") < 1e-12
    True
    >>> adjoint_test(np.cumsum, np.cumsum, x, y, comm="self")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: <F x, y> = ...
    """
    fx, fy = np.asarray(forward(x)), np.asarray(adjoint(y))
    with communicator_of(comm) as world:
        with all_ranks(world, "adjoint_test"):
            if fx.shape != np.shape(y) or fy.shape != np.shape(x):
                raise ValueError(f"forward maps {np.shape(x)} to {fx.shape}, adjoint {np.shape(y)} to {fy.shape}")
        wide = [np.asarray(a, np.result_type(a, np.float64)) for a in (fx, y, x, fy)]
        left, right = np.vdot(wide[0], wide[1]).real, np.vdot(wide[2], wide[3]).real
        size = np.linalg.norm(fx) * np.linalg.norm(y) + np.linalg.norm(x) * np.linalg.norm(fy)
        sums = np.array([left, right, size])
        world.allreduce(sums, tag="adjoint_test")
    difference = float(abs(sums[0] - sums[1]) / max(sums[2], np.finfo(np.float64).tiny))
    if not difference <= rtol:
        message = f"<F x, y> = {sums[0]!r} but <x, F* y> = {sums[1]!r}"
        raise AssertionError(f"{message}: relative difference {difference:.2e}")
    return difference


def parallel_assert(comm: Communicator, condition: object, message: str = "") -> None:
    """Assert that ``condition`` is true on every rank; otherwise raise the same error on all ranks.

    Collective over ``comm``.

    Raises
    ------
    AssertionError
        On every rank, if ``condition`` is false on any rank. The error names the ranks where ``condition`` is false,
        each with its ``message``.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.testing import parallel_assert, run_in_threads
    >>> def check(comm):
    ...     parallel_assert(comm, comm.rank < 2, "there is no data")
    >>> run_in_threads(2, check)
    [None, None]
    >>> run_in_threads(3, check)
    Traceback (most recent call last):
        ...
    AssertionError: rank 2: there is no data
    """
    answers = comm.allgather_object((bool(condition), message), tag="parallel_assert")
    if wrong := [f"rank {rank}: {text or 'false'}" for rank, (right, text) in enumerate(answers) if not right]:
        raise AssertionError("; ".join(wrong))


def assert_same_as_serial(
    checked: Any,
    comm: Any = None,
    x: Any = None,
    y: Any = None,
    *,
    tiles: int = 4,
    axis: str = "tensor",
    steps: int = 2,
    **settings: Any,
) -> None:
    """Assert that a function, a model or a layer computes the same bits on several ranks as on one.

    Collective over ``comm``. *A function*: the test calls ``checked(comm)`` on every rank, and compares the return
    value with that of the same call with a communicator of one rank. The value may be a number, a string, an array, or
    nested mappings, lists and tuples of these. Arrays are compared by dtype, shape and bytes, so NaN equals itself and
    0.0 differs from -0.0.

    *A model of blocks or a layer that can be split*, ``assert_same_as_serial(layer, x=x)``: first the model is trained
    in one process that computes all tiles. With the resulting parameters, this process runs all tiles of each block.
    Their joined results are compared with those of the whole block, within rounding. Results that every tile must have
    in full, such as outputs of a row-parallel layer, are compared between tiles, bit by bit. Then the same training
    runs in the group ``comm``, or if ``comm`` is None in groups of threads of ``tiles`` ranks, half as many, and so on:
    after each step loss, gradients and parameters must be those of the one process, bit by bit.

    Parameters
    ----------
    checked : callable, BlockModel or Layer
        The function, model or layer. A layer is trained with the loss ``MeanSquaredError``; if ``x`` has a floating
        dtype, a ``LayerNorm`` is put before the layer.
    comm : Communicator or mpi4py communicator, optional
        The ranks of the group. None, for models and layers only: groups of several sizes of threads of this process.
    x, y : array
        Inputs and targets, the same in every step on all ranks. ``y=None`` means zeros, for a layer that has
        ``output_shape``.
    tiles : int
        Number of tiles into which layers or sequences are cut, a power of two of at least 2.
    axis : {"tensor", "context"}
        "tensor" splits layers over the group, "context" splits sequences.
    steps : int
        Number of training steps with AdamW.
    **settings
        Settings of :class:`~mpizero.ShardingConfig`, such as ``micro_batch`` and ``clip``.

    Raises
    ------
    AssertionError
        On every rank, if a result differs on any rank. The message names, for a function, these ranks and the first
        difference on each; for a model, the block, tile, array and line of code, or the rank, step and array.
    ConfigError
        If the model cannot be split in this way, or ``tiles`` or ``axis`` is wrong or does not fit ``comm``.
    RemoteError
        On the ranks where the function or the layer succeeds, if it raises an error other than AssertionError on other
        ranks. The message names these ranks and the first error.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import assert_same_as_serial, run_in_threads
    >>> model, x, y = mz.nn.MLP(6, [8], 2), np.eye(6, dtype=np.float32), np.arange(6) % 2
    >>> run_in_threads(2, lambda comm: assert_same_as_serial(model, comm, x, y, tiles=2))
    [None, None]
    """
    if isinstance(checked, BlockModel | Layer) and not isinstance(checked, type):
        if axis not in TILED_AXES:
            raise ConfigError(f"axis={axis!r}: expected 'tensor' or 'context'")
        if tiles not in _SIZES:
            raise ConfigError(f"tiles={tiles!r}: expected a power of two from 2 to {_SIZES[-1]}")
        if x is None:
            raise ArgumentError("assert_same_as_serial: x is missing: a layer or a model needs inputs")
        training = SplitTraining(*_model_and_batch(checked, x, y), tiles, axis, steps, settings)
        with nullcontext() if comm is None else communicator_of(comm) as ranks:
            training.check(ranks)
        return
    _compare_results(checked, comm)


def _compare_results(function: Any, comm: Any) -> None:
    message = f"assert_same_as_serial: {function!r:.80} is"
    if isinstance(function, type):
        raise ArgumentError(f"{message} a class: call it to make a layer or a model")
    if not callable(function):
        raise ArgumentError(f"{message} neither a function, a model of blocks nor a layer")
    if comm is None:
        raise ArgumentError(f"{message} a function of ranks, and comm is missing")
    with communicator_of(comm) as ranks:
        difference = ""
        with all_ranks(ranks, "assert_same_as_serial"):
            try:
                difference = first_difference(function(ranks), function(one_process()))
            except AssertionError as error:
                difference = str(error) or "false"
        parallel_assert(ranks, not difference, difference)


def first_difference(actual: Any, expected: Any, label: str = "result") -> str:
    """Describe the first difference in bits between two nested values; return "" if there is none. Not collective.

    ``label`` is the name of the values in the description.
    """
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        if list(actual) != list(expected):
            return f"{label} has keys {list(actual)}, expected {list(expected)}"
        pairs = [(actual[key], expected[key], f"{label}[{key!r}]") for key in expected]
    elif isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            return f"{label} has {len(actual)} items, expected {len(expected)}"
        pairs = [(a, b, f"{label}[{i}]") for i, (a, b) in enumerate(zip(actual, expected, strict=True))]
    else:
        return _leaf_difference(actual, expected, label)
    return next(filter(None, (first_difference(*pair) for pair in pairs)), "")


def _leaf_difference(actual: Any, expected: Any, label: str) -> str:
    a, b = np.asarray(actual), np.asarray(expected)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{label} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
    if a.dtype.hasobject:
        return "" if actual == expected else f"{label} is {actual!r}, expected {expected!r}"
    if a.tobytes() == b.tobytes():
        return ""
    rows = [np.frombuffer(v.tobytes(), np.dtype((np.void, v.itemsize))) for v in (a, b)]
    wrong = [i for i, (p, q) in enumerate(zip(*rows, strict=True)) if p.tobytes() != q.tobytes()]
    first = wrong[0]
    values = f"{a.reshape(-1)[first]!r}, expected {b.reshape(-1)[first]!r}"
    return f"{label} differs in {len(wrong)} of {a.size} elements, first at {first}: {values}"


_SIZES = [2**k for k in range(1, 11)]


@dataclass(frozen=True)
class OneLayer:
    """Hold a layer as a model; the gradients of a norm before the layer test the gradient of the layer's input."""

    blocks: Mapping[str, Any]
    dtype: np.dtype[Any]
    loss: Loss = field(default_factory=nn.MeanSquaredError)
    seed: int = 0


@dataclass(frozen=True)
class SplitTraining:
    """Train a model on groups of several sizes that compute the same tiles; see :func:`assert_same_as_serial`."""

    model: Any
    batch: tuple[Any, Any]
    virtual_ranks: int
    axis: str
    steps: int
    settings: Mapping[str, Any]

    def check(self, comm: Communicator | None) -> None:
        """Raise AssertionError on all ranks if results depend on the group's size. Collective over a given ``comm``."""
        if comm is None:
            expected = self.serial()
            for size in reversed([size for size in _SIZES if size <= self.virtual_ranks]):
                run_in_threads(size, lambda ranks: self._compare(ranks, expected))
            return
        with all_ranks(comm, "assert_same_as_serial"):
            if not can_host(comm.size, self.virtual_ranks):
                message = f"{self.virtual_ranks} tiles do not fit {comm.size} ranks"
                raise ConfigError(f"{message}: each computes 1, 2, 4, ... of them")
            expected = self.serial()
        self._compare(comm, expected)

    def serial(self) -> list[dict[str, Any]]:
        """Train in this process alone, check the passes of every split block, and return the results of each step."""
        passes = SplitPasses(self.model, self.axis, self.virtual_ranks)
        passes.check_parameters()
        steps = self._trained("self", 1)
        passes.check_passes(steps[-1]["parameter"], self.batch)
        return steps

    def _compare(self, comm: Communicator, expected: list[dict[str, Any]]) -> None:
        label = f"{self.virtual_ranks} tiles on {comm.size} ranks: step"
        difference = first_difference(self._trained(comm, comm.size), expected, label)
        texts = comm.allgather_object(difference, tag="assert_same_as_serial")
        if wrong := [rank for rank, text in enumerate(texts) if text]:
            raise AssertionError(f"{texts[wrong[0]]} (on rank {wrong[0]}; {len(wrong)} of {comm.size} ranks differ)")

    def _trained(self, comm: Any, size: int) -> list[dict[str, Any]]:
        """Train, and return for each step a dict of its loss, its gradients, and the parameters after the step."""
        sizes: dict[str, Any] = {self.axis: size}
        way: dict[str, Any] = {"parallel_layout": ParallelLayout(**sizes), "optimizer": optim.AdamW(lr=1e-2)}
        steps: list[dict[str, Any]] = []
        with (
            ShardingConfig(comm=comm, **{**self.settings, "tiles": {self.axis: self.virtual_ranks}}) as config,
            Model(self.model, config, config.mesh, "zero1", **way) as placed,
        ):
            for _ in range(self.steps):
                gradients = placed.compute_gradients(*self.batch, gather=True).named()
                loss = placed.train(*self.batch)
                steps.append({"loss": loss, "gradient": gradients, "parameter": dict(placed.named_parameters())})
        return steps


def _model_and_batch(model: Any, x: Any, y: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return the model to train, which wraps ``model`` if that is a layer, and the batch of inputs and targets."""
    if isinstance(model, BlockModel):
        if y is None:
            raise ArgumentError("assert_same_as_serial: y is missing: a model needs targets")
        return model, (x, y)
    values = np.asarray(x)
    dtype = np.dtype(np.float64 if values.dtype == np.float64 else np.float32)
    if y is None:
        try:
            shape = model.output_shape(values.shape[1:])
        except AttributeError:
            raise ArgumentError(f"assert_same_as_serial: {type(model).__name__} has no output_shape: give y") from None
        y = np.zeros((len(values), *shape), dtype)
    before = {"norm": nn.LayerNorm(values.shape[-1])} if values.dtype.kind == "f" else {}
    return OneLayer({**before, "layer": model}, dtype), (x, y)


#: The numbers of two passes may differ by this many times the bound for the same sums in another order.
_OF_PASS = 64
#: A bound is relative to the largest element of the array, or to this fraction of the block's largest gradient if that
#: is more: the elements of a smaller array may be rounding errors only.
_SMALL = 0.01


class SplitPasses:
    """Check the split blocks of a model in this process: all tiles against one another and against the whole blocks.

    Methods raise AssertionError at the first difference. The message names the block, the tile, the array that differs,
    and the line of the method that computed it. Not collective.

    Parameters
    ----------
    model : BlockModel
        The whole model.
    axis : {"tensor", "context"}
        "tensor" splits layers, "context" splits sequences.
    virtual_ranks : int
        Number of tiles.
    """

    def __init__(self, model: BlockModel, axis: str, virtual_ranks: int) -> None:
        self.model, self.axis, self.virtual_ranks = model, axis, virtual_ranks
        self.alone = cast("Group", _Alone())
        counts = (virtual_ranks, 1) if axis == "tensor" else (1, virtual_ranks)
        self.tiled: Any = tiled_model(model, self.alone, self.alone, counts, model.blocks)
        self.checks = [
            _BlockCheck(name, model.blocks[name], block, model.dtype)
            for name, block in self.tiled.blocks.items()
            if isinstance(block, TiledBlock)
        ]

    def check_parameters(self) -> None:
        """Check of every parameter that the parts on all tiles together are the whole parameter."""
        for check in self.checks:
            check.parameters()

    def check_passes(self, named: Mapping[str, Array], batch: Any) -> None:
        """Check the passes of every split block, on the input and output gradient that it gets in the whole model.

        ``named`` are the parameters of the whole model by name, ``batch`` the inputs and targets of the model.
        """
        params, x = nn.bind(self.model, named), leaves_of(batch[0])[0]
        run = run_on(self.model, x, Run(training=True, seed=self.model.seed, count=len(x)))
        passes = _unsplit_passes(self.model, params, batch, run)
        if self.axis == "context":  # the positions of the first tile, then those of the next, and so on
            passes = {name: known.in_order_of(self.virtual_ranks, self.alone, x) for name, known in passes.items()}
            x = nn.cut_batch(x, x, self.alone, self.virtual_ranks)[0]
        run = self.tiled.run_on(x, run)
        for check in self.checks:
            check.passes(params[check.name], passes[check.name], run)


class _Alone(NamedTuple):
    """Represent a group of one process, which computes all tiles and sends no messages."""

    size: int = 1
    rank: int = 0


class _Pass(NamedTuple):
    """Hold input and output of a whole block, their gradients, and ``gradients``, those of its parameters by name."""

    x: Any
    y: Any
    dy: Any
    dx: Any
    gradients: dict[str, Array]

    def in_order_of(self, virtual_ranks: int, alone: Group, like: Array) -> _Pass:
        """Return these arrays with the positions of sequences sorted by the context tile to which they belong."""

        def ordered(leaf: Any) -> Any:
            cut = getattr(leaf, "shape", ())[:2] == like.shape[:2]
            return nn.cut_batch(leaf, leaf, alone, virtual_ranks)[0] if cut else leaf

        x, y, dy, dx = (map_leaves(ordered, value) for value in self[:-1])
        return _Pass(x, y, dy, dx, self.gradients)


def _unsplit_passes(model: BlockModel, params: Mapping[str, Any], batch: Any, run: Run) -> dict[str, _Pass]:
    """Run the whole model forward and backward; return the inputs, outputs and gradients of each block by name."""
    y, target = batch
    forward: dict[str, tuple[Any, Any, Any]] = {}
    for name, block in model.blocks.items():
        x = y
        y, cache = block.forward(params[name], x, run)
        forward[name] = x, y, cache
    dy: Any = model.loss.backward(model.loss.forward(y, target)[2])
    passes = {}
    for name, (x, y, cache) in reversed(forward.items()):
        block, above = model.blocks[name], dy
        grads = _new_gradients(block, model.dtype)
        dy = block.backward(params[name], cache, above, grads)
        passes[name] = _Pass(x, y, above, dy, {spec.name: value_at(grads, spec.name) for spec in _trained(block)})
    return dict(reversed(passes.items()))


class _Recorder:
    """Run a block's code for one tile, and store copies of its output and gradients by name."""

    def __init__(self, form: Any) -> None:
        self.form, self.values = form, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.form, name)

    def forward(self, params: Any, x: Any, run: Run) -> Any:
        y, cache = self.form.forward(params, x, run)
        self.values = dict(_leaves("output", y))
        return y, cache

    def backward(self, params: Any, cache: Any, dy: Any, grads: Any) -> Any:
        dx = self.form.backward(params, cache, dy, grads)
        self.values |= _leaves("gradient of the input", dx)
        self.values |= {f"gradient of {spec.name!r}": value_at(grads, spec.name).copy() for spec in _trained(self.form)}
        return dx


@dataclass(frozen=True)
class _BlockCheck:
    """Check one block, as it is split into tiles, against the whole block."""

    name: str
    unsplit: Any
    tiled: TiledBlock
    dtype: np.dtype[Any]

    def parameters(self) -> None:
        """Check of every parameter of the block that the parts on all tiles together are the whole parameter."""
        wanted = {spec.name: spec for spec in self.unsplit.specs()}
        for number, form in enumerate(self.tiled.forms):
            if (names := [spec.name for spec in form.specs()]) != list(wanted):
                self.fail("specs", f"tile {number} has the parameters {names}, the whole block {list(wanted)}")
            for spec in form.specs():
                if (shape := spec.shape if spec.part is None else spec.part.shape) != wanted[spec.name].shape:
                    fault = f"the shape {shape} of the whole {spec.name!r}, which is {wanted[spec.name].shape}"
                    self.fail("specs", f"tile {number} declares {fault}: say by Part which part a tile holds")
        for spec in self.tiled.specs():
            if spec.part is not None and spec.part.ranges != (expected := ((0, spec.part.shape[spec.part.axis]),)):
                fault = f"{spec.part.ranges} along axis {spec.part.axis}, not {expected}"
                self.fail("specs", f"the tiles together hold of {spec.name!r} the indices {fault}")

    def passes(self, params: Any, known: _Pass, run: Run) -> None:
        """Run forward and backward of all tiles, and compare outputs and gradients with those of the whole block."""
        recorders = [_Recorder(form) for form in self.tiled.forms]
        tiled = replace(self.tiled, forms=cast("Any", tuple(recorders)))
        first, _ = tiled.forward(params, known.x, run)
        y, cache = tiled.forward(params, known.x, run)
        for (label, again), (_, before) in zip(_leaves("output", y), _leaves("output", first), strict=True):
            if difference := first_difference(again, before, f"the {label} of a second pass on the same input"):
                self.fail("forward", f"{difference}: a layer must keep no state from call to call")
        if self.tiled.exit is None:
            self._equal(recorders, "forward", lambda label: label.startswith("output"))
        self._close("forward", _leaves("output", y), _leaves("output", known.y), known)
        grads = _new_gradients(tiled, self.dtype)
        dx = tiled.backward(params, cache, known.dy, grads)
        if self.tiled.entry is None:
            self._equal(recorders, "backward_input", lambda label: label.startswith("gradient of the input"))
        replicated = {f"gradient of {spec.name!r}" for spec in self.tiled.specs() if spec.part is None}
        self._equal(recorders, "backward_weights", replicated.__contains__)
        label = "gradient of the input"
        self._close("backward_input", _leaves(label, dx), _leaves(label, known.dx), known)
        for name, expected in known.gradients.items():
            label = f"gradient of {name!r}"
            self._close("backward_weights", [(label, value_at(grads, name))], [(label, expected)], known)

    def _equal(self, recorders: list[_Recorder], method: str, which: Callable[[str], bool]) -> None:
        """Require that arrays whose names satisfy ``which`` have equal bits on all tensor tiles of one context tile."""
        across = self.tiled.grid.across
        for number, recorder in enumerate(recorders):
            first = number // across * across
            for label, value in recorder.values.items():
                if which(label) and (wrong := first_difference(value, recorders[first].values[label], f"the {label}")):
                    self.fail(
                        method,
                        f"{wrong} of tile {first}: it must be whole and the same on every tile; is a sum over the "
                        "group missing (all_reduce), or does something depend on group.rank?",
                        number,
                    )

    def _close(self, method: str, actual: Any, known: Any, passed: _Pass) -> None:
        """Require that the joined arrays of the tiles equal those of the whole block within rounding."""
        sums = Rounding(str(self.dtype), float(max((spec.size for spec in self.unsplit.specs()), default=1)))
        least = _SMALL * max((largest(value) for value in passed.gradients.values()), default=0.0)
        for (label, value), (_, expected) in zip(actual, known, strict=True):
            if value is None or expected is None:
                if value is not expected:
                    self.fail(method, f"there is {'no' if value is None else 'a'} {label}, unlike the whole block's")
                continue
            a, b = np.asarray(value), np.asarray(expected)
            if a.shape != b.shape:
                self.fail(method, f"the {label} has the shape {a.shape}, the whole block's {b.shape}")
            bound = _OF_PASS * sums.of_sums * max(largest(b), least)
            apart = np.abs(a - b).reshape(-1)
            if apart.size and not apart.max() <= bound:
                worst = int(np.argmax(apart))
                factor = sums.factor([a], [b], summed=True)
                multiple = "" if factor is None else f", {factor:.6g} times it"
                self.fail(
                    method,
                    f"the {label} is not the whole block's{multiple}: {a.reshape(-1)[worst]!s} at {worst}, expected "
                    f"{b.reshape(-1)[worst]!s} ({np.count_nonzero(apart > bound)} of {a.size} elements differ)",
                )

    def fail(self, method: str, text: str, tile: int | None = None) -> None:
        """Raise AssertionError; the message names the block, the tile, and the line where ``method`` is defined."""
        form = self.tiled.forms[tile or 0]
        code = getattr(getattr(type(form), method, None), "__code__", None)
        line = f", {Path(code.co_filename).name}:{code.co_firstlineno}" if code and is_users(code.co_filename) else ""
        virtual_ranks = f"{len(self.tiled.forms)} tiles" + ("" if tile is None else f", tile {tile}")
        raise AssertionError(f"block {self.name!r} in {virtual_ranks} ({type(form).__name__}.{method}{line}): {text}")


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return copies of a tree's arrays with their paths, which begin with ``name``; a leaf None stays None."""
    return [(path, leaf if leaf is None else np.array(leaf)) for path, leaf in paths_of(**{name: value})]


def _trained(layer: Any) -> Iterator[ParameterSpec]:
    return (spec for spec in layer.specs() if spec.trainable)


def _new_gradients(layer: Any, dtype: Any) -> dict[str, Any]:
    """Return arrays for the gradients of a layer, filled with NaN, and its integer arrays, nested by name."""
    arrays = {spec.name: np.full(spec.shape, np.nan, spec.element_type(dtype)) for spec in layer.specs()}
    return nested(arrays | fresh_integers(layer))
