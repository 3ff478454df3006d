"""Define the section ``[model]``: a model of the library by name, or one that a function of the user's makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpizero._util.checks import fraction, whole
from mpizero.nn.losses import TASKS
from mpizero.train.config.data_sections import DataSection, MadeDataSection
from mpizero.train.config.make_settings import MakeSettings
from mpizero.train.config.parallel_section import ParallelSection
from mpizero.train.config.setting_checks import (
    ConfigSection,
    choice,
    flag,
    many,
    optional,
    rejected,
    required,
    setting,
    shown,
    text,
)
from mpizero.types import BlockModel


def names_by_name(value: Any) -> dict[str, str]:
    """Check ``model.start_rename``, a table of names in a file and in the model; return it."""
    if not isinstance(value, dict) or not value or not all(isinstance(new, str) for new in value.values()):
        raise ValueError('must be a table of names in the file and in the model, such as {"backbone.*" = "encoder.*"}')
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class ModelSection(ConfigSection):
    """Serve as base class of the sections that describe a model.

    Attributes
    ----------
    start : str or None
        A run's folder, a checkpoint, or a safetensors or ``.npz`` file with start values.
    start_include, start_exclude : tuple of str or None
        Patterns of the parameters that are loaded from ``start``, and of those that are not.
    start_rename : dict or None
        Names in that file and their names in the model.
    freeze : tuple of str or None
        Patterns of the parameters that are not trained.
    """

    start: str | None = setting(None, optional(text))
    start_include: tuple[str, ...] | None = setting(None, optional(many(text, least=1)))
    start_exclude: tuple[str, ...] | None = setting(None, optional(many(text, least=1)))
    start_rename: Mapping[str, str] | None = setting(None, optional(names_by_name))
    freeze: tuple[str, ...] | None = setting(None, optional(many(text, least=1)))

    def check_combination(self) -> None:
        """Raise an error for settings of start values where there are none."""
        for key in ("start_include", "start_exclude", "start_rename"):
            if getattr(self, key) is not None and self.start is None:
                raise self.reject(key, "needs model.start, the file with start values")

    @classmethod
    def title(cls) -> str:
        """Return the section's name in the file."""
        return "model"

    @property
    def described(self) -> str:
        """Name of the model in messages."""
        raise NotImplementedError

    @property
    def split_sizes(self) -> tuple[int, int]:
        """Number of attention heads, which tensor groups divide, and length of sequences, which context groups cut.

        They are 1 and 0 for a model without these.
        """
        return 1, 0

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise an error if the layout cannot split the model on any number of ranks.

        ``model`` is the model that this section describes; None if it is not made yet.
        """

    def check_data(self, data: DataSection | MadeDataSection) -> None:
        """Raise an error if the model cannot learn from data of this kind."""


@dataclass(frozen=True, kw_only=True)
class NamedModelSection(ModelSection):
    """Hold the settings that all models of the library have; :class:`GptSection` and :class:`MlpSection` add theirs."""

    name: str = required(choice("gpt", "mlp"))
    dtype: str = setting("float32", choice("float32", "float64"))

    @property
    def described(self) -> str:
        """Name of the model in messages, which is that in the file."""
        return self.name

    @property
    def block_count(self) -> int:
        """Number of blocks of the model, between which a pipeline can cut it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GptSection(NamedModelSection):
    """Hold the settings of a byte-level language model."""

    dim: int = setting(256, whole(1))
    layers: int = setting(4, whole(1))
    heads: int = setting(4, whole(1))
    sequence: int = setting(128, whole(1))
    dropout: float = setting(0.0, fraction)
    tied: bool = setting(True, flag)
    activation_checkpointing: bool = setting(False, flag)

    @property
    def block_count(self) -> int:
        """Number of blocks: embedding, transformer blocks, head."""
        return self.layers + 2

    @property
    def split_sizes(self) -> tuple[int, int]:
        """Number of attention heads, and length of sequences."""
        return self.heads, self.sequence

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise an error if there are more stages than blocks, or a tensor group's size does not divide ``heads``."""
        parallel.check_blocks(self.block_count)
        parallel.check_heads(self.heads)

    def check_data(self, data: DataSection | MadeDataSection) -> None:
        """Raise an error if the data are arrays or an HDF5 file."""
        if data.kind not in ("text", "make"):
            raise rejected("data", f"data.{data.kind}", 'model.name = "gpt" learns from data.text or data.make')

    def check_combination(self) -> None:
        """Raise an error if ``heads``, the number of attention heads, does not divide ``dim``."""
        super().check_combination()
        if self.dim % self.heads:
            fit = ", ".join(str(n) for n in range(1, min(self.dim, 64) + 1) if self.dim % n == 0)
            raise self.reject("heads", f"must divide model.dim = {self.dim}; these do: {fit}")


@dataclass(frozen=True, kw_only=True)
class MlpSection(NamedModelSection):
    """Hold the settings of a multi-layer perceptron, whose numbers of inputs and outputs are taken from the data."""

    hidden: tuple[int, ...] = setting((64, 64), many(whole(1)))
    activation: str = setting("relu", choice("relu", "gelu", "silu", "tanh"))
    task: str = setting("classification", choice(*TASKS))
    loss: str | None = setting(None, optional(choice(*(name for losses in TASKS.values() for name in losses))))

    def check_combination(self) -> None:
        """Raise an error if the loss belongs to another task."""
        super().check_combination()
        if self.loss is not None and self.loss not in TASKS[self.task]:
            known = ", ".join(map(shown, TASKS[self.task]))
            raise self.reject("loss", f"must be one of {known} with model.task = {shown(self.task)}")

    @property
    def block_count(self) -> int:
        """Number of blocks: hidden layers and output layer."""
        return len(self.hidden) + 1

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise an error if there are more stages than blocks, or a context group."""
        parallel.check_blocks(self.block_count)
        parallel.check_sequence(self.described)

    def check_data(self, data: DataSection | MadeDataSection) -> None:
        """Raise an error if the data are text."""
        if data.kind == "text":
            raise rejected("data", "data.text", 'model.name = "mlp" learns from data.arrays, data.hdf5 or data.make')


@dataclass(frozen=True, kw_only=True)
class MadeModelSection(MakeSettings, ModelSection):
    """Hold the function that makes the model, and its arguments."""

    @property
    def described(self) -> str:
        """Name of the model in messages, which is that of the function."""
        return self.make

    def check_layout(self, parallel: ParallelSection, model: Any = None) -> None:
        """Raise an error if the layout cannot split ``model``; without a model, nothing is known."""
        if model is None or not parallel.splits_model:
            return
        if not isinstance(model, BlockModel):
            raise parallel.reject_split(
                f"must be 1: {self.make} makes a {type(model).__name__}, a black box, which cannot be split; return a "
                "model of blocks, or use data parallelism alone"
            )
        parallel.check_blocks(len(model.blocks))


MODELS: dict[str, type[NamedModelSection]] = {"gpt": GptSection, "mlp": MlpSection}
