"""Compile a block's forward pass, and the two halves of its backward pass.

[Note: halves] ``jax.vjp`` gives a block's backward pass as one program, from what the forward pass keeps and from the
gradient of the output. Its equations are divided: those that the gradient of the input needs are the first half, the
others the second, which is given what the first one has computed. No equation runs twice, and every schedule runs the
same two programs, so all of them have the same bits.

[Note: what is kept] Of the values that the backward pass needs, parameters and all that is computed from parameters
alone are not kept: they are given, or computed, again. So a gathered unit can be released between both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from mpizero.adapters.jax.flat_jaxpr import FlatProgram, flat_program, is_variable
from mpizero.adapters.jax.loss_checks import check_rows, check_traces
from mpizero.adapters.jax.parameter_tree import ParameterTree, descending, host_view
from mpizero.adapters.jax.random_key import key_data, make_key
from mpizero.adapters.jax.traced_function import TracedFunction
from mpizero.types import Array, Run


class Half(NamedTuple):
    """Hold a compiled half of a backward pass: the numbers of the values that it takes, and the function."""

    takes: list[int]
    function: Callable[[list[Any]], list[Any]]


class BlockProgram(NamedTuple):
    """Hold the compiled programs of a block for inputs of one structure, shape and dtype.

    The values that a backward pass takes are numbered: first the parameters, then the arrays of the input, then what
    the forward pass keeps, the gradients of the output, and what the first half computes for the second.

    Attributes
    ----------
    forward : callable
        Takes the parameters, the arrays of the input and what makes a key; returns the arrays of the output, then those
        that are kept.
    output : tree structure
        The structure of the output.
    outputs : list
        For each array of the output its shape and dtype if it is of floating point, and has a gradient; else None.
    differentiated : list of int
        Numbers of the input's arrays that have a gradient.
    inputs, weights : Half
        The first half returns the gradients of these arrays, then what the second takes; the second those of the
        trained parameters.
    """

    forward: Callable[..., list[Any]]
    output: Any
    outputs: list[Any]
    differentiated: list[int]
    inputs: Half
    weights: Half


class Kept(NamedTuple):
    """Hold what a forward pass keeps: the input's arrays and structure, what made its key, and values of its own.

    ``values`` is None after a forward pass that is not one of training; the backward pass then runs it again.
    """

    inputs: list[Any]
    structure: Any
    key: Array | None
    values: list[Any] | None


class CompiledBlock:
    """Compute a block's output and gradients; blocks of one function and equal shapes share it.

    Parameters
    ----------
    apply : TracedFunction
        ``apply(parameters, x[, key]) -> y``.
    tree : ParameterTree
        Structure and names of the block's parameters.
    trained : list of int
        Numbers of the parameters that have gradients.
    first : bool
        Whether this is the model's first block, whose input needs no gradient.
    """

    def __init__(self, apply: TracedFunction, tree: ParameterTree, trained: list[int], *, first: bool) -> None:
        self.apply, self._tree, self._trained, self._first = apply, tree, trained, first
        self._programs: dict[Any, BlockProgram] = {}
        self._alone = jax.jit(self._applied)
        self._checked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself, which every copy of the model can use."""
        return self

    @property
    def compilations(self) -> int:
        """For how many shapes of inputs the forward and backward pass were compiled."""
        return len(self._programs)

    def traced_output(self, parameters: list[Any], x: Any) -> Any:
        """Return shapes and dtypes of the output, from those of parameters and input."""
        return jax.eval_shape(self._alone, parameters, x, None)

    def lowered(self, parameters: list[Any], x: Any) -> Any:
        """Return the forward pass as JAX lowers it, before XLA compiles it, from shapes and dtypes. Not collective."""
        key = key_data(Run(True, 0, 0, 0), 0) if self.apply.takes_key else None
        return self._alone.lower(parameters, x, key)

    def output(self, parameters: list[Array], x: Any) -> tuple[Any, Kept]:
        """Return the output for ``x`` without a key, as read-only arrays, and what :meth:`backward_input` needs."""
        inputs, structure = jax.tree_util.tree_flatten(x)
        with self.apply.traced(without_key=True):
            y = jax.tree_util.tree_map(host_view, self._alone(parameters, x, None))
        return y, Kept(inputs, structure, None, None)

    def forward(self, parameters: list[Array], x: Any, key: Array | None) -> tuple[Any, Kept]:
        """Return the output for ``x``, as read-only arrays, and what :meth:`backward_input` needs."""
        inputs, structure = jax.tree_util.tree_flatten(x)
        program = self._program(parameters, inputs, structure, key)
        if not self._checked:
            self._checked = check_rows(self.apply, lambda part: self._alone(parameters, part, None), x)
        found = program.forward(parameters, inputs, key)
        count = len(program.outputs)
        y = jax.tree_util.tree_unflatten(program.output, map(host_view, found[:count]))
        return y, Kept(inputs, structure, key, found[count:])

    def backward_input(self, parameters: list[Array], kept: Kept, dy: Any) -> tuple[Any, list[Any]]:
        """Return the gradient of the input, None where it has none, and values for :meth:`backward_weights`."""
        inputs, structure, key, values = kept
        program = self._program(parameters, inputs, structure, key)
        if values is None:
            values = program.forward(parameters, inputs, key)[len(program.outputs) :]
        leaves = jax.tree_util.tree_leaves(dy, is_leaf=lambda leaf: leaf is None)
        given = [
            np.zeros(kind.shape, kind.dtype) if leaf is None else leaf  # None: no loss depends on it
            for leaf, kind in zip(leaves, program.outputs, strict=True)
            if kind is not None
        ]
        known = [*parameters, *inputs, *values, *given]
        found = program.inputs.function([known[number] for number in program.inputs.takes])
        count = len(program.differentiated)
        gradients: list[Any] = [None] * len(inputs)
        for number, gradient in zip(program.differentiated, found[:count], strict=True):
            gradients[number] = host_view(gradient)
        dx = jax.tree_util.tree_unflatten(structure, gradients) if count else None
        return dx, [*values, *given, *found[count:]]

    def backward_weights(self, parameters: list[Array], kept: Kept, pending: list[Any]) -> list[Array]:
        """Return the gradients of the trained parameters, in their order, as read-only arrays."""
        half = self._program(parameters, kept.inputs, kept.structure, kept.key).weights
        known = [*parameters, *kept.inputs, *pending]
        return [host_view(gradient) for gradient in half.function([known[number] for number in half.takes])]

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
        """Trace the block for inputs of these shapes ([Note: halves])."""
        differentiated = [] if self._first else [i for i, leaf in enumerate(inputs) if leaf.dtype.kind in "fcV"]
        seen: dict[str, Any] = {}

        def forward(given: list[Any], leaves: list[Any], data: Any) -> list[Any]:
            def applied(trained: list[Any], floats: list[Any]) -> Any:
                every, changed = list(given), list(leaves)
                for number, value in zip(self._trained, trained, strict=True):
                    every[number] = value
                for number, value in zip(differentiated, floats, strict=True):
                    changed[number] = value
                return self._applied(every, jax.tree_util.tree_unflatten(structure, changed), data)

            y, backward = jax.vjp(applied, [given[i] for i in self._trained], [leaves[i] for i in differentiated])
            outputs, seen["output"] = jax.tree_util.tree_flatten(y)
            residuals, seen["backward"] = jax.tree_util.tree_flatten(backward)
            seen["outputs"] = [jax.typeof(leaf) for leaf in outputs]
            return [*outputs, *residuals]

        program = flat_program(forward, parameters, inputs, key)
        backward = Backward(program, len(parameters), len(inputs), seen)
        given = [*program.inputs]

        def run(*arguments: Any) -> list[Any]:
            known = dict(zip(given, jax.tree_util.tree_leaves(arguments), strict=True))
            return program.evaluated(program.equations, known, [*backward.outputs, *backward.kept])

        halves = backward.halves(parameters, inputs, len(differentiated))
        return BlockProgram(jax.jit(run), seen["output"], backward.shapes, differentiated, *halves)


class Backward:
    """Make the two halves of a backward pass from the program of the forward pass.

    Parameters
    ----------
    program : FlatProgram
        The forward pass: it takes parameters, arrays of the input and what makes a key, and returns the arrays of the
        output, and those that ``jax.vjp`` needs.
    parameters, inputs : int
        Number of parameters and of arrays of the input.
    seen : dict
        Structures that were found in tracing it: "output", "backward" (what ``jax.vjp`` returned), and "outputs", the
        types of the arrays of the output.
    """

    def __init__(self, program: FlatProgram, parameters: int, inputs: int, seen: dict[str, Any]) -> None:
        self.program, self.structure, self.output = program, seen["backward"], seen["output"]
        self.types = seen["outputs"]
        #: Shapes and dtypes of the arrays of the output, None of those without a gradient.
        self.shapes = [
            jax.ShapeDtypeStruct(kind.shape, kind.dtype) if kind.dtype.kind in "fcV" else None for kind in self.types
        ]
        self.outputs, self.residuals = program.outputs[: len(self.types)], program.outputs[len(self.types) :]
        self.given = program.inputs[: parameters + inputs]
        samples = program.following(program.inputs[parameters:])
        #: What the forward pass keeps ([Note: what is kept]).
        self.kept = [
            *dict.fromkeys(v for v in self.residuals if is_variable(v) and v in samples and v not in self.given)
        ]

    def halves(self, parameters: list[Array], inputs: list[Any], count: int) -> tuple[Half, Half]:
        """Compile both halves; ``count`` arrays of the input have a gradient."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.kept]
        dy = [shape for shape in self.shapes if shape is not None]
        whole = flat_program(self._backward, [*parameters, *inputs], shapes, dy)
        dx, weights = whole.outputs[:count], whole.outputs[count:]
        first = whole.needed(dx)
        done = {id(equation) for equation in first}
        rest = [equation for equation in whole.needed(weights) if id(equation) not in done]
        made = {v for equation in first for v in equation.outvars}
        wanted = [v for equation in rest for v in equation.invars] + weights
        crossing = [*dict.fromkeys(v for v in wanted if is_variable(v) and v in made)]
        known = [*whole.inputs, *crossing]
        return _half(whole, first, known, [*dx, *crossing]), _half(whole, rest, known, weights)

    def _backward(self, given: list[Any], kept: list[Any], dy: list[Any]) -> list[Any]:
        known = dict(zip(self.given, given, strict=True)) | dict(zip(self.kept, kept, strict=True))
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


def _half(whole: FlatProgram, equations: list[Any], known: list[Any], outputs: list[Any]) -> Half:
    wanted = {v for equation in equations for v in equation.invars if is_variable(v)}
    wanted.update(filter(is_variable, outputs))
    made = {v for equation in equations for v in equation.outvars}
    takes = [number for number, v in enumerate(known) if v in wanted and v not in made]
    variables = [known[number] for number in takes]

    def run(values: list[Any]) -> list[Any]:
        return whole.evaluated(equations, dict(zip(variables, values, strict=True)), outputs)

    return Half(takes, jax.jit(run) if outputs else lambda values: [])
