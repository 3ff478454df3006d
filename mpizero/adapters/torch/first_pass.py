"""Run the first passes of a module and of a loss several times, to find results that depend on ranks or grains.

:class:`FirstPass` checks a block's module by passes of copies, without side effects (:class:`ModuleCopy`);
:class:`FirstLoss` checks a loss, which it calls twice on its first samples. Both also compute the samples together and
in two parts (:class:`InParts`), which a :class:`Trial` passes from block to block, and compare results that must not
depend on how samples are divided into grains.

[Note: first passes] Before the first pass of a module, two copies of it run: one on other samples and then on the given
samples, the other on the given samples alone. Outputs, gradients, statistics and all state of the copies must then be
equal, because a module that was used must compute what a fresh one computes. And a pass for all samples must give the
results of the passes for two parts of them. A module that draws random numbers or has averaged statistics, which depend
on the grain, is compared in evaluation mode.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import isfinite
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode

from mpizero._util.checks import named
from mpizero._util.pytree import combine_leaves, leaves_of, map_leaves
from mpizero.adapters.torch.autograd import Gradients, gradient_leaves, gradients_of, graph_leaves
from mpizero.adapters.torch.call import (
    BlockTensors,
    TorchSettings,
    called,
    drawn_since,
    random_state,
    set_random_state,
    swapped_in,
)
from mpizero.adapters.torch.originals import Originals
from mpizero.adapters.user_code import differing, hidden_state, line_that_changes, part_of, shared_generators
from mpizero.errors import LayoutError


class InParts(NamedTuple):
    """Hold three trees of tensors: of some samples together, and of two parts of these samples."""

    full: Any
    first: Any
    second: Any


def parts_of(tree: Any, count: int, *, changed: bool = True) -> InParts | None:
    """Return a tree of ``count`` samples and its halves; None if a tensor's first axis is not that of the samples.

    A single sample is doubled: the second half is a copy, whose numbers are halved unless ``changed`` is False.
    """
    leaves = leaves_of(tree)
    if not leaves or any(not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (count,) for leaf in leaves):
        return None
    if count > 1:
        halves = slice(0, count // 2), slice(count // 2, count)
        return InParts(tree, *(map_leaves(itemgetter(half), tree) for half in halves))
    other = map_leaves(other_samples, tree) if changed else tree
    return InParts(combine_leaves(torch.cat, [tree, other]), tree, other)


def other_samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return different samples of the same shape: halve floating-point numbers; keep integers, which may be indices."""
    return tensor * 0.5 if tensor.is_floating_point() or tensor.is_complex() else tensor


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 or complex64 tensor in double precision, and any other tensor as it is."""
    kinds = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return tensor.to(kinds.get(tensor.dtype, tensor.dtype))


def sample_axis(leaves: Sequence[torch.Tensor]) -> int | None:
    """Return the axis along which the first tensor was cut into the two others; None if the shapes do not tell it."""
    full, first, second = (tuple(leaf.shape) for leaf in leaves)
    if not len(full) == len(first) == len(second):
        return None
    axes = [axis for axis, size in enumerate(full) if size != first[axis]]
    if len(axes) != 1 or first[axes[0]] + second[axes[0]] != full[axes[0]]:
        return None
    return axes[0]


def aligned(parts: InParts) -> list[tuple[int, int, list[torch.Tensor]]]:
    """Return the leaves whose axis of samples is found, each as (index of the leaf, this axis, its three tensors)."""
    trees = [leaves_of(tree) for tree in parts]
    if len({len(leaves) for leaves in trees}) > 1:
        return []
    tensors = []
    for number, leaves in enumerate(zip(*trees, strict=True)):
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves) and (axis := sample_axis(leaves)) is not None:
            tensors.append((number, axis, list(leaves)))
    return tensors


def recut(parts: InParts) -> InParts:
    """Return ``parts`` with the floating-point tensors of both parts cut from the whole along the axis of samples.

    A module rounds samples differently when they are fewer. Later blocks and the loss may amplify such rounding errors,
    as a loss does that is computed from a small difference of prediction and target. So the next block gets equal
    numbers, once the results of this block have been compared.
    """
    cuts: list[dict[int, torch.Tensor]] = [{}, {}]
    for number, axis, (full, first, _) in aligned(parts):
        if full.is_floating_point() or full.is_complex():
            size = first.shape[axis]
            cuts[0][number] = full.narrow(axis, 0, size)
            cuts[1][number] = full.narrow(axis, size, full.shape[axis] - size)

    def replaced(tree: Any, cut: dict[int, torch.Tensor]) -> Any:
        numbers = count()
        return map_leaves(lambda leaf: cut.get(next(numbers), leaf), tree)

    return InParts(parts.full, replaced(parts.first, cuts[0]), replaced(parts.second, cuts[1]))


#: Largest relative difference of results that counts as rounding, by the dtype of the elements.
_APART = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-3, torch.complex64: 1e-3}
#: The same for results that were computed in 16 bits.
_HALF = 3e-2


def apart(full: torch.Tensor, other: torch.Tensor, least: float = 0.0, *, half_precision: bool = False) -> float | None:
    """Return the relative difference of two tensors; None if it may be due to rounding, or one is not finite.

    The difference is divided by the largest magnitude, but at least by ``least``. ``half_precision`` says whether the
    tensors were computed in 16 bits.
    """
    if not full.numel() or not (torch.isfinite(full).all() and torch.isfinite(other).all()):
        return None
    size = max(float(full.abs().max()), float(other.abs().max()), least)
    difference = float((full - other).abs().max()) / size if size else 0.0
    return difference if difference > (_HALF if half_precision else _APART.get(full.dtype, _HALF)) else None


@dataclass
class _Chain:
    """Hold the next block's input, for all samples and for two parts of them, and the previous block's output."""

    next: int = 0
    count: int = 0
    parts: InParts | None = None
    end: Any = None


@dataclass
class Trial:
    """Pass the first samples from block to block of a model and to its loss, all together and in two halves.

    The results of both ways are compared. Each rank that is a thread passes its own samples. ``done`` is True once
    results were compared, or if they need not be.
    """

    done: bool = False
    _chains: dict[int, _Chain] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a new trial for a copy of a model."""
        return type(self)(self.done)

    def input(self, number: int, x: Any, count: int) -> InParts | None:
        """Return the input of block ``number`` in parts: the previous block's output or, if unknown, parts of ``x``."""
        chain = self._chains.get(threading.get_ident())
        if number and chain is not None and chain.next == number:
            return chain.parts
        self._chains[threading.get_ident()] = _Chain(number, count)
        return parts_of(x, count)

    def output(self, number: int, parts: InParts | None) -> None:
        """Store ``parts``, the output of block ``number`` for all samples and for two parts; None if it is unknown.

        :meth:`input` returns ``parts`` to the next block.
        """
        chain = self._chains[threading.get_ident()]
        chain.next, chain.parts = number + 1, parts

    def returned(self, number: int, output: Any) -> None:
        """Store what block ``number`` returned for all samples; the last block returns the loss's prediction."""
        chain = self._chains.get(threading.get_ident())
        if chain is not None and chain.next == number + 1:
            chain.end = output

    def prediction(self, raw: Any, tensors: Any, count: int) -> list[tuple[InParts, int]]:
        """Return up to two pairs, of a prediction in parts and its number of samples, for the loss of ``raw``.

        ``raw`` is what the last block returned.

        First come the parts that the blocks have computed, then parts that are cut from ``tensors``, which is the
        prediction as tensors, of ``count`` samples.
        """
        chain = self._chains.pop(threading.get_ident(), None)
        ways = []
        if chain is not None and chain.end is raw and chain.parts is not None:
            ways.append((chain.parts, chain.count))
        if (cut := parts_of(tensors, count)) is not None:
            ways.append((cut, count))
        return ways


class CopyGraph(NamedTuple):
    """Hold the results of a pass of a :class:`ModuleCopy`.

    Attributes
    ----------
    output : object
        What the module returned.
    ends : dict
        The tensors of parameters and input whose gradients are computed, by name.
    buffers : dict
        New values of buffers by name.
    changes_input : bool
        Whether the module has changed its input in place.
    half_precision : bool
        Whether a function of PyTorch has returned numbers of 16 bits.
    gradients : dict
        The gradients with respect to ``ends``, by name; empty if there was no backward pass.
    outside : list
        Weak references to other tensors whose gradients a backward pass would compute.
    """

    output: Any
    ends: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    changes_input: bool
    half_precision: bool
    gradients: Mapping[str, torch.Tensor | None] = MappingProxyType({})
    outside: Sequence[weakref.ref[torch.Tensor]] = ()


class _Kinds(TorchFunctionMode):  # type: ignore[misc]
    """Note whether any function of PyTorch returns floating-point numbers of 16 bits."""

    half_precision = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call one function, and note the dtype of its result."""
        result = func(*args, **(kwargs or {}))
        self.half_precision |= isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16)
        return result


@dataclass(eq=False)
class ModuleCopy:
    """Hold a copy of a block's module, and run its passes without effects on the original."""

    module: torch.nn.Module
    tensors: BlockTensors
    modes: Sequence[tuple[torch.nn.Module, bool]]
    settings: TorchSettings
    values: Sequence[torch.Tensor]
    numbers: Sequence[torch.Tensor]

    def run(self, x: Any, *, training: bool, gradients: bool, of_input: bool) -> CopyGraph:
        """Run the module with copies of ``x``, parameters and buffers."""
        for module, was in self.modes:
            module.training = was and training
        block = self.tensors
        values = [value.detach().clone() for value in self.values]
        numbers = [number.clone() for number in self.numbers]
        ends: dict[str, torch.Tensor] = {}
        if gradients:
            ends = {s.name: t.requires_grad_() for s, t in zip(block.specs, values, strict=True) if s.optimized}
        x = map_leaves(lambda leaf: leaf.detach().clone(), x)
        if gradients and of_input:
            ends |= {f"input {number}": leaf.requires_grad_() for number, leaf in enumerate(gradient_leaves(x))}
        x = map_leaves(torch.clone, x)  # which may be changed in place, as a leaf of the graph may not
        versions = [leaf._version for leaf in leaves_of(x)]
        targets = (*block.stored, *block.integers)
        with swapped_in(targets, [*values, *numbers]), _Kinds() as kinds, self.settings.functions():
            with torch.set_grad_enabled(gradients):
                output = called(self.module, x)
            now = {one.name: one.now.detach() for one in targets}
        names = {s.name for s in block.specs if s.averaged} | {one.name for one in block.integers}
        changed = [leaf._version for leaf in leaves_of(x)] != versions
        buffers = {name: value for name, value in now.items() if name in names}
        return CopyGraph(output, ends, buffers, changed, kinds.half_precision)

    def outcome(self, x: Any, **modes: bool) -> CopyGraph:
        """Run the module forward and, if ``gradients`` is True, backward; return results without their graph."""
        graph = self.run(x, **modes)
        outside = _outside(leaves_of(graph.output), graph.ends.values())
        output = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, graph.output)
        return graph._replace(output=output, ends={}, gradients=self.gradients(graph), outside=outside)

    def gradients(
        self, graph: CopyGraph, leaves: Sequence[torch.Tensor] | None = None, *, linear: bool = False
    ) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the sum of the sines of ``leaves``, which are tensors of the output.

        If ``leaves`` is None, all tensors of the output are used. If ``linear`` is true, return the gradients of the
        sum of the tensors themselves.
        """
        if leaves is None:
            leaves = gradient_leaves([leaf for leaf in leaves_of(graph.output) if isinstance(leaf, torch.Tensor)])
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        if not graph.ends or not leaves:
            return {}
        pairs = zip(self.tensors.specs, self.values, strict=True)
        present = [graph.ends[s.name] if s.optimized else value.clone() for s, value in pairs]
        present += [number.clone() for number in self.numbers]
        with swapped_in((*self.tensors.stored, *self.tensors.integers), present), self.settings.functions():
            cotangents = [torch.ones_like(t) if linear else torch.cos(t.detach()).conj() for t in leaves]
            gradients = gradients_of(leaves, list(graph.ends.values()), cotangents)
        return dict(zip(graph.ends, gradients, strict=True))


def _outside(tensors: Sequence[Any], known: Iterable[torch.Tensor]) -> list[weakref.ref[torch.Tensor]]:
    """Return weak references to the leaves of the autograd graph of ``tensors``, except those in ``known``.

    Leaves that the pass itself has made are freed with the graph; leaves that live on are held by other objects.
    """
    inside = {id(tensor) for tensor in known}
    return [weakref.ref(leaf) for leaf in graph_leaves(tensors) if id(leaf) not in inside]


def _check_outside(label: str, outside: Sequence[weakref.ref[torch.Tensor]], module: torch.nn.Module | None) -> None:
    """Raise :class:`LayoutError` if a tensor in ``outside``, of weak references from :func:`_outside`, still exists.

    Such a tensor requires a gradient, but is no parameter of the module, so nothing would train it.
    """
    kept = next((tensor for reference in outside if (tensor := reference()) is not None), None)
    if kept is None:
        return
    name = _attribute_of(kept, module) if module is not None else ""
    raise LayoutError(
        f"{label} computes with {f'what it holds in {name!r}' if name else 'a tensor'}, of shape {tuple(kept.shape)}, "
        "that requires a gradient and is not among the module's parameters: it would never be trained, nor saved; let "
        "the module register it, by nn.Parameter, nn.ParameterList, or nn.ModuleList in place of a list, or leave out "
        "its gradient, requires_grad_(False)"
    )


def _attribute_of(tensor: torch.Tensor, module: torch.nn.Module) -> str:
    """Return the path of a module's attribute that holds a tensor, also inside of another container; "" if unknown."""
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            listed = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            held = (one.parameters() if isinstance(one, torch.nn.Module) else (one,) for one in listed)
            if key not in ("_parameters", "_modules") and any(one is tensor for those in held for one in those):
                return f"{path}.{key}" if path else key
    return ""


@contextmanager
def seeded() -> Iterator[Callable[[], None]]:
    """Yield a function that resets PyTorch's generators to the state at the start; reset them at the end, too."""
    state = random_state()

    def again() -> None:
        set_random_state(state)

    try:
        yield again
    finally:
        again()


def _line(state: Callable[[], Any], action: Callable[[], Any]) -> str:
    """Return, for messages, the line of user code in ``action`` that changes ``state()``; "" if there is none."""
    with seeded():
        line = line_that_changes(state, action)
    return "" if line is None else f" ({line})"


#: Number of shapes of samples, in training and in evaluation, whose first pass is checked.
MOST_SHAPES = 4
#: Most bytes of a single sample that is computed twice, in one batch, with all that a backward pass needs.
_LARGE = 1 << 20

_ONCE = (
    "use reduction='sum', and multiply a term that does not depend on the samples, such as a penalty on weights, by "
    "their number"
)
_GRAIN = (
    "something in the backward pass sees a whole grain, such as a hook that clips, or scale_grad_by_freq=True; leave "
    "it out, or give TorchModel compare_forward=False if it is meant"
)


@dataclass(eq=False)
class FirstPass:
    """Check a module's first pass on samples of each shape, in training and in evaluation.

    Parameters
    ----------
    label : str
        The module's name, for messages.
    number : int
        Number of the block in the model.
    originals : Originals
        The tensors of the original module, of which the block's module is a copy.
    trial : Trial
        Passes samples in parts from block to block.
    random, changes_input : bool
        Whether the module has drawn random numbers, and whether it has changed its input in place.
    modes : set of bool
        Modes in which passes were completed: True for training, False for evaluation.
    sums : bool
        Whether the output is a loss and its weight, which must be sums over the parts.
    kinds : set
        The shapes and dtypes of samples that were checked.
    """

    label: str
    number: int
    originals: Originals
    trial: Trial
    random: bool = False
    changes_input: bool = False
    sums: bool = False
    modes: set[bool] = field(default_factory=set)
    kinds: set[Any] = field(default_factory=set)
    _followed: bool = False

    def new_kind(self, x: Any, *, training: bool, counted: bool) -> Any:
        """Return the form of samples ``x``, for :attr:`kinds` when they are checked; None if they need no check.

        ``counted`` says whether the samples belong to a batch; zeros that the planner uses do not.
        """
        self.originals.trained |= training and counted
        mode = training, counted
        kind = (mode, *((leaf.shape, leaf.dtype) for leaf in leaves_of(x)))
        return None if kind in self.kinds or sum(known == mode for known, *_ in self.kinds) >= MOST_SHAPES else kind

    def check(self, fresh: Callable[[], ModuleCopy], x: Any, *, training: bool) -> None:
        """Raise :class:`LayoutError` if a copy of the module that ran before gives other results than a fresh copy.

        The states of PyTorch's generators do not change. Not collective.
        """
        used, new = fresh(), fresh()
        modes = {"training": training, "gradients": training, "of_input": self.number > 0}
        with seeded() as again, self.originals.reads() as reads:
            with suppress(Exception):  # of samples that are none
                used.run(map_leaves(other_samples, x), **{**modes, "gradients": False})
            again()
            one, first = used.outcome(x, **modes), hidden_state(**{"": used.module})
            again()
            generators, drawn = shared_generators(), random_state()
            other, second = new.outcome(x, **modes), hidden_state(**{"": new.module})
            drawing = differing(generators, shared_generators())
            self.random |= drawn_since(drawn)
        self.changes_input |= other.changes_input
        if reads.first:
            raise LayoutError(
                f"{self.label} reads {reads.first!r} of the module that was given, not of the copy that is trained, so "
                "it would compute with the start values for ever: let no function, hook or global name refer to the "
                "module; use methods, or the module that hooks are given"
            )
        _check_outside(self.label, one.outside, used.module)
        ignored = {buffer.name for buffer in new.tensors.others}  # each pass looks at these
        first, second = ({p: d for p, d in state.items() if p not in ignored} for state in (first, second))

        if drawing is not None:
            line = _line(shared_generators, partial(fresh().outcome, x, **modes))
            raise LayoutError(
                f"{self.label} draws random numbers of {drawing}{line}, which would depend on the rank that computes "
                "it: draw them in the module with PyTorch's own generator (torch.rand, torch.nn.functional.dropout), "
                "which mpizero seeds"
            )
        if (path := differing(first, second)) is not None:
            twin = fresh()
            line = _line(lambda: part_of(hidden_state(**{"": twin.module}), path), partial(twin.outcome, x, **modes))
            raise LayoutError(
                f"{self.label} changes its attribute {path!r} in its forward pass{line}: what it keeps outside of "
                "buffers depends on which rank runs it, and is not saved; make it a buffer (a statistic of the samples "
                "is named in averaged=), or compute it from the samples; random numbers come from PyTorch's own "
                "generator, which mpizero seeds"
            )
        if (what := _difference(one, other)) is not None:
            raise LayoutError(
                f"{self.label} computes another {what} when it runs again on the same samples: it keeps something from "
                "pass to pass, reads a clock, or draws random numbers that PyTorch's generator does not know"
            )

    def follows(self, count: int, *, new: bool) -> bool:
        """Tell whether to compute ``count`` samples in parts: if shapes or dtypes are ``new``, or at the first time."""
        return not self.trial.done and count > 0 and (new or not self._followed)

    def follow(self, fresh: Callable[[], ModuleCopy], x: Any, count: int, *, training: bool) -> None:
        """Compute ``count`` samples together and in two parts; raise :class:`LayoutError` if the results differ.

        Nothing is compared if the module raises an error or draws random numbers in one of these passes. Not
        collective.
        """
        self._followed = True
        parts, one = self.trial.input(self.number, x, count), fresh()
        if parts is None or _sees_grains(one.module):
            self.trial.output(self.number, None)
            return
        by_grain = any(spec.averaged for spec in one.tensors.specs) or self.random  # in training
        large = count == 1 and sum(leaf.nbytes for leaf in leaves_of(parts.first)) > _LARGE
        modes = {
            "training": training and not by_grain,
            "gradients": training and not large,
            "of_input": self.number > 0,
        }
        ways = [(one, parts)]
        if self.sums and any(value.dtype == torch.float32 for value in one.values):
            wide = replace(one, values=list(map(in_double, one.values)))
            ways.insert(0, (wide, InParts(*(map_leaves(in_double, tree) for tree in parts))))
        with seeded() as again:
            graphs = next(filter(None, (_in_parts(*way, again, modes) for way in ways)), None)
            if graphs is None:  # a last grain may be as small as a part, but need not; noise is another in each part
                self.trial.output(self.number, None)
                return
            outputs = InParts(*(graph.output for graph in graphs))
            tensors = aligned(outputs)
            half_precision = any(graph.half_precision for graph in graphs)
            self._check_rows(tensors, count, half_precision=half_precision)
            if self.sums:
                self._check_sums(outputs, count)
            if modes["gradients"]:
                columns = (
                    [tree[:1] for tree in outputs] if self.sums else zip(*(each for *_, each in tensors), strict=True)
                )
                self._check_gradients(
                    one, list(zip(graphs, columns, strict=False)), count, half_precision=half_precision
                )
        self.trial.done |= self.sums
        detached = (map_leaves(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, o) for o in outputs)
        self.trial.output(self.number, recut(InParts(*detached)))

    def _check_rows(self, tensors: Any, count: int, *, half_precision: bool) -> None:
        for _, axis, (full, *parts) in tensors:
            if full.dtype == torch.bool or not (full.is_floating_point() or full.is_complex()):
                continue
            rows = torch.cat([part.detach() for part in parts], axis)
            if (by := apart(full.detach(), rows, half_precision=half_precision)) is not None:
                raise LayoutError(
                    f"{self.label}: its output for a sample depends on the other samples of a grain: for "
                    f"{max(count, 2)} samples together (shape {tuple(full.shape)}) and in two parts it differs by "
                    f"{by:.2g} of its size: is the first axis of what a layer is given that of samples "
                    "(batch_first=True)? Or give TorchModel compare_forward=False if it is meant"
                )

    def _check_sums(self, outputs: InParts, count: int) -> None:
        for what, *values in zip(("loss", "weight"), *outputs, strict=True):
            full, first, second = (float(value.detach()) for value in values)
            within = 1e-7 if outputs.full[0].dtype == torch.float64 else 1e-3
            size = abs(full) + abs(first) + abs(second)
            if abs(full - first - second) > within * size:  # also False where one is NaN, which the step tells
                raise LayoutError(
                    f"{self.label} is no sum over samples: the {what} is {full:.6g} for {max(count, 2)} samples, "
                    f"{first:.6g} and {second:.6g} for two parts of them: {_ONCE}"
                )

    def _check_gradients(
        self, one: ModuleCopy, passes: Sequence[tuple[CopyGraph, Any]], count: int, *, half_precision: bool
    ) -> None:
        if not passes:
            return
        full, first, second = (
            one.gradients(graph, gradient_leaves(list(leaves)), linear=self.sums) for graph, leaves in passes
        )
        sums = {name: (g, first[name], second[name]) for name, g in full.items() if not name.startswith("input ")}
        largest = max((float(g.abs().max()) for g, *_ in sums.values() if g is not None and g.numel()), default=0.0)
        for name, (total, a, b) in sums.items():
            if total is None or a is None or b is None:
                continue
            if (
                by := apart(total, a + b, (1.0 if half_precision else 1e-2) * largest, half_precision=half_precision)
            ) is not None:
                raise LayoutError(
                    f"{self.label}: the gradient of {name!r} for {max(count, 2)} samples is not the sum of those for "
                    f"two parts of them (they differ by {by:.2g} of its size): " + (_ONCE if self.sums else _GRAIN)
                )


def _same(tree: Any) -> Any:
    return tree


def _in_parts(
    one: ModuleCopy, parts: InParts, again: Callable[[], None], modes: Mapping[str, bool]
) -> list[CopyGraph] | None:
    """Run passes of the copy ``one`` of a module for all samples and for two parts of them, and return the results.

    Return None if the module raises an error or draws random numbers. ``again`` resets the random generators.
    """
    graphs = []
    try:
        for tree in parts:
            again()
            before = random_state()
            graphs.append(one.run(tree, **modes))
            if drawn_since(before):
                return None
    except Exception:
        return None
    return graphs


def _sees_grains(module: torch.nn.Module) -> bool:
    """Tell whether a batch norm has no running statistics, so that it uses those of the grain in evaluation, too."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return any(isinstance(inner, kind) and not inner.track_running_stats for inner in module.modules())


def _difference(one: CopyGraph, other: CopyGraph) -> str | None:
    """Return the name of the first result that differs between two passes; None if all are equal."""
    pairs = [("output", leaves_of(one.output), leaves_of(other.output))]
    for kind in ("gradients", "buffers"):
        a, b = getattr(one, kind), getattr(other, kind)
        what = "gradient of " if kind == "gradients" else "value of "
        pairs += [(f"{what}{name!r}", [a[name]], [b.get(name)]) for name in a]
    return next((what for what, a, b in pairs if not _equal(a, b)), None)


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b):
                return False
        elif a.shape != b.shape or not bool(((a == b) | ((a != a) & (b != b))).all()):
            return False
    return True


class _LossAndGradient(NamedTuple):
    """Hold a loss, its weight, its gradient with respect to the prediction, and other leaves of its graph."""

    loss: float
    weight: float
    gradient: list[torch.Tensor]
    outside: Sequence[weakref.ref[torch.Tensor]] = ()


#: Largest relative difference of the sum of parts' losses from the whole's loss: in double and in own precision.
_WIDE, _NATIVE = 1e-5, 1e-3
#: Number of grains compared in parts: in one grain the losses may be NaN, or add up although the loss is no sum, for
#: example if no sample of the grain is masked.
MOST_ADDED = 4
_SEE = (
    "; samples that are meant to see each other, as in a contrastive loss, do so in the module, which returns a loss "
    "for each sample (compare_forward=False)"
)


@dataclass(eq=False)
class FirstLoss:
    """Check a loss on its first samples of each shape.

    Parameters
    ----------
    function : callable
        The user's loss.
    value : callable
        Calls the loss, and returns the sum of losses as a tensor, and the weight.
    originals : Originals
        The tensors of the module that was given, which the loss must not read.
    added : bool
        Whether losses of parts were found to add up to the loss of the whole.
    checked : int
        How often losses of parts were computed.
    by_rows : bool
        Whether samples are on the first axis of the prediction, so that it can be cut even if the blocks did not
        compute the parts.
    kinds : set
        The shapes and dtypes of samples that were checked.
    """

    function: Callable[..., Any]
    value: Callable[[Any, Any], tuple[torch.Tensor, float]]
    originals: Originals
    added: bool = False
    checked: int = 0
    by_rows: bool = False
    kinds: set[Any] = field(default_factory=set)

    @property
    def label(self) -> str:
        """The loss's name, file and line, for messages."""
        return named(self.function, "loss")

    def new_kind(self, trees: Any) -> Any:
        """Return what to add to :attr:`kinds` once samples like ``trees`` are checked; None if they need no check."""
        kind = tuple((leaf.shape, leaf.dtype) for leaf in leaves_of(trees))
        return None if kind in self.kinds or len(self.kinds) >= MOST_SHAPES else kind

    def is_wanted(self, *, new: bool) -> bool:
        """Tell whether to compare the loss of samples with losses of their parts.

        ``new`` says whether no samples of these shapes and dtypes were checked before.
        """
        return (new and not self.added) or (self.by_rows and self.checked < MOST_ADDED)

    def check(self, prediction: Any, target: Any) -> None:
        """Raise :class:`LayoutError` if a second, equal call gives another result or changes state. Not collective.

        A loss that draws random numbers, or that computes with tensors of the module that was given, is an error, too.
        """
        state = partial(hidden_state, loss=self.function)
        with seeded(), self.originals.reads() as reads:
            one, first_state = self._loss_and_gradient(prediction, target), state()
            generators, drawn = shared_generators(), random_state()
            other, second_state = self._loss_and_gradient(prediction, target), state()
            drawing = differing(generators, shared_generators())
            if drawn_since(drawn):
                drawing = "PyTorch's generator"
        if reads.first:
            raise LayoutError(
                f"{self.label} reads {reads.first!r} of the module that was given, not of the copy that is trained: it "
                "would compute with the start values for ever, without a gradient; let it have a parameter module, "
                "loss(prediction, target, module), which is given the module that is trained"
            )

        _check_outside(self.label, one.outside, None)
        once = partial(self._loss_and_gradient, prediction, target)
        if drawing is not None:
            line = _line(lambda: (shared_generators(), [one.tolist() for one in random_state()]), once)
            raise self.draws(drawing, line)
        if (path := differing(first_state, second_state)) is not None:
            line = _line(lambda: part_of(state(), path), once)
            raise LayoutError(
                f"{self.label} changes {path!r} in each call{line}: what it keeps depends on the rank that calls it, "
                "and is not saved; compute from prediction and target"
            )
        if one.loss != other.loss and one.loss == one.loss or not _equal(one.gradient, other.gradient):
            raise LayoutError(
                f"{self.label} returns something else when it is called again with the same samples ({one.loss:.6g}, "
                f"then {other.loss:.6g}): it keeps something from call to call, or draws random numbers"
            )

    def draws(self, generator: str, line: str) -> LayoutError:
        """Return the exception for a loss that draws random numbers."""
        return LayoutError(
            f"{self.label} draws random numbers of {generator}{line}, which would depend on the rank that computes it: "
            "draw them in the module with PyTorch's own generator, where mpizero seeds them"
        )

    def adds_up(self, prediction: InParts, target: InParts, count: int) -> bool:
        """Raise :class:`LayoutError` if the losses of the parts do not add up; tell whether they could be computed."""
        self.checked += 1
        self.by_rows = all(axis == 0 for _, axis, _ in aligned(prediction))
        results, within = self._in_parts(prediction, target)
        if not results:
            return False
        full, *parts = results
        for what in ("loss", "weight"):
            total, sums = getattr(full, what), [getattr(part, what) for part in parts]
            if abs(total - sum(sums)) > within * (abs(total) + sum(map(abs, sums))):
                raise LayoutError(self._no_sum(what, total, sums, count, prediction, target))
        for number, axis, _ in aligned(InParts(*(one.gradient for one in results))):
            a, *rest = (one.gradient[number] for one in results)
            if (by := apart(a, torch.cat(rest, axis))) is not None:
                raise LayoutError(
                    f"{self.label} is no sum over samples: its gradient for {max(count, 2)} samples differs from that "
                    f"for two parts of them by {by:.2g} of its size: a term is added once a call, such as a penalty, "
                    f"or samples see each other; add a term for each sample, or return the sum and a weight{_SEE}"
                )
        return True

    def _in_parts(self, prediction: InParts, target: InParts) -> tuple[list[_LossAndGradient], float]:
        """Return the losses of all samples and of both parts, and a relative tolerance for their sum.

        The losses are computed in double precision if the loss function accepts it. The list is empty if the function
        raises an error, or a loss is not finite.
        """
        narrow = any(leaf.dtype in (torch.float32, torch.complex64) for leaf in gradient_leaves(prediction.full))
        for way, within in ((_wide_tree, _WIDE),) * narrow + ((_same, _NATIVE),):
            with suppress(Exception):
                results = [self._loss_and_gradient(way(p), way(t)) for p, t in zip(prediction, target, strict=True)]
                if all(isfinite(one.loss) and isfinite(one.weight) for one in results):
                    return results, within
        return [], _NATIVE

    def _no_sum(self, what: str, total: float, sums: Any, count: int, prediction: InParts, target: InParts) -> str:
        shapes = [[tuple(leaf.shape) for leaf in leaves_of(tree.full)] for tree in (prediction, target)]
        listed = [str(each[0]) if len(each) == 1 else ", ".join(map(str, each)) for each in shapes]
        hint = "; do the shapes fit, or are they broadcast?" if _become_larger(*shapes) else ""
        called = "is no sum over samples: it" if what == "loss" else "returns a weight that is no sum over samples: it"
        halves = "halves" if count > 1 else "parts"
        return (
            f"{self.label} {called} is {total:.6g} for {max(count, 2)} samples, {sums[0]:.6g} and {sums[1]:.6g} for "
            f"their {halves} (prediction {listed[0]}, target {listed[1]}{hint}); use reduction='sum', or return the "
            f"sum and a weight{_SEE}"
        )

    def _loss_and_gradient(self, prediction: Any, target: Any) -> _LossAndGradient:
        """Call the loss, and differentiate it with respect to the prediction."""
        copied = map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, prediction)
        leaves = gradient_leaves(copied)
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.enable_grad():
            loss, weight = self.value(copied, target)
            outside = _outside([loss], leaves)
            gradients: Gradients = [None] * len(leaves)
            if loss.requires_grad:
                gradients = gradients_of([loss], leaves, [torch.ones_like(loss)])
        gradient = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)]
        return _LossAndGradient(float(loss.detach()), weight, gradient, outside)


def _become_larger(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> bool:
    """Tell whether broadcasting the shapes of a prediction and a target would give a shape that neither has."""
    with suppress(RuntimeError):
        return len(one) == len(other) == 1 and tuple(torch.broadcast_shapes(*one, *other)) not in (*one, *other)
    return False


def _wide_tree(tree: Any) -> Any:
    return map_leaves(lambda leaf: in_double(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
