"""Run the passes of a PyTorch model: call modules with given parameters, compute the loss, count work and memory.

A :class:`ModuleCall` calls a module with given values in place of its parameters, and raises an error if the forward
pass changes tensors that it must not change. :func:`efficient_samples` counts the work of the kernels that PyTorch
calls in a pass, :class:`Allocations` the memory that they allocate. :class:`TorchLoss` makes a function or module of
PyTorch the loss of a model.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mpizero._util.checks import named
from mpizero._util.pytree import leaves_of, map_leaves
from mpizero._util.text import users_line
from mpizero.adapters.torch.autograd import (
    Gradients,
    Kernels,
    Placed,
    as_tensor,
    gradient_leaves,
    gradients_like,
    gradients_of,
    put,
)
from mpizero.adapters.torch.call import (
    UNDIFFERENTIATED,
    BlockTensors,
    ModuleTensor,
    TorchSettings,
    bring,
    called,
    check_contexts,
    drawn_since,
    random_state,
    set_random_state,
    swapped_in,
    torch_pass,
)
from mpizero.adapters.torch.first_pass import MOST_ADDED, FirstLoss, FirstPass, ModuleCopy, Trial, parts_of, seeded
from mpizero.adapters.torch.originals import Originals
from mpizero.adapters.user_code import EfficientSamples, PassWork, derived_seed
from mpizero.errors import ConfigError, DataError, LayoutError
from mpizero.layout.flat import value_at
from mpizero.types import Params, Run


class Passed(NamedTuple):
    """Hold the results of a forward pass.

    Attributes
    ----------
    output : tree of torch.Tensor
        What the module returned.
    values : list of torch.Tensor
        The tensors that were used in place of :attr:`BlockTensors.stored`.
    averages, numbers : list of torch.Tensor
        The new values of averaged statistics, and of integer buffers.
    """

    output: Any
    values: list[torch.Tensor]
    averages: list[torch.Tensor]
    numbers: list[torch.Tensor]


@dataclass(eq=False)
class ModuleCall:
    """Call a module with other tensors in place of its parameters: tensors that share the memory of given arrays.

    The first pass in training, and the first in evaluation, get copies of parameters and input, which are compared with
    the originals afterwards: if a module changes its parameters, an error is raised before any are overwritten; a
    module that changes its input gets copies from then on. Before these passes, copies of the module run ([Note: first
    passes] in adapters/torch/first_pass.py).

    Parameters
    ----------
    module : torch.nn.Module
        The module; its own parameters are on the meta device.
    number : int
        Number of the block within the model; its random numbers depend on it.
    tensors : BlockTensors
        Descriptions of the module's parameters and buffers.
    settings : TorchSettings
        Settings of the process during a pass.
    training : tuple of (torch.nn.Module, bool)
        Every submodule, and whether it was in training mode when the model was made.
    first_pass : FirstPass
        Checks the first passes.
    uses_data : bool
        Whether the module's code may change parameters through ``.data``, which autograd does not notice.
    """

    module: torch.nn.Module
    number: int
    tensors: BlockTensors
    settings: TorchSettings
    training: tuple[tuple[torch.nn.Module, bool], ...]
    first_pass: FirstPass
    uses_data: bool
    #: Module, tensors and modes before the first pass, of which copies are made.
    _before: tuple[Any, BlockTensors, Any] | None = field(default=None, init=False)

    @property
    def label(self) -> str:
        """The name of the module's class, for messages."""
        return type(self.module).__name__

    @property
    def new(self) -> bool:
        """Tell whether no pass in the present mode (training or evaluation) was completed yet."""
        return self.module.training not in self.first_pass.modes

    def values(self, params: Params) -> list[torch.Tensor]:
        """Return tensors that share the memory of arrays in ``params``, in the order of the specs. Not collective."""
        return [as_tensor(value_at(params, spec.name)) for spec in self.tensors.specs]

    @contextmanager
    def placed(self, params: Params) -> Iterator[None]:
        """Put the parameters into the module for a backward pass, in which hooks and functions may read them.

        Tensors that a forward pass may change are copied, because ``torch.utils.checkpoint`` runs another forward pass.
        """
        block = self.tensors
        values = zip(self.values(params), block.specs, strict=True)
        tensors = [t.clone() if s.averaged else t.requires_grad_(s.optimized) for t, s in values]
        with swapped_in((*block.stored, *block.integers), tensors + self._numbers(params)), self.settings.functions():
            yield

    @contextmanager
    def prepared(self, run: Run) -> Iterator[None]:
        """Set PyTorch's settings and seed, and the module's training mode, for a forward pass."""
        check_contexts()
        with torch_pass(self.settings, derived_seed(run, self.number)):
            for module, was in self.training:
                module.training = was and run.training
            yield

    def forward_values(self, params: Params) -> list[torch.Tensor]:
        """Return the tensors to use in place of ``tensors.stored``, copied if the pass may change them.

        To be called in the context of :meth:`prepared`.
        """
        block, new, arrays = self.tensors, self.new, self.values(params)
        bring(block.others, self._device(arrays))
        tensors = [t.clone() if spec.averaged or new else t for t, spec in zip(arrays, block.specs, strict=True)]
        if not self.uses_data:
            return tensors
        return [Placed.of(t) if s.name in block.parameters else t for t, s in zip(tensors, block.specs, strict=True)]

    def __call__(self, params: Params, values: list[torch.Tensor], x: Any, run: Run) -> Passed:
        """Call the module on ``x``, a tree of tensors, inside :meth:`prepared`. Not collective.

        ``values`` comes from :meth:`forward_values`. A tuple becomes several arguments, a dictionary keyword arguments.

        Raises
        ------
        DataError
            If the module returns something else than tensors.
        LayoutError
            If the module has changed a tensor that a forward pass must not change.
        """
        block, new = self.tensors, self.new
        numbers = self._numbers(params)
        self._look(values, numbers, x, run)
        x = x if not new and not self.first_pass.changes_input else map_leaves(torch.clone, x)
        watched = self._watched(values)
        inputs = [(leaf, leaf._version) for leaf in leaves_of(x)]
        with swapped_in((*block.stored, *block.integers), [*values, *numbers]):
            with self.settings.functions():
                output = called(self.module, x)
            averages = [one.now.detach() for one, spec in zip(block.stored, block.specs, strict=True) if spec.averaged]
            numbers = [one.now for one in block.integers]
            changed = [one for one, tensor, v in watched if one.now is not tensor or tensor._version != v]
        if odd := [leaf for leaf in leaves_of(output) if not isinstance(leaf, torch.Tensor)]:
            raise DataError(
                f"{self.label} returned a {type(odd[0]).__name__}: a block returns tensors, alone or in tuples, lists "
                "and dictionaries"
            )
        if new:
            before = dict(zip(map(id, block.stored), self.values(params), strict=True))
            changed += [one for one, now, _ in watched if id(one) in before and not torch.equal(now, before[id(one)])]
        if changed:
            raise self._change_of(changed[0])
        self._note_input(any(leaf._version != version for leaf, version in inputs))
        return Passed(output, values, averages, numbers)

    def write(self, grads: Params, weights: Gradients, passed: Passed, loss: str) -> None:
        """Write the gradients of parameters, and the new values of buffers, to the arrays ``grads``.

        Raises
        ------
        LayoutError
            If a parameter has no gradient; ``loss`` names the loss in the message.
        """
        block = self.tensors
        for integer, number in zip(block.integer_specs, passed.numbers, strict=True):
            put(value_at(grads, integer.name), number)
        gradients, statistics = iter(weights), iter(passed.averages)
        for spec in block.specs:
            value = next(statistics) if spec.averaged else next(gradients) if spec.optimized else None
            if not spec.trainable:
                continue
            if value is not None:
                put(value_at(grads, spec.name), value)
            elif spec.name in block.unused:
                value_at(grads, spec.name)[...] = 0
            else:
                raise LayoutError(
                    f"{loss} does not depend on parameter {spec.name!r}, so it has no gradient: freeze it (frozen=), "
                    "or name it in unused= if only some samples use it"
                )

    def on_zeros(self, x: Any, dtype: np.dtype[Any], mode: AbstractContextManager[Any]) -> Any:
        """Return the output for ``x`` of a copy of the module whose parameters and stored buffers are set to zero.

        The copy is in training mode. The pass runs inside the context manager ``mode``. Not collective.
        """
        kinds = (dtype, np.result_type(dtype, np.complex64))
        values = [as_tensor(np.zeros(spec.shape, kinds[spec.complex])) for spec in self.tensors.specs]
        numbers = [as_tensor(np.zeros(spec.shape, spec.dtype)) for spec in self.tensors.integer_specs]
        fresh = self._fresh(values, numbers)
        with torch_pass(self.settings), seeded(), mode:
            return fresh.run(x, training=True, gradients=False, of_input=False).output

    def _numbers(self, params: Params) -> list[torch.Tensor]:
        """Return copies of the integer buffers, on the device of the parameters."""
        numbers = [as_tensor(value_at(params, spec.name)) for spec in self.tensors.integer_specs]
        device = self._device(self.values(params)) if numbers else None
        return [number.to(device, copy=True) for number in numbers]

    @staticmethod
    def _device(values: Sequence[torch.Tensor]) -> torch.device:
        """Return the device of the parameters; the host for a block without parameters."""
        return values[0].device if values else torch.device("cpu")

    def _look(self, values: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor], x: Any, run: Run) -> None:
        """Check the module on samples of a new shape, by forward and backward passes of copies of the module."""
        training, fresh = self.module.training, partial(self._fresh, values, numbers)
        kind = self.first_pass.new_kind(x, training=training, counted=run.count > 0)
        if kind is not None:
            self.first_pass.check(fresh, x, training=training)
        if self.first_pass.follows(run.count, new=kind is not None):
            self.first_pass.follow(fresh, x, run.count, training=training)
        if kind is not None:
            self.first_pass.kinds.add(kind)

    def _fresh(self, values: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> ModuleCopy:
        """Return a copy of the module as it was before its first pass, which runs with other tensors.

        These are ``values`` for parameters, and ``numbers`` for integer buffers.
        """
        if self._before is None:  # a pass may leave what cannot be copied, such as a tensor with its graph
            self._before = copy.deepcopy((self.module, self.tensors, self.training))
        module, tensors, modes = copy.deepcopy(self._before)
        return ModuleCopy(module, tensors, modes, self.settings, values, numbers)

    def _watched(self, values: Sequence[torch.Tensor]) -> list[tuple[ModuleTensor, torch.Tensor, int]]:
        """Return the tensors that no forward pass may change, each with its description and its version."""
        block = self.tensors
        stored = zip(block.stored, block.specs, values, strict=True)
        tensors = [(one, t) for one, spec, t in stored if not spec.averaged] + [(one, one.now) for one in block.others]
        return [(one, tensor, tensor._version) for one, tensor in tensors]

    def _change_of(self, one: ModuleTensor) -> LayoutError:
        if one.name in self.tensors.parameters:
            what, advice = "parameter", "compute with a changed copy"
        else:
            what = "buffer"
            advice = "name it in averaged= if it is a statistic of the samples, or of weights, as in spectral_norm"
        return LayoutError(f"{self.label} changes its {what} {one.name!r} in its forward pass: {advice}")

    def _note_input(self, changed: bool) -> None:
        """Note whether the first pass has changed its input in place; raise an error if only a later pass does."""
        if changed and not self.new and not self.first_pass.changes_input:
            raise LayoutError(
                f"{self.label} changes its input in place, which it did not at first: samples and the output of the "
                "block before are overwritten; leave out inplace=True, or compute with a copy"
            )
        self.first_pass.changes_input |= changed
        self.first_pass.modes.add(self.module.training)


def efficient_samples(calls: Sequence[ModuleCall], dtype: np.dtype[Any]) -> EfficientSamples:
    """Return the :class:`EfficientSamples` for these blocks, which counts the work of passes by running copies of them.

    ``calls`` are the blocks in the order in which they run; ``dtype`` is the dtype of the parameters.
    """
    size = sum(int(spec.size) for call in calls for spec in call.tensors.specs)
    return EfficientSamples(partial(_work, calls, dtype), size)


def _work(calls: Sequence[ModuleCall], dtype: np.dtype[Any], x: Any, y: Any) -> PassWork:
    """Return the work of a forward and backward pass of the blocks on ``x``, with parameters set to zero."""
    counter, x = _Counter(), map_leaves(as_tensor, x)
    for call in calls:
        x = call.on_zeros(x, dtype, counter)
    return counter.work


#: Ratio of the kernel calls and work of a forward and backward pass to those of the forward pass alone.
_BOTH = 3


class _Counter(Kernels):
    """Estimate the kernels and the work of forward and backward passes from the kernels called in forward passes.

    The attribute ``work`` holds :data:`_BOTH` times what the forward passes have called and computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = PassWork()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the kernel, and count it, unless it makes a view or a copy."""
        kwargs = dict(kwargs or {})
        output = function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        if not function.is_view and function is not torch.ops.aten.clone.default and tensors:
            operations: Callable[..., int] | None = flop_registry.get(function.overloadpacket)
            count = operations(*args, **kwargs, out_val=output) if operations is not None else 0
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            one = PassWork(1, "convolution" in str(function), count, moved)
            self.work = self.work.plus(PassWork(*(_BOTH * int(number) for number in one)))
        return output


class Allocations(Kernels):
    """Count, in a ``with`` block, the bytes of the tensors that operations of PyTorch make and that are still used.

    Memory that an operation allocates and frees before it ends is not counted (:attr:`unseen`).

    Attributes
    ----------
    now, most : int
        Bytes in use, and the most bytes in use since :meth:`begin`.
    unseen : str
        Description of memory that is not counted, for messages.
    looks : int
        Largest number of passes on samples of one shape in which a module and a loss may be checked, which takes
        additional memory.
    """

    unseen: ClassVar[str] = "what an operation of PyTorch takes while it runs (convolutions do)"
    looks: ClassVar[int] = MOST_ADDED + 1

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def begin(self) -> None:
        """Start a new measurement of :attr:`most`. Not collective."""
        self.most = self.now

    def size_at(self, address: int) -> int:
        """Return the bytes in use of the memory that begins at ``address``; 0 if no operation made it."""
        return self._sizes.get(address, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and count the memory that it has made."""
        self._see((args, kwargs), made=False)
        result = function(*args, **(kwargs or {}))
        self._see(result, made=True)
        return result

    def _see(self, tree: Any, *, made: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not address or address in self._sizes:
                continue
            self._sizes[address] = storage.nbytes() if made else 0
            self.now += self._sizes[address]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        self.now -= self._sizes.pop(address, 0)


class TorchLoss:
    """Call ``function(prediction, target)``, which returns a sum over samples, or the sum and its weight.

    If the function returns no weight, the weight is the number of samples. On the first batches, :class:`FirstLoss`
    checks the function.
    """

    #: Counts the arrays of a pass for the planner.
    allocations: ClassVar[Any] = Allocations

    def __init__(self, function: Any, settings: TorchSettings, originals: Originals, trial: Trial) -> None:
        if isinstance(function, type):
            raise ConfigError(
                f"TorchModel: loss is the class {function.__name__}: make one of it, "
                f"{function.__name__}(reduction='sum')"
            )
        if not callable(function):
            raise ConfigError(f"TorchModel: loss is a function of prediction and target, got {function!r:.80}")
        if isinstance(function, torch.nn.Module) and any(True for _ in function.parameters()):
            raise ConfigError("TorchModel: the loss has parameters, which would stay: put them into the module")
        if (reduction := getattr(function, "reduction", "sum")) != "sum":
            raise ConfigError(
                f"TorchModel: the loss {type(function).__name__} has reduction={reduction!r}: it must be a sum over "
                "samples, reduction='sum'; mpizero divides the sum of the global batch by its weight"
            )
        self.function, self.settings, self.trial = function, settings, trial
        self._first = FirstLoss(function, self.value, originals)

    @property
    def fingerprint(self) -> Any:
        """Parts of the loss that must be equal on all ranks."""
        return {"function": self.function}

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        """Return the sum of the losses, the weight, and the graph for :meth:`backward`. Not collective."""
        with torch_pass(self.settings), torch.enable_grad():
            predicted, wanted = map_leaves(as_tensor, prediction), map_leaves(as_tensor, target)
            kind = self._first.new_kind((predicted, wanted))
            if kind is not None:
                self._first.check(predicted, wanted)
                self._first.kinds.add(kind)
            if self._first.is_wanted(new=kind is not None) and self._adds_up(prediction, predicted, wanted):
                self._first.added = True
                self.trial.done = True
            leaves = gradient_leaves(predicted)
            for leaf in leaves:
                leaf.requires_grad_()
            before = random_state()
            loss, weight = self.value(predicted, wanted)
            if drawn_since(before):
                set_random_state(before)
                raise self._first.draws("PyTorch's generator", "")
            return float(loss.detach()), weight, (loss, leaves, prediction)

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        """Return ``scale`` times the gradient of the loss sum, in the structure of the prediction. Not collective."""
        loss, leaves, prediction = cache
        with torch_pass(self.settings):
            if not loss.requires_grad:
                raise LayoutError(
                    f"{named(self.function, 'loss')} returned a loss that does not depend on the prediction: does it "
                    "use .detach(), .item() or torch.no_grad()?"
                )
            gradients = gradients_of([loss], leaves, [torch.full_like(loss, scale)])
        return gradients_like(prediction, gradients)

    def value(self, prediction: Any, target: Any, **extra: Any) -> tuple[torch.Tensor, float]:
        """Call the function, with its ``extra`` arguments; return the sum as a tensor, and the weight."""
        try:
            result = self.function(prediction, target, **extra)
        except RuntimeError as error:
            if not extra and any(words in str(error) for words in UNDIFFERENTIATED):
                line = users_line(error.__traceback__)
                at = "" if line is None else f" ({line})"
                raise LayoutError(
                    f"{named(self.function, 'loss')}{at} differentiates what it has no graph of: let it have a "
                    "parameter x, loss(prediction, target, x), which is given the input by which the prediction can be "
                    "differentiated, or a parameter module, which is given the module"
                ) from error
            raise
        loss, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, torch.Tensor)
            returned = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
            raise LayoutError(
                f"{named(self.function, 'loss')} returned {returned}: expected one number, the sum over samples "
                "(reduction='sum'), or that number and its weight"
            )
        if weight is None:
            return loss, float(self._count(prediction, target))
        return loss, float(weight.detach() if isinstance(weight, torch.Tensor) else weight)

    @staticmethod
    def _count(*trees: Any) -> int:
        leaves = [leaf for tree in trees for leaf in leaves_of(tree) if leaf.ndim]
        if not leaves:
            raise DataError("TorchModel: neither prediction nor target has an axis of samples")
        return int(leaves[-1].shape[0])

    def _adds_up(self, raw: Any, prediction: Any, target: Any) -> bool:
        """Compare the loss of samples with the losses of two parts; tell whether this was possible. Not collective."""
        count = self._count(prediction, target)
        wanted = parts_of(target, count, changed=False)
        ways = self.trial.prediction(raw, prediction, count)
        return wanted is not None and any(n == count and self._first.adds_up(way, wanted, count) for way, n in ways)
