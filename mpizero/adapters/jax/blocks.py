"""Compile functions that a user has written in JAX: a model's blocks and their loss, or one loss of all parameters.

:class:`CompiledBlock` compiles a block's forward pass and the two halves of its backward pass, which :class:`JaxBlock`
runs as a layer; :class:`JaxLoss` computes the loss of the last block's output. :class:`CompiledLoss` compiles a loss of
all parameters and its gradient, once for each number of samples, and checks the loss on the first samples.
:func:`read_blocks` and :func:`make_layers` make layers of a user's list of blocks, and :class:`StartValues` makes the
start values of their parameters.

[Note: halves] ``jax.vjp`` gives a block's backward pass as one program (a jaxpr), whose inputs are the residuals of the
forward pass and the gradient of the output. The program's equations are divided into two halves: the first half has
those that the gradient of the input needs; the second half has the others, and also takes values that the first half
computes. No equation runs twice, and all pipeline schedules run the same two programs, so they give the same bits.

[Note: what is kept] The forward pass does not keep parameters, or values computed from parameters alone: the backward
pass gets the parameters again, and recomputes such values. So a gathered unit can be released between the two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np

from mpizero._util.names import nearest
from mpizero.adapters.jax.function import (
    FirstGrains,
    FlatProgram,
    ParameterTree,
    TracedFunction,
    check_rows,
    check_traces,
    count,
    descending,
    flat_program,
    is_variable,
    key_data,
    make_key,
    named_leaves,
    real_type,
    samples,
    sum_and_weight,
)
from mpizero.adapters.user_code import PassTimes
from mpizero.errors import ConfigError, UnsupportedError
from mpizero.layout.flat import value_at
from mpizero.nn.layer import Layer, Operations
from mpizero.types import EVALUATE, Array, ParameterSpec, Params, Run


class Half(NamedTuple):
    """Hold a compiled half of a backward pass: its function, and the indices of the values that it takes."""

    takes: list[int]
    function: Callable[[list[Any]], list[Any]]


class BlockProgram(NamedTuple):
    """Hold the compiled programs of a block for inputs of one structure, shape and dtype.

    The values that a backward pass takes are numbered: first the parameters, then the arrays of the input, then the
    values that the forward pass keeps, the gradients of the output, and the values that the first half computes for the
    second.

    Attributes
    ----------
    forward : callable
        Takes the parameters, the arrays of the input and the result of :func:`key_data`; returns the arrays of the
        output, then the values that are kept for the backward pass.
    output : tree structure
        The structure of the output.
    outputs : list
        For each array of the output, its shape and dtype if it has a gradient; None for integers and bools.
    differentiated : list of int
        Indices of the input's arrays that have a gradient.
    inputs, weights : Half
        The halves of the backward pass. ``inputs`` returns the gradients of the arrays ``differentiated``, then values
        that ``weights`` takes; ``weights`` returns the gradients of the trained parameters.
    """

    forward: Callable[..., list[Any]]
    output: Any
    outputs: list[Any]
    differentiated: list[int]
    inputs: Half
    weights: Half


class ForwardCache(NamedTuple):
    """Hold the values that a forward pass keeps for the backward pass.

    Attributes
    ----------
    inputs, structure
        The arrays of the block's input, and the structure of the pytree whose leaves they are.
    key : Array or None
        The result of :func:`key_data` from which the block's PRNG key was made.
    values : list or None
        The residuals of the block's vector-Jacobian product. None after a pass in evaluation: the backward pass then
        runs the forward pass again.
    """

    inputs: list[Any]
    structure: Any
    key: Array | None
    values: list[Any] | None


class CompiledBlock:
    """Compute a block's output and gradients; blocks with the same function and equal shapes share one instance.

    Parameters
    ----------
    apply : TracedFunction
        ``apply(parameters, x[, key]) -> y``.
    tree : ParameterTree
        Structure and names of the block's parameters.
    trained : list of int
        Indices of the parameters that have gradients.
    first : bool
        Whether this is the model's first block, whose input needs no gradient.
    """

    def __init__(self, apply: TracedFunction, tree: ParameterTree, trained: list[int], *, first: bool) -> None:
        self.apply, self._tree, self._trained, self._first = apply, tree, trained, first
        self._programs: dict[Any, BlockProgram] = {}
        self._alone = jax.jit(self._applied)
        self._checked = False

    @property
    def compilations(self) -> int:
        """Number of input shapes for which the forward and backward pass were compiled."""
        return len(self._programs)

    def traced_output(self, parameters: list[Any], x: Any) -> Any:
        """Return the shapes and dtypes of the output, from the shapes and dtypes of parameters and input."""
        return jax.eval_shape(self._alone, parameters, x, None)

    def lowered(self, parameters: list[Any], x: Any) -> Any:
        """Return the forward pass, lowered by JAX for shapes and dtypes but not compiled by XLA. Not collective."""
        key = key_data(Run(True, 0, 0, 0), 0) if self.apply.takes_key else None
        return self._alone.lower(parameters, x, key)

    def output(self, parameters: list[Array], x: Any) -> tuple[Any, ForwardCache]:
        """Return the output for ``x`` without a key, as read-only arrays, and the cache for :meth:`backward_input`."""
        inputs, structure = jax.tree_util.tree_flatten(x)
        with self.apply.traced(without_key=True):
            y = jax.tree_util.tree_map(np.asarray, self._alone(parameters, x, None))
        return y, ForwardCache(inputs, structure, None, None)

    def forward(self, parameters: list[Array], x: Any, key: Array | None) -> tuple[Any, ForwardCache]:
        """Return the output for ``x``, as read-only arrays, and the cache for :meth:`backward_input`."""
        inputs, structure = jax.tree_util.tree_flatten(x)
        program = self._program(parameters, inputs, structure, key)
        if not self._checked:
            self._checked = check_rows(self.apply, lambda part: self._alone(parameters, part, None), x)
        results = program.forward(parameters, inputs, key)
        count = len(program.outputs)
        y = jax.tree_util.tree_unflatten(program.output, map(np.asarray, results[:count]))
        return y, ForwardCache(inputs, structure, key, results[count:])

    def backward_input(self, parameters: list[Array], cache: ForwardCache, dy: Any) -> tuple[Any, list[Any]]:
        """Return the gradient of the input (None if it has none), and values for :meth:`backward_weights`."""
        inputs, structure, key, values = cache
        program = self._program(parameters, inputs, structure, key)
        if values is None:
            values = program.forward(parameters, inputs, key)[len(program.outputs) :]
        leaves = jax.tree_util.tree_leaves(dy, is_leaf=lambda leaf: leaf is None)
        cotangents = [
            np.zeros(kind.shape, kind.dtype) if leaf is None else leaf  # None: no loss depends on it
            for leaf, kind in zip(leaves, program.outputs, strict=True)
            if kind is not None
        ]
        known = [*parameters, *inputs, *values, *cotangents]
        results = program.inputs.function([known[number] for number in program.inputs.takes])
        count = len(program.differentiated)
        gradients: list[Any] = [None] * len(inputs)
        for number, gradient in zip(program.differentiated, results[:count], strict=True):
            gradients[number] = np.asarray(gradient)
        dx = jax.tree_util.tree_unflatten(structure, gradients) if count else None
        return dx, [*values, *cotangents, *results[count:]]

    def backward_weights(self, parameters: list[Array], cache: ForwardCache, pending: list[Any]) -> list[Array]:
        """Return the gradients of the trained parameters, in their order, as read-only arrays."""
        half = self._program(parameters, cache.inputs, cache.structure, cache.key).weights
        known = [*parameters, *cache.inputs, *pending]
        return [np.asarray(gradient) for gradient in half.function([known[number] for number in half.takes])]

    # ------------------------------------------------------------------ compiling

    def _applied(self, parameters: Sequence[Any], x: Any, key: Any) -> Any:
        return self.apply(self._tree.build(parameters), x, key=make_key(key))

    def _program(self, parameters: list[Array], inputs: list[Any], structure: Any, key: Array | None) -> BlockProgram:
        form = (structure, key is None, parameters[0].dtype if parameters else None)
        form = (*form, *((leaf.shape, leaf.dtype) for leaf in inputs))
        program = self._programs.get(form)
        if program is None:
            with self.apply.traced(without_key=key is None):
                x = jax.tree_util.tree_unflatten(structure, inputs)
                check_traces(self.apply, self._applied, (parameters, x, key))
                program = self._programs[form] = self._compiled(parameters, inputs, structure, key)
        return program

    def _compiled(self, parameters: list[Array], inputs: list[Any], structure: Any, key: Array | None) -> BlockProgram:
        """Trace the block for inputs of these shapes, and return its programs ([Note: halves])."""
        differentiated = [] if self._first else [i for i, leaf in enumerate(inputs) if leaf.dtype.kind in "fcV"]
        structures: dict[str, Any] = {}

        def forward(values: list[Any], leaves: list[Any], data: Any) -> list[Any]:
            def applied(trained: list[Any], floats: list[Any]) -> Any:
                every, changed = list(values), list(leaves)
                for number, value in zip(self._trained, trained, strict=True):
                    every[number] = value
                for number, value in zip(differentiated, floats, strict=True):
                    changed[number] = value
                return self._applied(every, jax.tree_util.tree_unflatten(structure, changed), data)

            y, backward = jax.vjp(applied, [values[i] for i in self._trained], [leaves[i] for i in differentiated])
            outputs, structures["output"] = jax.tree_util.tree_flatten(y)
            residuals, structures["backward"] = jax.tree_util.tree_flatten(backward)
            structures["outputs"] = [jax.typeof(leaf) for leaf in outputs]
            return [*outputs, *residuals]

        program = flat_program(forward, parameters, inputs, key)
        backward = Backward(program, len(parameters), len(inputs), structures)
        variables = [*program.inputs]

        def run(*arguments: Any) -> list[Any]:
            known = dict(zip(variables, jax.tree_util.tree_leaves(arguments), strict=True))
            return program.evaluated(program.equations, known, [*backward.outputs, *backward.saved])

        halves = backward.halves(parameters, inputs, len(differentiated))
        return BlockProgram(jax.jit(run), structures["output"], backward.shapes, differentiated, *halves)


class Backward:
    """Make the two halves of a backward pass from the program of the forward pass.

    Parameters
    ----------
    program : FlatProgram
        The forward pass: it takes the parameters, the arrays of the input and the result of :func:`key_data`; it
        returns the arrays of the output, then the residuals of ``jax.vjp``.
    parameters, inputs : int
        Number of parameters and of arrays of the input.
    structures : dict
        Found while tracing ``program``: the pytree structures "output" and "backward" (of the function that ``jax.vjp``
        returned), and "outputs", the types of the arrays of the output.
    """

    def __init__(self, program: FlatProgram, parameters: int, inputs: int, structures: dict[str, Any]) -> None:
        self.program, self.structure, self.output = program, structures["backward"], structures["output"]
        self.types = structures["outputs"]
        #: Shapes and dtypes of the arrays of the output; None for arrays without a gradient.
        self.shapes = [
            jax.ShapeDtypeStruct(kind.shape, kind.dtype) if kind.dtype.kind in "fcV" else None for kind in self.types
        ]
        self.outputs, self.residuals = program.outputs[: len(self.types)], program.outputs[len(self.types) :]
        self.arguments = program.inputs[: parameters + inputs]
        samples = program.following(program.inputs[parameters:])
        #: What the forward pass keeps ([Note: what is kept]).
        self.saved = [
            *dict.fromkeys(v for v in self.residuals if is_variable(v) and v in samples and v not in self.arguments)
        ]

    def halves(self, parameters: list[Array], inputs: list[Any], count: int) -> tuple[Half, Half]:
        """Compile the backward pass for inputs and that for weights; ``count`` arrays of the input have a gradient."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.saved]
        dy = [shape for shape in self.shapes if shape is not None]
        full = flat_program(self._backward, [*parameters, *inputs], shapes, dy)
        dx, weights = full.outputs[:count], full.outputs[count:]
        first = full.needed(dx)
        done = {id(equation) for equation in first}
        rest = [equation for equation in full.needed(weights) if id(equation) not in done]
        made = {v for equation in first for v in equation.outvars}
        wanted = [v for equation in rest for v in equation.invars] + weights
        crossing = [*dict.fromkeys(v for v in wanted if is_variable(v) and v in made)]
        known = [*full.inputs, *crossing]
        return _half(full, first, known, [*dx, *crossing]), _half(full, rest, known, weights)

    def _backward(self, arguments: list[Any], saved: list[Any], dy: list[Any]) -> list[Any]:
        known = dict(zip(self.arguments, arguments, strict=True)) | dict(zip(self.saved, saved, strict=True))
        again = self.program.needed(v for v in self.residuals if is_variable(v) and v not in known)
        residuals = self.program.evaluated(again, known, self.residuals)
        gradients = iter(dy)
        cotangents = [
            np.zeros(kind.shape, jax.dtypes.float0) if shape is None else next(gradients)
            for kind, shape in zip(self.types, self.shapes, strict=True)
        ]
        backward = jax.tree_util.tree_unflatten(self.structure, residuals)
        trained, floats = backward(jax.tree_util.tree_unflatten(self.output, cotangents))
        return [*floats, *map(descending, trained)]


def _half(program: FlatProgram, equations: list[Any], known: list[Any], outputs: list[Any]) -> Half:
    wanted = {v for equation in equations for v in equation.invars if is_variable(v)}
    wanted.update(filter(is_variable, outputs))
    made = {v for equation in equations for v in equation.outvars}
    takes = [number for number, v in enumerate(known) if v in wanted and v not in made]
    variables = [known[number] for number in takes]

    def run(values: list[Any]) -> list[Any]:
        return program.evaluated(equations, dict(zip(variables, values, strict=True)), outputs)

    return Half(takes, jax.jit(run) if outputs else lambda values: [])


@dataclass(frozen=True, eq=False)
class JaxBlock(Layer):
    """Apply a user's function ``apply(parameters, x[, key])`` as a block.

    Parameters
    ----------
    apply : callable
        The function.
    parameters : tuple of ParameterSpec
        The block's parameters, in the order of the pytree's leaves.
    number : int
        Number of the block in the model; its random keys depend on it.
    """

    apply: Callable[..., Any]
    parameters: tuple[ParameterSpec, ...]
    number: int
    dtype: np.dtype[Any]
    _compiled: CompiledBlock = field(repr=False)
    #: Library that allocates the arrays of a pass, which the planner cannot count.
    memory_of: ClassVar[str] = "JAX"

    @property
    def compiled(self) -> CompiledBlock:
        """The compiled functions, which blocks with the same function and equal shapes share."""
        return self._compiled

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the block itself, which holds no values."""
        return self

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Return the descriptions of the block's parameters."""
        return self.parameters

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, ForwardCache]:
        """Return the output for ``x``, and a cache for the backward pass, which contains no parameters.

        The output is a read-only array, or a tree of them.
        """
        inputs = samples(x, self.dtype, "the input")
        if not run.training:
            return self._compiled.output(self._leaves(params), inputs)
        key = key_data(run, self.number) if self._compiled.apply.takes_key else None
        return self._compiled.forward(self._leaves(params), inputs, key)

    def backward_input(self, params: Params, cache: ForwardCache, dy: Any) -> tuple[Any, list[Any]]:
        """Return the gradient of the input, and values for :meth:`backward_weights`.

        The gradient is None in the first block, and for arrays of integers.
        """
        return self._compiled.backward_input(self._leaves(params), cache, dy)

    def backward_weights(self, params: Params, cache: ForwardCache, pending: list[Any], grads: Params) -> None:
        """Overwrite the gradients of the parameters."""
        gradients = iter(self._compiled.backward_weights(self._leaves(params), cache, pending))
        for spec in self.parameters:
            if spec.trainable:
                value_at(grads, spec.name)[...] = next(gradients)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the output for one sample of ``shape``, or ``shape`` itself if tracing fails."""
        for dtype in (self.dtype, np.dtype(np.int32)):
            try:
                shapes = [jax.ShapeDtypeStruct(spec.shape, self.dtype) for spec in self.parameters]
                output = self._compiled.traced_output(shapes, jax.ShapeDtypeStruct((1, *shape), dtype))
                return tuple(output.shape[1:])
            except Exception:  # of the user's function, for an input that it does not take
                continue
        return shape

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Raise ``UnsupportedError``, because the operations of a function of JAX are not counted."""
        raise UnsupportedError("a block written in JAX does not count its operations")

    def _leaves(self, params: Params) -> list[Array]:
        return [value_at(params, spec.name) for spec in self.parameters]


class JaxLoss:
    """Compute a user's loss ``loss(prediction, y)``, and its gradient."""

    def __init__(self, loss: Callable[..., Any], dtype: np.dtype[Any]) -> None:
        self.loss, self.dtype = loss, dtype
        self._traced = TracedFunction(loss, "loss", "prediction", "y")
        self._gradient = jax.jit(jax.value_and_grad(self._value, has_aux=True, allow_int=True))
        self._first = FirstGrains(self._traced, self._value, self._gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the loss itself, which holds no values."""
        return self

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        """Return the sum of the losses, the weight, and the gradient of the sum."""
        y = samples(target, self.dtype, "y")
        with self._traced.traced():
            self._first.check((), (prediction, y))
            (loss, weight), gradient = self._gradient(prediction, y)
        return float(loss), float(count(y) if weight is None else weight), gradient

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        """Return ``scale`` times the gradient of the loss sum, in the structure of the prediction."""

        def scaled(leaf: Any) -> Any:
            if leaf.dtype == jax.dtypes.float0:
                return None
            values = np.asarray(leaf)
            return values if scale == 1.0 else values * values.dtype.type(scale)

        return jax.tree_util.tree_map(scaled, cache)

    def _value(self, prediction: Any, y: Any) -> tuple[Any, Any]:
        return sum_and_weight(self._traced, self._traced(prediction, y, key=None))


#: Most seconds of a first pass, which compiles, after which a pass of a single sample is compiled to be timed.
_MOST_COMPILING = 2.0


class CompiledLoss:
    """Compute a user's loss of all parameters, with its gradient or without.

    Parameters
    ----------
    loss : TracedFunction
        ``loss(parameters, x, y[, key])``.
    tree : ParameterTree
        Structure and names of the parameters.
    frozen : frozenset of str
        Names of the parameters that are not differentiated.
    dtype : dtype
        Type of the parameters, to which wider samples are converted.
    """

    def __init__(self, loss: TracedFunction, tree: ParameterTree, frozen: frozenset[str], dtype: np.dtype[Any]) -> None:
        self.loss, self._tree, self._dtype = loss, tree, dtype
        self._trained = [name for name in tree.names if name not in frozen]
        self._fixed = [name for name in tree.names if name in frozen]
        self._gradient = jax.jit(self._with_gradient)
        self._forward = jax.jit(self._value)
        #: How often the loss with its gradient was traced and compiled.
        self.compilations = 0
        #: Times the first passes.
        self.times = PassTimes()
        self._alone = jax.jit(jax.value_and_grad(self._value, has_aux=True))  # for passes of no effect
        self._first = FirstGrains(loss, self._value, self._alone)
        self._compiled_in = 0.0

    def loss_and_grad(
        self, parameters: Mapping[str, Array], batch: tuple[Any, Any], run: Run = EVALUATE
    ) -> tuple[float, Mapping[str, Array], float]:
        """Return the sum of the losses, its gradient by name, and the weight; the arrays are read-only."""
        start = perf_counter()
        trained, fixed, x, y, key = arguments = self._arguments(parameters, batch, run)
        with self.loss.traced(without_key=key is None):
            self._first.check((trained, fixed), (x, y), (key,))
            (loss, weight), gradients = self._gradient(*arguments)
        named = {name: np.asarray(gradients[name]) for name in self._trained}
        total, seconds = float(loss), perf_counter() - start
        self._compiled_in = self._compiled_in or seconds
        if run.training and self._compiled_in < _MOST_COMPILING:

            def one() -> None:  # compiled in the first pass, which takes longer than those that count
                x_one, y_one = jax.tree_util.tree_map(lambda leaf: leaf[:1], (x, y))
                jax.block_until_ready(self._alone(trained, fixed, x_one, y_one, key))

            self.times.add(0, run.count, seconds, one)
        return total, named, _weight(weight, batch, run)

    def loss_alone(
        self, parameters: Mapping[str, Array], batch: tuple[Any, Any], run: Run = EVALUATE
    ) -> tuple[float, float]:
        """Return the sum of the losses and the weight."""
        arguments = self._arguments(parameters, batch, run)
        with self.loss.traced(without_key=arguments[-1] is None):
            loss, weight = self._forward(*arguments)
        return float(loss), _weight(weight, batch, run)

    def lowered(self, parameters: Mapping[str, Array], x: Any, y: Any) -> Any:
        """Return the loss with its gradient, lowered by JAX but not compiled by XLA. Not collective.

        Only the shapes and dtypes of the arguments are used.
        """
        return self._alone.lower(*self._arguments(parameters, (x, y), Run(True, 0, 0, 0)))

    def _arguments(self, parameters: Mapping[str, Array], batch: tuple[Any, Any], run: Run) -> tuple[Any, ...]:
        """Return the arguments of the compiled functions: trained and frozen parameters, x, y, and key data or None."""
        trained, fixed = ({name: parameters[name] for name in names} for names in (self._trained, self._fixed))
        key = key_data(run, 0) if self.loss.takes_key and run.training else None
        return trained, fixed, samples(batch[0], self._dtype, "x"), samples(batch[1], self._dtype, "y"), key

    def _with_gradient(self, *arguments: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
        self.compilations += 1
        value, gradients = jax.value_and_grad(self._value, has_aux=True)(*arguments)
        return value, {name: descending(gradient) for name, gradient in gradients.items()}

    def _value(self, trained: dict[str, Any], fixed: dict[str, Any], x: Any, y: Any, key: Any) -> tuple[Any, Any]:
        every = {**trained, **fixed}
        parameters = self._tree.build([every[name] for name in self._tree.names])
        return sum_and_weight(self.loss, self.loss(parameters, x, y, key=make_key(key)))


def _weight(weight: Any, batch: tuple[Any, Any], run: Run) -> float:
    return float(run.count or count(*batch)) if weight is None else float(weight)


class Block(NamedTuple):
    """Hold a block as the user gave it: its parameters, or the ``init(key)`` that makes them, and its ``apply``."""

    parameters: Any
    apply: TracedFunction


_PAIRS = "pairs (init, apply) or (parameters, apply), in a list or by name"


def read_blocks(parameters: Any, blocks: Any) -> dict[str, Block]:
    """Return the blocks by name; those of a list are named "0", "1", ...

    ``parameters`` is None, or it has the parameters of every block and ``blocks`` has only the functions ``apply``.

    Raises
    ------
    ConfigError
        If ``blocks`` has another form, or does not fit ``parameters``.
    """
    if isinstance(blocks, str | bytes) or not isinstance(blocks, Mapping | Sequence) or not blocks:
        raise ConfigError(f"JaxModel: blocks are {_PAIRS}; got {blocks!r:.60}")
    named = dict(blocks) if isinstance(blocks, Mapping) else {str(i): block for i, block in enumerate(blocks)}
    of_blocks = parameters
    if isinstance(parameters, list | tuple):
        of_blocks = {str(i): part for i, part in enumerate(parameters)}
    if of_blocks is not None and (not isinstance(of_blocks, Mapping) or set(of_blocks) != set(named)):
        has = sorted(map(str, of_blocks)) if isinstance(of_blocks, Mapping) else type(parameters).__name__
        raise ConfigError(f"JaxModel: the blocks are {list(named)}, parameters are given for {has}")
    result = {}
    for name, block in named.items():
        pair = block if of_blocks is None else (of_blocks[name], block)
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and callable(pair[1])):
            way = f"blocks are {_PAIRS}" if of_blocks is None else "give its function, or parameters=None"
            raise ConfigError(f"JaxModel: block {name!r} is {block!r:.60}: {way}")
        result[str(name)] = Block(pair[0], TracedFunction(pair[1], f"apply of block {name!r}", "parameters", "x"))
    return result


class StartValues(Mapping[str, Array]):
    """Map names of parameters to start values, which are made one block at a time.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks.
    seed : int
        Seed of the keys that functions ``init`` are given.
    """

    def __init__(self, blocks: Mapping[str, Block], seed: int) -> None:
        self._blocks, self._seed = blocks, seed
        self._homes: dict[str, str] = {}
        self._last: tuple[str, dict[str, Array]] = ("", {})

    def of_block(self, name: str) -> tuple[ParameterTree, dict[str, Array]]:
        """Return the structure and the start values of a block's parameters."""
        block, number = self._blocks[name], list(self._blocks).index(name)
        tree = block.parameters
        if callable(tree):
            try:
                tree = tree(make_key(key_data(Run(seed=self._seed, step=-1), number)))
            except TypeError as error:
                error.add_note(f"In block {name!r}: init is called as init(key), and returns a pytree of parameters")
                raise
        if not jax.tree_util.tree_leaves(tree):
            return ParameterTree((), jax.tree_util.tree_structure(tree)), {}
        structure, leaves = named_leaves(tree, f"JaxModel: block {name!r}")
        arrays = {f"{name}.{leaf}": np.asarray(value) for leaf, value in zip(structure.names, leaves, strict=True)}
        for parameter in arrays:
            if self._homes.setdefault(parameter, name) != name:
                raise ConfigError(f"JaxModel: blocks {self._homes[parameter]!r} and {name!r} both have {parameter!r}")
        return structure, arrays

    def __getitem__(self, name: str) -> Array:
        """Return the start value of one parameter."""
        block, last = self._homes[name], self._last
        if last[0] != block:
            last = self._last = (block, self.of_block(block)[1])
        return last[1][name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the parameters."""
        return iter(self._homes)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._homes)


def make_layers(
    blocks: Mapping[str, Block], start: StartValues, frozen: frozenset[str]
) -> tuple[dict[str, JaxBlock], np.dtype[Any]]:
    """Return a layer for each block, and the dtype of all parameters (of complex ones, that of the real part).

    Raises
    ------
    ConfigError
        If parameters have different precision, there are no parameters, or ``frozen`` names an unknown parameter.
    """
    trees: dict[str, tuple[ParameterTree, dict[str, tuple[int, ...]]]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    for name in blocks:
        tree, arrays = start.of_block(name)
        dtypes |= {parameter: array.dtype for parameter, array in arrays.items()}
        trees[name] = tree, {parameter: array.shape for parameter, array in arrays.items()}
    if unknown := sorted(frozen - set(dtypes)):
        raise ConfigError(f"frozen names {unknown}, but the parameters are {list(dtypes)}{nearest(unknown[0], dtypes)}")
    kinds = {real_type(dtype): f"{name!r} is {dtype}" for name, dtype in reversed(dtypes.items())}
    if len(kinds) != 1:
        listed = ", ".join(kinds.values()) or "there are none"
        raise ConfigError(
            f"JaxModel: all parameters must be float32 or complex64, or all float64 or complex128; {listed}"
        )
    (dtype,) = kinds
    compiled: dict[Any, CompiledBlock] = {}
    layers = {}
    for number, (name, (tree, shapes)) in enumerate(trees.items()):
        specs = tuple(
            ParameterSpec(
                full[len(name) + 1 :],
                shape,
                decay=len(shape) > 1,
                trainable=full not in frozen,
                complex=dtypes[full].kind == "c",
            )
            for full, shape in shapes.items()
        )
        apply = blocks[name].apply
        form = (id(apply.function), tree, tuple((s.shape, s.trainable) for s in specs), number == 0)
        if form not in compiled:
            compiled[form] = CompiledBlock(
                apply, tree, [i for i, s in enumerate(specs) if s.trainable], first=number == 0
            )
        layers[name] = JaxBlock(apply.function, specs, number, dtype, compiled[form])
    return layers, dtype
