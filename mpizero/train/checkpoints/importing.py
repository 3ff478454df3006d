"""Describe what an imported checkpoint must contain, by the example of another checkpoint or by a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpizero import checkpoint, nn
from mpizero.checkpoint.inspect import element_types, find_checkpoint
from mpizero.errors import DataError
from mpizero.train.config.build import build_model, build_source, needs_data
from mpizero.train.config.checks import data_fingerprint
from mpizero.train.config.schema import Config
from mpizero.train.config.toml import ConfigDocument, parse_config, read_config
from mpizero.train.run_folder import ATTRIBUTE


@dataclass(frozen=True)
class CheckpointTemplate:
    """Hold the attributes and arrays that an imported checkpoint must have.

    Attributes
    ----------
    attributes : dict
        The checkpoint's attributes (JSON values such as step and configuration), which are saved with the arrays.
    expected : mapping or None
        Shape and element type of every array, by its path in the file; None allows any arrays.
    """

    attributes: Mapping[str, Any]
    expected: Mapping[str, tuple[tuple[int, ...], str]] | None


def like(path: str) -> CheckpointTemplate:
    """Return a template with the attributes, array names, shapes and element types of an existing checkpoint."""
    with checkpoint.open_checkpoint(find_checkpoint(Path(path)), "self") as reader:
        elements = element_types(reader)
        return CheckpointTemplate(
            reader.attributes, {path: (reader.arrays[path][0], elements[path]) for path in elements}
        )


def described(name: str) -> CheckpointTemplate:
    """Return a template for a checkpoint at step 0 of the training that the configuration file ``name`` describes.

    It has the model's parameters, and no optimizer state. If the model is a GPT and its training data are missing, the
    checkpoint can be used to generate text, but not to resume training.
    """
    document = ConfigDocument(name, read_config(name))
    config = parse_config(document)
    with document.located():
        model, fingerprint = _build(config)
    specs = [spec for spec in nn.model_specs(model) if spec.tied is None]
    training = {
        "step": 0,
        "samples": 0,
        "seed": config.train.seed,
        "loss": None,
        "config": config.to_dict(),
        "data": fingerprint,
    }
    element = np.dtype(model.dtype).name
    return CheckpointTemplate(
        {ATTRIBUTE: training}, {f"parameters/{spec.name}": (spec.shape, element) for spec in specs}
    )


def _build(config: Config) -> tuple[Any, str]:
    try:
        source, validation = build_source(config)
    except DataError:
        if needs_data(config):
            raise
        return build_model(config), ""
    return build_model(config, source, validation), data_fingerprint(source)
