"""Generate text with a language model from a checkpoint, byte by byte, for ``mpizero generate``.

:func:`open_language_model` loads the model, on one rank or split over several, and :func:`write` prints the bytes that
:func:`generate` yields. All ranks compute the logits, and append the byte that rank 0 has chosen.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpizero import checkpoint, nn
from mpizero._util.checks import number, whole
from mpizero._util.settings import SettingError, check_option
from mpizero._util.text import printable
from mpizero.checkpoint.inspect import find_checkpoint
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, from_rank_0
from mpizero.errors import CheckpointError
from mpizero.sharding import Config, distribute, state_dict
from mpizero.train.config.sections import GptSection, ParallelSection
from mpizero.train.run_folder import SavedRun
from mpizero.types import Array

#: The prompt that is used when none is given: a new line.
START = b"\n"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Hold the settings for choosing the next byte from the model's logits.

    Parameters
    ----------
    temperature : float
        Divides the logits; 0 always takes the likeliest byte.
    top_k : int
        Choose only among the ``top_k`` likeliest bytes; 0 means among all.
    seed : int
        Seed of the random choices; the same seed gives the same text.
    """

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` for values out of range."""
        check_option("--temperature", self.temperature, number())
        check_option("--top-k", self.top_k, whole())
        check_option("--seed", self.seed, whole())

    def choose(self, logits: Array, random: np.random.Generator) -> int:
        """Sample the next byte from ``logits``, which has one number for each byte, and return it. Not collective."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        scaled = logits.astype(np.float64) / self.temperature
        if 0 < self.top_k < scaled.size:
            # A stable order keeps exactly k, the first of equals.
            scaled[np.argsort(-scaled, kind="stable")[self.top_k :]] = -np.inf
        weights = np.exp(scaled - scaled.max())
        edges = np.cumsum(weights)
        return int(np.searchsorted(edges, random.random() * edges[-1], side="right"))


class LanguageModel(NamedTuple):
    """Evaluate a language model.

    Attributes
    ----------
    sequence : int
        Length of the longest context that the model takes.
    predict : callable
        Returns the logits after each byte of a batch of contexts; collective if parameters are split over ranks.
    """

    sequence: int
    predict: Callable[[Array], Any]

    def logits(self, context: Array) -> Array:
        """Return the logits of the byte after ``context``, a 1-D array of bytes as integers.

        Only the last :attr:`sequence` bytes of the context are used. Collective if ``predict`` is: all ranks must pass
        the same context.
        """
        result: Array = self.predict(context[-self.sequence :][np.newaxis])[0, -1]
        return result


class FirstRankWriter:
    """Write generated text on rank 0, and send the bytes that rank 0 chooses to all ranks.

    If rank 0 cannot write, all ranks stop.

    Parameters
    ----------
    comm : Communicator
        The ranks that generate.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.failure: OSError | None = None

    def agree(self, index: int) -> int:
        """Return rank 0's ``index``, the byte it chose, on all ranks; -1 once rank 0 cannot write. Collective."""
        message = np.array([-1 if self.failure is not None else index], np.int64)
        self.comm.broadcast(message, 0, "generate")
        return int(message[0])

    def say(self, text: str, end: str = "") -> None:
        """Write a text to standard output on rank 0; do nothing on other ranks. Not collective.

        On a terminal, control characters are escaped, because a model may have learnt to write them. A file or a pipe
        gets the text unchanged.
        """
        if self.comm.rank or self.failure is not None:
            return
        try:
            print(printable(text, keep="\n\t") if sys.stdout.isatty() else text, end=end, flush=True)
        except OSError as error:
            self.failure = error


def generate(
    model: LanguageModel, prompt: bytes, length: int, sampling: Sampling, agree: Callable[[int], int] = int
) -> Iterator[bytes]:
    """Generate ``length`` bytes after the prompt, and yield them one by one.

    ``agree`` is called with each byte that this rank has chosen, and returns the byte that all ranks use; a negative
    number ends the text. Collective if ``model.logits`` or ``agree`` is.
    """
    random = np.random.Generator(np.random.Philox(sampling.seed))
    text = np.frombuffer(prompt or START, np.uint8).astype(np.int64)
    for _ in range(length):
        chosen = agree(sampling.choose(model.logits(text), random))
        if chosen < 0:
            return
        text = np.append(text, chosen)[-model.sequence :]
        yield bytes([chosen])


def write(model: LanguageModel, prompt: bytes, length: int, sampling: Sampling, comm: Communicator) -> None:
    """Write the prompt and ``length`` bytes after it to standard output of rank 0.

    Collective over ``comm``.
    """
    speaker = FirstRankWriter(comm)
    speaker.say(prompt.decode("utf-8", "replace"))
    chosen = generate(model, prompt, length, sampling, speaker.agree)
    for text in codecs.iterdecode(chosen, "utf-8", "replace"):  # each character as soon as it is complete
        speaker.say(text)
    speaker.say("", end="\n")
    if speaker.failure is not None:
        raise speaker.failure


@contextmanager
def open_language_model(
    path: str | Path, comm: Communicator, layout: ParallelSection, threads: int = 1
) -> Iterator[LanguageModel]:
    """Load a language model, yield it, and free it after the ``with`` block.

    ``path`` is a checkpoint, or the folder of a run or of its checkpoints, whose newest undamaged checkpoint is loaded.
    Collective over ``comm``. A single rank loads the whole model. Several ranks split it by ``layout``, which may be
    another layout than the checkpoint was written with.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, or it is damaged, or its model is not a language model.
    SettingError
        If the layout does not fit the ranks or the model.
    """
    layout.check_ranks(comm.size)
    home = from_rank_0(comm, lambda: str(find_checkpoint(Path(path))))
    with ExitStack() as stack:
        with checkpoint.open_checkpoint(home, comm) as reader:
            with all_ranks(comm):
                settings = _settings_of(reader, home)
                if settings.layers > len(reader.arrays):
                    raise CheckpointError(f"{home}: holds {len(reader.arrays)} arrays, too few for its configuration")
                settings.check_layout(layout)
            model = _model_of(settings)
            with all_ranks(comm):  # before allocating memory of the size that a file says
                specs = [spec for spec in nn.model_specs(model) if spec.tied is None]
                wanted = {f"parameters/{spec.name}": (spec.shape, settings.dtype) for spec in specs}
                reader.check(wanted, complete=False)
            predict: Callable[[Array], Any]
            if comm.size == 1:
                named = {spec.name: reader.read_whole(f"parameters/{spec.name}") for spec in specs}
                predict = partial(nn.evaluate, model, nn.bind(model, named))
            else:
                mesh = stack.enter_context(layout.mesh(comm))
                config = Config(threads=threads, **layout.settings())
                sharded = stack.enter_context(distribute(model, None, layout.strategy, mesh=mesh, config=config))
                state_dict.restore(sharded._engine, reader)
                predict = sharded.predict
        yield LanguageModel(model.sequence, predict)


def _settings_of(reader: checkpoint.Reader, home: str) -> GptSection:
    section = SavedRun.of(reader.attributes, home).config.get("model")
    if section is None:
        raise CheckpointError(f"{home}: of a run of mpizero.Trainer, which does not record how its model is made")
    if section.get("name") != "gpt":
        name = section.get("make", section.get("name"))
        raise CheckpointError(f"{home}: holds the model {name!r}, which writes no text; train a gpt")
    try:
        return GptSection(**section)
    except (TypeError, SettingError) as error:
        raise CheckpointError(f"{home}: its configuration is not one of this version: {error}") from None


def _model_of(settings: GptSection) -> nn.GPT:
    names = ("dim", "layers", "heads", "sequence", "tied", "dtype")
    return nn.GPT(**{name: getattr(settings, name) for name in names})
