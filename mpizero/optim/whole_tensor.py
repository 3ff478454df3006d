"""Update whole tensors, each on one rank: the base class of such optimizers, Muon and SOAP.

A :class:`TensorOptimizer` chooses the tensors that it updates, and declares their state arrays; AdamW updates all other
parameters. :class:`Muon` (Jordan et al. 2024) steps along the momentum of a matrix, made nearly orthogonal;
:class:`SOAP` (Vyas et al. 2024) is Adam in the eigenbasis of Shampoo's preconditioner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero._util.checks import flag, fraction, number, whole
from mpizero._util.names import explains, fits, selected
from mpizero._util.settings import many, one_of, setting, text
from mpizero.errors import ConfigError
from mpizero.kernels.elementary import power
from mpizero.kernels.matmul import matmul
from mpizero.optim.elementwise import DECAY_RATES, AdamW
from mpizero.types import Array, Dtype, LearningRate, ParameterSpec


def _patterns(value: Any) -> tuple[str, ...]:
    return () if value is None else tuple(many(text)((value,) if isinstance(value, str) else value))


class TensorStep(NamedTuple):
    """Hold the scalar arguments of the update of a tensor.

    Attributes
    ----------
    number : int
        Number of the step; 1 is the first.
    lr, weight_decay : float
        Learning rate and weight decay of the tensor in this step.

    Examples
    --------
    >>> import mpizero as mz
    >>> step = mz.optim.TensorStep(number=1, lr=0.1, weight_decay=0.01)
    >>> 1.0 - step.lr * step.weight_decay  # the factor of decoupled weight decay
    0.999
    """

    number: int
    lr: float
    weight_decay: float


@explains
@dataclass(frozen=True, kw_only=True)
class TensorOptimizer(AdamW):
    """Base class of optimizers that update whole tensors, each on the rank that owns it, and other parameters by AdamW.

    A subclass declares the names of its state arrays, :attr:`tensor_slots`, and has three methods:
    :meth:`state_shapes`, :meth:`cost` and :meth:`update_tensor`. None of these depends on ranks. The tensors that
    :meth:`takes` chooses are divided over the ranks by their costs. The owner of a tensor keeps its state, and is given
    its whole averaged gradient; the new values are sent to all ranks that hold them. So results have the same bits on
    any number of ranks. ``betas`` and ``eps`` are those of AdamW for the other parameters; ``lr``, ``weight_decay`` and
    ``groups`` apply to all parameters.

    Attributes
    ----------
    exclude : sequence of str
        Shell patterns of the names of tensors that are left to AdamW.
    adamw_lr_scale : float
        Factor by which the learning rate of the parameters that AdamW updates is multiplied.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> class SpectralDescent(mz.optim.TensorOptimizer):  # steps along the orthogonal factor of the gradient
    ...     def state_shapes(self, shape):
    ...         return {}
    ...     def cost(self, shape):
    ...         return shape[0] * shape[1] * min(shape)
    ...     def update_tensor(self, w, g, state, step):
    ...         u, _, v = np.linalg.svd(g, full_matrices=False)
    ...         w -= step.lr * (u @ v)
    >>> x, y = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1])
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2, dtype="float64"), SpectralDescent(0.1)) as model:
    ...     losses = [model.train(x, y) for _ in range(5)]
    >>> losses[-1] < losses[0] / 2
    True
    """

    exclude: Sequence[str] = setting((), _patterns)
    adamw_lr_scale: float = setting(1.0, number())

    needs_whole_tensors: ClassVar[bool] = True
    #: Names of all state arrays that a tensor may have. The arrays are zero before the first step.
    tensor_slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` if a setting is out of range, or two state arrays have one name."""
        super().__post_init__()
        if both := sorted({*self.slots} & {*self.tensor_slots}):
            owner = type(self).__name__
            raise ConfigError(
                f"{owner}: tensor_slots has {both[0]!r}, the name of one of AdamW's arrays: call it otherwise"
            )

    def check_names(self, names: Sequence[str]) -> None:
        """Check that every pattern of :attr:`groups` and :attr:`exclude` matches at least one parameter's name.

        Raises
        ------
        ConfigError
            If a pattern matches no name.
        """
        super().check_names(names)
        selected(names, f"{type(self).__name__}: exclude", self.exclude)

    # ------------------------------------------------------------------ what a subclass defines

    def takes(self, spec: ParameterSpec) -> bool:
        """Tell whether a parameter is updated as a whole tensor; ``spec.name`` is the parameter's name in the model.

        By default these are the matrices of real numbers with ``spec.decay`` (which is False for biases, norms and
        embeddings), except those that :attr:`exclude` names.
        """
        matrix = len(spec.shape) == 2 and spec.size > 0 and not spec.complex
        return matrix and spec.decay and not any(fits(spec.name, pattern) for pattern in self.exclude)

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the state arrays of a tensor of this shape, by their names in ``tensor_slots``."""
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
        """False, because gradients must be summed before they are sent to the owners of tensors."""
        return False

    @property
    def _kernel(self) -> str:
        return "adamw"

    def group_of(self, spec: ParameterSpec) -> int:
        """Return the number of a parameter's group, for :meth:`hyper`: odd for tensors that :meth:`takes` chooses."""
        return 2 * super().group_of(spec) + int(self.takes(spec))

    def hyper(self, step: int, group: int, dtype: Dtype, lr: float | None = None) -> Array:
        """Return AdamW's scalars, or for a group of whole tensors the fields of a :class:`TensorStep`, in float64."""
        base, is_tensor = divmod(group, 2)
        rate, decay = self._rates(step, base, lr)
        if is_tensor:
            return np.array([step, rate, decay], np.float64)
        return np.array(self._scalars(step, rate * self.adamw_lr_scale, decay), dtype)

    def tensor_step(self, hyper: Array) -> TensorStep:
        """Convert the array that :meth:`hyper` returned for a group of whole tensors to a :class:`TensorStep`."""
        step, lr, decay = hyper.tolist()
        return TensorStep(int(step), lr, decay)


SCALES = ("original", "match_rms_adamw")


@explains
@dataclass(frozen=True, kw_only=True)
class Muon(TensorOptimizer):
    """Implement Muon (Jordan et al. 2024), momentum with orthogonal steps, for matrices; AdamW for other parameters.

    The momentum m of a matrix is updated with the gradient g, ``m = momentum * m + (1 - momentum) * g``. The step u is
    computed from m by :func:`newton_schulz`, and ``w = (1 - lr * weight_decay) * w - lr * scale * u``. Parameters with
    ``spec.decay`` False (biases, norms, embeddings), those that are no matrices and those that ``exclude`` names are
    updated by AdamW, with ``betas`` and ``eps``. The authors advise AdamW for the output layer, too:
    ``exclude=["head.*"]`` in a :class:`~mpizero.nn.GPT`.

    Attributes
    ----------
    momentum : float
        Decay rate of the momentum, in [0, 1).
    nesterov : bool
        Whether the step is computed from ``momentum * m + (1 - momentum) * g`` instead of ``m``.
    iterations : int
        Number of iterations of :func:`newton_schulz`.
    scale : str
        "original": the factor of a matrix is ``sqrt(max(1, outputs / inputs))``. "match_rms_adamw": it is ``0.2 *
        sqrt(max(outputs, inputs))``, so that steps are about as large as AdamW's, and one learning rate suits both (Liu
        et al. 2025, section 2.2).
    output_axis : int
        The axis of a matrix that counts outputs: 1 in the layers of :mod:`mpizero.nn`, which compute ``x @ w``, and 0
        in those of PyTorch.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> muon = mz.Muon(lr=0.02, exclude=["head.*"])
    >>> w, g, state = np.zeros((2, 2)), np.array([[3.0, 0.0], [0.0, 1.0]]), {"momentum_buffer": np.zeros((2, 2))}
    >>> muon.update_tensor(w, g, state, mz.optim.TensorStep(number=1, lr=1.0, weight_decay=0.0))
    >>> w.round(1)  # nearly minus the orthogonal factor of the gradient
    array([[-0.8,  0. ],
           [ 0. , -1.1]])
    """

    lr: LearningRate = field(default=2e-2, kw_only=False)
    momentum: float = setting(0.95, fraction)
    nesterov: bool = setting(True, flag)
    iterations: int = setting(5, whole(1))
    scale: str = setting("original", one_of(*SCALES))
    output_axis: int = setting(1, whole(0, 1))

    tensor_slots: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the momentum, which is the matrix's own."""
        return {"momentum_buffer": shape}

    def cost(self, shape: tuple[int, ...]) -> int:
        """Return the number of operations of the products of :func:`newton_schulz`."""
        small, large = sorted(shape)
        return self.iterations * 2 * small * small * (2 * large + small)

    def update_tensor(self, w: Array, g: Array, state: Mapping[str, Array], step: TensorStep) -> None:
        """Update a matrix and its momentum in place; ``g`` is overwritten."""
        m = state["momentum_buffer"]
        g *= 1.0 - self.momentum
        m *= self.momentum
        m += g
        if self.nesterov:
            g += self.momentum * m
        else:
            g[...] = m
        u = newton_schulz(g, self.iterations)
        u *= step.lr * self.factor(w.shape)
        w *= 1.0 - step.lr * step.weight_decay
        w -= u

    def factor(self, shape: tuple[int, ...]) -> float:
        """Return the factor by which the step of a matrix is multiplied, besides the learning rate."""
        outputs, inputs = shape[self.output_axis], shape[1 - self.output_axis]
        if self.scale == "match_rms_adamw":
            return 0.2 * math.sqrt(max(outputs, inputs))
        return math.sqrt(max(1.0, outputs / inputs))


#: Factors of x, (x x^T) x and (x x^T)^2 x in a step of the iteration (Jordan et al. 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: A matrix with a smaller norm is divided by this number.
SMALLEST_NORM = 1e-7


def newton_schulz(g: Array, iterations: int = 5) -> Array:
    """Return a matrix with the singular vectors of ``g`` and singular values near 1 (Jordan et al. 2024).

    ``g``, divided by its norm, is iterated ``x = a x + b (x x^T) x + c (x x^T)^2 x`` with :data:`COEFFICIENTS`. Five
    iterations bring singular values that are not tiny to between 0.7 and 1.2. If ``g`` has more rows than columns, x is
    its transpose. All products have shapes that depend on the shape of ``g`` alone. ``g`` is overwritten, and its
    memory may hold the result.
    """
    a, b, c = COEFFICIENTS
    tall = g.shape[0] > g.shape[1]
    x = np.ascontiguousarray(g.T) if tall else g
    x /= max(norm(x), SMALLEST_NORM)
    gram, square = np.empty((2, x.shape[0], x.shape[0]), x.dtype)
    y = np.empty_like(x)
    for _ in range(iterations):
        matmul(x, x.T, gram)
        matmul(gram, gram, square)
        gram *= b
        square *= c
        gram += square
        matmul(gram, x, y)
        x *= a
        y += x
        x, y = y, x
    return x.T if tall else x


def norm(x: Array) -> float:
    """Return the norm of all elements of a C-contiguous array, computed in float64 in the order of a binary tree."""
    total = np.empty(1, np.float64)
    starts, stops = np.zeros(1, np.int64), np.array([x.size], np.int64)
    kernels.backend(x).reduction.tree_square_sums(x.reshape(-1), starts, stops, total)
    return math.sqrt(total[0])


@explains
@dataclass(frozen=True, kw_only=True)
class SOAP(TensorOptimizer):
    """Implement SOAP (Vyas et al. 2024, algorithm 3) for matrices; AdamW for other parameters.

    For the gradients g of a matrix, moving averages L of ``g g^T`` and R of ``g^T g`` are kept, with the decay rate
    ``betas[1]``. The eigenvectors of L and R are a basis in which AdamW updates the matrix. The bases are computed by
    an eigendecomposition in the first step, which updates no matrix, as in the authors' implementation. Every
    ``frequency`` updates the bases are corrected by one power iteration and a QR decomposition (algorithm 4).
    ``betas`` and ``eps`` apply to the updates in this basis and to the other parameters. Moments are bias-corrected as
    in Adam.

    Attributes
    ----------
    frequency : int
        Number of updates from one correction of the bases to the next.
    max_dimension : int
        Largest side of a matrix for which a basis is kept. A larger side is not rotated, and has no state arrays.

    Examples
    --------
    >>> import mpizero as mz
    >>> soap = mz.SOAP(lr=3e-3, max_dimension=1000)
    >>> soap.state_shapes((4, 2000))  # the larger side is not rotated
    {'momentum': (4, 2000), 'second_moment': (4, 2000), 'left': (4, 4), 'left_basis': (4, 4)}
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), soap) as model:
    ...     sorted(model.optimizer.state_dict()["state"])[:4]
    ['exp_avg', 'exp_avg_sq', 'left', 'left_basis']
    """

    lr: LearningRate = field(default=3e-3, kw_only=False)
    betas: tuple[float, float] = setting((0.95, 0.95), DECAY_RATES)
    frequency: int = setting(10, whole(1))
    max_dimension: int = setting(10_000, whole(1))

    foreign_arithmetic: ClassVar[str] = "SOAP uses NumPy's products and LAPACK's eigh and qr"
    magnifies_rounding: ClassVar[str] = (
        "SOAP magnifies it: in float32 a difference in the last place becomes one of a whole step in a few steps"
    )
    tensor_slots: ClassVar[tuple[str, ...]] = (
        "momentum",
        "second_moment",
        "left",
        "right",
        "left_basis",
        "right_basis",
    )

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the two moments (the matrix's shape) and of averages and bases of its sides."""
        sides = {name: (size, size) for name, size in zip(("left", "right"), shape, strict=True) if self._rotates(size)}
        bases = {f"{name}_basis": square for name, square in sides.items()}
        return {"momentum": shape, "second_moment": shape} | sides | bases

    def _rotates(self, size: int) -> bool:
        return size <= self.max_dimension

    def cost(self, shape: tuple[int, ...]) -> int:
        """Return the number of operations of an update: its products, and its share of the QR decompositions."""
        rows, columns = shape
        sides = [size for size in shape if self._rotates(size)]
        return sum(8 * rows * columns * size + 5 * size**3 // self.frequency for size in sides)

    def update_tensor(self, w: Array, g: Array, state: Mapping[str, Array], step: TensorStep) -> None:
        """Update a matrix and its state in place from the gradient ``g``."""
        bases = state.get("left_basis"), state.get("right_basis")
        updates = step.number - 1
        if updates:
            u = rotated(self._direction(g, state, updates), *bases, back=True)
            u *= step.lr
            w *= 1.0 - step.lr * step.weight_decay
            w -= u
        for name, factors in (("left", (g, g.T)), ("right", (g.T, g))):
            if name in state:
                average, basis = state[name], state[f"{name}_basis"]
                average *= self.betas[1]
                average += (1.0 - self.betas[1]) * np.matmul(*factors)
                if not updates:
                    basis[...] = np.linalg.eigh(average)[1][:, ::-1]
                elif updates % self.frequency == 0:
                    basis[...] = np.linalg.qr(average @ basis)[0]

    def _direction(self, g: Array, state: Mapping[str, Array], updates: int) -> Array:
        """Return Adam's direction in the rotated basis; ``updates`` counts this update, too."""
        bases = state.get("left_basis"), state.get("right_basis")
        (beta1, beta2), m, v = self.betas, state["momentum"], state["second_moment"]
        m *= beta1
        m += (1.0 - beta1) * g
        square = rotated(g, *bases)
        square *= square
        square *= 1.0 - beta2
        v *= beta2
        v += square
        u = rotated(m, *bases)
        np.sqrt(v, out=square)
        square *= 1.0 / math.sqrt(1.0 - power(beta2, updates))
        square += self.eps
        u /= square
        u *= 1.0 / (1.0 - power(beta1, updates))
        return u


def rotated(x: Array, left: Array | None, right: Array | None, *, back: bool = False) -> Array:
    """Return a new array, ``left^T x right`` or with ``back`` ``left x right^T``; None stands for the identity."""
    result: Array = x.copy() if left is None else np.matmul(left if back else left.T, x)
    if right is not None:
        result = np.matmul(result, right.T if back else right)
    return result
