"""Save and load sharded models: every rank writes and reads its own ranges of the arrays of the whole model.

A checkpoint holds the arrays of the whole model, so a model with any layout can load it. The slices and copies of
parameters that a rank holds (``sharding/full_params.py``) are translated to ranges of these arrays.
:func:`local_arrays` and :func:`attributes` return what a checkpoint contains, :func:`restore` loads a checkpoint, and
:func:`load_chosen` loads chosen parameters from a file of any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero import checkpoint
from mpizero._util.names import as_patterns, nearest, selected
from mpizero._util.text import list_few, notice
from mpizero.checkpoint import LocalArray
from mpizero.checkpoint.format import short_name
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.errors import CheckpointError, ConfigError
from mpizero.layout.flat import by_global_name
from mpizero.optim import elementwise
from mpizero.sharding import saved_attributes
from mpizero.sharding.partition import blocks_of
from mpizero.sharding.saved_attributes import (
    ArrayPiece,
    ArrayReader,
    SavedArray,
    axis_record,
    check_layout,
    check_order,
    fill_arrays,
    grain_record,
    read_attribute,
    resume_grains,
    tile_record,
    warn_tiles,
)
from mpizero.types import Array, ParameterSpec

if TYPE_CHECKING:
    from mpizero.checkpoint.convert import ImportRules, ParameterFile
    from mpizero.sharding.engine import Engine


_REMEDY = "bind the same one, or load into a model without an optimizer to take the parameters alone"


def local_arrays(
    engine: Engine, *, parameters: bool = True, values: Array | None = None, fetch: bool = True
) -> list[checkpoint.LocalArray]:
    """Return every parameter and optimizer array of the whole model, with the ranges that this rank writes.

    Not collective.

    The ranges are views of this rank's memory. Optimizer state that is on a GPU is first copied to the host. With
    ``fetch=False`` the host memory for this copy is allocated, but not filled. ``parameters=False`` leaves out the
    parameters. If ``values`` is given, its elements are written instead of the parameters; it holds all parameters of
    this rank, one after the other, in the order of ``engine.layout``.
    """
    arrays = _parameter_arrays(engine, engine.global_view.writes, values) if parameters else []
    if parameters:
        coordinates = engine.grid.coordinates
        arrays += _integer_arrays(engine, filled=coordinates.data == coordinates.tensor == coordinates.context == 0)
    if engine.updater is not None:
        state = engine.updater.host_state(fetch=fetch)
        arrays += _state_arrays(engine, state, engine.global_view.writes, local_only=True)
    return [array.local() for array in arrays]


def _everything(spec: ParameterSpec) -> bool:
    """Return True for every parameter: a rank that loads reads all parameters that it holds, copies included."""
    return True


def parameter_arrays(engine: Engine) -> list[SavedArray]:
    """Return the arrays of all parameters of the model, with the ranges that this rank holds. Not collective."""
    return _parameter_arrays(engine, _everything) + _integer_arrays(engine, filled=True)


def _integer_arrays(engine: Engine, *, filled: bool) -> list[SavedArray]:
    """Return the integer arrays of the model; with ``filled``, those of this rank's stage have their values."""
    arrays = []
    for name, spec in by_global_name(engine.integers.specs).items():
        parameter, value = ParameterSpec(name, spec.shape, trainable=False), engine.integers.values.get(name)
        stored = spec.stored_dtype
        pieces = [] if value is None or not filled else [ArrayPiece(parameter, 0, value.reshape(-1).view(stored))]
        arrays.append(SavedArray(f"parameters/{name}", parameter, stored, pieces))
    return arrays


def _parameter_arrays(
    engine: Engine, wanted: Callable[[ParameterSpec], bool], values: Array | None = None
) -> list[SavedArray]:
    """Return the arrays of all parameters of the model, with this rank's ranges of those that ``wanted`` accepts.

    ``wanted`` tells for each parameter of this rank whether its pieces are included. The pieces are views of ``values``
    (see :func:`local_arrays`), or of the parameters if ``values`` is None.
    """
    arrays = _global_arrays("parameters", (entry.spec for entry in engine.global_view.layout.parameters), engine.dtype)
    for unit, span in zip(engine.layout.units, engine.store.shard.spans, strict=True):
        owned = engine.store.owned(unit.index) if values is None else values[span.start : span.stop]
        for entry, part in engine.layout.pieces(span):
            view = owned[part.start - span.start : part.stop - span.start]
            _add(arrays, ArrayPiece(entry.spec, part.start - entry.offset, view), wanted)
    return list(arrays.values())


def _state_arrays(
    engine: Engine, state: Mapping[str, Array], wanted: Callable[[ParameterSpec], bool], *, local_only: bool = False
) -> list[SavedArray]:
    """Return all arrays of the optimizer state, with this rank's ranges where ``wanted`` accepts the parameter.

    ``state`` is this rank's state by slot, such as "exp_avg". With ``local_only``, copies of state from the shards of
    other ranks are left out.
    """
    updater = engine.bound_updater
    specs = [elementwise.state_specs(updater.optimizer, entry.spec) for entry in engine.global_view.layout.parameters]
    result: list[SavedArray] = []
    for slot, values in state.items():
        arrays = _global_arrays(f"optimizer/{slot}", (of[slot] for of in specs if slot in of), engine.dtype)
        for piece in updater.state_pieces(slot, local_only=local_only):
            _add(arrays, ArrayPiece(piece.spec, piece.start, values[piece.state : piece.state + piece.size]), wanted)
        result += arrays.values()
    return result


def _global_arrays(folder: str, specs: Iterable[ParameterSpec], real: np.dtype[Any]) -> dict[str, SavedArray]:
    """Describe, by name, the whole array of each parameter in ``specs``; the ranges that a rank holds are added later.

    ``folder`` is the first part of the arrays' names in the checkpoint, such as ``parameters``.
    """
    return {spec.name: SavedArray(f"{folder}/{spec.name}", spec, real) for spec in specs}


def _add(arrays: Mapping[str, SavedArray], piece: ArrayPiece, wanted: Callable[[ParameterSpec], bool]) -> None:
    """Add a piece (range that this rank holds) to the description of its array, if ``wanted`` accepts its parameter."""
    if wanted(piece.spec):
        arrays[piece.spec.guest or piece.spec.name].pieces.append(piece)


def checkpoint_attributes(engine: Engine) -> dict[str, Any]:
    """Return the values to save beside the arrays, as the attributes of a checkpoint. Not collective."""
    rate = saved_attributes.learning_rate_record(engine.updater)
    return {"mpizero": attributes(engine), saved_attributes.LEARNING_RATE: rate}


def attributes(engine: Engine) -> dict[str, Any]:
    """Return the value of the checkpoint attribute ``mpizero``. Not collective.

    The value holds the optimizer's name, the names of its state arrays and its number of updates, the step number, the
    loss scale, the layout, how batches are cut into grains, numbers of tiles, and the name of each tied use of a
    parameter, with the name under which the parameter is saved.
    """
    updater = engine.updater
    return {
        "optimizer": None
        if updater is None
        else {
            "name": elementwise.optimizer_name(updater.optimizer),
            "slots": list(updater.state),
            "step_count": updater.step_count,
            **({} if updater.method is None else {"progress": updater.method.progress.saved()}),
        },
        "step_number": engine.step_number,
        "loss_scale": None
        if engine.loss_scale is None
        else {"scale": engine.loss_scale.scale, "good_steps": engine.loss_scale.good_steps},
        "layout": {
            "strategy": engine.placement.saved_as,
            "ranks": engine.grid.axes.size,
            "nodes": engine.global_view.nodes,
            **axis_record(engine.partitioned.parallel_layout),
        },
        "grains": grain_record(engine.grain_rule, engine.config.wire),
        **tile_record(engine.partitioned.parallel_layout),
        **({"tied": tied} if (tied := _other_names(engine.model)) else {}),
    }


def _other_names(model: Any) -> dict[str, str]:
    """Return the names of all tied uses of parameters, each with the name of the parameter."""
    specs = by_global_name(blocks_of(model))
    tied = {name: spec.tied for name, spec in specs.items() if spec.tied is not None}
    return tied | dict(getattr(model, "other_names", {}))


def restore(engine: Engine, reader: ArrayReader, *, strict_layout: bool = False) -> None:
    """Restore a model from an open checkpoint: all of it, or nothing (see :func:`fill_arrays`).

    Collective over the world.

    If an optimizer is bound and the checkpoint has optimizer state, this state is restored, too; otherwise only the
    parameters and the step number are.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, or belongs to another model or optimizer. With ``strict_layout`` also if it was
        saved with another strategy, or with other numbers of ranks, nodes, stages, or tensor, context or domain ranks.
    """
    with all_ranks(engine.grid.world, "restore"):
        saved = read_attribute(reader)
    with_state = engine.updater is not None and saved["optimizer"] is not None
    with all_ranks(engine.grid.world, "restore"):
        _check_model(engine, reader)
        if strict_layout:
            check_layout(attributes(engine)["layout"], saved.get("layout"))
        if engine.updater is not None:
            (_check_optimizer if with_state else _check_no_state)(engine, reader, saved)
        if with_state:
            check_order(saved["grains"])
            _warn_rates(engine, reader, saved)
            _warn_average(engine, saved)
    arrays, state = parameter_arrays(engine), dict[str, Array]()
    if with_state:
        state, state_arrays = _state_to_fill(engine, saved)
        arrays += state_arrays
    fill_arrays(engine, reader, arrays)
    _forget_residuals(engine)
    engine.store.all_gather()  # before an average begins, of parameters that other nodes own as well
    _take_state(engine, state, saved, reader) if with_state else engine.begin_copies()
    engine.step_number = saved["step_number"]


def restore_state(engine: Engine, reader: ArrayReader) -> None:
    """Restore only the optimizer state from an open checkpoint: all of it, or nothing.

    Collective over the world.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, has no optimizer state or the state of another optimizer, or if no optimizer is
        bound.
    """
    with all_ranks(engine.grid.world, "restore"):
        saved = read_attribute(reader)
        _check_optimizer(engine, reader, saved)
        check_order(saved["grains"])
        _warn_rates(engine, reader, saved)
        _warn_average(engine, saved)
    state, state_arrays = _state_to_fill(engine, saved)
    fill_arrays(engine, reader, state_arrays)
    _forget_residuals(engine)
    _take_state(engine, state, saved, reader)


def _forget_residuals(engine: Engine) -> None:
    """Drop the residuals of gradient compression; rank 0 prints a notice if the compression has error feedback.

    Checkpoints do not contain residuals.
    """
    if engine.exchange.feedback and engine.prints_notices:
        notice(
            f"checkpoints do not hold what gradient_compression={engine.exchange.compression!r} has not sent "
            "yet: training goes on without it, and not with the bits of a run that was never interrupted"
        )
    engine.exchange.forget()


def _check_optimizer(engine: Engine, reader: ArrayReader, saved: Mapping[str, Any]) -> None:
    updater, optimizer = engine.updater, saved.get("optimizer")
    if updater is None or optimizer is None:
        which = "model has no bound optimizer" if updater is None else "checkpoint has none"
        raise CheckpointError(f"no optimizer state to restore: the {which}")
    name = elementwise.optimizer_name(updater.optimizer)
    if optimizer["name"] != name:
        raise CheckpointError(
            f"the checkpoint holds the state of {optimizer['name']:.80}, the bound optimizer is {name}: {_REMEDY}"
        )
    if ("progress" in optimizer) != (updater.method is not None):
        raise CheckpointError(f"the checkpoint's attribute mpizero.optimizer does not tell the progress of {name}")
    expected, slots = set(updater.state) - {elementwise.EMA}, set(optimizer["slots"]) - {elementwise.EMA}
    stored = {path.split("/")[1] for path in _state_paths(reader)} - {elementwise.EMA} | slots
    if other := sorted((stored - expected) | (expected - slots)):
        has, lacks = ("lacks", "has") if other[0] in expected else ("has", "lacks")
        raise CheckpointError(
            f"the checkpoint's state of {name} {has} {other[0]!r:.80}, which the bound optimizer {lacks} "
            f"(its own: {', '.join(updater.state) or 'none'}): {_REMEDY}"
        )
    if updater.optimizer.needs_whole_tensors:
        _check_tensors(engine, reader, name)


def _check_tensors(engine: Engine, reader: ArrayReader, name: str) -> None:
    """Raise ``CheckpointError`` if the model's matrix optimizer has other state arrays than the checkpoint's."""
    for entry in engine.global_view.layout.parameters:
        for slot, spec in elementwise.state_specs(engine.bound_updater.optimizer, entry.spec).items():
            path = f"optimizer/{slot}/{spec.name}"
            stored = reader.arrays.get(path)
            if slot != elementwise.EMA and (stored is None or tuple(stored[0]) != spec.shape):
                has = f"lacks {path}" if stored is None else f"has {path} of shape {tuple(stored[0])}"
                raise CheckpointError(
                    f"the checkpoint {has}, the bound {name} has that array of shape {spec.shape}: the saved one took "
                    f"other tensors as whole, or had other settings (exclude, for instance): {_REMEDY}"
                )


def _check_no_state(engine: Engine, reader: ArrayReader, saved: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if a checkpoint that names no optimizer has optimizer state, which would be ignored."""
    if paths := _state_paths(reader):
        raise CheckpointError(
            f"the checkpoint holds {paths[0]} and {len(paths) - 1} more arrays of optimizer state, and its attribute "
            f"mpizero.optimizer, which says of what optimizer, is missing: {_REMEDY}"
        )


def _state_paths(reader: ArrayReader) -> list[str]:
    return [path for path in reader.arrays if path.startswith("optimizer/")]


def _warn_rates(engine: Engine, reader: ArrayReader, saved: Mapping[str, Any]) -> None:
    """Print a notice on rank 0 if learning rate or schedule of the bound optimizer differ from the checkpoint's."""
    change = saved_attributes.learning_rate_change(
        engine.bound_updater, reader.attributes, saved["optimizer"]["step_count"]
    )
    if change is not None and engine.prints_notices:
        notice(f"{change}: training goes on with the bound one")


def _take_state(engine: Engine, state: Mapping[str, Array], saved: Mapping[str, Any], reader: ArrayReader) -> None:
    """Set the optimizer's state, step count and last learning rate, and the loss scale, to those of the checkpoint.

    ``state`` is the optimizer state by slot, already read; ``saved`` is the attribute that :func:`read_attribute`
    returns.
    """
    updater = engine.bound_updater
    if _begins_average(engine, saved):
        updater.begin_copies(state)
    updater.take_state(state)
    if updater.method is not None:
        updater.method.restore(saved["optimizer"]["progress"])
    engine.integrity.forget()
    updater.step_count = saved["optimizer"]["step_count"]
    updater.last_rate = saved_attributes.last_learning_rate(reader.attributes)
    resume_grains(engine, saved["grains"])
    warn_tiles(engine, saved)
    if saved.get("loss_scale") is not None and engine.loss_scale is not None:
        engine.loss_scale = replace(engine.loss_scale, **saved["loss_scale"])


def _state_to_fill(engine: Engine, saved: Mapping[str, Any]) -> tuple[dict[str, Array], list[SavedArray]]:
    """Return memory for this rank's optimizer state by slot, and the checkpoint's arrays to be read into that memory.

    The arrays include those that another rank has saved for all, because their state is replicated.
    The parameters' moving average is left out if the checkpoint has none.
    """
    state = engine.bound_updater.host_state(fetch=False)
    read = {slot: data for slot, data in state.items() if slot != elementwise.EMA or not _begins_average(engine, saved)}
    return state, _state_arrays(engine, read, _everything)


def _begins_average(engine: Engine, saved: Mapping[str, Any]) -> bool:
    """Tell whether the model keeps a moving average, which begins anew because the checkpoint has none."""
    return engine.bound_updater.averages_parameters and elementwise.EMA not in saved["optimizer"]["slots"]


def _warn_average(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Print a notice on rank 0 if the parameters' average begins anew, or the checkpoint's is not read."""
    if not engine.prints_notices:
        return
    if _begins_average(engine, saved):
        notice("the checkpoint holds no average of the parameters (ema): it begins with the parameters that are loaded")
    elif elementwise.EMA in saved["optimizer"]["slots"] and not engine.bound_updater.averages_parameters:
        notice(
            "the checkpoint holds an average of the parameters, which is not read: ShardingConfig(ema=...) would go on "
            "with it"
        )


def copy_state(source: Engine, target: Engine) -> None:
    """Copy optimizer, optimizer state, loss scale and step number to another engine of the same layout and grid.

    The residuals of gradient compression are copied too. Collective over the world.
    """
    if source.updater is not None:
        target.bind(source.updater.optimizer)
        updater = target.bound_updater
        state = updater.host_state(fetch=False)
        for slot, values in source.updater.host_state().items():
            state[slot][:] = values
        updater.take_state(state)
        if updater.method is not None and source.updater.method is not None:
            updater.method.progress = deepcopy(source.updater.method.progress)
        updater.step_count, updater.last_rate = source.updater.step_count, source.updater.last_rate
        target.integrity.forget()
    target.loss_scale, target.step_number = source.loss_scale, source.step_number
    target.grain_rule = source.grain_rule
    target.exchange.copy_from(source.exchange)


def _check_model(engine: Engine, reader: ArrayReader) -> None:
    prefix = "parameters/"
    stored = {path[len(prefix) :]: shape for path, (shape, _) in reader.arrays.items() if path.startswith(prefix)}
    integers = by_global_name(engine.integers.specs)
    wanted = {e.spec.name: e.spec.shape for e in engine.global_view.layout.parameters}
    wanted |= {name: spec.shape for name, spec in integers.items()}
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    different = [n for n in wanted if n in stored and tuple(stored[n]) != wanted[n]]
    if missing or extra or different:
        problems = []
        if missing:
            problems.append(f"missing {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}")
        if extra:
            problems.append(f"unknown {', '.join(extra[:3])}{' ...' if len(extra) > 3 else ''}")
        if different:
            name = different[0]
            problems.append(f"{name} has shape {tuple(stored[name])}, the model's has {wanted[name]}")
        raise CheckpointError(f"the checkpoint belongs to another model: {'; '.join(problems)}")
    types = {prefix + e.spec.name: e.spec.element_type(engine.dtype) for e in engine.global_view.layout.parameters}
    types |= {prefix + name: spec.stored_dtype for name, spec in integers.items()}
    for path, expected in types.items():
        if (dtype := np.dtype(reader.arrays[path][1])) != expected:
            raise CheckpointError(f"{path} is {dtype}, the model's parameter is {expected}")


@dataclass(frozen=True)
class LoadReport:
    """Say which parameters of a model were loaded from a file, and which were not.

    Attributes
    ----------
    path : str
        The file.
    taken : tuple of str
        Parameters that were loaded.
    left : tuple of str
        Parameters of the model that the patterns do not choose.
    missing : tuple of str
        Chosen parameters that the file does not have.
    different : mapping of str to str
        Chosen parameters that have another shape or type in the file, and how they differ.
    unused : tuple of str
        Parameters of the file, by their names there, that the model does not have.
    """

    path: str
    taken: tuple[str, ...]
    left: tuple[str, ...]
    missing: tuple[str, ...]
    different: Mapping[str, str]
    unused: tuple[str, ...]

    @property
    def is_incomplete(self) -> bool:
        """True if a parameter of the model was not loaded; rank 0 then prints this report."""
        return bool(self.left or self.missing or self.different)

    def __str__(self) -> str:
        """Return one line that lists the parameters of each kind."""
        count = len(self.taken) + len(self.left) + len(self.missing) + len(self.different)
        lines = [f"{len(self.taken)} of {count} parameters loaded from {self.path}"]
        for what, names in (("left as they were", self.left), ("not in the file", self.missing)):
            lines += [f"{what}: {list_few(names)}"] if names else []
        if self.different:
            lines.append(f"different: {list_few([f'{name} ({how})' for name, how in self.different.items()])}")
        lines += [f"in the file only: {list_few(self.unused)}"] if self.unused else []
        return "; ".join(lines)


@dataclass(frozen=True)
class Choice:
    """Hold the arguments of ``load_parameters`` that choose parameters; :meth:`of` checks them.

    Attributes
    ----------
    include, exclude : tuple of str
        Shell patterns of the model's parameters that are loaded (none: all), and of those that are not.
    rules : ImportRules
        Rules that map names in the file to names in the model.
    strict : bool
        Whether a chosen parameter that cannot be loaded is an error, and without patterns also one that is in the file
        only.
    """

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    rules: ImportRules
    strict: bool

    @classmethod
    def of(cls, include: Any, exclude: Any, rename: Any, strict: bool | None) -> Choice:
        """Check the arguments of ``load_parameters``, and return them as a choice."""
        inside, outside = as_patterns("include", include), as_patterns("exclude", exclude)
        if rename is not None and not isinstance(rename, Mapping):
            raise ConfigError(
                f"rename={rename!r:.80}: expected names in the file and their names in the model, such as "
                '{"backbone.*": "encoder.*"}'
            )
        from mpizero.checkpoint.convert import ImportRules

        rules = ImportRules(names=tuple((str(old), str(new)) for old, new in (rename or {}).items()))
        return cls(inside, outside, rules, not (inside or outside) if strict is None else bool(strict))

    def report(self, specs: Mapping[str, tuple[tuple[int, ...], str]], file: ParameterFile) -> tuple[LoadReport, Any]:
        """Compare the model's parameters with those of ``file``; return the report, and the file's names by model name.

        ``specs`` has shape and element type of the model's parameters by name. Not collective.
        """
        names = list(specs)
        inside = selected(names, "include", self.include) if self.include else names
        outside = set(selected(names, "exclude", self.exclude))
        chosen = [name for name in inside if name not in outside]
        if not chosen:
            raise ConfigError("load_parameters: exclude leaves nothing of what include chooses")
        origin = self._origin(file)
        taken, missing, different = [], [], {}
        for name in chosen:
            if name not in origin:
                missing.append(name)
            elif how := _difference(specs[name], file.arrays[origin[name]]):
                different[name] = how
            else:
                taken.append(name)
        picked = set(chosen)
        left = tuple(name for name in names if name not in picked)
        unused = tuple(there for name, there in origin.items() if name not in specs)
        report = LoadReport(file.path, tuple(taken), left, tuple(missing), different, unused)
        self._check(report, names)
        return report, origin

    def _origin(self, file: ParameterFile) -> dict[str, str]:
        """Return the name of each parameter in the file, by the parameter's name in the model."""
        origin: dict[str, str] = {}
        for old, _ in self.rules.names:
            selected(list(file.arrays), "rename", [old], f"parameter of {file.path}")
        for name in file.arrays:
            new = short_name(self.rules.path(name))
            if new in origin:
                raise ConfigError(f"rename: {origin[new]!r} and {name!r} of {file.path} both become {new!r}")
            origin[new] = name
        return origin

    def _check(self, report: LoadReport, names: Sequence[str]) -> None:
        unexpected = () if self.include or self.exclude else report.unused
        if report.taken and not (self.strict and (report.missing or report.different or unexpected)):
            return
        problems = [f"missing {list_few(report.missing)}"] if report.missing else []
        problems += [f"different {name}: {how}" for name, how in list(report.different.items())[:5]]
        problems += [f"only in the file {list_few(report.unused)}"] if report.unused else []
        hint = nearest(report.unused[0], report.missing or names) if report.unused else ""
        if not report.taken and PurePath(report.path).suffix in (".pt", ".pth", ".ckpt", ".bin"):
            raise CheckpointError(
                f"{report.path} is a file of torch.save: load it into the module before TorchModel takes it, by "
                "module.load_state_dict(torch.load(path), strict=False) if the head is another, or give all parameters "
                "to the model, model.load_named(torch.load(path))"
            )
        summary = "holds none of the chosen parameters" if not report.taken else "holds other parameters than the model"
        raise CheckpointError(
            f"{report.path} {summary}: {'; '.join(problems)}{hint}; choose with include=[...], or map names with "
            'rename={"old.*": "new.*"}'
        )


def _difference(wanted: tuple[tuple[int, ...], str], actual: tuple[tuple[int, ...], str | None]) -> str:
    """Describe how shape and type of a parameter in the file differ from the model's; "" if it can be loaded."""
    (shape, element), (there, stored) = wanted, actual
    if tuple(there) != tuple(shape):
        turned = ", transposed" if tuple(there) == tuple(shape)[::-1] else ""
        return f"shape {list(there)} in the file, {list(shape)} in the model{turned}"
    from mpizero.checkpoint.convert import loadable

    return "" if loadable(stored, element) else f"{stored or 'an unknown type'} in the file, {element} in the model"


@dataclass
class _Renamed:
    """Read arrays of a model from a file in which the arrays have other names."""

    file: ParameterFile
    origin: Mapping[str, str]
    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    attributes: dict[str, Any]

    def read(self, requests: list[LocalArray]) -> None:
        """Read the ranges of arrays that ``requests`` list, by the arrays' names in the model, into their memory.

        Collective.
        """
        self.file.read([replace(request, path=self.origin[short_name(request.path)]) for request in requests])


def load_chosen(engine: Engine, path: Any, choice: Choice) -> LoadReport:
    """Load the chosen parameters, or change nothing and raise on every rank; return what was loaded.

    Collective over the world. Optimizer state and step numbers stay as they are.
    """
    from mpizero.checkpoint.convert import open_parameters  # which other loads do not need

    world = engine.grid.world
    agree_equal(world, lambda: {"the arguments of load_parameters": choice}, "load parameters")
    arrays = parameter_arrays(engine)
    specs = {array.spec.name: (array.spec.shape, array.dtype.name) for array in arrays}
    with open_parameters(path, world) as file:
        reports: list[tuple[LoadReport, Any]] = []
        with all_ranks(world, "load parameters"):
            reports.append(choice.report(specs, file))
        report, origin = reports[0]
        taken = set(report.taken)
        chosen = [array for array in arrays if array.spec.name in taken]
        table = {array.path: (array.shape, array.dtype) for array in chosen}
        fill_arrays(engine, _Renamed(file, origin, table, {}), chosen)
    engine.store.all_gather()
    engine.begin_copies()
    return report
