"""Run the first pass of a block's module several times, and name what it does that depends on ranks or on grains.

[Note: first passes] Copies of the module run before it does. One runs on other samples and then on the given ones, one
on the given ones alone. Outputs, gradients, statistics and all that the copies keep must be the same then: a pass on a
module that was used before does what a fresh one does. And a pass for all samples must be the passes for two parts of
them, but for what random numbers and statistics of a grain change: in evaluation mode, where the module has any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mpizero.adapters.hidden_state import differing, hidden_state, line_that_changes, part_of, shared_generators
from mpizero.adapters.torch.arrays import gradient_leaves
from mpizero.adapters.torch.bound import BlockTensors, in_places
from mpizero.adapters.torch.calling import called
from mpizero.adapters.torch.first.originals import Originals
from mpizero.adapters.torch.first.parts import InParts, Trial, aligned, apart, other_samples
from mpizero.adapters.torch.process import TorchSettings
from mpizero.errors import LayoutError
from mpizero.sampletree import leaves_of, map_leaves

#: Number of shapes of samples, in training and in evaluation, whose first pass is looked at.
MOST_SHAPES = 4
#: Most bytes of a single sample that is computed twice at once with all that a backward pass needs.
_LARGE = 1 << 20


class _Outcome(NamedTuple):
    """Hold what a pass has computed: output, gradients of parameters and input by name, new values of buffers."""

    output: Any
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    changes_input: bool


class _Graph(NamedTuple):
    """Hold a forward pass with its graph: the output, and the tensors whose gradients are wanted by name."""

    output: Any
    ends: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    changes_input: bool


@dataclass(eq=False)
class _Copy:
    """Hold a copy of a block's module, and run passes of it that leave no trace."""

    module: torch.nn.Module
    tensors: BlockTensors
    modes: Sequence[tuple[torch.nn.Module, bool]]
    settings: TorchSettings
    values: Sequence[torch.Tensor]
    numbers: Sequence[torch.Tensor]

    def run(self, x: Any, *, training: bool, gradients: bool, of_input: bool) -> _Graph:
        """Run the module on ``x``, with copies of everything that it is given."""
        for module, was in self.modes:
            module.training = was and training
        own = self.tensors
        given = [value.detach().clone() for value in self.values]
        numbers = [number.clone() for number in self.numbers]
        ends: dict[str, torch.Tensor] = {}
        if gradients:
            ends = {s.name: t.requires_grad_() for s, t in zip(own.specs, given, strict=True) if s.optimized}
        x = map_leaves(lambda leaf: leaf.detach().clone(), x)
        if gradients and of_input:
            ends |= {f"input {number}": leaf.requires_grad_() for number, leaf in enumerate(gradient_leaves(x))}
        x = map_leaves(torch.clone, x)  # which may be changed in place, as a leaf of the graph may not
        versions = [leaf._version for leaf in leaves_of(x)]
        held = (*own.stored, *own.integers)
        with in_places(held, [*given, *numbers]), self.settings.functions(), torch.set_grad_enabled(gradients):
            output = called(self.module, x)
            now = {one.name: one.now.detach() for one in held}
        names = {s.name for s in own.specs if s.averaged} | {one.name for one in own.integers}
        changed = [leaf._version for leaf in leaves_of(x)] != versions
        return _Graph(output, ends, {name: value for name, value in now.items() if name in names}, changed)

    def outcome(self, x: Any, **modes: bool) -> _Outcome:
        """Run the module forward and, if there are ``gradients``, backward."""
        graph = self.run(x, **modes)
        output = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, graph.output)
        return _Outcome(output, self.gradients(graph), graph.buffers, graph.changes_input)

    def gradients(self, graph: _Graph, leaves: Sequence[torch.Tensor] | None = None) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the sum of the sines of some tensors of the output: of all if None."""
        if leaves is None:
            leaves = gradient_leaves([leaf for leaf in leaves_of(graph.output) if isinstance(leaf, torch.Tensor)])
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        if not graph.ends or not leaves:
            return {}
        pairs = zip(self.tensors.specs, self.values, strict=True)
        present = [graph.ends[s.name] if s.optimized else value.clone() for s, value in pairs]
        present += [number.clone() for number in self.numbers]
        with in_places((*self.tensors.stored, *self.tensors.integers), present), self.settings.functions():
            given = [torch.cos(leaf.detach()).conj() for leaf in leaves]
            found = torch.autograd.grad(leaves, list(graph.ends.values()), given, allow_unused=True)
        return dict(zip(graph.ends, found, strict=True))


@dataclass(eq=False)
class FirstPass:
    """Look at a module's first pass on samples of each shape, in training and in evaluation.

    Parameters
    ----------
    shown : str
        The module's name, for messages.
    number : int
        Number of the block in the model.
    originals : Originals
        The tensors of the module that the block's one is a copy of.
    trial : Trial or None
        Follows samples from block to block in parts; None: they are not compared.
    random, changes_input : bool
        Whether the module has drawn random numbers, and whether it has changed its input in place.
    """

    shown: str
    number: int
    originals: Originals
    trial: Trial | None
    random: bool = False
    changes_input: bool = False
    _seen: set[Any] = field(default_factory=set)
    _followed: bool = False

    def is_new(self, x: Any, *, training: bool) -> bool:
        """Tell whether samples like ``x`` are to be looked at in this mode; from then on they are not."""
        kind = (training, *((leaf.shape, leaf.dtype) for leaf in leaves_of(x)))
        if kind in self._seen or sum(mode == training for mode, *_ in self._seen) >= MOST_SHAPES:
            return False
        self._seen.add(kind)
        return True

    def check(self, fresh: Callable[[], _Copy], x: Any, *, training: bool) -> None:
        """Raise :class:`LayoutError` where a used copy of the module does something else than a fresh one.

        PyTorch's generator stays as it is. Not collective.
        """
        used, new = fresh(), fresh()
        modes = {"training": training, "gradients": training, "of_input": self.number > 0}
        with seeded() as again, self.originals.reads() as reads:
            with suppress(Exception):  # of samples that are none
                used.run(map_leaves(other_samples, x), **{**modes, "gradients": False})
            again()
            one, kept = used.outcome(x, **modes), hidden_state(**{"": used.module})
            again()
            generators, drawn = shared_generators(), torch.default_generator.get_state()
            other, left = new.outcome(x, **modes), hidden_state(**{"": new.module})
            drawing = differing(generators, shared_generators())
            self.random |= not torch.equal(drawn, torch.default_generator.get_state())
        self.changes_input |= other.changes_input
        if reads.found:
            raise LayoutError(
                f"{self.shown} reads {reads.found!r} of the module that was given, not of the copy that is trained, so "
                "it would compute with the start values for ever: let no function, hook or global name refer to the "
                "module; use methods, or the module that hooks are given"
            )
        ignored = {buffer.name for buffer in new.tensors.kept}  # each pass looks at these
        kept, left = ({p: d for p, d in state.items() if p not in ignored} for state in (kept, left))

        def traced(state: Callable[[_Copy], Any]) -> str:
            with seeded():
                run = fresh()
                line = line_that_changes(lambda: state(run), lambda: run.outcome(x, **modes))
            return "" if line is None else f" ({line})"

        if drawing is not None:
            raise LayoutError(_draws(self.shown, drawing, traced(lambda run: shared_generators())))
        if (path := differing(kept, left)) is not None:
            line = traced(lambda run: part_of(hidden_state(**{"": run.module}), path))
            raise LayoutError(_keeps(self.shown, path, line))
        if (what := _difference(one, other)) is not None:
            raise LayoutError(
                f"{self.shown} computes another {what} when it runs again on the same samples: it keeps something from "
                "pass to pass, reads a clock, or draws random numbers that PyTorch's generator does not know"
            )

    def follows(self, count: int, *, new: bool) -> bool:
        """Tell whether ``count`` samples are to be computed in parts: where they are ``new``, or were not before."""
        return self.trial is not None and not self.trial.done and count > 0 and (new or not self._followed)

    def returned(self, output: Any) -> None:
        """Note what the block returned for the samples."""
        if self.trial is not None:
            self.trial.returned(self.number, output)

    def follow(self, fresh: Callable[[], _Copy], x: Any, count: int, *, training: bool) -> None:
        """Compute ``count`` samples together and in two parts; raise :class:`LayoutError` if that is not the same.

        Samples for which the module raises an error are left out. Not collective.
        """
        assert self.trial is not None
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
        with seeded() as again:
            graphs = []
            try:
                for tree in parts:
                    again()
                    graphs.append(one.run(tree, **modes))
            except Exception:  # a last grain may be as small as a part, but need not
                self.trial.output(self.number, None)
                return
            outputs = InParts(*(graph.output for graph in graphs))
            found = aligned(outputs)
            self._check_rows(found, count)
            if found and modes["gradients"]:
                self._check_gradients(one, graphs, found, count)
        detached = (map_leaves(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, o) for o in outputs)
        self.trial.output(self.number, InParts(*detached))

    def _check_rows(self, found: Any, count: int) -> None:
        for _, axis, (whole, *parts) in found:
            if whole.dtype == torch.bool or not (whole.is_floating_point() or whole.is_complex()):
                continue
            if (by := apart(whole.detach(), torch.cat([part.detach() for part in parts], axis))) is not None:
                raise LayoutError(
                    f"{self.shown}: its output for a sample depends on the other samples of a grain: for "
                    f"{max(count, 2)} samples together (shape {tuple(whole.shape)}) and in two parts it differs by "
                    f"{by:.2g} of its size: is the first axis of what a layer is given that of samples "
                    "(batch_first=True)? Or give TorchModel compare_forward=False if it is meant"
                )

    def _check_gradients(self, one: _Copy, graphs: Sequence[_Graph], found: Any, count: int) -> None:
        columns = zip(*(leaves for *_, leaves in found), strict=True)
        whole, first, second = (
            one.gradients(graph, gradient_leaves(list(leaves))) for graph, leaves in zip(graphs, columns, strict=True)
        )
        sums = {name: (g, first[name], second[name]) for name, g in whole.items() if not name.startswith("input ")}
        largest = max((float(g.abs().max()) for g, *_ in sums.values() if g is not None and g.numel()), default=0.0)
        for name, (total, a, b) in sums.items():
            if total is None or a is None or b is None:
                continue
            if (by := apart(total, a + b, 1e-2 * largest)) is not None:
                raise LayoutError(
                    f"{self.shown}: the gradient of {name!r} for {max(count, 2)} samples is not the sum of those for "
                    f"two parts of them (they differ by {by:.2g} of its size): something in the backward pass sees a "
                    "whole grain, such as a hook that clips, or scale_grad_by_freq=True; leave it out, or give "
                    "TorchModel compare_forward=False if it is meant"
                )


@contextmanager
def seeded() -> Iterator[Callable[[], None]]:
    """Yield a function that sets PyTorch's generator to the present state; set it so again at the end."""
    state = torch.default_generator.get_state()

    def again() -> None:
        torch.default_generator.set_state(state)

    try:
        yield again
    finally:
        again()


@dataclass(eq=False)
class Copies:
    """Make copies of a block's module as it was before its first pass.

    Parameters
    ----------
    module, tensors, modes
        The module, what it holds, and whether each of its submodules is in training mode.
    settings : TorchSettings
        Settings of the process during a pass.
    """

    module: torch.nn.Module
    tensors: BlockTensors
    modes: Sequence[tuple[torch.nn.Module, bool]]
    settings: TorchSettings
    _first: tuple[torch.nn.Module, BlockTensors, Any] | None = None

    def maker(self, values: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> Callable[[], _Copy]:
        """Return a function that makes a copy for passes with these values of what is stored. Not collective."""
        if self._first is None:  # a pass may leave what cannot be copied, such as a tensor with its graph
            self._first = copy.deepcopy((self.module, self.tensors, self.modes))
        first = self._first

        def fresh() -> _Copy:
            module, tensors, modes = copy.deepcopy(first)
            return _Copy(module, tensors, modes, self.settings, values, numbers)

        return fresh


def _sees_grains(module: torch.nn.Module) -> bool:
    """Tell whether a norm has no running statistics, so that it takes those of the grain in evaluation, too."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return any(isinstance(inner, kind) and not inner.track_running_stats for inner in module.modules())


def _difference(one: _Outcome, other: _Outcome) -> str | None:
    """Return the first thing that two passes have computed differently."""
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


def _draws(shown: str, generator: str, line: str) -> str:
    return (
        f"{shown} draws random numbers of {generator}{line}, which would depend on the rank that computes it: draw "
        "them in the module with PyTorch's own generator (torch.rand, torch.nn.functional.dropout), which mpizero seeds"
    )


def _keeps(shown: str, path: str, line: str) -> str:
    return (
        f"{shown} changes its attribute {path!r} in its forward pass{line}: what it keeps outside of buffers depends "
        "on which rank runs it, and is not saved; make it a buffer (a statistic of the samples is named in averaged=), "
        "or compute it from the samples; random numbers come from PyTorch's own generator, which mpizero seeds"
    )
