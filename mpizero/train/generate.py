"""Text from a language model's checkpoint, byte by byte."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpizero import checkpoint, nn
from mpizero.errors import CheckpointError, ConfigError
from mpizero.train.checks import SettingError, whole
from mpizero.train.config import GptSection
from mpizero.train.resume import Saved
from mpizero.types import Array

#: What a model sees before the first byte when there is no prompt: a new line.
START = b"\n"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next byte is chosen from the model's probabilities.

    Parameters
    ----------
    temperature : float
        Divides the logits; 0 always takes the likeliest byte.
    top_k : int
        Choose among the likeliest ``top_k`` only; 0 is all.
    seed : int
        The same seed gives the same text.
    """

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject values that mean nothing."""
        if not 0 <= self.temperature < float("inf"):  # NaN fails both
            raise ConfigError(f"--temperature {self.temperature}: must be a finite number >= 0")
        for name, value in (("--top-k", self.top_k), ("--seed", self.seed)):
            try:
                whole(0)(value)
            except ValueError as error:
                raise ConfigError(f"{name} {value}: {error}") from None

    def choose(self, logits: Array, random: np.random.Generator) -> int:
        """Return one index of ``logits`` (1-D).

        Not collective.
        """
        if self.temperature == 0:
            return int(np.argmax(logits))
        scaled = logits.astype(np.float64) / self.temperature
        if 0 < self.top_k < scaled.size:
            # A stable order keeps exactly k, the first of equals.
            scaled[np.argsort(-scaled, kind="stable")[self.top_k :]] = -np.inf
        weights = np.exp(scaled - scaled.max())
        edges = np.cumsum(weights)
        return int(np.searchsorted(edges, random.random() * edges[-1], side="right"))


@dataclass(frozen=True)
class LanguageModel:
    """A GPT and its parameters, in one process."""

    model: nn.GPT
    parameters: dict[str, Any]

    def logits(self, context: Array) -> Array:
        """Return the logits of what follows ``context`` (1-D ids), at most ``sequence`` of which count.

        Not collective.
        """
        window = context[-self.model.sequence :]
        result: Array = nn.evaluate(self.model, self.parameters, window[np.newaxis])[0, -1]
        return result

    def generate(self, prompt: bytes, length: int, sampling: Sampling) -> Iterator[bytes]:
        """Yield ``length`` bytes, one by one.

        Not collective.
        """
        random = np.random.Generator(np.random.Philox(sampling.seed))
        text = np.frombuffer(prompt or START, np.uint8).astype(np.int64)
        for _ in range(length):
            chosen = sampling.choose(self.logits(text), random)
            text = np.append(text, chosen)[-self.model.sequence :]
            yield bytes([chosen])


def characters(stream: Iterator[bytes]) -> Iterator[str]:
    """Turn bytes into characters as soon as they are whole; what is not UTF-8 becomes a replacement mark.

    Not collective.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in stream:
        if text := decoder.decode(piece):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def load_language_model(path: str | Path) -> LanguageModel:
    """Load the model of a run's folder, of its checkpoint folder (the newest good one), or of one checkpoint.

    Not collective.

    Raises
    ------
    CheckpointError
        Nothing there, damaged, or not a language model's.
    """
    home = find_checkpoint(Path(path))
    with checkpoint.open_checkpoint(home) as reader:
        saved = Saved.of(reader.attributes, home)
        section = saved.config["model"]
        if section.get("name") != "gpt":
            raise CheckpointError(f"{home}: holds the model {section.get('name')!r}, which writes no text; train a gpt")
        try:
            settings = GptSection(**section)
        except (TypeError, SettingError) as error:
            raise CheckpointError(f"{home}: its configuration is not one of this version: {error}") from None
        model = nn.GPT(
            dim=settings.dim,
            layers=settings.layers,
            heads=settings.heads,
            sequence=settings.sequence,
            tied=settings.tied,
            dtype=settings.dtype,
        )
        names = [spec.name for spec in nn.model_specs(model) if spec.tied is None]
        named = {name: reader.read_whole(f"parameters/{name}") for name in names}
    return LanguageModel(model, nn.bind(model, named))


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path means.

    Not collective.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is a file; a checkpoint is a folder, as is a run")
    if checkpoint.step_of(path.absolute()) is not None or (path / "manifest.json").exists():
        return path
    for folder in (path / "checkpoints", path):
        passed: list[str] = []
        found = checkpoint.newest(folder, report=passed.append)
        if found is not None:
            return Path(found)
        if passed:
            raise CheckpointError(f"{folder}: no good checkpoint in it; {passed[0]}")
    raise CheckpointError(f"{path}: holds no checkpoint; give a run's folder, its checkpoint folder, or one checkpoint")
