"""Take programs of JAX apart: evaluate some of a program's equations, and find those that given values need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

#: Primitives that call a program and compute nothing themselves; ``jaxpr`` among their parameters is the program.
_CALLS = ("jit", "pjit", "closed_call", "core_call")


@dataclass(frozen=True)
class FlatProgram:
    """Hold a program without calls of inner programs.

    Attributes
    ----------
    inputs, outputs : list
        Its variables; an output may also be a literal.
    equations : list
        Its equations, in their order.
    constants : dict
        Values of its constants, by variable.
    """

    inputs: list[Any]
    outputs: list[Any]
    equations: list[Any]
    constants: dict[Any, Any]
    _whole: Any

    def evaluated(self, equations: list[Any], known: Mapping[Any, Any], outputs: Sequence[Any]) -> list[Any]:
        """Evaluate some of the equations, from the values ``known`` by variable, and return those of ``outputs``."""
        return _evaluated(self._whole, equations, self.constants | dict(known), outputs)

    def needed(self, outputs: Iterable[Any]) -> list[Any]:
        """Return the equations that compute the variables ``outputs``, in their order."""
        wanted, found = {v for v in outputs if is_variable(v)}, []
        for equation in reversed(self.equations):
            if wanted.intersection(equation.outvars):
                found.append(equation)
                wanted.update(v for v in filter(is_variable, equation.invars))
        return found[::-1]

    def following(self, inputs: Iterable[Any]) -> set[Any]:
        """Return ``inputs``, variables, and all variables that depend on them."""
        found = set(inputs)
        for equation in self.equations:
            if any(v in found for v in filter(is_variable, equation.invars)):
                found.update(equation.outvars)
        return found


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


def _inlined(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Run a program, and those that it calls, equation by equation."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr") if equation.primitive.name in _CALLS else None
        if inner is None:
            found = _evaluated(jaxpr, [equation], values, equation.outvars)
        else:
            given = [values[v] if is_variable(v) else v.val for v in equation.invars]
            found = _inlined(inner.jaxpr, inner.consts, given)
        values.update(zip(equation.outvars, found, strict=True))
    return [values[v] if is_variable(v) else v.val for v in jaxpr.outvars]


def _evaluated(jaxpr: Any, equations: list[Any], known: Mapping[Any, Any], outputs: Sequence[Any]) -> list[Any]:
    """Evaluate equations of a program, from the values ``known`` by variable, and return those of ``outputs``."""
    needed = {v for equation in equations for v in equation.invars if is_variable(v)}
    needed.update(filter(is_variable, outputs))
    inputs = [v for v in known if v in needed]
    part = jaxpr.replace(constvars=[], invars=inputs, outvars=list(outputs), eqns=list(equations))
    found: list[Any] = jax.core.eval_jaxpr(part, (), *[known[v] for v in inputs])
    return found
