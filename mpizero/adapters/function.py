"""Wrap a user's function, which computes loss and gradients from named arrays, as a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from mpizero._util import checks
from mpizero._util.checks import loss_arguments, takes_run
from mpizero._util.names import explains, nearest
from mpizero.errors import ConfigError
from mpizero.types import Array

#: By the type of a parameter's elements, the type of its real numbers.
_PRECISION = {"float32": "float32", "complex64": "float32", "float64": "float64", "complex128": "float64"}
LossAndGrad = Callable[..., tuple[float, Mapping[str, Array], float] | tuple[float, float]]


@explains
class FunctionModel:
    """Wrap any code that computes a loss and its gradient, so that every strategy (DDP, ZeRO) can train it.

    ``loss_and_grad`` is called with all parameters together. ZeRO-3 therefore gathers the whole model for each call and
    frees it afterwards, so each rank needs memory for a full copy of parameters and gradients.

    Parameters
    ----------
    parameters : mapping of str to array
        Initial values by name, all float32 or complex64, or all float64 or complex128. The gradient of a complex
        parameter is ``dL/dRe + i dL/dIm``, as in PyTorch, so that ``w -= lr * gradient`` descends (JAX returns its
        conjugate). Initial values are copied when a sharded model is made. Names are printable strings of any language,
        such as ``"layers.0.weight"``, ``"['a'][0]"`` or ``"dense/kernel:0"``. The sharded model raises an error for
        names that a checkpoint cannot hold.
    loss_and_grad : callable
        ``loss_and_grad(parameters, (x, y)) -> (loss_sum, gradients, weight)``. The function returns the sum of the
        losses over the samples, the gradient of that sum by name for every trainable parameter, and the weight of the
        samples. For a plain mean the weight is the number of samples without padding samples. Loss and weight are one
        real number each. The gradient of a real parameter is a real array, that of a complex parameter a complex array.
        ``x`` and ``y`` are NumPy arrays of some consecutive samples of the global batch, alone or in tuples, lists,
        dictionaries and dataclasses. If the function has a parameter ``run``, it is called with a
        :class:`~mpizero.types.Run` as this keyword. The attributes of ``run`` are ``run.samples`` (indices of the
        samples in the global batch), ``run.first_sample`` (the first of them), ``run.step``, ``run.epoch`` (the
        argument of ``train``), ``run.seed``, and ``run.training``, which is False in ``evaluate``. Random numbers
        computed from these attributes are the same on any number of ranks, for example with
        ``numpy.random.default_rng((run.seed, run.step, run.first_sample))``. The function must not change its
        arguments: parameters and samples are read-only views, and NumPy raises an error for code that writes to them.
        Copy an array before changing it (``x = x.copy()``), and also before passing on its bare pointer
        (``x.ctypes.data``), which no flag protects.
    loss : callable or None
        ``loss(parameters, (x, y)) -> (loss_sum, weight)``: the same loss and weight, without gradients. ``evaluate``
        calls this function, or ``loss_and_grad`` if ``loss`` is None. The function may have a parameter ``run``, as
        ``loss_and_grad`` may.
    predict : callable or None
        ``predict(parameters, x)`` returns predictions. The arguments are read-only.
    product : callable or None
        ``product(parameters, (x, y), direction) -> (products, weight)``: the product of the Hessian of the sum of
        losses, or of an approximation such as Gauss and Newton's, with a direction. Products and direction are mappings
        by parameter name, like gradients. The weight is that of ``loss_and_grad``. :func:`mpizero.minimize` calls this
        function with the methods "newton-cg" and "gauss-newton".
    frozen : collection of str
        Names of the parameters that are not trained.
    averaged : collection of str
        Names of statistics of the samples, such as running means, that no optimizer trains. In place of a gradient,
        ``loss_and_grad`` returns the new value, computed from the value that it was given. The step takes the mean of
        the new values of all micro-batches, weighted by their numbers of samples
        (:attr:`ParameterSpec.averaged <mpizero.types.ParameterSpec>`).
    integers : mapping of str to array, optional
        Start values of arrays of whole numbers, such as a counter of batches. ``loss_and_grad`` gets them among the
        parameters, and may return new values among the gradients: the same for all samples of a step
        (:class:`~mpizero.types.IntegerSpec`).
    seed : int
        The value of ``run.seed``.
    in_place : bool
        Whether ``loss_and_grad`` writes its gradients into arrays that it is given, so that nothing is copied. The
        function is then called as ``loss_and_grad(parameters, batch, gradients) -> (loss_sum, weight)``. ``gradients``
        has a writable array for each parameter (also for frozen ones, where it is never read), with the shape and data
        type of the parameter. The arrays hold arbitrary numbers at first, so the function overwrites every element in
        every call: ``gradients["weight"][...] = value``, or ``numpy.matmul(..., out=gradients["weight"])``, or compiled
        code that gets a pointer. The arrays are writable during the call only. Give ``loss``, too: without it
        ``evaluate`` needs memory for gradients that are not used.

    Raises
    ------
    ConfigError
        If there is no parameter, parameters have other dtypes or differ in precision, ``frozen`` or ``averaged`` names
        an unknown parameter, both name the same parameter, or a function cannot be called with the arguments above.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def squares(parameters, batch):
    ...     x, y = batch
    ...     error = parameters["slope"] * x - y
    ...     return float(error @ error), {"slope": np.array([2 * error @ x])}, float(len(x))
    >>> x = np.arange(4.0)
    >>> model = mz.FunctionModel({"slope": np.zeros(1)}, squares)
    >>> with mz.distribute(model, mz.SGD(lr=0.1)) as placed:
    ...     losses = [placed.train(x, 3 * x) for _ in range(20)]
    ...     placed.gather_full_parameters().round(3)
    array([3.])
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        loss_and_grad: LossAndGrad,
        *,
        loss: Callable[..., tuple[float, float]] | None = None,
        predict: Callable[[Mapping[str, Array], Any], Any] | None = None,
        product: Callable[..., tuple[Mapping[str, Array], float]] | None = None,
        frozen: Collection[str] = (),
        averaged: Collection[str] = (),
        integers: Mapping[str, Array] | None = None,
        seed: int = 0,
        in_place: bool = False,
    ) -> None:
        if not isinstance(parameters, Mapping):
            raise ConfigError(
                f"FunctionModel: parameters are arrays by name, such as {{'weight': array}}; got "
                f"{type(parameters).__name__}"
            )
        if not parameters:
            raise ConfigError("FunctionModel needs at least one named parameter")
        if odd := [name for name in parameters if not isinstance(name, str)]:
            raise ConfigError(
                f"parameter {odd[0]!r}: its name is of type {type(odd[0]).__name__}; give it another, a string"
            )
        arrays = {name: checks.number_array(value, f"parameter {name!r}") for name, value in parameters.items()}
        dtypes = {name: str(array.dtype) for name, array in arrays.items()}
        precisions = {_PRECISION.get(kind) for kind in dtypes.values()}
        if len(precisions) > 1 or None in precisions:
            first = {kind: name for name, kind in reversed(dtypes.items())}
            listed = ", ".join(f"{name!r} is {kind}" for kind, name in first.items())
            raise ConfigError(f"all parameters must be float32 or complex64, or all float64 or complex128; {listed}")
        for what, names in (("frozen", frozen), ("averaged", averaged)):
            _check_names(what, names, parameters)
        if both := sorted(set(frozen) & set(averaged)):
            raise ConfigError(f"frozen and averaged both name {both}: a frozen parameter is not changed by any step")
        functions = {"loss_and_grad": loss_and_grad, "loss": loss, "predict": predict, "product": product}
        for what, function in functions.items():
            if not callable(function) and (function is not None or what == "loss_and_grad"):
                raise ConfigError(f"{what} must be a function, got {function!r}")
        self.parameters = MappingProxyType(arrays)
        self.dtype = np.dtype(precisions.pop())
        self.frozen, self.averaged = frozenset(frozen), frozenset(averaged)
        self.integers = {name: _integers(name, value) for name, value in (integers or {}).items()}
        self.in_place = checks.require("in_place", in_place, checks.flag)
        _check_arguments(loss_and_grad, in_place=self.in_place)
        self.loss_and_grad, self.seed = loss_and_grad, checks.require("seed", seed, checks.seed)
        if loss is not None:
            takes_run(loss, "loss", "parameters", "batch")
            self.loss, self.has_loss = loss, True
        if predict is not None:
            self.predict = predict
        if product is not None:
            takes_run(product, "product", "parameters", "batch", "direction")
            self.product = product

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a deep copy of the model; ``deepcopy`` alone cannot copy its ``MappingProxyType``."""
        twin = copy(self)
        vars(twin).update({name: deepcopy(v, memo) for name, v in vars(self).items() if name != "parameters"})
        twin.parameters = MappingProxyType(deepcopy(dict(self.parameters), memo))
        return twin


def _integers(name: str, value: Any) -> Array:
    return np.array(checks.unmasked(value, f"integer array {name!r}"))


def _check_arguments(function: Callable[..., Any], *, in_place: bool) -> None:
    """Raise ``ConfigError`` if ``loss_and_grad`` does not take the arguments that it is called with.

    The message suggests ``in_place=True`` if the function takes the arguments that this mode passes.
    """
    try:
        takes_run(function, "loss_and_grad", *loss_arguments(in_place=in_place))
    except ConfigError as error:
        advice = ""
        if not in_place:
            with suppress(ConfigError):
                takes_run(function, "loss_and_grad", *loss_arguments(in_place=True))
                advice = "; a function that writes gradients into a third argument needs in_place=True"
        raise ConfigError(f"{error}{advice}") from None


def _check_names(what: str, names: Collection[str], parameters: Mapping[str, Array]) -> None:
    """Raise ``ConfigError`` if ``names`` (the argument ``what``) is not a collection of names of parameters."""
    if isinstance(names, str):
        raise ConfigError(f"FunctionModel: {what} is a collection of names, got one string: give [{names!r}]")
    if unknown := sorted(set(names) - set(parameters)):
        hint = nearest(unknown[0], map(str, parameters))
        raise ConfigError(f"{what} names {unknown}, but the parameters are {sorted(parameters)}{hint}")
