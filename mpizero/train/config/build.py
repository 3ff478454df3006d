"""Build the objects of a run from its configuration: data, model, optimizer, sharding.

:func:`build_source` opens the data, :func:`build_model` makes the model, and :func:`build` shards the model and its
optimizer over the ranks, and yields all objects as a :class:`~mpizero.train.setup.RunSetup`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero import data, nn
from mpizero._util.checks import whole
from mpizero._util.pytree import SampleTree
from mpizero._util.settings import rejected, shown
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_equal, all_ranks, from_rank_0
from mpizero.data import ArraySource, Source
from mpizero.data.batches import choose_grains
from mpizero.errors import ConfigError, DataError, MpizeroError
from mpizero.layout import Grains
from mpizero.layout.flat import FlatLayout
from mpizero.nn.models import unfrozen
from mpizero.nn.unet import FieldModel
from mpizero.sharding import Config, Mesh, Model, distribute
from mpizero.sharding.config import ComputeSettings
from mpizero.sharding.partition import blocks_of, check_model
from mpizero.train.config.schema import RunConfig
from mpizero.train.config.sections import (
    ArrayModelSection,
    DataSection,
    FieldModelSection,
    GptSection,
    MadeDataSection,
    MadeModelSection,
    ModelSection,
    UNetSection,
    source_arguments,
)
from mpizero.train.data_identity import data_fingerprint, shared_contents
from mpizero.train.setup import COMMAND, RunRecord, RunSetup

if TYPE_CHECKING:
    from mpizero.train.config.toml import UserFunction

#: The tasks of models; the task decides which metrics a validation reports.
TASKS = ("language", "classification", "regression")
_TWO_SETS = '{"training": (x, y), "validation": (x, y)}'


def user_functions(config: RunConfig) -> dict[str, UserFunction]:
    """Return the user's functions that ``model.make`` and ``data.make`` name, by the keys "model" and "data".

    Not collective.
    """
    from mpizero.train.config.toml import UserFunction  # the trainer of a program needs no TOML

    sections = {"model": config.model, "data": config.data}
    return {
        name: UserFunction(name, section.make, Path(config.folder))
        for name, section in sections.items()
        if isinstance(section, MadeModelSection | MadeDataSection)
    }


def users_modules(config: RunConfig) -> AbstractContextManager[None]:
    """Return a context manager in which the user's functions can import modules from the folders of their files.

    Not collective.
    """
    from mpizero.train.config.toml import importable

    return importable(*user_functions(config).values())


def build_source(config: RunConfig) -> tuple[Any, Any]:
    """Open the data; return the samples for training and the samples held back for validation.

    Not collective.

    Raises
    ------
    DataError
        If data are missing, empty, or too short; the message names the file.
    SettingError
        If the user's function that makes the data fails, or does not return data.
    """
    section = config.data
    if isinstance(section, MadeDataSection):
        return _made_source(section, config)
    parts: tuple[Any, Any] = _open(section, config).split(section.validation)
    return parts


def _made_source(section: MadeDataSection, config: RunConfig) -> tuple[Source, Source]:
    function = user_functions(config)["data"]
    made = function.call(section.arguments, {"seed": lambda: config.train.seed})
    training, validation = _parts_of(made, function)
    if validation is None:
        return training.split(section.validation)
    if section.validation is not None:
        raise rejected("data.validation", section.validation, f"must be left out: {section.make} makes these samples")
    return training, validation


def _parts_of(made: Any, function: UserFunction) -> tuple[Source, Source | None]:
    """Convert the return value of a user's function to sources for training and validation; the latter may be None."""
    if isinstance(made, Mapping) and set(made) == {"training", "validation"}:
        return _source_of(made["training"], function), _source_of(made["validation"], function)
    if isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(part, Source) for part in made):
        return made[0], made[1]
    return _source_of(made, function), None


def _source_of(made: Any, function: UserFunction) -> Source:
    if isinstance(made, Source):
        return made
    wanted = f"must return arrays (x, y), a mpizero.data.Source, or for two sets of samples two sources or {_TWO_SETS}"
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise function.reject(f"{wanted}; {returned(made)}")
    if any(isinstance(part, type(None) | Source | str) for part in made):
        raise function.reject(f"{wanted}; it returned a pair of {' and '.join(type(p).__name__ for p in made)}")
    try:
        return ArraySource(*made)
    except MpizeroError as error:
        both = all(isinstance(part, tuple | list) for part in made)
        hint = f"; for two sets of samples return {_TWO_SETS}" if both else ""
        raise DataError(
            f"{function.key} = {shown(function.make)}: it returned samples that do not fit: {error}{hint}"
        ) from None


def returned(made: Any) -> str:
    """Describe, for an error message, the object ``made`` that a user's function has returned. Not collective."""
    if made is None:
        return "it returned None: does it end with return?"
    if isinstance(made, tuple | list | Mapping):
        return f"it returned a {type(made).__name__} of {len(made)}"
    kind = f"the class {made.__name__}: call it" if isinstance(made, type) else f"a {type(made).__name__}"
    return f"it returned {kind}"


def with_batch(config: RunConfig, source: Any) -> RunConfig:
    """Return the configuration; for a full-batch method, set its global batch to the number of samples of ``source``.

    Not collective.

    Raises
    ------
    SettingError
        If ``train.global_batch`` is larger than the number of training samples; for a full-batch method, if it differs
        from that number, or if ``train.prefetch`` is set.
    """
    if config.optimizer.kind.needs_vectors:
        train = config.train.of_all(len(source), f'optimizer.name = "{config.optimizer.name}"')
        return replace(config, train=train)
    if len(source) < config.train.global_batch:
        raise rejected(
            "train.global_batch",
            config.train.global_batch,
            f"must be at most the number of training samples, which is {len(source)}",
        )
    return config


def _open(section: DataSection, config: RunConfig) -> Any:
    if section.text is not None:
        paths = "stdlib" if section.text == ("stdlib",) else list(section.text)
        return data.TextSource(paths, sequence=_sequence(config))
    for kind, source in (("hdf5", data.Hdf5Source), ("zarr", data.ZarrSource), ("netcdf", data.NetcdfSource)):
        if (table := getattr(section, kind)) is not None:
            return source(**source_arguments(table))
    if section.arrays == "digits":
        return data.digits()
    return data.NpySource(section.arrays["x"], section.arrays["y"])


def _sequence(config: RunConfig) -> int:
    """Return the length of the sequences into which ``data.text`` is cut."""
    section = config.model
    length = section.arguments.get("sequence") if isinstance(section, MadeModelSection) else section.split_sizes[1]
    try:
        return int(whole(1)(length))
    except ValueError as error:
        problem = f"must be given with data.text, the length of a sample, {error}"
        raise rejected("model.sequence", length, problem) from None


def build_model(config: RunConfig, *sources: Any) -> Any:
    """Build the model; the numbers of inputs and outputs of an MLP or a model of fields are taken from the data.

    Not collective. ``sources`` are the samples for training and for validation. If their numbers of classes differ, a
    classifier gets outputs for the larger one. If a user's function has a parameter ``source``, it gets the training
    samples, which are opened if ``sources`` is empty.

    Raises
    ------
    SettingError
        If the user's function that makes the model fails, or does not return a model.
    """
    section = config.model
    if isinstance(section, MadeModelSection):
        return _frozen(section, _made_model(section, config, sources))
    return make_model(config, _widths(section, sources) if isinstance(section, ArrayModelSection) else None)


def _frozen(section: ModelSection, model: Any) -> Any:
    """Return the model; the parameters that ``model.freeze`` names are not trained in it."""
    if section.freeze is None:
        return model
    try:
        return nn.freeze(model, section.freeze)
    except ConfigError as error:
        raise section.reject("freeze", str(error).removeprefix("freeze: ")) from None


def _made_model(section: MadeModelSection, config: RunConfig, sources: Sequence[Any]) -> Any:
    function = user_functions(config)["model"]
    offered = {"seed": lambda: config.train.seed, "source": lambda: sources[0] if sources else build_source(config)[0]}
    model = function.call(section.arguments, offered)
    if model is None:
        raise function.reject(f"must return a model; {returned(model)}")
    if isinstance(model, Model):
        raise function.reject(f"must return the model alone, not a {model._name}: [parallel] says how it is sharded")
    try:
        check_model(model)
    except MpizeroError as error:
        raise function.reject(f"must return a model; {error}") from None
    section.check_layout(config.parallel, model)
    return model


def make_model(config: RunConfig, widths: Sequence[int] | None) -> Any:
    """Build the model of the library that ``model.name`` names.

    Not collective. ``widths`` is, for an MLP, (features, outputs); for a model of fields (input channels, output
    channels, extents of space); None for a GPT.

    Raises
    ------
    DataError
        If ``widths`` has more or fewer numbers than the model takes.
    """
    section = config.model
    arguments = section.values("name", *(item.name for item in fields(ModelSection))) | {"seed": config.train.seed}
    if isinstance(section, GptSection):
        return _frozen(section, nn.GPT(**arguments))
    inputs, outputs, *space = widths if isinstance(widths, list | tuple) and len(widths) > 1 else (0, 0, 0, 0, 0, 0)
    if isinstance(section, FieldModelSection):
        if not 1 <= len(space) <= 3:
            raise DataError(f"a {section.name} takes numbers of channels, and extents, from its data, got {widths!r}")
        for name, value in arguments.items():
            if isinstance(value, tuple) and len(value) != len(space):
                raise section.reject(name, f"must be one for all axes of space, or one for each of {len(space)}")
        config.parallel.check_space(f"model.name = {shown(section.name)}", len(space))
        kind = nn.UNet if isinstance(section, UNetSection) else nn.FNO
        return _frozen(section, kind(inputs, outputs, len(space), space=tuple(space), **arguments))
    if space:
        raise DataError(f"an mlp takes features and outputs from its data, got {widths!r}")
    return _frozen(section, nn.MLP(inputs, arguments.pop("hidden"), outputs, **arguments))


def model_and_sample(config: RunConfig) -> tuple[RunConfig, Any, Any, Any]:
    """Return the configuration from :func:`with_batch`, the model, and a batch of one sample: inputs and targets.

    Not collective. The data are opened, except for a GPT that is trained by a stochastic optimizer.
    """
    section = config.model
    if isinstance(section, GptSection) and not config.optimizer.kind.needs_vectors:
        sample = np.zeros((1, section.sequence), np.int64)
        return config, build_model(config), sample, sample
    source, validation = build_source(config)
    config = with_batch(config, source)
    return config, build_model(config, source, validation), *source.samples(np.arange(1))


def task_of(model: Any) -> str:
    """Return the model's attribute ``task``: "language", "classification" or "regression"; "" if it has none.

    Not collective. Validation reports perplexity for a language model. It reports accuracy for a classifier, and for a
    model without a task whose predictions are scores of classes.
    """
    task = getattr(model, "task", "")
    return task if task in TASKS else ""


def units_per_sample(task: str, source: Source) -> int:
    """Return the number of tokens in a sample for the task "language"; 1 for other tasks. Not collective."""
    if task != "language":
        return 1
    first = next(SampleTree.of(x=source.samples(np.arange(1))[0]).named)[1]
    return int(first.size)


def _widths_of(model: Any) -> tuple[int, ...] | None:
    """Return the argument ``widths`` with which :func:`make_model` makes ``model``; None for other models.

    Not collective. Only an MLP and a model of fields are made with ``widths``.
    """
    if isinstance(unfrozen(model), FieldModel) and model.space is not None:
        return model.inputs, model.outputs, *model.space
    return (model.features, model.outputs) if isinstance(unfrozen(model), nn.MLP) else None


def _widths(section: ArrayModelSection, sources: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers of inputs and outputs that an MLP or a model of fields needs, and the extents of fields.

    Outputs are scores of classes, logits (loss "bce"), predicted values, or two for each value (loss "gaussian").
    """
    x, y = sources[0].samples(np.arange(1))
    fits, takes, leading = x.ndim == 2, "an mlp takes samples of one axis (samples, features)", "samples"
    if isinstance(section, FieldModelSection):
        fits = 3 <= x.ndim <= 5
        takes = f"a {section.name} takes fields (samples, one to three axes of space, channels)"
        leading = f"samples, {', '.join(map(str, x.shape[1:-1]))}"
    if not fits:
        raise DataError(f"{takes}, the data have shape {x.shape[1:]} each")
    found = f"the data's are {y.dtype} of shape (samples, {', '.join(map(str, y.shape[1:]))})"
    one, several = y.shape == x.shape[:-1], y.shape[:-1] == x.shape[:-1]
    if section.task == "regression":
        if not several:
            raise DataError(f'task = "regression" takes targets ({leading}, outputs), {found}')
        outputs = y.shape[-1] * (2 if section.loss == "gaussian" else 1)
    elif section.loss == "bce":
        if not one and not several:
            raise DataError(f'loss = "bce" takes targets ({leading}) or ({leading}, outputs), {found}')
        outputs = y.shape[-1] if several else 1
    else:
        if not one or not np.issubdtype(y.dtype, np.integer):
            raise DataError(f'task = "classification" takes whole numbers ({leading}) as targets, {found}')
        outputs = max(map(classes, sources))
    return x.shape[-1], outputs, *x.shape[1:-1]


def classes(source: Any) -> int:
    """Return the number of classes of a source: one more than its largest target.

    Not collective.

    Raises
    ------
    DataError
        If a target is negative.
    """
    largest = -1
    for start in range(0, len(source), 4096):
        _, y = source.samples(np.arange(start, min(start + 4096, len(source))))
        if y.min() < 0:
            raise DataError(
                f"classes are numbered from 0; sample {start + int(y.argmin()) * len(y) // y.size} has {int(y.min())}"
            )
        largest = max(largest, int(y.max()))
    return largest + 1


@contextmanager
def build(config: RunConfig, comm: Communicator, *, overridden: tuple[str, ...] = ()) -> Iterator[RunSetup]:
    """Build the objects of a run, yield them as a :class:`RunSetup`, and free them after the ``with`` block.

    Collective over ``comm``. ``overridden`` has the keys of settings that may differ from those of a resumed run.
    """
    with users_modules(config):
        with all_ranks(comm):
            source, validation = build_source(config)
            config = with_batch(config, source)
            wrapped = build_model(config, source, validation)
            optimizer = build_optimizer(config)
            _check_bounds(config, optimizer, wrapped)
            fingerprint = data_fingerprint(source)
            validation_fingerprint = data_fingerprint(validation) if len(validation) else ""
            task = task_of(wrapped)
            units = units_per_sample(task, source)
            code = {k: v for function in user_functions(config).values() for k, v in function.files().items()}
        agree_equal(
            comm,
            lambda: {"the training data": fingerprint[:16], "the validation data": validation_fingerprint[:16]},
            "agree data",
        )
        contents = shared_contents(comm, source, validation)
        mesh = build_mesh(config, comm)
        with distribute(
            wrapped, optimizer, config.parallel.strategy, mesh=mesh, config=build_settings(config)
        ) as model:
            with all_ranks(comm):
                choose_grains(model, source, config.train.global_batch)
            model.reserve(config.train.global_batch)
            settings = config.to_dict()
            record = RunRecord(
                settings=settings,
                about={"config": settings, "widths": _widths_of(model.wrapped_model), "folder": config.folder},
                fingerprint=fingerprint,
                validation_fingerprint=validation_fingerprint,
                contents=contents,
                code=code,
                task=task,
                units_per_sample=units,
                description=_described(config, model, source, validation),
                wording=COMMAND,
                overridden=overridden,
            )
            yield RunSetup(
                model=model,
                source=source,
                validation=validation,
                loop=config.train,
                checkpoints=config.checkpoint,
                record=record,
                begin=None if config.model.start is None else lambda: _load_start(config.model, model),
            )
        mesh.close()


def _described(config: RunConfig, model: Model, source: Any, validation: Any) -> str:
    """Describe a run in one line: model, layout, numbers of samples, grains. Not collective."""
    train, parallel, size = config.train, config.parallel, model.batch_group.size
    grains = Grains(train.global_batch, model.grain_size(train.global_batch))
    who = "replicas" if parallel.splits_model else "ranks"
    count = grains.count
    idle = f"; {who} {count} to {size - 1} have no grain and only help" if size > count else ""
    return (
        f"{config.model.described} with {model.parameter_count:,} parameters, "
        f"{parallel.describe(model.world_size)}{model._engine.exactness_suffix}; "
        f"{len(source):,} training and {len(validation):,} validation samples; "
        f"{train.global_batch} a step in {grains.described(train.accumulate)}{idle}"
        f"{model._engine.compute_device.describe()}"
    )


def _load_start(section: ModelSection, model: Model) -> str:
    """Load start values from the file that ``model.start`` names; return a message about the loaded parameters.

    Collective over the ranks that train. The message is "" if parameters were left out, because ``load_parameters`` has
    printed it then.
    """
    from mpizero.checkpoint.inspect import find_checkpoint

    start = Path(section.start or "")
    path = from_rank_0(
        model.mesh.communicator, lambda: find_checkpoint(start) if start.is_dir() else start, "start values"
    )
    chosen = {name: getattr(section, f"start_{name}") for name in ("include", "exclude", "rename")}
    report = model.load_parameters(str(path), **chosen)
    return "" if report.is_incomplete else str(report)


def _check_bounds(config: RunConfig, optimizer: Any, model: Any) -> None:
    """Raise SettingError if a key of ``optimizer.bounds`` matches no parameter of the model. Not collective."""
    if config.optimizer.name != "l-bfgs":
        return
    try:
        optimizer.check_names([entry.spec.name for entry in FlatLayout.build(blocks_of(model)).parameters])
    except ConfigError as error:
        raise config.optimizer.reject("bounds", str(error).partition("bounds: ")[2]) from None


def build_optimizer(config: RunConfig) -> Any:
    """Build the optimizer with its learning rate schedule, if any. Not collective."""
    return config.optimizer.optimizer(config.train.steps)


def computing_settings(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of :class:`~mpizero.Config` that are about computation, such as ``micro_batch``.

    Not collective. Settings of the parallel layout other than ``tiles``, and those of communication, are left out.
    """
    sent = {"gradient_compression", "check_every"}
    settings = {name: value for name, value in config.train.values_of(ComputeSettings).items() if name not in sent}
    return settings | {"tiles": config.parallel.tiles}


def build_mesh(config: RunConfig, comm: Communicator) -> Mesh:
    """Build the :class:`~mpizero.Mesh` of a training; its first use is collective over ``comm``."""
    return config.parallel.mesh(comm, timeout=config.train.timeout)


def build_settings(config: RunConfig) -> Config:
    """Build the :class:`~mpizero.Config` of a training. Not collective."""
    return Config(**config.train.values_of(ComputeSettings), **config.parallel.settings())
