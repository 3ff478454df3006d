"""Models and data that functions of the user's make, from the configuration file, in every command."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from mpizero.errors import ConfigError
from mpizero.tools.bench.checkpoint import LEAST
from mpizero.tools.verify.command import verify
from mpizero.train.config.build import build, build_model, build_source
from mpizero.train.config.toml import ConfigDocument, config_of, parse_config
from mpizero.train.data_identity import data_fingerprint
from tests.train.conftest import ThreadCommands

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_model"
#: A linear model as one function, and data for it.
MODEL = """
import numpy as np
import mpizero as mz

def squares(parameters, batch):
    x, y = batch
    error = x @ parameters["weight"] - y
    return float((error**2).sum()), {"weight": 2 * x.T @ error}, float(len(x))

def make(width=3):
    return mz.FunctionModel({"weight": np.full((width, 1), 0.1)}, squares)
"""
DATA = """
import numpy as np

def make(count=20, width=3):
    x = np.random.default_rng(0).normal(size=(count, width))
    return x, x.sum(axis=1, keepdims=True)
"""
CONFIG = """
[model]
make = "model.py:make"
[data]
make = "data.py:make"
[train]
steps = 4
global_batch = 6
micro_batch = 1
[checkpoint]
every = 2
"""


@pytest.fixture
def example(tmp_path):
    """The example's commands on threads, in a folder above that of its files."""
    shutil.copytree(EXAMPLE, tmp_path / "own", ignore=shutil.ignore_patterns("run", "__pycache__"))
    return ThreadCommands(tmp_path)


@pytest.fixture
def linear(tmp_path):
    """Commands in a folder with a linear model and its data, which tests spoil."""
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("config.toml", CONFIG)):
        (tmp_path / name).write_text(text)
    return ThreadCommands(tmp_path)


def document(folder, *settings):
    return ConfigDocument(str(folder / "config.toml"), CONFIG, settings)


@pytest.mark.slow
def test_an_own_model_trains_to_one_hash_and_is_resumed_by_other_ranks(example):
    def train(ranks, *settings, flags=()):
        settings = ("train.steps=6", "checkpoint.every=2", *settings)
        return example.run(ranks, "train", "own/config.toml", *settings, flags=flags)

    path = list(sys.path)
    whole = train(1).result["parameters_sha256"]
    assert train(4, "parallel.pipeline=2").result["parameters_sha256"] == whole
    train(3, "train.steps=4", "parallel.pipeline=3")
    resumed = train(2, "parallel.strategy=zero3", flags=["--resume"])
    assert resumed.result["parameters_sha256"] == whole
    assert "resuming from" in resumed.err
    assert "changed since" not in resumed.err
    assert sys.path == path
    last = example.metrics()[-1]
    assert last["validation_loss"] > 0
    assert not {"accuracy", "perplexity"} & last.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("without_collections")
def test_the_commands_that_look_at_a_training_take_own_models(example, linear):
    """Measured memory is that of the plan; of a function no array is told of which nobody knows."""
    outcome = example(2, "bench", "memory", "own/config.toml", "--steps", "1", "--strategy", "zero3", "--json")
    tables = outcome.result["layouts"]
    assert [(table["strategy"], table["memory"]) for table in tables] == [("zero3", "shared"), ("zero3", "private")]
    for row in (row for table in tables for row in table["rows"]):
        assert row["held"] == row["planned"]
        assert (row["sent"], row["messages"]) == (row["planned_sent"], row["planned_messages"])
    flags = ["config.toml", "--steps", "1", "--strategy", "zero1", "--memory", "shared"]
    outcome = linear(2, "bench", "memory", *flags, "--json")
    (table,) = outcome.result["layouts"]
    assert "FunctionModel is a black box" in table["not_counted"]
    assert "activations" not in table["rows"][0]["held"]
    assert table["rows"][0]["held"] == table["rows"][0]["planned"]
    assert "neither counted nor planned" in linear(2, "bench", "memory", *flags).out
    linear(2, "bench", "memory", *flags, "--pipeline", "2", status=78)
    linear(2, "bench", "step", "config.toml", "--steps", "1", "--warm-up", "0")
    plan = linear(1, "plan", "config.toml", "--ranks", "2", "--json", "--memory-per-node", "1MB").result
    assert "black box" in plan["not_counted"]
    assert "what is not counted must fit --memory-per-node, too" in plan["warnings"][0]


@pytest.mark.slow
def test_an_own_model_is_verified_planned_and_its_checkpoints_are_read_and_written(example):
    found = example(1, "verify", "own/config.toml", "--ranks", "2", "--steps", "1", "--json")
    layouts = found.result["layouts"]
    assert {"zero3*2, private", "ddp*2, pipeline=2, schedule=1f1b"} <= {one["layout"] for one in layouts}
    assert {one["verdict"] for one in layouts} == {"same bits"}
    assert "under mpiexec only" in found.err
    plan = example(1, "plan", "own/config.toml", "--ranks", "8", "--json").result
    assert plan["not_counted"] is None
    assert {rank["operations"] for rank in plan["ranks"]} == {None}  # its own layers count none
    example.run(2, "train", "own/config.toml", "train.steps=2")
    about = example(1, "checkpoint", "inspect", "run/checkpoints/step_00000002", "--json").result
    assert about["configuration"]["model"]["width"] == 24
    example(1, "checkpoint", "verify", "run")
    example(1, "checkpoint", "export", "run", "values.safetensors")
    imported = ("values.safetensors", "new/checkpoints/step_00000000", "--config", "own/config.toml")
    example(1, "checkpoint", "import", *imported)
    sized = ["--set", "model.width=300", "--repeat", "1", "--backend", "direct", "--json"]
    bench = example(2, "bench", "checkpoint", "own/config.toml", *sized).result
    layers = 2 * (300 * 300 + 2 * 300) + 17 * 300 + 2 * 301
    assert 0 <= 12 * layers - bench["nbytes"] < LEAST  # of equal arrays
    go_on = ["checkpoint.folder=new/checkpoints", "train.steps=1"]
    example.run(2, "train", "own/config.toml", *go_on, flags=["--resume"])
    outcome = example(1, "generate", "run", status=65)
    assert "holds the model 'my_model.py:make', which writes no text; train a gpt" in outcome.err


def test_a_skipped_step_of_an_own_model_is_replayed_where_its_files_are(linear, monkeypatch):
    bad = MODEL.replace("(parameters, batch)", "(parameters, batch, run)").replace(
        "    error =", "    x = x / (run.step != 2 or 1 not in run.samples)\n    error ="
    )
    (linear.folder / "model.py").write_text(bad)
    linear.run(2, "train", "config.toml", "data.width=4", "model.width=4")
    dump = str(linear.folder / "run" / "bad_steps" / "step_00000003")
    found = linear(1, "replay", dump, "--json")
    assert found.result["parameters"].startswith("step 2, from ")
    assert found.result["replays"][0]["first"] == "loss loss"
    (linear.folder / "model.py").rename(linear.folder / "other.py")
    lost = linear(1, "replay", dump, status=65)
    assert f'model.make was "model.py:make", which is neither in {linear.folder}' in lost.err
    other = linear.folder / "other"
    other.mkdir()
    for name in ("model.py", "data.py"):
        (other / name).write_text(bad)
    monkeypatch.chdir(other)
    ThreadCommands(other)(1, "replay", dump)


def test_what_make_describes_must_be_the_same_when_a_run_is_resumed(linear):
    linear.run(1, "train", "config.toml")
    again = {"train.steps=5", "data.width=3"}
    outcome = linear.run(1, "train", "config.toml", *sorted(again), flags=["--resume"], status=78)
    assert "data.width was (not given) in the saved run and is 3 now" in outcome.err
    (linear.folder / "model.py").write_text(f"{MODEL}\n# and a comment\n")
    outcome = linear.run(2, "train", "config.toml", "train.steps=5", flags=["--resume"])
    assert "model.py has changed since it was saved" in outcome.err


def test_a_module_is_loaded_once_by_its_content_and_its_siblings_are_its_own(tmp_path):
    """Two folders with files of one name, one after the other and at once; a changed file is loaded again."""
    found = []
    for name, size in (("a", 1), ("b", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helper.py").write_text(f"size = {size}\n")
        text = "from helper import size\ncalls = []\n"
        text += "def make(**keys):\n    calls.append(1)\n    return [[size]], [[0]]\n"
        (folder / "data.py").write_text(text)
        config = parse_config(document(folder, "model.make=data.py:make", "data.validation=0"))
        found.append(build_source(config)[0].samples([0])[0].item())
    assert found == [1, 2]
    (module,) = {m for n, m in sys.modules.items() if n.startswith("data_") and m.__file__ == str(folder / "data.py")}
    assert module.calls == [1]
    assert pickle.loads(pickle.dumps(module.make)) is module.make
    (folder / "data.py").write_text(text.replace("[[size]]", "[[size + 5]]"))
    assert build_source(config)[0].samples([0])[0].item() == 7


def test_values_of_keys_are_those_of_toml_also_after_a_checkpoint_has_held_them(tmp_path):
    keys = 'sizes = [1, 2]\nwhen = 2026-01-02\nmost = inf\nshape = {x = 1.5, names = ["a"]}\n'
    text = CONFIG.replace('make = "model.py:make"\n', f'make = "model.py:make"\n{keys}')
    config = parse_config(ConfigDocument("c.toml", text, ["model.more=true"]))
    again = parse_config(ConfigDocument("c.toml", CONFIG))
    arguments = config.model.arguments
    assert arguments["most"] == float("inf")
    assert arguments["more"] is True
    assert arguments["shape"] == {"x": 1.5, "names": ["a"]}
    saved = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert config_of(saved).model == config.model
    assert again.model != config.model


def test_samples_may_be_trees_and_come_with_those_for_validation(linear):
    (linear.folder / "data.py").write_text(
        "import numpy as np\n"
        "def make(seed):\n"
        "    def samples(count):\n"
        "        x = {'a': np.full((count, 3), float(seed)), 'b': (np.ones(count), np.zeros(count))}\n"
        "        return x, np.ones((count, 1))\n"
        "    return {'training': samples(20), 'validation': samples(4)}\n"
    )
    training, validation = build_source(parse_config(document(linear.folder, "train.seed=7")))
    assert (len(training), len(validation)) == (20, 4)
    x, _ = training.samples([3, 4])
    assert x["a"].tolist() == [[7.0] * 3] * 2
    assert x["b"][0].shape == (2,)
    assert data_fingerprint(training) != data_fingerprint(validation)


def test_a_function_is_told_seed_and_samples_if_it_asks_for_them(linear):
    (linear.folder / "model.py").write_text(
        MODEL.replace(
            "def make(width=3):", "def make(source, seed, **more):\n    width = source.samples([0])[0].shape[1] + seed"
        )
    )
    config = parse_config(document(linear.folder, "train.seed=2", "model.any=1"))
    assert build_model(config, *build_source(config)).parameters["weight"].shape == (5, 1)
    assert build_model(config).parameters["weight"].shape == (5, 1)


SHARDED = MODEL.replace("FunctionModel(", "DDPModel(mz.FunctionModel(").replace(
    "squares)\n", "squares), mz.ShardingConfig(comm='self'))\n"
)
#: What is done: settings, files in place of the right ones, what is said, and the status unless it is 78.
WRONG = {
    "a file that is not there": (["model.make=modle.py:make"], {}, 'model.make = "modle.py:make": no file '),
    "a module that is not there": (["model.make=no.such:make"], {}, "no module no.such"),
    "no function": (["model.make=model.py:mak"], {}, "model.py has no function mak (did you mean 'make'?)"),
    "no colon": (["model.make=model.py"], {}, 'must be "FILE.py:FUNCTION" or "PACKAGE.MODULE:FUNCTION"'),
    "an unknown key": (["model.widht=4"], {}, "model.widht: model.py:make takes no such key (did you mean 'width'?)"),
    "a key of data": (["data.cuont=4"], {}, "data.cuont: data.py:make takes no such key (did you mean 'count'?)"),
    "a name too": (["model.name=gpt"], {}, "must be left out with model.make"),
    "a needed key": ([], {"model.py": MODEL.replace("=3", "")}, "it needs width, which is not given as model.width"),
    "a value": ([], {"model.py": f"{MODEL}\nmake = 3\n"}, "make is a int, which cannot be called"),
    "an error": (
        [],
        {"model.py": MODEL.replace("    return mz", "    int('x')\n    return mz")},
        'config.toml:3: model.make = "model.py:make": make raised ValueError: invalid literal for int() with base 10: '
        "'x' (model.py:11 in make)",
    ),
    "an error of the module": ([], {"data.py": f"import nothing_at_all\n{DATA}"}, "(data.py:1 in <module>)"),
    "bad syntax": ([], {"model.py": f"{MODEL}\ndef f(:\n"}, "SyntaxError: invalid syntax (model.py, line 13)"),
    "an exit": ([], {"model.py": f"{MODEL}\nraise SystemExit(0)\n"}, "its module raised SystemExit: 0"),
    "no return": ([], {"model.py": MODEL.replace("    return mz", "    mz")}, "returned None: does it end with return"),
    "a pair": ([], {"model.py": MODEL.replace("squares)\n", "squares), 1\n")}, "tuple is not a model"),
    "a sharded model": ([], {"model.py": SHARDED}, "must return the model alone, not a DDPModel"),
    "a black box in stages": (["parallel.pipeline=2"], {}, "pipeline = 2: must be 1: model.py:make makes a Func"),
    "x alone": ([], {"data.py": DATA.replace("return x, x", "return x  #")}, "must return arrays (x, y)"),
    "other lengths": ([], {"data.py": DATA.replace("return x, x", "return x, x[1:]")}, "20 samples and y has 19", 65),
    "two sets and a share": (
        ["data.validation=0.1"],
        {"data.py": "def make():\n    return {'training': ([[1.0]], [1]), 'validation': ([[1.0]], [1])}\n"},
        "data.validation = 0.1: must be left out: data.py:make makes these samples",
    ),
}


def test_what_is_wrong_with_a_function_is_one_line_with_key_and_place(linear):
    for change, told in WRONG.items():
        settings, files, expected, status = told if len(told) == 4 else (*told, 78)
        for name, text in {"model.py": MODEL, "data.py": DATA, **files}.items():
            (linear.folder / name).write_text(text)
        (line,) = linear.run(2, "train", "config.toml", *settings, status=status).told
        assert expected in line, change


@pytest.mark.mpi
def test_ranks_that_make_other_models_or_data_or_compute_otherwise_are_named(world, tmp_path, capsys):
    folder = Path(world.broadcast_object(str(tmp_path)))
    if world.rank == 0:
        rank = "from mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\n"
        (folder / "data.py").write_text(
            rank + DATA.replace("default_rng(0)", "default_rng(RANK if count == 30 else 0)")
        )
        model = MODEL.replace("0.1)", "0.1 + (RANK if width == 1 else 0))")
        model = model.replace("x, y = batch", "x, y = batch\n    x = x + PLANT * RANK")
        (folder / "model.py").write_text(f"{rank}PLANT = 0\n{model}")
        (folder / "plant.py").write_text(f"{rank}PLANT = 1e-6\n{model}")
        (folder / "config.toml").write_text(CONFIG)
    world.barrier("files")
    if world.size == 1:
        return

    def config(*settings):
        return parse_config(document(folder, "checkpoint.folder=unused", *settings))

    with pytest.raises(ConfigError, match="ranks differ: the training data"), build(config("data.count=30"), world):
        pass
    one = config("model.width=1", "data.width=1")
    with pytest.raises(ConfigError, match="ranks differ: weight of the start values"), build(one, world):
        pass
    options = Namespace(layouts="2; zero3*2", ranks=None, steps=2, tolerance=None, json=False)
    assert verify(config(), world, options) == 0
    capsys.readouterr()
    assert verify(config("model.make=plant.py:make"), world, options) == 1
    told = capsys.readouterr().out
    if world.rank == 0:
        assert "wrong: loss: rank 1 computes other bits than rank 0" in told
        assert "zero3*2: step 1: loss computed by rank 1" in told
