"""Evaluate a user's model on a batch through one interface, for models of blocks and for functional models.

Batches are cut into pieces as training does (:func:`cut`), their arrays are read-only, and :func:`content` detects
changes of them. :class:`ModelReport` holds the result of checking a model, for people and for programs.
:func:`checked_model` wraps a model in the interface, :class:`CheckedModel`.

[Note: pairs] The interface uses real numbers only. A complex parameter of shape ``s`` is passed as an array of shape
``(*s, 2)``, with the real and the imaginary part of each element, and so is its gradient. The model itself gets complex
arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.checks import loss_arguments, named, takes_run, writes_in_place
from mpizero._util.names import nearest
from mpizero._util.pytree import SampleTree, leaves_of, map_arrays, map_leaves, paths_of
from mpizero._util.text import users_line
from mpizero.errors import DataError, LayoutError
from mpizero.layout.flat import joined, nested
from mpizero.nn.layer import fresh_integers, start_integers
from mpizero.nn.models import bind, evaluate, initial_parameters, model_specs, run_on
from mpizero.sharding.forward_backward import writable
from mpizero.sharding.integrity import count_sentinels, write_sentinel
from mpizero.sharding.partition import blocks_of
from mpizero.types import Array, BlackBoxModel, BlockModel, ParameterSpec, Run, as_reals


def sample_count(x: Any, y: Any) -> int | None:
    """Return how many samples a batch has; None if it cannot be cut into samples."""
    try:
        tree = SampleTree.of(x=x, y=y)
        return None if tree.uncut else tree.count()
    except DataError:
        return None


def cut(tree: Any, start: int, stop: int) -> Any:
    """Return the samples ``start`` to ``stop - 1`` as contiguous arrays, as training passes them to a model."""
    return map_arrays(lambda array: np.ascontiguousarray(array[start:stop]), tree)


def read_only(tree: Any) -> Any:
    """Return the same nested containers, with a read-only view in the place of every array."""

    def view(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        result: Array = leaf.view()
        result.flags.writeable = False
        return result

    return map_leaves(view, tree)


def content(tree: Any) -> tuple[bytes, ...]:
    """Return the bytes of all arrays in nested containers, so that changes of the arrays can be detected."""
    return tuple(leaf.tobytes() for leaf in leaves_of(tree) if isinstance(leaf, np.ndarray))


@dataclass(frozen=True)
class ModelFinding:
    """Describe one thing that is wrong with a model.

    Attributes
    ----------
    check : str
        The check with this finding: "values", "repeats", "sum", "gradient", "prediction", "layers" or "ranks".
    what : str
        Name of the wrong value: "loss", "weight", "prediction", "gradient of 'w'", ...
    seen : str
        What is wrong with the value, with numbers.
    cause : str
        The probable cause.
    remedy : str
        How to correct the model.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import check_model
    >>> def mean(parameters, batch):  # wrong: training adds the sums of pieces of a batch
    ...     error = parameters["slope"] * batch[0] - batch[1]
    ...     return float((error**2).mean()), {"slope": np.array([2 * (error * batch[0]).mean()])}, float(len(error))
    >>> x = np.array([0.5, 1.0, 2.0, 3.0])
    >>> try:
    ...     check_model(mz.FunctionModel({"slope": np.ones(1)}, mean), x, 3 * x, comm="self")
    ... except mz.errors.ModelCheckError as error:
    ...     finding = error.report.findings[0]
    >>> finding.check, finding.what
    ('sum', 'loss')
    >>> print(finding.remedy)
    return the sum over the samples, and float(len(x)) as the weight
    """

    check: str
    what: str
    seen: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.seen}; probably {self.cause}: {self.remedy}"


@dataclass(frozen=True)
class ModelReport:
    """Hold the result of :func:`~mpizero.testing.check_model`.

    Attributes
    ----------
    findings : tuple of ModelFinding
        What is wrong with the model; empty if nothing is wrong.
    passed : tuple of str
        One line for each check that passed, with what the check measured.
    notes : tuple of str
        Lines about what could not be checked, or is worth knowing.
    evaluations : int
        How often the model was evaluated.
    seconds : float
        Duration of all checks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import check_model
    >>> x, y = np.random.default_rng(0).normal(size=(4, 2)), np.array([0, 1, 1, 0])
    >>> report = check_model(mz.nn.MLP(2, [3], 2), x, y, comm="self")
    >>> report.right, report.findings
    (True, ())
    >>> print(report.passed[1])
    repeats: the same bits every time, in any memory
    """

    findings: tuple[ModelFinding, ...]
    passed: tuple[str, ...]
    notes: tuple[str, ...]
    evaluations: int
    seconds: float

    @property
    def right(self) -> bool:
        """Tell whether there are no findings."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, for JSON."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {"right": self.right, **values}

    @property
    def told(self) -> tuple[str, ...]:
        """Return one line for each pair of check and cause, which names all values that are wrong for that cause."""
        groups: dict[tuple[str, str], list[ModelFinding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.check, finding.cause), []).append(finding)
        return tuple(_of_group(group) for group in groups.values())

    def __str__(self) -> str:
        lines = [f"wrong: {line}" for line in self.told]
        lines += [f"ok:    {line}" for line in self.passed]
        lines += [f"note:  {line}" for line in self.notes]
        return "\n".join(lines)


def _of_group(group: list[ModelFinding]) -> str:
    first, *others = group
    listed = ", ".join(finding.what for finding in others[:6]) + (", ..." if len(others) > 6 else "")
    return f"{first}{f' (and so with {listed})' if others else ''}"


class UnusableEvaluation(Exception):  # noqa: N818 - never leaves the package
    """Report that training could not use the values that the model returns, and end all checks with ``findings``."""

    def __init__(self, *findings: ModelFinding) -> None:
        super().__init__()
        self.findings = findings


Named = Mapping[str, Array]


class LossAndGradients(NamedTuple):
    """Hold the loss, the weight, the gradients and the new values of averaged parameters of a batch, as copies.

    ``gradients`` has the gradients of the parameters that an optimizer trains. ``outputs`` has the outputs of the
    blocks, by name, in the order of the forward pass; it is empty for a functional model.
    """

    loss: float
    gradients: dict[str, Array]
    weight: float
    averages: dict[str, Array]
    outputs: dict[str, Array]

    def named(self) -> Iterator[tuple[str, Array]]:
        """Yield the name and the values of each result, in the order of computation. Not collective."""
        yield from ((f"output of block {name}", value) for name, value in self.outputs.items())
        yield from (("loss", np.array(self.loss)), ("weight", np.array(self.weight)))
        yield from ((f"gradient of {name!r}", value) for name, value in self.gradients.items())
        yield from ((f"new value of {name!r}", value) for name, value in self.averages.items())


def in_pairs(values: Array) -> Array:
    """Return complex values as pairs of real numbers along a new last axis; return real values unchanged."""
    return as_reals(values).reshape(*values.shape, 2) if values.dtype.kind == "c" else values


def as_declared(spec: ParameterSpec, values: Array) -> Array:
    """Return a parameter's values in the form that its model takes: complex numbers in place of pairs of real ones."""
    return spec.view(as_reals(np.ascontiguousarray(values)))


def checked_model(model: Any) -> CheckedModel:
    """Return a :class:`CheckedBlocks` for a model of blocks, else a :class:`CheckedFunction`.

    Raise TypeError if ``model`` is not a model.
    """
    blocks_of(model)
    return CheckedBlocks(model) if isinstance(model, BlockModel) else CheckedFunction(model)


class CheckedFunction:
    """Evaluate a functional model as training does: each call gets the parameters in the same, read-only memory.

    No method is collective. Parameters and gradients are arrays of real numbers; see the module's [Note: pairs].

    Attributes
    ----------
    evaluations : int
        How often the model was evaluated.
    declared : dict of str to ParameterSpec
        Declarations of all parameters by name, without integer arrays and tied parameters.
    names, averaged : tuple of str
        Names of the parameters that an optimizer trains, and of the averaged ones.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.evaluations = model, 0
        self.integers = start_integers(model)
        self.declared = {name: specs[0] for name, specs in blocks_of(model).items() if specs}
        self.names = tuple(name for name, spec in self.declared.items() if spec.optimized)
        self.averaged = tuple(name for name, spec in self.declared.items() if spec.averaged and spec.trainable)
        self.dtype = np.dtype(model.dtype)
        self.in_place = writes_in_place(model)
        names = loss_arguments(in_place=self.in_place)
        self._takes_run = takes_run(model.loss_and_grad, "loss_and_grad", *names)
        self._memory = self._new()
        self._gradients = self._new() if self.in_place else {}

    def _new(self) -> dict[str, Array]:
        arrays = {name: spec.view(np.zeros(spec.size, self.dtype)) for name, spec in self.declared.items()}
        return arrays | {name: value.copy() for name, value in self.integers.items()}

    def start(self) -> dict[str, Array]:
        """Return copies of the start values of all parameters by name."""
        values = self.model.parameters.items()
        return {name: in_pairs(np.array(value, self.declared[name].element_type(self.dtype))) for name, value in values}

    def _provided(self, parameters: Named, fresh: bool) -> dict[str, Array]:
        provided = self._new() if fresh else self._memory
        for name, spec in self.declared.items():
            provided[name][...] = as_declared(spec, parameters[name])
        return provided

    def evaluate(self, parameters: Named, x: Any, y: Any, first: int = 0, *, fresh: bool = False) -> LossAndGradients:
        """Call ``loss_and_grad``, and raise UnusableEvaluation if training could not use what it returns.

        The batch's first sample has the number ``first`` in its global batch. With ``fresh``, the model gets its
        parameters in newly allocated arrays.
        """
        self.evaluations += 1
        provided = self._provided(parameters, fresh)
        with np.errstate(all="ignore"):
            run = Run(True, getattr(self.model, "seed", 0), 0, first, count=_count(x, y))
            returned = self._called(provided, x, y, run, self._new() if fresh else self._gradients)
        for name, array in provided.items():
            before = parameters[name] if name in self.declared else self.integers[name]
            if array.tobytes() != before.tobytes():
                raise UnusableEvaluation(_written(f"parameter {name!r}", "through a bare pointer"))
        return self._examined(returned)

    def _called(self, provided: Named, x: Any, y: Any, run: Run, gradients: dict[str, Array]) -> Any:
        """Call the function; return loss, gradients and weight, also if it writes gradients into arrays it is given."""
        args, kwargs = ((read_only(provided), (read_only(x), read_only(y))), {"run": run} if self._takes_run else {})
        try:
            if not self.in_place:
                return self.model.loss_and_grad(*args, **kwargs)
            for name in self.names:
                write_sentinel(gradients[name])
            with writable(gradients) as views:
                result = self.model.loss_and_grad(*args, views, **kwargs)
            return self._checked_in_place(result, gradients)
        except LayoutError as error:  # from the mapping of the views
            remedy = "write into the array that is there, gradients[name][...] = value"
            problem = f"are bound at {raising_line(error)}: {error}"
            raise UnusableEvaluation(_value("gradients", problem, "an assignment to a name", remedy)) from error
        except (ValueError, TypeError, BufferError) as error:
            if any(word in str(error) for word in ("read-only", "readonly", "writable", "writeable")):
                raise UnusableEvaluation(_written("arguments", f"at {raising_line(error)}")) from error
            raise

    def _checked_in_place(self, result: Any, gradients: dict[str, Array]) -> Any:
        if not isinstance(result, tuple) or len(result) != 2:
            remedy = "return (loss_sum, weight), and write the gradients into the third argument"
            raise UnusableEvaluation(_returned(result, "a function that returns its gradients", remedy))
        wrong = []
        for name in self.names:
            if left := count_sentinels(gradients[name]):
                problem = f"has {left} of {gradients[name].size} elements that are not written, or added to"
                cause = "a part that is left out, or gradients[name] += value"
                remedy = f"overwrite all of it in every call, zeros too: gradients[{name!r}][...] = value"
                wrong.append(_value(f"gradient of {name!r}", problem, cause, remedy))
        if wrong:
            raise UnusableEvaluation(*wrong)
        return result[0], gradients, result[1]

    def loss(self, parameters: Named, x: Any, y: Any) -> float:
        """Return only the loss, although the function computes the gradients, too."""
        return self.evaluate(parameters, x, y).loss

    def predict(self, parameters: Named, x: Any) -> Any:
        """Return what the model's ``predict`` returns; raise NotImplementedError if it has none."""
        if (function := getattr(self.model, "predict", None)) is None:
            raise NotImplementedError
        self.evaluations += 1
        with np.errstate(all="ignore"):
            return function(read_only(self._provided(parameters, False)), read_only(x))

    def _examined(self, returned: Any) -> LossAndGradients:
        if not isinstance(returned, tuple) or len(returned) != 3 or not isinstance(returned[1], Mapping):
            remedy = "return (loss_sum, gradients by name, weight)"
            raise UnusableEvaluation(_returned(returned, "another order or number", remedy))
        loss, gradients, weight = returned
        wrong = [*_of_number("loss", loss), *_of_number("weight", weight), *self._of_gradients(gradients)]
        if not wrong and float(weight) < 0:
            remedy = "return how much the batch counts, float(len(x)) for a mean over samples"
            wrong.append(_value("weight", f"is {float(weight):g}", "a sign", remedy))
        if wrong:
            raise UnusableEvaluation(*wrong)
        arrays = {name: in_pairs(np.array(gradients[name])) for name in (*self.names, *self.averaged)}
        trained, averaged = ({n: arrays[n] for n in names} for names in (self.names, self.averaged))
        return LossAndGradients(float(loss), trained, float(weight), averaged, {})

    def _of_gradients(self, gradients: Mapping[str, Any]) -> list[ModelFinding]:
        wrong = []
        for name in gradients:
            if name not in self.declared and name not in self.integers:
                problem = f"is of no parameter{nearest(name, self.declared)}"
                remedy = f"use the names of the parameters, {', '.join(map(repr, list(self.declared)[:8]))}"
                wrong.append(_value(f"gradient of {name!r}", problem, "another name", remedy))
        for name in (*self.names, *self.averaged):
            what = f"{'new value' if name in self.averaged else 'gradient'} of {name!r}"
            if name not in gradients:
                remedy = "return one for every trainable parameter, zeros too, or name it in frozen="
                wrong.append(_value(what, "is missing", "a parameter that was forgotten", remedy))
                continue
            value = np.asarray(gradients[name])
            spec, wanted = self.declared[name], self.declared[name].element_type(self.dtype)
            if value.dtype.kind != wanted.kind or value.real.dtype.itemsize < 4:
                cause = "a part that was never taken" if value.dtype.kind == "c" else "a conversion"
                cause = "a part that is lost" if spec.complex else cause
                wrong.append(_value(what, f"is of type {value.dtype}", cause, f"return it as {wanted}"))
            elif value.shape != spec.shape:
                problem = f"has shape {value.shape}, its parameter has {spec.shape}"
                wrong.append(_value(what, problem, "a sum over a wrong axis", "return it shaped like its parameter"))
            elif not np.isfinite(value).all():
                problem = f"has {int(np.sum(~np.isfinite(value)))} elements of {value.size} that are not finite"
                remedy = "divide and take roots where they are defined; check_model(parameters=...) looks elsewhere"
                wrong.append(_value(what, problem, "a singularity at these parameters", remedy))
        return wrong


class CheckedBlocks:
    """Evaluate a model of blocks as training does: the blocks write their gradients into memory that they are given.

    The class has the attributes and methods of :class:`CheckedFunction`, and more.
    """

    def __init__(self, model: Any, dtype: Any = None) -> None:
        self.model, self.evaluations = model, 0
        if dtype is not None:
            self.model = SimpleNamespace(blocks=model.blocks, loss=model.loss, dtype=np.dtype(dtype), seed=model.seed)
        self.specs = model_specs(model)
        self.declared = {spec.name: spec for spec in self.specs if spec.tied is None}
        self.names = tuple(name for name, spec in self.declared.items() if spec.optimized)
        self.averaged = tuple(spec.name for spec in self.specs if spec.averaged and spec.trainable)
        self.dtype = np.dtype(self.model.dtype)

    def start(self) -> dict[str, Array]:
        """Return the start values of all parameters by name."""
        return {name: in_pairs(value) for name, value in initial_parameters(self.model).items()}

    def _bound(self, parameters: Named) -> dict[str, dict[str, Any]]:
        return bind(self.model, {name: as_declared(self.declared[name], v) for name, v in parameters.items()})

    def wide(self) -> CheckedBlocks:
        """Return the same model with float64 parameters, where differences of the loss are more accurate."""
        return CheckedBlocks(self.model, np.float64)

    def evaluate(self, parameters: Named, x: Any, y: Any, first: int = 0, *, fresh: bool = False) -> LossAndGradients:
        """Run forward and backward; add up the gradients of all uses of a tied parameter. ``fresh`` has no effect."""
        outputs: dict[str, Array] = {}
        loss, weight, uses = self.passed(parameters, (x, y), first, outputs=outputs)
        gradients = {name: uses[name] for name in self.names}
        for spec in self.specs:
            if spec.tied in gradients and spec.trainable:
                gradients[spec.tied] = gradients[spec.tied] + uses[spec.name]
        averages = {name: uses[name] for name in self.averaged}
        return LossAndGradients(loss, gradients, weight, averages, outputs)

    def passed(
        self,
        parameters: Named,
        batch: tuple[Any, Any],
        first: int = 0,
        *,
        fill: float = 0.0,
        halves: bool = False,
        outputs: dict[str, Array] | None = None,
    ) -> tuple[float, float, dict[str, Array]]:
        """Run forward and backward, and return loss, weight, and gradients by name.

        A tied parameter has one gradient for each use, a frozen one none. The memory for gradients is first filled with
        ``fill``. With ``halves``, ``backward_input`` and ``backward_weights`` run in place of ``backward``, on the
        gradient of twice the loss; the resulting gradients (not the new values of averaged parameters) are halved.
        Copies of the blocks' outputs are added to ``outputs``.
        """
        self.evaluations += 1
        params, run, scale = self._bound(read_only(dict(parameters))), self._run(batch[0], first), 1.0 + halves
        x, caches = read_only(batch[0]), []
        uses: dict[str, Array] = {}
        with np.errstate(all="ignore"):
            for block, layer in self.model.blocks.items():
                x, cache = layer.forward(params[block], x, run)
                caches.append((block, layer, cache))
                if outputs is not None:
                    outputs |= {f"{block!r}{path[1:]}": np.array(leaf) for path, leaf in paths_of(x=x)}
            loss, weight, cache = self.model.loss.forward(x, read_only(batch[1]))
            dy = self.model.loss.backward(cache, scale)
            for block, layer, cache in reversed(caches):
                views = {spec.name: spec.view(np.full(spec.size, fill, self.dtype)) for spec in layer.specs()}
                grads = nested(views | fresh_integers(layer))
                if halves:
                    dy, pending = layer.backward_input(params[block], cache, dy)
                    layer.backward_weights(params[block], cache, pending, grads)
                else:
                    dy = layer.backward(params[block], cache, dy, grads)
                for name in (spec.name for spec in layer.specs() if spec.trainable):
                    use, view = joined(block, name), views[name]
                    uses[use] = in_pairs(view if use in self.averaged else view / self.dtype.type(scale))
        wrong = [*_of_number("loss", loss), *_of_number("weight", weight)]
        if wrong:
            raise UnusableEvaluation(*wrong)
        return float(loss), float(weight), uses

    def _run(self, x: Any, first: int) -> Run:
        run = Run(training=True, seed=self.model.seed, first_sample=first, count=_count(x, None))
        return run_on(self.model, x, run)

    def loss(self, parameters: Named, x: Any, y: Any) -> float:
        """Return only the loss of a batch, by a forward pass."""
        self.evaluations += 1
        with np.errstate(all="ignore"):
            prediction = evaluate(self.model, self._bound(parameters), x, self._run(x, 0))
            return float(self.model.loss.forward(prediction, y)[0])

    def predict(self, parameters: Named, x: Any) -> Any:
        """Return the prediction for ``x``, by a forward pass without dropout."""
        self.evaluations += 1
        return evaluate(self.model, self._bound(parameters), read_only(x))


#: The interface through which models are checked.
CheckedModel = CheckedFunction | CheckedBlocks


def _count(x: Any, y: Any) -> int:
    return sample_count(x, y) or 1


def raising_line(error: BaseException) -> str:
    """Return file and line of the user's own code that raised ``error``, as text."""
    return str(users_line(error.__traceback__) or "a line that is not known")


def origin_of(model: Any, member: str) -> str:
    """Describe where a model is defined: for a functional model, by file and line of its function named ``member``.

    For other models, and if there is no such function, return the name of the class.
    """
    function = getattr(model, member, None) if isinstance(model, BlackBoxModel) else None
    return type(model).__name__ if function is None else named(function, member)


def _of_number(what: str, value: Any) -> list[ModelFinding]:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "fiu":
        described = f"{array.dtype} of shape {array.shape}" if array.size != 1 else f"{value!r}"
        return [_value(what, f"is {described}", "a sum or conversion that is missing", "return one real number")]
    if not math.isfinite(float(array.reshape(-1)[0])):
        hint = "check the samples, or give check_model(parameters=...) where the model can be evaluated"
        return [_value(what, f"is {value} at these parameters", "start values or samples outside of the domain", hint)]
    return []


def _value(what: str, problem: str, cause: str, remedy: str) -> ModelFinding:
    return ModelFinding("values", what, problem, cause, remedy)


def _returned(value: Any, cause: str, remedy: str) -> ModelFinding:
    kinds = [type(v).__name__ for v in value] if isinstance(value, tuple) else type(value).__name__
    return _value("what loss_and_grad returns", f"is {kinds}", cause, remedy)


def _written(what: str, where: str) -> ModelFinding:
    remedy = "copy what is changed, x = x.copy(); training passes its own memory"
    return ModelFinding("repeats", what, f"is written to {where}", "code that works in place", remedy)
