"""Run all checks of one model, on one rank, or on all ranks of a communicator, and compare the ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ConfigError, DataError, ModelCheckError, MpizeroError
from mpizero.sharding import ShardingConfig
from mpizero.sharding.parameter_access import ShardedCore
from mpizero.train.modelcheck.batch_pieces import content, sample_count
from mpizero.train.modelcheck.checked_model import (
    CheckedBlocks,
    CheckedModel,
    LossAndGradients,
    Named,
    checked_model,
    in_pairs,
    origin_of,
)
from mpizero.train.modelcheck.gradient import check_gradient
from mpizero.train.modelcheck.model_report import ModelFinding, ModelReport, UnusableEvaluation
from mpizero.train.modelcheck.prediction import check_prediction
from mpizero.train.modelcheck.repeats import CheckBatch, check_again, check_layers, check_repeats
from mpizero.train.modelcheck.slopes import ParameterPoint, generic, scales_of, shaken
from mpizero.train.modelcheck.sums import check_sums
from mpizero.types import Array


def check_model(
    model: Any, x: Any, y: Any, *, comm: Any = None, parameters: Mapping[str, Array] | None = None, seed: int = 0
) -> ModelReport:
    """Check that a model fulfils what training relies on, and name everything that is wrong.

    Collective over ``comm``. The checks are, in this order:

    - values: the model returns loss, gradients and weight, with the right types, shapes and names;
    - repeats: it returns the same bits every time, whatever was evaluated before and wherever its arrays lie in memory,
      and does not change its arguments;
    - layers, of models of blocks: they overwrite the memory for gradients, and ``backward_input`` with
      ``backward_weights`` computes the same as ``backward``;
    - sums: loss, gradients and weight of a batch are the sums over its pieces;
    - gradient: the gradient of each parameter agrees with finite differences of the loss;
    - prediction: each sample's prediction does not depend on the other samples;
    - ranks: all ranks compute the same bits.

    A handful of samples is enough. The model is evaluated one to two hundred times, within two seconds if it is small.
    On a machine whose cache has no kernels yet, compiling those of a layer takes some seconds more, in both precisions.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model as the sharded models take it: a model of blocks, or a :class:`~mpizero.FunctionModel`.
    x, y : arrays, or nested tuples and mappings of them
        At least two samples, different from each other; the same on all ranks.
    comm : mpi4py communicator, Communicator or None
        The ranks that are compared, as in :class:`~mpizero.ShardingConfig`.
    parameters : mapping of str to array, or None
        Values to use in place of the model's start values. The model is evaluated at these values and close to them.
    seed : int
        Seed of the random directions along which parameters are changed.

    Returns
    -------
    ModelReport
        What was checked, as a report that can be printed; it is returned only if nothing is wrong.

    Raises
    ------
    ModelCheckError
        Raised on all ranks if something is wrong. It names everything that is wrong: which value, of which parameter,
        with numbers, the probable cause and a remedy.
    TypeError
        If ``model`` is not a model.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> report = mz.testing.check_model(mz.nn.MLP(2, [3], 2), np.eye(2), np.arange(2), comm="self")
    >>> print(report.passed[1])
    repeats: the same bits every time, in any memory
    """
    __tracebackhide__ = True  # pytest shows the message, not this function's long docstring
    with ShardingConfig(comm=comm) as config:
        report = _looked_at(model, CheckBatch(x, y, sample_count(x, y)), config.communicator, parameters, seed)
        if not report.right:  # raised before the communicator is freed: with the last one, the hooks would be gone
            raise _wrong(model, report)
    return report


def _wrong(model: Any, report: ModelReport) -> ModelCheckError:
    """Return the error that tells all findings."""
    member = "predict" if {f.check for f in report.findings} == {"prediction"} else "loss_and_grad"
    lines = "\n".join(f"- {line}" for line in report.told)
    return ModelCheckError(f"the model is wrong ({origin_of(model, member)})\n{lines}", report)


def examine(model: Any, x: Any, y: Any, *, comm: Any = None) -> ModelReport:
    """Run :func:`check_model`'s checks, and return the report even if the model is wrong. Collective over ``comm``."""
    with ShardingConfig(comm=comm) as config:
        return _looked_at(model, CheckBatch(x, y, sample_count(x, y)), config.communicator, None, 0)


def _looked_at(
    model: Any, batch: CheckBatch, comm: Communicator, parameters: Mapping[str, Array] | None, seed: int
) -> ModelReport:
    started = time.monotonic()
    with all_ranks(comm, "check_model"):
        if isinstance(model, ShardedCore):
            raise TypeError(f"check_model takes the model before it is sharded: {type(model).__name__}.wrapped_model")
        check = _Check(checked_model(model), batch, seed)
        check.run(parameters)
    findings = _beside_others(check, comm)
    seconds = time.monotonic() - started
    return ModelReport(findings, tuple(check.passed), tuple(check.notes), check.checked.evaluations, seconds)


class _Check:
    """Run the checks of one model on one rank, and collect findings, passed checks and notes."""

    def __init__(self, checked: CheckedModel, batch: CheckBatch, seed: int) -> None:
        self.checked, self.batch = checked, batch
        self.given = content((batch.x, batch.y))
        self.rng = np.random.default_rng(seed)
        self.findings: list[ModelFinding] = []
        self.passed: list[str] = []
        self.notes: list[str] = []
        self.evaluated: list[LossAndGradients] = []

    def run(self, parameters: Mapping[str, Array] | None) -> None:
        """Run all checks, with ``parameters`` in place of the start values unless it is None.

        Stop if the model returns values that cannot be used, because later checks would mean nothing.
        """
        try:
            self._run(parameters)
        except UnusableEvaluation as error:
            self.findings += error.findings

    def _run(self, parameters: Mapping[str, Array] | None) -> None:
        checked, batch = self.checked, self.batch
        start = self._start(parameters)
        begun = checked.evaluate(start, batch.x, batch.y)
        self.passed.append(f"values: loss {begun.loss:.6g}, weight {begun.weight:g}, {len(begun.gradients)} gradients")
        scales = scales_of(checked, start, begun)
        self.evaluated.append(begun)
        if self._repeated(check_again(checked, batch, start, begun)):
            return
        here, there = (self._near(start, scales) for _ in range(2))
        evaluation, findings = check_repeats(checked, batch, here, (there, start))
        if self._repeated(findings):
            return
        self.evaluated.append(evaluation)
        self.passed.append("repeats: the same bits every time, in any memory")
        if isinstance(checked, CheckedBlocks):
            if findings := check_layers(checked, batch, here):
                self.findings += findings
                return
            self.passed.append("layers: they overwrite their gradients, and their halves are the whole")
        self._sums(here)
        self._gradient([here, there], start, scales)
        self.findings += check_again(checked, batch, start, begun)
        findings, line = check_prediction(checked, batch, here)
        self.findings += findings
        (self.passed if line and not findings else self.notes).append(line or "prediction: the model has none")

    def _repeated(self, findings: list[ModelFinding]) -> bool:
        if findings:
            self.findings += findings
            self.notes.append("sums, gradient and prediction were not looked at: the model does not repeat itself")
        return bool(findings)

    def _start(self, parameters: Mapping[str, Array] | None) -> Named:
        start = self.checked.start()
        if parameters is None:
            return start
        if wrong := sorted(set(start) ^ set(parameters)):
            raise ConfigError(f"check_model: parameters= must have the model's names, {wrong[:8]} are not in both")
        values = {name: in_pairs(np.array(parameters[name])) for name in start}
        return {name: values[name].astype(value.dtype).reshape(value.shape) for name, value in start.items()}

    def _near(self, start: Named, scales: Mapping[str, float]) -> Named:
        """Return random parameters near ``start``; return ``start`` if the model cannot be evaluated at them."""
        there = generic(self.checked, start, scales, self.rng)
        try:
            self.checked.evaluate(there, self.batch.x, self.batch.y)
        except (UnusableEvaluation, ArithmeticError, ValueError):
            return start
        return there

    def _sums(self, here: Named) -> None:
        if self.batch.samples is None or self.batch.samples < 2:
            self.notes.append("sums were not looked at: give a batch of arrays with at least two samples")
            return

        if getattr(getattr(self.checked, "model", None), "random_by_grain", False):
            self.notes.append(
                "sums were not looked at: the model's random numbers depend on where a grain begins, and differ in "
                "other pieces of the batch"
            )
            return
        if self.checked.averaged:
            self.notes.append(
                f"sums were not looked at: {self.checked.averaged[0]!r} is averaged, so samples of a grain may see "
                "each other, and the grain's size is part of the mathematics"
            )
            return

        def noise() -> list[LossAndGradients]:
            return [self.checked.evaluate(shaken(here, self.rng), self.batch.x, self.batch.y) for _ in range(3)]

        findings, line = check_sums(self.checked, self.batch, here, self.evaluated[-1], noise)
        self.findings += findings
        if not findings:
            self.passed.append(line)

    def _gradient(self, places: list[Named], start: Named, scales: Mapping[str, float]) -> None:
        def points_of(checked: CheckedModel) -> Callable[[int], ParameterPoint]:
            @cache
            def point(number: int) -> ParameterPoint:
                at = places[number] if number < len(places) else self._near(start, scales)
                wide = {name: value.astype(checked.dtype) for name, value in at.items()}
                return ParameterPoint(checked, self.batch, wide, scales)

            return point

        own, wide = points_of(self.checked), self._wide(places[0])
        if wide is not None and own(0).shows_right(self.rng):
            findings, line, notes = check_gradient(points_of(wide), self.rng)
            self.checked.evaluations += wide.evaluations
        else:
            findings, line, notes = check_gradient(own, self.rng)
        self.findings += findings
        self.notes += notes
        if not findings:
            self.passed.append(line)

    def _wide(self, here: Named) -> CheckedBlocks | None:
        """Return the checked model in float64 if it is a float32 model of blocks; None for other models.

        Return None too if the loss still has only float32 precision, because layers compute in float32.
        """
        if not isinstance(self.checked, CheckedBlocks) or self.checked.dtype == np.float64:
            return None
        wide = self.checked.wide()
        try:
            evaluation = wide.evaluate({n: v.astype(np.float64) for n, v in here.items()}, self.batch.x, self.batch.y)
        except (UnusableEvaluation, MpizeroError, ValueError, TypeError, RuntimeError):  # PyTorch's for other types
            return None
        return None if float(np.float32(evaluation.loss)) == evaluation.loss else wide

    def digests(self) -> dict[tuple[int, str], str]:
        """Return a hash of every value that must be equal on all ranks, in the order of computing. Not collective.

        Keys are the number of the evaluation and the name of the value.
        """
        found = {}
        for number, evaluation in enumerate(self.evaluated):
            for name, value in evaluation.named():
                found[number, name] = hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return found


def _beside_others(check: _Check, comm: Communicator) -> tuple[ModelFinding, ...]:
    """Return the findings of all ranks, and one more if ranks computed different bits. Collective over ``comm``."""
    if comm.size == 1:
        check.notes.append("ranks: one only; under mpiexec -n 2 two are compared")
        return tuple(check.findings)
    everyone = comm.allgather_object((check.findings, check.digests(), _digest(check)), tag="check_model")
    found: list[ModelFinding] = []
    for findings, _, _ in everyone:
        known = {(finding.check, finding.what, finding.cause) for finding in found}
        found += [f for f in findings if (f.check, f.what, f.cause) not in known]  # numbers may differ
    for rank, (_, digests, given) in enumerate(everyone):
        if given != everyone[0][2]:
            raise DataError(f"check_model: rank {rank} was given other samples or parameters than rank 0")
        unlike = [what for what, digest in digests.items() if everyone[0][1].get(what, digest) != digest]
        if unlike:
            seen = f"rank {rank} computes other bits than rank 0 from the same parameters and samples"
            cause = "something that a process has of its own: its rank, hash seed, threads or random numbers"
            told = "compute everything from the arguments; sort what comes out of sets"
            found.append(ModelFinding("ranks", unlike[0][1], seen, cause, told))
            break
    else:
        check.passed.append(f"ranks: the same bits on all {comm.size}")
    return tuple(found)


def _digest(check: _Check) -> str:
    found = hashlib.sha256()
    for name, value in check.checked.start().items():
        found.update(name.encode() + value.tobytes())
    found.update(b"".join(check.given))
    return found.hexdigest()
