"""Run submodules of PyTorch as layers, and describe their parameters and buffers as mpizero stores them.

:class:`Describer` describes the parameters and buffers of a module's blocks. A :class:`TorchBlock` runs one block:
autograd computes both halves of its backward pass. :class:`SavedParameters` keeps autograd from saving the memory of
parameters.

With ZeRO-3 on several nodes the parameters of a block are gathered for its forward pass, freed, and gathered again for
its backward pass; in the meantime their memory holds other parameters. Autograd saves weights for the backward pass,
and does not notice that NumPy has overwritten them. So a saved tensor that lies in a parameter is replaced by the
parameter's number and the offset in it, and later read from the newly gathered parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from mpizero._util.names import as_patterns, selected
from mpizero._util.pytree import map_leaves, paths_of
from mpizero._util.text import notice
from mpizero.adapters.torch.autograd import (
    Gradients,
    HalfTimes,
    Pass,
    PendingWeights,
    as_array,
    as_tensor,
    full_backward,
    gradient_leaves,
    gradients_like,
    half_times,
    input_half,
    weight_half,
)
from mpizero.adapters.torch.call import BlockTensors, ModuleTensor, module_tensors, running_statistics, torch_pass
from mpizero.adapters.torch.originals import OriginalForward
from mpizero.adapters.torch.passes import Allocations, ModuleCall, Passed
from mpizero.adapters.user_code import PassTimes
from mpizero.errors import ConfigError, LayoutError
from mpizero.layout.flat import joined
from mpizero.nn.layer import Layer
from mpizero.types import EVALUATE, INTEGER_DTYPES, IntegerSpec, ParameterSpec, Params, Run


class _SavedTensor(NamedTuple):
    """Hold a tensor that autograd saves, and the version that the tensor had when it was saved."""

    tensor: torch.Tensor
    version: int


class _ParameterView(NamedTuple):
    """Describe a tensor that lies in the memory of a parameter."""

    parameter: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


class SavedParameters:
    """Replace saved tensors that lie in parameters by their offsets, and read them from newly gathered parameters.

    Attributes
    ----------
    tensors : sequence of torch.Tensor
        The parameters that are gathered now; the caller replaces them before the backward pass.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps in place of ``tensor``. Not collective."""
        number = self.parameter_of(tensor)
        if number is None:
            return _SavedTensor(tensor, tensor._version)
        if tensor.dtype != self.tensors[number].dtype or tensor.is_conj() or tensor.is_neg():
            return _SavedTensor(tensor.detach().clone(), 0)  # a view with elements of another kind
        offset = (tensor.data_ptr() - self._ranges[number][0]) // tensor.element_size()
        return _ParameterView(number, offset, tensor.shape, tensor.stride())

    def parameter_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the parameter in whose memory a tensor begins, or None. Not collective."""
        address = tensor.data_ptr()
        return next((i for i, (start, stop) in enumerate(self._ranges) if start <= address < stop), None)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given, with the parameters' present values. Not collective."""
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "a tensor that the backward pass needs was changed in place after the module had used it: compute "
                    "with a copy"
                )
            return saved.tensor
        flat = self.tensors[saved.parameter].detach().reshape(-1)
        return flat.as_strided(saved.shape, saved.strides, flat.storage_offset() + saved.offset)


class Describer:
    """Describe the blocks of a module, one after the other: a parameter belongs to the first block that holds it.

    Parameters
    ----------
    module : torch.nn.Module
        The whole module.
    dtype : numpy dtype
        The dtype of its parameters.
    frozen, unused, averaged : collection of str
        Names and patterns that the user gave; see :class:`~mpizero.adapters.torch.TorchModel`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: np.dtype[Any],
        *,
        frozen: Collection[str],
        unused: Collection[str],
        averaged: Collection[str],
    ) -> None:
        buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        named = dict(module.named_parameters(remove_duplicate=False))  # a tied one has several names
        self._frozen = {id(named[name]) for name in chosen_names(list(named), "frozen", frozen)}
        self._unused = {id(named[name]) for name in chosen_names(list(named), "unused", unused)}
        self._averaged = chosen_names(buffers, "averaged", averaged, "buffer")
        self._dtype, self._order = dtype, tuple(module.state_dict())
        self._running = running_statistics(module)
        self._homes: dict[int, str] = {}
        self._stored: list[ModuleTensor] = []

    def describe(self, block: str, module: torch.nn.Module) -> BlockTensors:
        """Return descriptions of the parameters and buffers of a block's module. Not collective."""
        parameters = module_tensors(module, "_parameters")
        stored, specs = list(parameters.values()), []
        for identity, one in parameters.items():
            full_name = joined(block, one.name)
            home = self._homes.setdefault(identity, full_name)
            tied, trainable = None if home == full_name else home, one.trainable and identity not in self._frozen
            specs.append(ParameterSpec(one.name, one.shape, decay=len(one.shape) > 1, trainable=trainable, tied=tied))
        integers, numbers, others = [], [], []
        for identity, one in module_tensors(module, "_buffers").items():
            full_name, dtype = joined(block, one.name), str(one.now.dtype).removeprefix("torch.")
            averaged, saved = identity in self._running or full_name in self._averaged, full_name in self._order
            if refusal := self._refusal(averaged, saved, dtype, self._homes.setdefault(identity, block), block):
                raise ConfigError(f"TorchModel: buffer {full_name!r} {refusal}")
            if saved and dtype in INTEGER_DTYPES:
                integers.append(one)
                numbers.append(IntegerSpec(one.name, one.shape, dtype))
            elif averaged or (saved and dtype == self._dtype):
                stored.append(one)
                specs.append(ParameterSpec(one.name, one.shape, decay=False, trainable=averaged, averaged=averaged))
                self._stored.append(one)
            else:
                others.append(one)
        position = {name: number for number, name in enumerate(self._order)}
        order = sorted(range(len(stored)), key=lambda n: position.get(joined(block, stored[n].name), len(position)))
        stored, specs = [stored[n] for n in order], [specs[n] for n in order]
        names = frozenset(one.name for one in parameters.values())
        unused = frozenset(one.name for identity, one in parameters.items() if identity in self._unused)
        return BlockTensors(tuple(stored), tuple(specs), tuple(integers), tuple(numbers), tuple(others), names, unused)

    def _refusal(self, averaged: bool, saved: bool, dtype: str, home: str, block: str) -> str | None:
        """Return the reason, for an error message, why a buffer cannot be stored; None if it can."""
        if averaged and home != block:
            return (
                f"is in block {home!r}, too: each block would have a statistic of its own; put both uses into one "
                "block, or give each its own norm"
            )
        if averaged and not saved:
            return (
                "of averaged= was registered with persistent=False, but statistics are stored and exported with the "
                "parameters: leave persistent=False out"
            )
        if saved and dtype != self._dtype and dtype not in INTEGER_DTYPES:
            return (
                f"is {dtype} and would be missing from checkpoints, whose other arrays are all {self._dtype}, as the "
                "parameters are: convert it, or register it with persistent=False if the code makes it again"
            )
        return None

    def forget_values(self) -> None:
        """Free the memory of the buffers that mpizero stores. Not collective."""
        for one in self._stored:
            empty = torch.empty_like(one.now, device="meta")
            for owner, key in one.locations:
                owner[key] = empty


def chosen_names(names: list[str], where: str, patterns: Collection[str], what: str = "parameter") -> frozenset[str]:
    """Return the names that match ``patterns``; raise ``ConfigError`` for a pattern that matches none of ``names``."""
    where = f"TorchModel: {where}"
    return frozenset(selected(names, where, as_patterns(where, patterns), what))


@dataclass
class _Recorded:
    """Hold the values that a forward pass keeps for the backward pass.

    Attributes
    ----------
    x, run
        Input of the forward pass, and the samples and step that it belongs to. After an evaluation, and for a
        recomputed block, only ``x`` and ``run`` are kept, and the backward pass begins with a forward pass.
    graph : Pass or None
        Autograd's graph.
    paths : tuple of str
        The paths of the graph's outputs in the tree of the module's output.
    passed : Passed or None
        The results of the forward pass.
    saved : SavedParameters or None
        Reads saved tensors from parameters that have been gathered again.
    first : bool
        Whether this was the module's first pass, which gets copies of the parameters.
    seconds : float
        Duration of the forward pass.
    """

    x: Any
    run: Run
    graph: Pass | None = None
    paths: tuple[str, ...] = ()
    passed: Passed | None = None
    saved: SavedParameters | None = None
    first: bool = False
    seconds: float = 0.0


#: Smallest ratio of the time of both halves of a backward pass to that of the whole that leads to a notice, the seconds
#: by which both must exceed the whole, and the number of passes that are measured.
MOST_OF_HALVES, LEAST_EXCESS, MEASURED = 1.15, 5e-3, 5


@dataclass(frozen=True, eq=False)
class TorchBlock(Layer):
    """Run a submodule of PyTorch as a layer: autograd computes both halves of its backward pass.

    Parameters
    ----------
    call : ModuleCall
        Calls the module with the parameters that the layer is given.
    original_forward : OriginalForward or None
        Compares the blocks with the whole module; None for all but the first block.
    recomputed : bool
        Whether the backward pass computes the activations again.
    times : PassTimes
        Times the first passes; all blocks of a model share it.
    """

    call: ModuleCall
    original_forward: OriginalForward | None = None
    recomputed: bool = False
    times: PassTimes = field(default_factory=PassTimes)
    _halves: list[HalfTimes] = field(default_factory=list)
    #: Counts the arrays of a pass for the planner.
    allocations: ClassVar[Any] = Allocations

    @property
    def fingerprint(self) -> Any:
        """Parts of the block that must be equal on all ranks."""
        call = self.call
        buffers = {one.name: one.now.cpu() for one in call.tensors.others}
        return {"module": call.module, "specs": call.tensors.specs, "number": call.number, "buffers": buffers}

    def own_integers(self) -> tuple[IntegerSpec, ...]:
        """Return the descriptions of the integer buffers in ``state_dict()``. Not collective."""
        return self.call.tensors.integer_specs

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Return the descriptions of the module's parameters, and of the buffers that are stored like parameters.

        Not collective. The names are those of ``state_dict()``.
        """
        return self.call.tensors.specs

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the output for ``x``, and a cache for the backward pass.

        The cache has autograd's graph or, in evaluation and if the block is recomputed, only ``x``. Not collective.
        """
        if self.original_forward is not None:
            self.original_forward.compare(x, run)
        recorded, start = _Recorded(x, run), perf_counter()
        if run.training and not self.recomputed:
            passed = self._record(params, recorded)
        else:
            with self.call.prepared(run), torch.no_grad():
                passed = self.call(params, self.call.forward_values(params), map_leaves(as_tensor, x), run)
        y = passed.output
        if getattr(params, "gathered", False):  # a parameter's memory is overwritten before the next block reads it
            saved = recorded.saved or SavedParameters(passed.values)
            y = map_leaves(lambda leaf: leaf if saved.parameter_of(leaf) is None else leaf.detach().clone(), y)
        output = map_leaves(as_array, y)
        self.call.first_pass.trial.returned(self.call.number, output)
        recorded.seconds = perf_counter() - start
        return output, recorded

    def _record(self, params: Params, recorded: _Recorded) -> Passed:
        """Run the module so that autograd records its graph, and store the results of the pass in ``recorded``."""
        call, specs = self.call, self.call.tensors.specs
        with call.prepared(recorded.run), torch.enable_grad():
            recorded.first, values = call.new, call.forward_values(params)
            weights = [t.requires_grad_() for t, s in zip(values, specs, strict=True) if s.optimized]
            x = map_leaves(as_tensor, recorded.x)
            inputs = gradient_leaves(x) if call.number else []  # block 0 takes samples, which need no gradient
            for tensor in inputs:
                tensor.requires_grad_()
            hooks: Any = nullcontext()
            if getattr(params, "gathered", False):
                recorded.saved = SavedParameters(values)
                hooks = saved_tensors_hooks(recorded.saved.pack, recorded.saved.unpack)
            with hooks:
                recorded.passed = passed = call(params, values, x, recorded.run)
            outputs = {path: t for path, t in paths_of(y=passed.output) if t.requires_grad}
            recorded.graph, recorded.paths = Pass(list(outputs.values()), inputs, weights), tuple(outputs)
            return passed

    def backward(self, params: Params, cache: Any, dy: Any, grads: Params) -> Any:
        """Write the gradients of the parameters to ``grads``; return that of the input, or None. Not collective."""
        start = perf_counter()
        graph, gradients = self._graph(params, cache, dy)
        with torch_pass(self.call.settings), self.call.placed(params):
            self._check_rereads(graph, gradients, cache)
            inputs, weights = full_backward(graph, gradients)
            self.call.write(grads, weights, cache.passed, f"{self.call.label}: the loss")
            dx = self._input_gradient(cache, inputs)
        seconds = cache.seconds + perf_counter() - start
        self.times.add(self.call.number, cache.run.count, seconds, partial(self._pass_one, params, cache, dy))
        return dx

    def _pass_one(self, params: Params, cache: _Recorded, dy: Any) -> None:
        """Run a forward and backward pass of the first sample alone, to time it; drop the results."""
        x, dy = (map_leaves(lambda leaf: _first_of(leaf, cache.run.count), tree) for tree in (cache.x, dy))
        graph, gradients = self._graph(params, _Recorded(x, replace(cache.run, count=0)), dy)
        with torch_pass(self.call.settings), self.call.placed(params):
            full_backward(graph, gradients)

    def backward_input(self, params: Params, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of the input, or None, and the values for :meth:`backward_weights`. Not collective."""
        graph, gradients = self._graph(params, cache, dy)
        with torch_pass(self.call.settings), self.call.placed(params):
            self._check_rereads(graph, gradients, cache)
            self._look_at_halves(graph, gradients, cache.run)
            if self._undivided:
                inputs, weights = full_backward(graph, gradients)
                pending = PendingWeights((), {}, (), weights)
            else:
                inputs, pending = input_half(graph, gradients)
            return self._input_gradient(cache, inputs), pending

    def backward_weights(self, params: Params, cache: Any, pending: PendingWeights, grads: Params) -> None:
        """Write the gradients of the parameters to ``grads``. Not collective."""
        if cache.saved is not None:
            cache.saved.tensors = self.call.values(params)
        with torch_pass(self.call.settings), self.call.placed(params):
            weights = weight_half(cache.graph, pending)
            self.call.write(grads, weights, cache.passed, f"{self.call.label}: the loss")

    def _check_rereads(self, graph: Pass, gradients: Sequence[torch.Tensor], cache: _Recorded) -> None:
        """Raise :class:`LayoutError` if the backward pass reads the memory that parameters had in the forward pass."""
        if not cache.first or cache.saved is None or cache.passed is None:
            return
        cache.first = False
        before = full_backward(graph, gradients, keep=True)
        for tensor, spec in zip(cache.passed.values, self.call.tensors.specs, strict=True):
            if not spec.averaged:  # those are results of the pass
                as_array(tensor).fill(np.nan)
        after = full_backward(graph, gradients, keep=True)
        pairs = zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True)
        if any(a is not None and b is not None and not torch.equal(a, b) and bool((b != b).any()) for a, b in pairs):
            raise LayoutError(
                f"{self.call.label}: its backward pass reads a parameter that the forward pass has kept by itself, and "
                "whose memory holds other parameters by then, with ZeRO-3 on several nodes: an autograd.Function keeps "
                "tensors by ctx.save_for_backward(weight), not as ctx.weight = weight"
            )

    @property
    def _undivided(self) -> bool:
        """Tell whether the backward pass must run as a whole: its halves gave other gradients than the whole."""
        return bool(self._halves) and not self._halves[-1].equal

    def _look_at_halves(self, graph: Pass, gradients: Sequence[torch.Tensor], run: Run) -> None:
        """Measure the first backward passes in training; print a notice if halves take much longer than the whole.

        If the halves do not give the gradients of the whole, the pass is not divided from then on. Measured times only
        lead to a notice, because they depend on the load of the machine.
        """
        measured = self._halves
        if not run.count or self._undivided or len(measured) == MEASURED or not graph.outputs or not graph.weights:
            return
        # Unequal where a hook on a tensor, for example, runs in both halves.
        measured.append(half_times(graph, gradients))
        best = min(measured, key=lambda times: times.ratio)
        longer = best.ratio > MOST_OF_HALVES and best.inputs + best.weights - best.full > LEAST_EXCESS
        if longer and not self._undivided and len(measured) == MEASURED:
            notice(
                f"a zero-bubble schedule divides the backward pass, and for {self.call.label} both halves took "
                f"{best.ratio:.2f} times as long as the whole, at best of {MEASURED} ({best.inputs * 1e3:.2f} ms for "
                f"inputs and {best.weights * 1e3:.2f} ms for weights, {best.full * 1e3:.2f} ms together): schedule "
                "'1f1b' or 'interleaved' may be faster, or let its autograd functions look at ctx.needs_input_grad"
            )

    def _graph(self, params: Params, cache: _Recorded, dy: Any) -> tuple[Pass, list[torch.Tensor]]:
        """Return the graph of the forward pass, and the gradients of its outputs as tensors."""
        if cache.graph is None:
            self._record(params, cache)
        assert cache.graph is not None
        if cache.saved is not None:
            cache.saved.tensors = self.call.values(params)
        by_path = dict(paths_of(y=dy))  # the blocks after this one may use some of its outputs only
        used = [(t, by_path[path]) for path, t in zip(cache.paths, cache.graph.outputs, strict=True) if path in by_path]
        return cache.graph._replace(outputs=[t for t, _ in used]), [as_tensor(gradient) for _, gradient in used]

    def _input_gradient(self, cache: _Recorded, gradients: Gradients) -> Any:
        """Return the gradients of the input as a tree like the input; None in block 0, whose input are samples."""
        return gradients_like(cache.x, gradients) if self.call.number else None


def _first_of(array: Any, count: int) -> Any:
    """Return an array of the first sample, from an array of ``count`` samples."""
    if len(array) != count:
        raise LayoutError(f"an array of shape {array.shape} has not {count} samples on its first axis")
    return array[:1]
