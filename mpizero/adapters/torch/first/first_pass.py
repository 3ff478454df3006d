"""Run the first pass of a block's module several times, and name what it does that depends on ranks or on grains.

[Note: first passes] Copies of the module run before it does. One runs on other samples and then on the given ones, one
on the given ones alone. Outputs, gradients, statistics and all that the copies keep must be the same then: a pass on a
module that was used before does what a fresh one does. And a pass for all samples must be the passes for two parts of
them, but for what random numbers and statistics of a grain change: in evaluation mode, where the module has any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mpizero._util.pytree import leaves_of, map_leaves
from mpizero.adapters.hidden_state import differing, hidden_state, line_that_changes, part_of, shared_generators
from mpizero.adapters.torch.arrays import gradient_leaves
from mpizero.adapters.torch.first.copies import CopyGraph, ModuleCopy, Outcome, seeded
from mpizero.adapters.torch.first.originals import Originals
from mpizero.adapters.torch.first.parts import InParts, Trial, aligned, apart, in_double, of_whole, other_samples
from mpizero.adapters.torch.process import drawn_since, random_state
from mpizero.errors import LayoutError

#: Number of shapes of samples, in training and in evaluation, whose first pass is looked at.
MOST_SHAPES = 4
#: Most bytes of a single sample that is computed twice at once with all that a backward pass needs.
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
    sums : bool
        Whether the output is a loss and its weight, which must add up over the parts.
    seen : set
        The kinds of samples that have been looked at.
    """

    shown: str
    number: int
    originals: Originals
    trial: Trial | None
    random: bool = False
    changes_input: bool = False
    sums: bool = False
    seen: set[Any] = field(default_factory=set)
    _followed: bool = False

    def new_kind(self, x: Any, *, training: bool, counted: bool) -> Any:
        """Return what :attr:`seen` is to have when samples like ``x`` have been looked at; None if they need not be.

        ``counted`` says whether they are of a batch; a planner's zeros are not.
        """
        self.originals.trained |= training and counted
        mode = training, counted
        kind = (mode, *((leaf.shape, leaf.dtype) for leaf in leaves_of(x)))
        return None if kind in self.seen or sum(seen == mode for seen, *_ in self.seen) >= MOST_SHAPES else kind

    def check(self, fresh: Callable[[], ModuleCopy], x: Any, *, training: bool) -> None:
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
            generators, drawn = shared_generators(), random_state()
            other, left = new.outcome(x, **modes), hidden_state(**{"": new.module})
            drawing = differing(generators, shared_generators())
            self.random |= drawn_since(drawn)
        self.changes_input |= other.changes_input
        if reads.found:
            raise LayoutError(
                f"{self.shown} reads {reads.found!r} of the module that was given, not of the copy that is trained, so "
                "it would compute with the start values for ever: let no function, hook or global name refer to the "
                "module; use methods, or the module that hooks are given"
            )
        ignored = {buffer.name for buffer in new.tensors.kept}  # each pass looks at these
        kept, left = ({p: d for p, d in state.items() if p not in ignored} for state in (kept, left))

        def traced(state: Callable[[ModuleCopy], Any]) -> str:
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

    def follow(self, fresh: Callable[[], ModuleCopy], x: Any, count: int, *, training: bool) -> None:
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
        ways = [_wide(one)] if self.sums and _is_narrow(one) else []
        with seeded() as again:
            graphs = next(filter(None, (_in_parts(way, parts, again, modes) for way in (*ways, (one, _same)))), None)
            if graphs is None:  # a last grain may be as small as a part, but need not; noise is another in each part
                self.trial.output(self.number, None)
                return
            outputs = InParts(*(graph.output for graph in graphs))
            found = aligned(outputs)
            half_precision = any(graph.half_precision for graph in graphs)
            self._check_rows(found, count, half_precision=half_precision)
            if self.sums:
                self._check_sums(outputs, count)
            if modes["gradients"]:
                columns = (
                    [tree[:1] for tree in outputs] if self.sums else zip(*(each for *_, each in found), strict=True)
                )
                self._check_gradients(
                    one, list(zip(graphs, columns, strict=False)), count, half_precision=half_precision
                )
        self.trial.done |= self.sums
        detached = (map_leaves(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, o) for o in outputs)
        self.trial.output(self.number, of_whole(InParts(*detached)))

    def _check_rows(self, found: Any, count: int, *, half_precision: bool) -> None:
        for _, axis, (whole, *parts) in found:
            if whole.dtype == torch.bool or not (whole.is_floating_point() or whole.is_complex()):
                continue
            rows = torch.cat([part.detach() for part in parts], axis)
            if (by := apart(whole.detach(), rows, half_precision=half_precision)) is not None:
                raise LayoutError(
                    f"{self.shown}: its output for a sample depends on the other samples of a grain: for "
                    f"{max(count, 2)} samples together (shape {tuple(whole.shape)}) and in two parts it differs by "
                    f"{by:.2g} of its size: is the first axis of what a layer is given that of samples "
                    "(batch_first=True)? Or give TorchModel compare_forward=False if it is meant"
                )

    def _check_sums(self, outputs: InParts, count: int) -> None:
        for what, *values in zip(("loss", "weight"), *outputs, strict=True):
            whole, first, second = (float(value.detach()) for value in values)
            within = 1e-7 if outputs.whole[0].dtype == torch.float64 else 1e-3
            size = abs(whole) + abs(first) + abs(second)
            if abs(whole - first - second) > within * size:  # also False where one is NaN, which the step tells
                raise LayoutError(
                    f"{self.shown} is no sum over samples: the {what} is {whole:.6g} for {max(count, 2)} samples, "
                    f"{first:.6g} and {second:.6g} for two parts of them: {_ONCE}"
                )

    def _check_gradients(
        self, one: ModuleCopy, passes: Sequence[tuple[CopyGraph, Any]], count: int, *, half_precision: bool
    ) -> None:
        if not passes:
            return
        whole, first, second = (
            one.gradients(graph, gradient_leaves(list(leaves)), linear=self.sums) for graph, leaves in passes
        )
        sums = {name: (g, first[name], second[name]) for name, g in whole.items() if not name.startswith("input ")}
        largest = max((float(g.abs().max()) for g, *_ in sums.values() if g is not None and g.numel()), default=0.0)
        for name, (total, a, b) in sums.items():
            if total is None or a is None or b is None:
                continue
            if (
                by := apart(total, a + b, (1.0 if half_precision else 1e-2) * largest, half_precision=half_precision)
            ) is not None:
                raise LayoutError(
                    f"{self.shown}: the gradient of {name!r} for {max(count, 2)} samples is not the sum of those for "
                    f"two parts of them (they differ by {by:.2g} of its size): " + (_ONCE if self.sums else _GRAIN)
                )


def _is_narrow(one: ModuleCopy) -> bool:
    return any(value.dtype == torch.float32 for value in one.values)


def _wide(one: ModuleCopy) -> tuple[ModuleCopy, Callable[[Any], Any]]:
    """Return a copy with parameters in double precision, and the function that converts samples to it."""
    values = [in_double(value) for value in one.values]
    return replace(one, values=values), lambda tree: map_leaves(in_double, tree)


def _same(tree: Any) -> Any:
    return tree


def _in_parts(
    way: tuple[ModuleCopy, Callable[[Any], Any]], parts: InParts, again: Callable[[], None], modes: Mapping[str, bool]
) -> list[CopyGraph] | None:
    """Run passes for all samples and for both parts; None where the module raises an error, or draws noise."""
    one, converted = way
    graphs = []
    try:
        for tree in parts:
            again()
            before = random_state()
            graphs.append(one.run(converted(tree), **modes))
            if drawn_since(before):
                return None
    except Exception:
        return None
    return graphs


def _sees_grains(module: torch.nn.Module) -> bool:
    """Tell whether a norm has no running statistics, so that it takes those of the grain in evaluation, too."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return any(isinstance(inner, kind) and not inner.track_running_stats for inner in module.modules())


def _difference(one: Outcome, other: Outcome) -> str | None:
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
