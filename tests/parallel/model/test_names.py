"""A name that no checkpoint could hold is refused when the model is made; every other one goes everywhere."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mpizero as mz
from mpizero import checkpoint
from mpizero._util.names import NAME_LIMIT, NAME_PARTS, SLOT_LIMIT, check_names, fault_of
from mpizero.checkpoint import LocalArray
from mpizero.checkpoint.convert import ImportRules, TensorFile, export, write_imported
from mpizero.cli.main import main
from mpizero.comm import as_communicator
from mpizero.errors import ConfigError, MpizeroError
from mpizero.testing import run_in_threads

#: As PyTorch, JAX, TensorFlow and people call parameters.
GOOD = (
    "layers.0.weight",
    "['a'][0]",
    ".params['dense']['kernel']",
    "model/dense/kernel:0",
    "w[0]",
    "W_äöü",
    "веса/слой",
    "重み",
    "two words",
    "a..b",
    "*",
    "-n",
    "%s{0}",
    "x.npy",
    "file",
    "args",
    "kwds",
    "allow_pickle",
    "\U0001d400" * 100,
    "z" * NAME_LIMIT,
    "/".join(["deep"] * NAME_PARTS),
)
BAD = {
    "": "is empty",
    "/a": "has an empty part",
    "b/": "has an empty part",
    "c//d": "has an empty part",
    ".": r"has the part '\.'",
    "e/../f": r"has the part '\.\.'",
    "g/..\\h": "has the part",
    "i\0j": r"U\+0000",
    "\x1b[2Jk": r"U\+001B",
    "l\u202em": r"U\+202E",
    "\ud800": r"U\+D800",
    "n\u2028": r"U\+2028",
    "e\u0301": "NFC",
    " o": "space at an end",
    "p" * (NAME_LIMIT + 1): f"has {NAME_LIMIT + 1} characters",
    "/".join(["q"] * (NAME_PARTS + 1)): f"has {NAME_PARTS + 1} parts",
    7: "is of type int",
}


def black_box(names):
    def loss_and_grad(parameters, batch):
        x, _ = batch
        return float(len(x)), {name: np.full_like(value, len(x)) for name, value in parameters.items()}, float(len(x))

    return mz.FunctionModel({name: np.full(3, i, np.float32) for i, name in enumerate(names)}, loss_and_grad)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints of a model with all the good names, one step apart, and the file of its parameters."""
    folder = tmp_path_factory.mktemp("names")
    with mz.ShardingConfig(micro_batch=2) as config, mz.ZeRO3Model(black_box(GOOD), config) as model:
        mz.ShardedOptimizer(mz.optim.AdamW(), config).set_model(model)
        for step in (1, 2):
            model.train(np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32))
            model.save_model(folder / f"step{step}")
        with checkpoint.open_checkpoint(folder / "step2", "self") as reader:
            export(reader, folder / "named.npz", "npz")
        expected = model.named_parameters()
        model.load_model(folder / "step1")
        model.load_parameters(folder / "named.npz")
        assert {name: a.tolist() for name, a in model.named_parameters().items()} == {
            name: a.tolist() for name, a in expected.items()
        }
    return folder, expected


def command(capsys, *words):
    capsys.readouterr()
    status = main(["checkpoint", *map(str, words)], as_communicator("self"))
    return status, capsys.readouterr().out


def test_any_hdf5_tool_finds_them_under_their_names(saved):
    folder, expected = saved
    checkpoint.verify(folder / "step2")
    with h5py.File(folder / "step2" / "state.h5") as file:
        for name in GOOD:
            assert file["parameters"][name][()].tolist() == expected[name].tolist()
            above, _, last = f"parameters/{name}".rpartition("/")
            group = file[above]
            kind = group.id.links.get_info(last.encode()).cset
            assert kind == (h5py.h5t.CSET_ASCII if last.isascii() else h5py.h5t.CSET_UTF8)


def test_every_command_takes_them(saved, capsys):
    folder, _ = saved
    status, out = command(capsys, "inspect", folder / "step2", "--arrays", "--statistics")
    assert status == 0
    assert all(f"parameters/{name}" in out for name in GOOD)
    for name in ("w[0]", "['a'][0]", "重み"):
        status, out = command(capsys, "inspect", folder / "step2", f"--pattern={name}")
        assert status == 0
        assert f"parameters/{name}" in out
    status, out = command(capsys, "diff", folder / "step1", folder / "step2")
    assert status == 1
    assert all(f"parameters/{name}: " in out for name in GOOD)


def test_exported_files_have_them_and_import_gives_them_back(saved, tmp_path):
    folder, expected = saved
    with checkpoint.open_checkpoint(folder / "step2") as reader:
        for kind in ("hdf5", "safetensors"):
            export(reader, tmp_path / kind, kind)
    tensors = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "safetensors")
    with h5py.File(tmp_path / "hdf5") as file:
        for found in (tensors, {name: file[name][()] for name in GOOD}):
            assert {name: a.tolist() for name, a in found.items()} == {name: a.tolist() for name, a in expected.items()}
    rules = ImportRules(names=[("w[0]", "v[0]")], drop=["['a'][0]"], transpose=["重み"])
    with TensorFile(tmp_path / "safetensors") as source:
        write_imported(source, tmp_path / "back", source.attributes, rules)
    with checkpoint.open_checkpoint(tmp_path / "back") as reader:
        wanted = {*GOOD, "v[0]"} - {"w[0]", "['a'][0]"}
        assert set(reader.arrays) == {f"parameters/{name}" for name in wanted}
        assert reader.read_whole("parameters/v[0]").tolist() == expected["w[0]"].tolist()


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_cannot_be_stored_is_refused_when_the_model_is_made(name):
    kind = (mz.DDPModel, mz.ZeRO3Model)[list(BAD).index(name) % 2]
    with mz.ShardingConfig(micro_batch=2) as config, pytest.raises(ConfigError, match=BAD[name]) as caught:
        kind(black_box(["w", name]), config)
    assert "give it another" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_name_that_is_also_the_folder_of_another_is_refused_when_the_model_is_made():
    with mz.ShardingConfig(micro_batch=2) as config, pytest.raises(ConfigError, match="'a' and 'a/b'"):
        mz.DDPModel(black_box(["a/b", "a.c", "a"]), config)


def test_all_ranks_refuse_the_name_also_where_one_alone_has_it():
    def make(comm):
        with mz.ShardingConfig(comm=comm, micro_batch=2) as config, pytest.raises(MpizeroError) as caught:
            mz.ZeRO2Model(black_box(["w", "a\n" if comm.rank else "b"]), config)
        return str(caught.value)

    assert all("U+000A" in text for text in run_in_threads(2, make))


class Momentum:
    """An optimizer of a user, whose state has a name of its own."""

    def __init__(self, slot):
        self.slots = (slot,)

    def update(self, params, grads, state):
        """Take a step."""
        (slot,) = self.slots
        state[slot] += grads
        params -= 0.1 * state[slot]


@pytest.mark.parametrize(
    ("slot", "fault"), [("a/b", "2 parts"), ("", "empty"), ("s" * (SLOT_LIMIT + 1), "61 characters")]
)
def test_a_name_of_optimizer_state_that_cannot_be_stored_is_refused_at_once(slot, fault):
    with mz.ShardingConfig() as config, pytest.raises(ConfigError, match=f"optimizer Momentum: .*{fault}"):
        mz.ShardedOptimizer(Momentum(slot), config)


@pytest.mark.slow
@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4, unique=True))
@settings(max_examples=10, deadline=None)
@example(["\U0001d400" * NAME_LIMIT])
@example(["/".join(["\U0001d400" * 17] * NAME_PARTS)])
def test_what_is_not_refused_can_be_saved_read_and_verified(tmp_path_factory, names):
    try:
        check_names(names)
    except ConfigError:
        return
    values = np.arange(2, dtype=np.float32)
    paths = [f"{folder}/{name}" for folder in ("parameters", "optimizer/" + "s" * SLOT_LIMIT) for name in names]
    arrays = [LocalArray(path, (2,), values.dtype, ((0, values),)) for path in paths]
    folder = tmp_path_factory.mktemp("any") / "c"
    checkpoint.write(folder, arrays, {})
    checkpoint.verify(folder)
    with checkpoint.open_checkpoint(folder) as reader:
        assert set(reader.arrays) == set(paths)
        export(reader, folder.parent / "f.npz", "npz")
    with np.load(folder.parent / "f.npz") as file:
        assert set(file.files) == set(names)


@pytest.mark.slow
@given(st.text())
def test_names_without_a_fault_can_be_shown(name):
    assert fault_of(name) or name.isprintable()
