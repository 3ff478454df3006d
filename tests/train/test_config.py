"""The configuration: every bad value is one clear error that names the key, what was given, and the place."""

from __future__ import annotations

import datetime
import json
import math
import re
from contextlib import suppress
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpizero as mz
from mpizero.errors import ConfigError, ExitStatus
from mpizero.sharding import Config
from mpizero.train.config.build import build_mesh, computing_settings
from mpizero.train.config.optimizers import OPTIMIZERS, optimizer_section
from mpizero.train.config.schema import TrainSection, changes, described_change, mathematics, section_kinds
from mpizero.train.config.sections import MODELS
from mpizero.train.config.toml import ConfigDocument, config_of, parse_config, read_config

GPT = '[model]\nname = "gpt"\n[data]\ntext = "stdlib"\n'
MLP = '[model]\nname = "mlp"\n[data]\narrays = "digits"\n'
OWN = '[model]\nmake = "m.py:make"\nfreeze = ["a.*"]\nsizes = [1, 2]\n[data]\narrays = "digits"\n'
#: Numbers of stages and chunks for which no list fits into memory.
LARGE = [
    ["parallel.pipeline=9223372036854775807"],
    ["parallel.schedule=interleaved", "parallel.virtual_stages=9223372036854775807"],
    ["parallel.schedule=interleaved", "parallel.virtual_stages=40000", "parallel.pipeline=2"],
]
V = "parallel.schedule=zero_bubble_v"


def parse(text=GPT, *overrides):
    return parse_config(ConfigDocument("run.toml", text, overrides))


def failure(text=GPT, *overrides):
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    assert caught.value.status == ExitStatus.CONFIG
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_time_is_given_in_seconds_or_as_batch_systems_write_it():
    times = {"90": 90, "0.5": 0.5, "00:01:30": 90, '"48:00:00"': 172800, '"2-00:00:01"': 172801, "30:00:00": 108000}
    for text, seconds in times.items():
        assert parse(GPT, f"train.time_limit={text}").train.time_limit == seconds


@pytest.mark.parametrize(
    ("given", "seconds"), [([], 600.0), (["train.timeout=2.5"], 2.5), (["train.timeout=01:00:00"], 3600.0)]
)
def test_ranks_wait_for_one_another_as_long_as_the_configuration_says(given, seconds):
    config = parse(GPT, *given)
    assert config.train.timeout == seconds
    assert build_mesh(config, None).timeout == seconds


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (GPT, ["train.time_limit=00:10:00", "train.time_reserve=600"], ["reserve", "less than train.time_limit = 600"]),
        (GPT, ["train.wire=bfloat16", "model.dtype=float64"], ["train.wire", "model.dtype = float32"]),
        (GPT, ["train.wire=bfloat16", "parallel.context=2"], ["train.wire", "parallel.context = 2"]),
        (GPT, ["parallel.bucket_mb=1", "train.gradient_compression=int8"], ["bucket_mb", "train.gradient_compression"]),
        (GPT, ["checkpoint.backend=mpio", "checkpoint.asynchronous=true"], ['needs checkpoint.backend = "direct"']),
        (MLP, ["parallel.context=2"], ["parallel.context = 2: must be 1"]),  # it has no sequences
        (MLP, ["parallel.pipeline=4", "model.hidden=[8]"], ["at least 4 blocks, the model has 2"]),
        *((GPT, overrides, ["expected at most 65,536 chunks"]) for overrides in LARGE),
        (GPT, ["parallel.schedule=interleaved"], ["parallel.virtual_stages = 1: ", "at least 2"]),
        (GPT, [V, "parallel.virtual_stages=3"], ["parallel.virtual_stages = 3: ", "expected 2"]),
        (GPT, [V, "parallel.pipeline=4"], ["parallel.pipeline = 4: ", "at least 8 blocks, the model has 6"]),
        (GPT, ["parallel.pipeline=3", "parallel.cuts=[4, 2]"], ["parallel.cuts = [4, 2]: ", "2 ascending", "1 to 5"]),
        (GPT, ["parallel.pipeline=2", "parallel.cuts=[6]"], ["parallel.cuts = [6]: ", "1 ascending", "1 to 5"]),
    ],
)
def test_settings_that_do_not_go_together_are_named(text, overrides, words):
    told = failure(text, *overrides)
    assert all(word in told for word in words), told


#: For each key, values that it does not take, as ``--set`` has them.
BAD = """
model.name = gtp
model.dim = 0 | 1.5
model.heads = 3
model.layers = -1
model.sequence = true
model.dropout = 1.0 | nan
model.dtype = float16
data.text = [] | [1] | digits
data.validation = 1 | -0.1
parallel.strategy = zero4
parallel.pipeline = 0 | 7
parallel.tensor = -1 | 3 | 8
parallel.context = 0
parallel.virtual_stages = 2
parallel.data = 0
parallel.schedule = 2f2b
parallel.order = data,tensor | data,tensor,pipelin | data,tensor,pipeline,data
parallel.cuts = [1] | [0] | 3
parallel.share_node_memory = 1
parallel.ranks_per_node = 0
parallel.bucket_mb = 0 | true | tuned
parallel.tiles = 9223372036854775807 | {tensor = 9000000000000}
train.steps = 0 | 1e3
train.global_batch = 0 | -8
train.micro_batch = 0 | 65
train.accumulate = 0 | 65
train.timeout = 0 | inf | never
train.time_limit = 0 | nan | 12:30 | a day
train.time_reserve = -1
train.seed = -1
train.clip = inf | -1.0
train.gradient_compression = int4 | topk:0.5 | 8 | [] | {} | [1] | 1.5 | 07:32:00
train.threads = 0
train.device = gpu
train.mixed_precision = bfloat16
train.optimizer_device = cuda
train.validate_every = -1
train.patience = 0
train.min_delta = 0.1
optimizer.name = adamv
optimizer.lr = nan | inf | 0 | high
optimizer.schedule = cosin
optimizer.warmup = 201
optimizer.end = 1e-5
optimizer.betas = [0.9] | [0.9, 1.0]
optimizer.eps = 0.0
optimizer.momentum = 0.9
checkpoint.folder = ''
checkpoint.keep = 0
checkpoint.every = -1
checkpoint.keep_every = -1
checkpoint.asynchronous = 1
checkpoint.backend = posix
checkpoint.alignment = 32 | 96
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_a_bad_value_is_an_error_that_names_the_key_and_the_override(line):
    key, _, values = line.partition(" = ")
    for value in values.split(" | "):
        assert re.match(rf"--set: {re.escape(key)}\b", failure(GPT, f"{key}={value}")), value


@pytest.mark.parametrize(
    "overrides",
    [
        ["pipeline=6"],
        ["pipeline=3", "schedule=interleaved", "virtual_stages=2"],
        ["pipeline=2", "cuts=[1]"],
        ["tensor=4", "order=' tensor, data,pipeline'"],
        ["context=2", "order=context,data,tensor,pipeline"],
        ["schedule=interleaved", "virtual_stages=9"],  # no pipeline: nothing to cut
    ],
)
def test_layouts_that_fit_the_model_are_accepted(overrides):
    parse(GPT, *(f"parallel.{override}" for override in overrides))


@pytest.mark.parametrize(
    ("overrides", "ranks", "fits"),
    [
        (["pipeline=2", "tensor=2", "data=2"], 8, True),
        (["pipeline=2", "tensor=2"], 6, False),
        (["pipeline=2", "tensor=2", "data=2"], 4, False),
        (["data=3"], 4, False),
        (["context=2"], 3, False),
    ],
)
def test_sizes_must_multiply_to_the_ranks_and_else_all_numbers_are_told(overrides, ranks, fits):
    section = parse(GPT, *(f"parallel.{override}" for override in overrides)).parallel
    if fits:
        assert section.axes_of(ranks).size == ranks
        return
    with pytest.raises(ConfigError) as caught:
        section.check_ranks(ranks)
    told = str(caught.value)
    assert told.startswith("parallel.")
    assert str(ranks) in told
    assert all(override in told for override in overrides if not override.startswith("data"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GPT + "[train]\nsteps = 3\nglobal_batch = 0\n", "run.toml:7: train.global_batch = 0: must be a whole num"),
        (GPT + "[train]\nstep = 3\n", "run.toml:6: train.step: unknown key (did you mean 'steps'?)"),
        (GPT + "[parallel]\nthreads = 2\n", "run.toml:6: parallel.threads: unknown key (did you mean 'train.threads'"),
        (GPT + "[train]\nlr = 1\n", "run.toml:6: train.lr: unknown key (did you mean 'optimizer.lr'?)"),
        (GPT + "[optimzer]\nlr = 1\n", "run.toml:5: optimzer: unknown section (did you mean 'optimizer'?)"),
        ("[model]\nnam = 'gpt'\n[data]\ntext = 'a'\n", "run.toml:1: model.name is missing"),
        ("[data]\ntext = 'a'\n", "run.toml: [model] is missing"),
        ("[model]\nname = 'gpt'\n", "run.toml: [data] is missing"),
        ("train = 3\n" + GPT, "run.toml: train = 3: must be a section"),
        ("[model\n", "run.toml: not valid TOML"),
        (GPT + "arrays = 'digits'\n", "run.toml:3: data = "),
        (MLP.replace("mlp", "gpt"), "run.toml:3: data = "),
        (GPT.replace("gpt", "mlp"), "run.toml:3: data = "),
        (MLP + "[optimizer]\nname = 'sgd'\nnesterov = true\n", "run.toml:7: optimizer.nesterov = true: needs"),
        (MLP.replace('"digits"', '{x = "a.npy"}'), 'run.toml:4: data.arrays = {x = "a.npy"}: must be a table'),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(text, message):
    assert failure(text).startswith(message)


def test_a_key_of_another_optimizer_says_whose_it_is():
    text = failure(GPT, "optimizer.name=lion", "optimizer.eps=1e-8")
    owners = text.partition("not a setting of lion but of ")[2].partition(";")[0].split(", ")
    assert {"adam", "adamw", "lamb", "rmsprop"} <= set(owners)


@pytest.mark.parametrize("override", ["steps=3", "train.steps", "=3", "train..steps=3", "train.steps=[1"])
def test_an_override_without_the_right_form_is_an_error(override):
    assert "--set" in failure(GPT, override)


def test_overrides_take_toml_values_and_bare_words():
    config = parse(
        GPT, "train.steps=0x10", "optimizer.betas=[0.8, 0.9]", "checkpoint.folder=a/b", "model.dtype=float64"
    )
    assert (config.train.steps, config.optimizer.betas) == (16, (0.8, 0.9))
    assert (config.checkpoint.folder, config.model.dtype) == ("a/b", "float64")


def test_an_override_reaches_into_a_table():
    config = parse('[model]\nname = "mlp"\n[data]\narrays = {x = "x.npy", y = "y.npy"}\n', "data.arrays.x=other.npy")
    assert config.data.arrays == {"x": "other.npy", "y": "y.npy"}


def test_defaults_of_the_environment_give_way_to_the_file():
    document = ConfigDocument("run.toml", GPT + "[train]\nthreads = 3\n")
    assert parse_config(document, 2).train.threads == 3
    assert parse_config(ConfigDocument("run.toml", GPT), 2).train.threads == 2


def test_every_setting_but_the_names_and_the_data_has_a_default():
    for kind in section_kinds():
        assert {item.name for item in fields(kind) if item.default is item.default_factory} <= {"name"}
    assert [optimizer_section(name)().name for name in OPTIMIZERS] == list(OPTIMIZERS)


@pytest.mark.parametrize(
    ("text", "section", "held"),
    [
        (f'{GPT}[optimizer]\nname = "sgd"\nmomentum = 0.9\n', "optimizer", {"momentum": 0.9}),
        (
            f'{MLP}[optimizer]\nname = "l-bfgs"\nbounds = {{w = [-inf, 2], "*.bias" = [0, 1.5]}}\n',
            "optimizer",
            {"bounds": {"w": [None, 2.0], "*.bias": [0.0, 1.5]}},
        ),
        (OWN, "model", {"freeze": ["a.*"], "sizes": [1, 2]}),
    ],
)
def test_a_configuration_survives_its_dictionary(text, section, held):
    found = parse(text).to_dict()
    assert held.items() <= found[section].items()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert config_of(found).to_dict() == found


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.strategy=ddp", "parallel.pipeline=2", "parallel.tensor=2", "parallel.share_node_memory=false"],
        ["train.steps=7", "train.validate_every=3", "train.time_limit=60", "train.timeout=60", "train.threads=2"],
        ["train.patience=5", "train.min_delta=0.1", "checkpoint.best=perplexity"],
        ["checkpoint.folder=x", "data.text=other.txt", "train.device=cuda", "model.activation_checkpointing=true"],
    ],
)
def test_a_resumed_run_may_differ_in_how_it_is_laid_out_and_where_it_saves(overrides):
    assert not changes(parse().to_dict(), parse(GPT, *overrides).to_dict())


def test_a_resumed_run_with_other_mathematics_is_told_which_with_both_values():
    sizes = {"train.micro_batch": 8, "train.accumulate": 2, "model.dim": 128}
    others = sizes | {"train.seed": 1, "optimizer.lr": 0.001, "train.clip": 1.0, "train.gradient_compression": "int8"}
    for key, value in others.items():
        (change,) = changes(parse().to_dict(), parse(GPT, f"{key}={value}").to_dict()).items()
        assert re.fullmatch(rf"{key} was .+ in the saved run and is \W?{value}\W? now", described_change(*change))


def test_a_setting_that_a_saved_run_lacks_is_none():
    saved = parse().to_dict()
    del saved["train"]["gradient_compression"]
    assert not changes(saved, parse(GPT, "train.gradient_compression=none").to_dict())


def test_the_mathematics_has_no_section_that_lays_out_work():
    assert not [key for key in mathematics(parse().to_dict()) if key.startswith(("parallel.", "checkpoint."))]


def test_layouts_are_compared_with_all_settings_of_training_but_two():
    """Compressed gradients differ by the layout, and hashes of state are compared by the comparison itself."""
    known = {item.name for item in fields(TrainSection)} & {item.name for item in fields(Config)}
    assert known - set(computing_settings(parse())) == {"gradient_compression", "check_every"}


#: Values of every kind that a program or a TOML file can give.
ANYTHING = (
    None, True, -1, 0, 1.5, math.nan, 10**400, "", "x\0", b"a", [], [1], ["a"], [[1], [1, 2]], {}, {"a": 1}, {1: 2}, (),
    set(), 1j, float, object(), range(3), np.float32(1), np.array(3), np.array([1, 2]), datetime.time(1),
    datetime.date(2020, 1, 1),
)  # fmt: skip


def test_no_value_of_a_setting_makes_anything_but_a_configuration_error():
    optimizers = [getattr(mz.optim, name) for name in OPTIMIZERS.values()]
    for kind in (mz.Mesh, mz.Config, *section_kinds(), *optimizers):
        needed = {"name": kind.__name__[:3].lower()} if kind in MODELS.values() else {}
        for item in (item for item in fields(kind) if "check" in item.metadata):
            for value in ANYTHING:
                with suppress(ConfigError):
                    kind(**needed | {item.name: value})


def test_the_default_order_of_the_axes_may_be_left_out_or_none():
    assert mz.Mesh(order=None).order == mz.Mesh().order == parse().parallel.order


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_override_makes_anything_but_a_configuration_error(text):
    with suppress(ConfigError):
        parse(GPT, text)


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 20_000 + "]" * 20_000, "a = " + "9" * 100_000, "a = " + "{a = " * 20_000 + "1" + "}" * 20_000],
    ids=["deep lists", "many digits", "deep tables"],
)
def test_a_made_up_file_is_not_valid_toml(text):
    with pytest.raises(ConfigError, match=r"made\.toml: not valid TOML"):
        parse_config(ConfigDocument("made.toml", text))
    with pytest.raises(ConfigError, match=r"not a TOML value|train\.steps"):
        parse_config(ConfigDocument("made.toml", GPT, [f"train.steps={text[4:]}"]))


def test_a_number_that_no_float_holds_is_named_with_its_key():
    with pytest.raises(ConfigError, match=r"optimizer\.lr = 10+: must be a finite number"):
        parse_config(ConfigDocument("made.toml", GPT + "\n[optimizer]\nlr = 1" + "0" * 400))


def test_a_configuration_without_end_is_none(tmp_path):
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_config(str(tmp_path / "config.toml"))


def test_a_mark_of_byte_order_is_no_part_of_the_text(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf[model]\n")
    assert read_config(str(tmp_path / "config.toml")) == "[model]\n"
