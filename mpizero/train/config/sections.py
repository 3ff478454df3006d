"""Define the sections ``[parallel]``, ``[data]`` and ``[model]`` of a configuration.

:class:`ParallelSection` has the layout of a run over ranks, and checks it against the model and the number of ranks.
:class:`DataSection` names files with samples. :class:`GptSection`, :class:`MlpSection`, :class:`UNetSection` and
:class:`FnoSection` describe models of the library. :class:`MadeDataSection` and :class:`MadeModelSection` name a
function of the user that makes the data or the model (:class:`MakeSettings`); the other keys of the section are its
arguments. Functions that check a setting return the value to use, or raise ValueError that says what is allowed.
``train/config/optimizers.py`` has the section ``[optimizer]``, and ``train/config/schema.py`` all others and the whole
configuration.
"""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from mpizero._util.checks import Check, flag, fraction, number, whole
from mpizero._util.names import nearest
from mpizero._util.settings import (
    ConfigSection,
    SettingError,
    allowed,
    like,
    many,
    one_of,
    optional,
    rejected,
    setting,
    shown,
    text,
)
from mpizero.errors import ConfigError, GridError
from mpizero.layout import Axes, chunk_stages
from mpizero.layout.stages import explicit_cuts
from mpizero.nn.losses import TASKS
from mpizero.nn.models import unfrozen
from mpizero.nn.unet import REFINEMENTS
from mpizero.sharding.config import DataParallelSettings, check_shard_nodes, placement
from mpizero.sharding.mesh import SPLITTING, AxisSettings, Mesh, NodeSettings
from mpizero.sharding.partition import ParallelLayout, SplitSettings, can_host
from mpizero.types import BlockModel

#: The only key of a JSON object that represents a TOML value which JSON lacks: a date, a time, NaN or infinity.
_TOML = "toml"


def reference(value: Any) -> str:
    """Check ``make``: it must name a file or module, and a function in it."""
    module, _, function = text(value).rpartition(":")
    if not module.strip() or not function.isidentifier():
        raise ValueError('must be "FILE.py:FUNCTION" or "PACKAGE.MODULE:FUNCTION"')
    return str(value)


@dataclass(frozen=True, kw_only=True)
class MakeSettings(ConfigSection):
    """Serve as base class of the sections that name a function of the user which makes the model or the data.

    Attributes
    ----------
    make : str
        File or module, and function: ``"my_model.py:make"`` or ``"package.module:make"``.
    arguments : dict
        Keyword arguments of the function: the section's other keys with their TOML values.
    """

    make: str = setting(MISSING, reference, resume="never")
    arguments: Mapping[str, Any] = field(default_factory=dict, metadata={"check": dict})

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """Make the section from a TOML table, or from a result of :meth:`to_dict`; unknown keys become arguments."""
        declared = {item.name for item in fields(cls)} - {"arguments"}
        arguments = {key: _decoded(value) for key, value in table.items() if key not in declared}
        return cls(**{key: value for key, value in table.items() if key in declared}, arguments=arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, including defaults, and all arguments, as JSON values by key."""
        settings = {item.name: _encoded(getattr(self, item.name)) for item in fields(self) if item.name != "arguments"}
        return settings | {key: _encoded(value) for key, value in self.arguments.items()}


def _encoded(value: Any) -> Any:
    """Convert a TOML value to a JSON value, which :func:`_decoded` converts back."""
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TOML: repr(value)}
    return {_TOML: value.isoformat()} if isinstance(value, datetime.date | datetime.time) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if list(value) == [_TOML]:
        return tomllib.loads(f"value = {value[_TOML]}")["value"]
    return {key: _decoded(item) for key, item in value.items()}


#: Names of the strategies, by ZeRO stage.
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class ParallelSection(ConfigSection, DataParallelSettings, SplitSettings, NodeSettings, AxisSettings):
    """Hold the section ``[parallel]``: strategy, axes of parallelism, pipeline schedule, nodes."""

    strategy: str = setting("zero2", one_of(*STRATEGIES), resume="free")

    def check_combination(self) -> None:
        """Raise :class:`SettingError` for settings that contradict each other."""
        super().check_combination()
        check_shard_nodes(placement(self.strategy), self)
        try:
            chunk_stages(self.schedule, self.pipeline, self.virtual_stages)
        except ConfigError as error:
            raise self.reject("virtual_stages", f"does not fit parallel.schedule: {error}") from None

    @property
    def chunks(self) -> int:
        """Number of pipeline chunks into which the model's blocks are cut; 1 without a pipeline."""
        return 1 if self.pipeline == 1 else len(chunk_stages(self.schedule, self.pipeline, self.virtual_stages))

    def axes_of(self, ranks: int) -> Axes:
        """Return the sizes and order of the axes for a job of ``ranks`` ranks.

        Raises
        ------
        SettingError
            If the product of the axes' sizes is not ``ranks``.
        """
        try:
            return super().axes_of(ranks)
        except GridError as error:
            key = "data" if self.data != -1 else next(self._split_axes(), "pipeline")
            raise self.reject(key, f"does not fit this job: {error}") from None

    def _split_axes(self) -> Iterator[str]:
        """Yield the names of the settings that split the model or each sample."""
        yield from (axis for axis in SPLITTING if getattr(self, axis) > 1)
        if math.prod(self.domain) > 1:
            yield "domain"

    def check_ranks(self, ranks: int) -> None:
        """Raise SettingError if the product of the axes' sizes is not ``ranks``, the number of ranks of the job."""
        self.axes_of(ranks)

    def check_blocks(self, blocks: int) -> None:
        """Raise SettingError if the pipeline has more chunks than ``blocks``, or ``cuts`` does not fit ``blocks``."""
        chunks = self.chunks
        if chunks > blocks:
            each = f" of {chunks // self.pipeline} parts each" if chunks > self.pipeline else ""
            raise self.reject(
                "pipeline",
                f"more stages than layers: {self.pipeline} stages{each} need at least {chunks} blocks, the model has "
                f"{blocks}; use fewer stages or a model with more layers",
            )
        if self.cuts is None:
            return
        try:
            explicit_cuts(self.cuts, blocks, chunks)
        except ConfigError:
            few = f"{chunks - 1} ascending numbers from 1 to {blocks - 1}"
            wanted = f"must be {few}, the first block of every part but the first" if chunks > 1 else "must be left out"
            raise self.reject("cuts", f"{wanted}: {chunks} parts of {blocks} blocks") from None

    def check_heads(self, heads: int) -> None:
        """Raise SettingError if the tensor group's size, or its number of tiles, does not divide ``heads``."""
        if heads % self.tensor:
            fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise self.reject("tensor", f"must divide model.heads = {heads}; these do: {fit}")
        if heads % self.parallel_layout().tensor_virtual_ranks:
            numbers = (n for n in range(1, heads + 1) if heads % n == 0)
            fit = ", ".join(str(n) for n in numbers if can_host(self.tensor, n))
            raise self.reject("tiles", f"its number for the tensor axis must divide model.heads = {heads}; {fit} do")

    def reject_split(self, allowed: str) -> SettingError:
        """Return a SettingError about the first axis that splits the model; ``allowed`` says what is allowed there."""
        return self.reject(next(self._split_axes()), allowed)

    def check_space(self, model: str, axes: int) -> None:
        """Raise SettingError if a domain is set that does not cut ``axes`` axes of space, those of the model's fields.

        ``axes`` is 0 for a model without space; ``model`` is the model's name in the message.
        """
        if self.domain and not axes:
            raise self.reject("domain", f"must be left out: {model} has no space to cut")
        if self.domain and len(self.domain) != axes:
            raise self.reject("domain", f"must have {axes} numbers: {model} has fields of {axes} axes of space")

    def parallel_layout(self) -> ParallelLayout:
        """Return the layout as a :class:`ParallelLayout`."""
        return ParallelLayout(**self.values_of(AxisSettings), **self._split())

    def mesh(self, comm: Any, **more: Any) -> Mesh:
        """Return a :class:`~mpizero.Mesh` of ``comm`` with this section's settings; ``more`` are further arguments."""
        return Mesh(comm, **self.values_of(AxisSettings), **self.values_of(NodeSettings), **more)

    def settings(self) -> dict[str, Any]:
        """Return the settings of this section that are arguments of :class:`~mpizero.Config`, by name."""
        return self.values_of(DataParallelSettings) | self._split()

    def _split(self) -> dict[str, Any]:
        """Return, by name, the settings of how a model is split that apply: without a pipeline only ``tiles``."""
        return self.values_of(SplitSettings) if self.pipeline > 1 else {"tiles": self.tiles}

    def describe(self, ranks: int) -> str:
        """Return a text such as "pipeline 2 x tensor 1 x data 2, 1f1b, zero1" for a job of ``ranks`` ranks."""
        if not self.splits_model:
            return f"{self.strategy} on {ranks} rank{'s' if ranks > 1 else ''}"
        sizes: dict[str, Any] = self.axes_of(ranks).sizes
        if sizes.pop("context") > 1:
            sizes |= {"domain": " x ".join(map(str, self.domain))} if self.domain else {"context": self.context}
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        virtual = f" with {self.virtual_stages} parts a stage" if self.schedule == "interleaved" else ""
        schedule = f", {self.schedule}{virtual}" if self.pipeline > 1 else ""
        return f"{named}{schedule}, {self.strategy}"


def arrays(value: Any) -> Any:
    """Check ``data.arrays``: it must be "digits", or a table with file paths under the keys ``x`` and ``y``."""
    if value == "digits":
        return value
    example = 'must be a table {x = "...", y = "..."} or "digits" (scikit-learn\'s handwritten digits)'
    return _table(value, example, {"x": text, "y": text})


def patterns(value: Any) -> tuple[str, ...]:
    """Check ``data.text``, one or several file patterns, or "stdlib" alone; return the patterns as a tuple."""
    if value in ("digits", ["digits"]):
        raise ValueError('is for text; scikit-learn\'s digits are data.arrays = "digits"')
    result: tuple[str, ...] = many(text, least=1)([value] if isinstance(value, str) else value)
    if "stdlib" in result and len(result) > 1:
        raise ValueError('"stdlib" (this Python\'s own sources) stands alone')
    return result


def _table(value: Any, example: str, checks: Mapping[str, Check], needed: Sequence[str] = ("x", "y")) -> dict[str, Any]:
    """Check a table: ``checks`` has the check of each key, ``needed`` the required keys; errors show ``example``."""
    if not isinstance(value, dict):
        raise ValueError(example)
    if unknown := [key for key in value if key not in checks]:
        raise ValueError(f"{example}; {unknown[0]} is unknown{nearest(unknown[0], tuple(checks))}")
    if missing := [key for key in needed if key not in value]:
        raise ValueError(f"{example}; {missing[0]} is missing")
    checked = {}
    for key, item in value.items():
        try:
            checked[key] = checks[key](item)
        except ValueError as error:
            raise ValueError(f"{example}; {key} {allowed(error)}") from None
    return checked


def stored(value: Any) -> dict[str, Any]:
    """Check ``data.hdf5``, ``zarr`` or ``netcdf``: a table with the keys ``path``, ``x`` and ``y``, and maybe others.

    The result has JSON values; :func:`source_arguments` converts it to arguments of a source.
    """
    return _table(value, 'must be a table such as {path = "*.h5", x = "x", y = "y"}', _STORED, ("path", "x", "y"))


def _texts(value: Any) -> Any:
    return text(value) if isinstance(value, str) else list(many(text, least=1)(value))


def _array_names(value: Any) -> Any:
    if not isinstance(value, dict):
        return _texts(value)
    return {key: text(name) for key, name in value.items()}


def source_arguments(table: dict[str, Any]) -> dict[str, Any]:
    """Convert a checked table to the arguments of a :class:`~mpizero.data.FileSource`; axes become integers again."""
    by_axis = {
        key: {int(axis): number for axis, number in table[key].items()} for key in ("window", "stride") if key in table
    }
    return table | by_axis


def _by_axis(value: Any) -> dict[str, int]:
    """Check a table that maps axes, which are strings in TOML, to whole numbers >= 1."""
    if not isinstance(value, dict) or not all(str(axis).isdecimal() for axis in value):
        raise ValueError("must be a table from axes to numbers, such as {0 = 4}")
    return {axis: whole(1)(length) for axis, length in value.items()}


_STORED = {
    "path": _texts,
    "x": _array_names,
    "y": _array_names,
    "axis": whole(0),
    "window": _by_axis,
    "stride": _by_axis,
    "lead": whole(0),
    "allow_nan": flag,
}


#: Keys of ``[data]`` that name the samples, of which exactly one must be set.
KINDS = ("text", "arrays", "hdf5", "zarr", "netcdf")


@dataclass(frozen=True, kw_only=True)
class DataSection(ConfigSection):
    """Hold the section ``[data]`` that names the samples by exactly one of the keys :data:`KINDS`.

    Paths are relative to the working directory. ``validation`` is the fraction of samples held back for validation.
    """

    text: tuple[str, ...] | None = setting(None, optional(patterns), resume="free")
    arrays: Any = setting(None, optional(arrays), resume="free")
    hdf5: Any = setting(None, optional(stored), resume="free")
    zarr: Any = setting(None, optional(stored), resume="free")
    netcdf: Any = setting(None, optional(stored), resume="free")
    validation: float = setting(0.05, fraction, resume="never")

    @property
    def kind(self) -> str:
        """The key of :data:`KINDS` that is set."""
        return next(key for key in KINDS if getattr(self, key) is not None)

    def check_combination(self) -> None:
        """Raise SettingError if not exactly one of the keys :data:`KINDS` is set."""
        chosen = [key for key in KINDS if getattr(self, key) is not None]
        if len(chosen) != 1:
            what = " and ".join(f"data.{key}" for key in chosen) if chosen else "none"
            example = 'text = ["corpus/*.txt"], text = "stdlib", arrays = {x = "x.npy", y = "y.npy"}, arrays = "digits"'
            raise rejected("data", what, f"must have exactly one of {', '.join(KINDS)} and make, for example {example}")


@dataclass(frozen=True, kw_only=True)
class MadeDataSection(MakeSettings):
    """Hold the section ``[data]`` that names a function of the user which makes the samples, and its arguments.

    ``validation`` is the fraction of samples held back for validation. None means the source's default, which is 0.05
    unless the source sets another one, or no samples if the function makes the samples for validation, too.
    """

    make: str = like(MakeSettings, "make", resume="free")
    validation: float | None = setting(None, optional(fraction), resume="never")

    #: The key that names the samples, as in :class:`DataSection`.
    kind = "make"
    table = "data"


def names_by_name(value: Any) -> dict[str, str]:
    """Check ``model.start_rename``, a table from parameter names in a file to names in the model; return it."""
    if not isinstance(value, dict) or not value or not all(isinstance(new, str) for new in value.values()):
        raise ValueError('must be a table of names in the file and in the model, such as {"backbone.*" = "encoder.*"}')
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class ModelSection(ConfigSection):
    """Serve as base class of the sections that describe a model.

    Attributes
    ----------
    start : str or None
        Path of the start values: a run's folder, a checkpoint, or a safetensors or ``.npz`` file.
    start_include, start_exclude : tuple of str or None
        Patterns of parameter names that are loaded from ``start``, and of names that are not.
    start_rename : dict or None
        Table from parameter names in ``start`` to names in the model.
    freeze : tuple of str or None
        Patterns of the names of parameters that are not trained.
    """

    table = "model"

    start: str | None = setting(None, optional(text), resume="never")
    start_include: tuple[str, ...] | None = setting(None, optional(many(text, least=1)), resume="never")
    start_exclude: tuple[str, ...] | None = setting(None, optional(many(text, least=1)), resume="never")
    start_rename: Mapping[str, str] | None = setting(None, optional(names_by_name), resume="never")
    freeze: tuple[str, ...] | None = setting(None, optional(many(text, least=1)), resume="never")

    def check_combination(self) -> None:
        """Raise SettingError if ``start_include``, ``start_exclude`` or ``start_rename`` is set without ``start``."""
        for key in ("start_include", "start_exclude", "start_rename"):
            if getattr(self, key) is not None and self.start is None:
                raise self.reject(key, "needs model.start, the file with start values")

    @property
    def described(self) -> str:
        """Name of the model for messages."""
        raise NotImplementedError

    @property
    def split_sizes(self) -> tuple[int, int]:
        """Number of attention heads, split by tensor groups, and length of sequences, split by context groups.

        The first is 1 for a model without attention heads, the second 0 for a model without sequences.
        """
        return 1, 0

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise SettingError if the layout cannot split the model, whatever the number of ranks is.

        ``model`` is the model that this section describes; None if the model does not exist yet.
        """

    def check_data(self, data: DataSection | MadeDataSection) -> None:
        """Raise SettingError if the model cannot be trained on data of this kind."""


@dataclass(frozen=True, kw_only=True)
class NamedModelSection(ModelSection):
    """Hold the settings that all models of the library have in common."""

    name: str = setting(MISSING, one_of("gpt", "mlp", "unet", "fno"), resume="never")
    dtype: str = setting("float32", one_of("float32", "float64"), resume="never")

    @property
    def described(self) -> str:
        """Name of the model for messages: the setting ``name``."""
        return self.name

    @property
    def block_count(self) -> int:
        """Number of blocks of the model, between which a pipeline can cut the model."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GptSection(NamedModelSection):
    """Hold the section ``[model]`` of a GPT, a byte-level language model."""

    dim: int = setting(256, whole(1))
    layers: int = setting(4, whole(1))
    heads: int = setting(4, whole(1))
    sequence: int = setting(128, whole(1))
    dropout: float = setting(0.0, fraction)
    tied: bool = setting(True, flag)
    activation_checkpointing: bool = setting(False, flag, resume="free")

    @property
    def block_count(self) -> int:
        """Number of blocks: embedding, transformer blocks, head."""
        return self.layers + 2

    @property
    def split_sizes(self) -> tuple[int, int]:
        """Number of attention heads, and length of sequences."""
        return self.heads, self.sequence

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise SettingError if the pipeline or the tensor group cannot split the model, or a domain is set.

        The pipeline must not have more chunks than the model has blocks. Size and number of tiles of the tensor group
        must divide the number of heads.
        """
        parallel.check_blocks(self.block_count)
        parallel.check_heads(self.heads)
        parallel.check_space(f"model.name = {shown(self.name)}", 0)

    def check_data(self, data: DataSection | MadeDataSection) -> None:
        """Raise SettingError unless the data are text or made by a function of the user."""
        if data.kind not in ("text", "make"):
            raise rejected("data", f"data.{data.kind}", 'model.name = "gpt" learns from data.text or data.make')

    def check_combination(self) -> None:
        """Raise SettingError if ``heads``, the number of attention heads, does not divide ``dim``."""
        super().check_combination()
        if self.dim % self.heads:
            fit = ", ".join(str(n) for n in range(1, min(self.dim, 64) + 1) if self.dim % n == 0)
            raise self.reject("heads", f"must divide model.dim = {self.dim}; these do: {fit}")


@dataclass(frozen=True, kw_only=True)
class ArrayModelSection(NamedModelSection):
    """Hold the settings that :class:`MlpSection` and :class:`FieldModelSection` have in common.

    The samples of their models are arrays, from which the sizes of input and output are taken.
    """

    activation: str = setting("relu", one_of("relu", "gelu", "silu", "tanh"))
    task: str = setting("classification", one_of(*TASKS))
    loss: str | None = setting(None, optional(one_of(*(name for losses in TASKS.values() for name in losses))))

    def check_combination(self) -> None:
        """Raise SettingError if ``loss`` is not a loss of ``task``."""
        super().check_combination()
        if self.loss is not None and self.loss not in TASKS[self.task]:
            known = ", ".join(map(shown, TASKS[self.task]))
            raise self.reject("loss", f"must be one of {known} with model.task = {shown(self.task)}")

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise SettingError if the model has fewer blocks than pipeline chunks, or if ``context`` is more than 1."""
        parallel.check_blocks(self.block_count)
        if parallel.context > 1:
            raise parallel.reject("context", f"must be 1: model.name = {shown(self.name)} has no sequence to cut")

    def check_data(self, data: DataSection | MadeDataSection) -> None:
        """Raise SettingError if the data are text."""
        if data.kind == "text":
            learns = f"model.name = {shown(self.name)} learns from data.arrays, data.hdf5 or data.make"
            raise rejected("data", "data.text", learns)


@dataclass(frozen=True, kw_only=True)
class MlpSection(ArrayModelSection):
    """Hold the section ``[model]`` of a multi-layer perceptron; its input and output sizes are taken from the data."""

    hidden: tuple[int, ...] = setting((64, 64), many(whole(1)))

    @property
    def block_count(self) -> int:
        """Number of blocks: hidden layers and output layer."""
        return len(self.hidden) + 1

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise SettingError as in the base class, or if a domain is requested: the model has no space to cut."""
        super().check_layout(parallel, model)
        parallel.check_space(f"model.name = {shown(self.name)}", 0)


def by_axis(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a check for a setting that has one value for all axes of space, or a list with one value for each axis.

    ``check`` checks each value; a list is returned as a tuple.
    """
    several = many(check, least=1)
    return lambda value: several(value) if isinstance(value, list | tuple) else check(value)


@dataclass(frozen=True, kw_only=True)
class FieldModelSection(ArrayModelSection):
    """Hold the settings that the models of fields have in common; channels and extents are taken from the data."""

    width: int = setting(32, whole(1))
    task: str = like(ArrayModelSection, "task", default="regression")
    activation_checkpointing: bool = setting(False, flag, resume="free")

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise SettingError as in the base class, or if ``tensor`` is more than 1 or a domain does not fit the fields.

        The domain must have as many axes as the fields of ``model`` have axes of space; this is checked only if
        ``model`` is given.
        """
        super().check_layout(parallel, model)
        if model is not None:
            parallel.check_space(f"model.name = {shown(self.name)}", unfrozen(model).axes)
        if parallel.tensor > 1:
            raise parallel.reject(
                "tensor", f"must be 1: blocks of model.name = {shown(self.name)} are not split; use pipeline or data"
            )


@dataclass(frozen=True, kw_only=True)
class UNetSection(FieldModelSection):
    """Hold the section ``[model]`` of a U-Net."""

    levels: int = setting(3, whole(2, 16))
    groups: int = setting(8, whole(1))
    kernel: int = setting(3, whole(1))
    activation: str = like(ArrayModelSection, "activation", default="silu")
    padding: str | tuple[str, ...] = setting("zeros", by_axis(one_of("zeros", "periodic", "reflect")))
    dropout: float = setting(0.0, fraction)
    refine: str = setting("nearest", one_of(*REFINEMENTS))

    @property
    def block_count(self) -> int:
        """Number of blocks: two for each resolution but the coarsest, which has one, and the output block."""
        return 2 * self.levels

    def check_combination(self) -> None:
        """Raise SettingError if ``groups`` does not divide ``width``."""
        super().check_combination()
        if self.width % self.groups:
            raise self.reject("groups", f"must divide model.width = {self.width}")


@dataclass(frozen=True, kw_only=True)
class FnoSection(FieldModelSection):
    """Hold the section ``[model]`` of a Fourier neural operator."""

    modes: int | tuple[int, ...] = setting(12, by_axis(whole(1)))
    layers: int = setting(4, whole(1))
    expansion: int = setting(2, whole(1))
    activation: str = like(ArrayModelSection, "activation", default="gelu")
    padding: float | tuple[float, ...] = setting(0.0, by_axis(number()))
    coordinates: bool = setting(True, flag)

    @property
    def block_count(self) -> int:
        """Number of blocks: lifting, Fourier blocks, projection."""
        return self.layers + 2


@dataclass(frozen=True, kw_only=True)
class MadeModelSection(MakeSettings, ModelSection):
    """Hold the section ``[model]`` that names a function of the user which makes the model, and its arguments."""

    @property
    def described(self) -> str:
        """Name of the model for messages: the setting ``make``."""
        return self.make

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise SettingError if the layout cannot split ``model``; if ``model`` is None, check nothing."""
        if model is None or not parallel.splits_model:
            return
        if not isinstance(model, BlockModel):
            raise parallel.reject_split(
                f"must be 1: {self.make} makes a {type(model).__name__}, a black box, which cannot be split; return a "
                "model of blocks, or use data parallelism alone"
            )
        parallel.check_blocks(len(model.blocks))


MODELS: dict[str, type[NamedModelSection]] = {
    "gpt": GptSection,
    "mlp": MlpSection,
    "unet": UNetSection,
    "fno": FnoSection,
}
