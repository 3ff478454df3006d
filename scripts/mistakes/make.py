"""Make mistakes with ``[model] make`` and ``[data] make``: paths, names, keys, and what the functions return."""

from __future__ import annotations

import sys
from pathlib import Path

import case

#: A linear model, its data, and a configuration of both.
MODEL = """\
import numpy as np
import mpizero as mz


def squares(parameters, batch):
    x, y = batch
    error = x @ parameters["weight"] - y
    return float((error**2).sum()), {"weight": 2 * x.T @ error}, float(len(x))


def make(width=3):
    return mz.FunctionModel({"weight": np.full((width, 1), 0.1)}, squares)
"""
DATA = """\
import numpy as np


def make(count=40):
    x = np.random.default_rng(0).normal(size=(count, 3))
    return x, x.sum(axis=1, keepdims=True)
"""
CONFIG = """\
[model]
make = "model.py:make"
[data]
make = "data.py:make"
[train]
steps = 2
global_batch = 8
micro_batch = 1
"""


def command(name: str, *settings: str, model: str = MODEL, data: str = DATA, flags: tuple[str, ...] = ()) -> None:
    """Run the command ``name`` with a configuration of these files, each setting given by ``--set``."""
    for file, text in (("model.py", model), ("data.py", data), ("config.toml", CONFIG)):
        if case.rank() == 0:
            Path(file).write_text(text)
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    from mpizero.cli.main import main

    sys.exit(main([name, "config.toml", *(part for s in settings for part in ("--set", s)), *flags]))


def mistake(*says: str, status: int = 78, ranks: tuple[int, ...] = (1, 2, 4)):
    """Declare a mistake whose message names a key, and a line only if it is in ``says``."""
    return case.mistake(*says, status=status, ranks=ranks, names_line=False)


@mistake('--set: model.make = "modle.py:make": no file')
def a_file_misspelt():
    """Misspell the file: `make = "modle.py:make"`."""
    command("train", "model.make=modle.py:make")


@mistake("model.py has no function mak (did you mean 'make'?)")
def a_function_misspelt():
    """Misspell the function: `make = "model.py:mak"`."""
    command("train", "model.make=model.py:mak")


@mistake('must be "FILE.py:FUNCTION" or "PACKAGE.MODULE:FUNCTION"')
def no_function():
    """Name a file and no function."""
    command("verify", "model.make=model.py")


@mistake("no module no_such_package.models")
def no_module():
    """Name a module that is not installed."""
    command("train", "model.make=no_such_package.models:make")


@mistake("model.widht: model.py:make takes no such key (did you mean 'width'?); it takes width")
def a_key_misspelt():
    """Misspell a key of `[model]`, an argument of the function."""
    command("train", "model.widht=4")


@mistake("it needs width, which is not given as model.width")
def a_key_left_out():
    """Leave out a key that the function needs."""
    command("plan", model=MODEL.replace("width=3", "width"), flags=("--ranks", "2"))


@mistake('model.make = "model.py:make": make raised ZeroDivisionError', "(model.py:12 in make)")
def an_error_in_make():
    """Divide by zero in the function."""
    command("train", model=MODEL.replace("    return mz", "    width / 0\n    return mz"))


@mistake("make raised ValueError: only here", "(data.py:4 in make)", ranks=(2, 4))
def an_error_in_make_on_one_rank():
    """Raise an error in the function on one rank only."""
    rank = "    from mpi4py import MPI\n    if MPI.COMM_WORLD.rank == 1: raise ValueError('only here')\n"
    command("train", data=DATA.replace("):\n", f"):\n{rank}").replace("\n\n\n", "\n"))


@mistake("its module raised SyntaxError: invalid syntax (model.py, line 12)")
def a_file_with_a_syntax_error():
    """Write what is no Python."""
    command("train", model=MODEL.replace("    return mz", "    return = mz"))


@mistake("its module raised ModuleNotFoundError: No module named 'helpers'", "(data.py:1 in <module>)")
def a_module_that_imports_what_is_not_there():
    """Import a module that is not beside the file."""
    command("train", data=f"import helpers\n{DATA}")


@mistake("its module raised SystemExit")
def a_script_in_place_of_a_module():
    """Name a script that ends the program when it is imported."""
    command("train", model=f"{MODEL}\nraise SystemExit(0)\n")


@mistake("must return a model; it returned None: does it end with return?")
def a_function_without_return():
    """Forget `return` in the function that makes the model."""
    command("verify", model=MODEL.replace("return mz.F", "mz.F"))


@mistake("must return a model; FunctionModel is a class, not a model: call it to make one")
def a_class_of_models():
    """Return the class of a model."""
    command("train", model=MODEL + "\n\ndef make():\n    return mz.FunctionModel\n")


@mistake("must return the model alone, not a DDPModel")
def a_sharded_model():
    """Return a model that is sharded already."""
    command(
        "train",
        model=MODEL + "\n\nplain = make\n\n\ndef make():\n    return mz.DDPModel(plain(), mz.ShardingConfig())\n",
    )


@mistake("parallel.pipeline = 2: must be 1: model.py:make makes a FunctionModel, a black box", ranks=(2, 4))
def a_black_box_in_stages():
    """Ask for a pipeline with a model that is one function."""
    command("train", "parallel.pipeline=2")


@mistake("must return arrays (x, y)", "it returned a ndarray")
def inputs_alone():
    """Return inputs without targets."""
    command("train", data=DATA.replace("return x, x.sum(axis=1, keepdims=True)", "return x"))


@mistake("it returned samples that do not fit: x has 40 samples and y has 39", status=65)
def targets_of_another_length():
    """Return inputs and targets of different lengths."""
    command("train", data=DATA.replace("return x, x", "return x, x[1:]"))


@mistake("data.validation = 0.1: must be left out: data.py:make makes these samples")
def validation_twice():
    """Return samples for validation, and ask for a share of the others, too."""
    both = 'return {"training": (x, x[:, :1]), "validation": (x, x[:, :1])}'
    command("train", "data.validation=0.1", data=DATA.replace("return x, x.sum(axis=1, keepdims=True)", both))


@mistake("ranks differ: the training data", ranks=(2, 4))
def data_by_the_rank():
    """Make other data on every rank."""
    by_rank = DATA.replace("import numpy as np", "import numpy as np\nfrom mpi4py import MPI")
    command("train", data=by_rank.replace("default_rng(0)", "default_rng(MPI.COMM_WORLD.rank)"))


@mistake("ranks differ: weight of the start values", ranks=(2, 4))
def a_model_by_the_rank():
    """Make other start values on every rank."""
    by_rank = MODEL.replace("import numpy as np", "import numpy as np\nfrom mpi4py import MPI")
    command("train", model=by_rank.replace("0.1)", "0.1 * MPI.COMM_WORLD.rank)"))


@mistake("wrong: loss: rank 1 computes other bits than rank 0", "differs at step 1", status=(1, 70), ranks=(2, 4))
def a_model_that_computes_by_the_rank():
    """Verify a model that adds a millionth of the rank to its inputs."""
    by_rank = MODEL.replace("import numpy as np", "import numpy as np\nfrom mpi4py import MPI")
    planted = by_rank.replace("x, y = batch", "x, y = batch\n    x = x + 1e-6 * MPI.COMM_WORLD.rank")
    command("verify", model=planted, flags=("--layouts", "zero3*2", "--steps", "1"))
