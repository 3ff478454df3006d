"""Define the base class of optimizers that update whole tensors, and which arrays of state a parameter has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mpizero._util.checks import number, require
from mpizero._util.names import as_patterns, explains, fits, selected
from mpizero.errors import ConfigError
from mpizero.optim.optimizers import AdamW
from mpizero.types import Array, Dtype, ParameterSpec


class TensorStep(NamedTuple):
    """Hold what an update of a tensor is given besides its arrays.

    Attributes
    ----------
    number : int
        Number of the step; 1 is the first.
    lr, weight_decay : float
        Learning rate and weight decay of the tensor in this step.

    Examples
    --------
    >>> import mpizero as mz
    >>> step = mz.TensorStep(number=1, lr=0.1, weight_decay=0.01)
    >>> 1.0 - step.lr * step.weight_decay  # the factor of decoupled weight decay
    0.999
    """

    number: int
    lr: float
    weight_decay: float


@explains
@dataclass(frozen=True, kw_only=True)
class TensorOptimizer(AdamW):
    """Base class of optimizers that update whole tensors, each on the rank that owns it, and the others by AdamW.

    A subclass declares the names of its state arrays, :attr:`tensor_slots`, and has three methods:
    :meth:`state_shapes`, :meth:`cost` and :meth:`update_tensor`. It knows no ranks. The tensors that :meth:`takes`
    chooses are divided over the ranks by their costs. The owner of a tensor keeps its state, and is given its whole
    averaged gradient; the new values are sent to all ranks that hold them. So results have the same bits on any number
    of ranks. ``betas`` and ``eps`` are those of AdamW for the other parameters; ``lr``, ``weight_decay`` and ``groups``
    are for all.

    Attributes
    ----------
    exclude : sequence of str
        Shell patterns of the names of parameters that AdamW updates although they could be taken.
    adamw_lr_scale : float
        Factor by which the learning rate of the parameters that AdamW updates is multiplied.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> class SpectralDescent(mz.TensorOptimizer):  # steps along the orthogonal factor of the gradient
    ...     def state_shapes(self, shape):
    ...         return {}
    ...     def cost(self, shape):
    ...         return shape[0] * shape[1] * min(shape)
    ...     def update_tensor(self, w, g, state, step):
    ...         u, _, v = np.linalg.svd(g, full_matrices=False)
    ...         w -= step.lr * (u @ v)
    >>> x, y = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1])
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2, dtype="float64"), SpectralDescent(0.1), comm="self") as model:
    ...     losses = [model.train(x, y) for _ in range(5)]
    >>> losses[-1] < losses[0] / 2
    True
    """

    exclude: Sequence[str] = ()
    adamw_lr_scale: float = 1.0

    needs_whole_tensors: ClassVar[bool] = True
    #: Names of all state arrays that a tensor may have. The arrays are zero before the first step.
    tensor_slots: ClassVar[tuple[str, ...]] = ()

    def _check(self, owner: str) -> None:
        super()._check(owner)
        object.__setattr__(self, "exclude", as_patterns(f"{owner}: exclude", self.exclude))
        require(f"{owner}: adamw_lr_scale", self.adamw_lr_scale, number())
        if both := sorted({*self.slots} & {*self.tensor_slots}):
            raise ConfigError(
                f"{owner}: tensor_slots has {both[0]!r}, the name of one of AdamW's arrays: call it otherwise"
            )

    def check_names(self, names: Sequence[str]) -> None:
        """Check that every pattern of :attr:`groups` and :attr:`exclude` fits at least one of the names of parameters.

        Raises
        ------
        ConfigError
            If a pattern fits none.
        """
        super().check_names(names)
        selected(names, f"{type(self).__name__}: exclude", self.exclude)

    # ------------------------------------------------------------------ what a subclass defines

    def takes(self, spec: ParameterSpec) -> bool:
        """Tell whether the tensor of a parameter is updated as a whole; ``spec`` has its name in the whole model.

        Here it is if it is a matrix of real numbers with ``spec.decay`` (which is False for biases, norms and
        embeddings) that :attr:`exclude` does not name.
        """
        matrix = len(spec.shape) == 2 and spec.size > 0 and not spec.complex
        return matrix and spec.decay and not any(fits(spec.name, pattern) for pattern in self.exclude)

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the state arrays of a tensor of this shape, by name; names are of `tensor_slots`."""
        raise NotImplementedError(f"{type(self).__name__} must define state_shapes(shape)")

    def cost(self, shape: tuple[int, ...]) -> int:
        """Return about how many floating-point operations an update of a tensor of this shape takes, a whole number."""
        raise NotImplementedError(f"{type(self).__name__} must define cost(shape)")

    def update_tensor(self, w: Array, g: Array, state: Mapping[str, Array], step: TensorStep) -> None:
        """Update a tensor ``w`` and its ``state`` in place from its averaged gradient ``g``, which may be overwritten.

        All arrays are C-contiguous, of the model's type. Results must depend on the arguments alone.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update_tensor(w, g, state, step)")

    # ------------------------------------------------------------------ the interface of FlatOptimizer

    @property
    def elementwise_kernel(self) -> bool:
        """False: gradients must be summed before the owners of tensors can get them."""
        return False

    @property
    def _kernel(self) -> str:
        return "adamw"

    def group_of(self, spec: ParameterSpec) -> int:
        """Return the number of a parameter's group, for :meth:`hyper`: odd for tensors that :meth:`takes` chooses."""
        return 2 * super().group_of(spec) + int(self.takes(spec))

    def hyper(self, step: int, group: int, dtype: Dtype, lr: float | None = None) -> Array:
        """Return AdamW's scalars; for a group of whole tensors the numbers of a :class:`TensorStep`, in float64."""
        base, whole = divmod(group, 2)
        rate, decay = self._rates(step, base, lr)
        if whole:
            return np.array([step, rate, decay], np.float64)
        return np.array(self._scalars(step, rate * self.adamw_lr_scale, decay), dtype)

    def tensor_step(self, hyper: Array) -> TensorStep:
        """Return the numbers of :meth:`hyper`, for a group of whole tensors, by their names."""
        step, lr, decay = hyper.tolist()
        return TensorStep(int(step), lr, decay)
