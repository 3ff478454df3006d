"""``mpizero checkpoint``: what it tells, its exit statuses, and every command of its page."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.cli.main import main
from mpizero.comm import InMemoryCommunicator, as_communicator
from mpizero.errors import ExitStatus
from mpizero.tools.generate import FirstRankWriter
from tests.train.conftest import ThreadCommands

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def tool(trained, tmp_path, monkeypatch):
    """Run commands on a thread of this process, in a folder with a copy of a trained run."""
    shutil.copytree(trained[0].folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return partial(ThreadCommands(tmp_path), 1)


def damage(step: int) -> None:
    """Flip a bit of the first array of a step."""
    path = Path(f"run/checkpoints/step_{step:08d}")
    with checkpoint.open_checkpoint(path) as reader:
        name = min(reader.arrays)
        place = (path / "state.h5").read_bytes().index(reader.read_whole(name).tobytes())
    with (path / "state.h5").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.slow
def test_every_command_of_the_page_does_what_it_says(tool):
    """The lines of the page, one after the other; a comment may promise another status than 0."""
    pytest.importorskip("safetensors")
    count = 0
    for line in (line for block in FENCE.findall(PAGE.read_text(encoding="utf-8")) for line in block.splitlines()):
        words = shlex.split(line, comments=True)
        promised = re.search(r"# status (\d+)", line)
        if words[:3] == ["python", "-m", "mpizero"]:
            assert tool(*words[3:], status=int(promised[1]) if promised else 0).out
            count += 1
        elif words[0] != "h5dump" or shutil.which("h5dump"):
            subprocess.run(words, check=True, capture_output=True)
    assert count >= 14


def test_a_run_lists_its_checkpoints_with_the_damaged_ones(tool):
    (Path("run/checkpoints/step_00000004") / "manifest.json").write_text("{}")
    told = tool("checkpoint", "inspect", "run", "--json")
    first, second = json.loads(told.out)["checkpoints"]
    assert (first["step"], first["sound"], second["step"], second["sound"]) == (4, False, 6, True)
    assert "manifest.json" in first["problem"]
    assert (second["samples"], second["layout"]["ranks"]) == (36, 1)
    written = Path("run/checkpoints/step_00000006/manifest.json").stat().st_mtime
    assert -1 <= second["age_seconds"] <= time.time() - written + 1  # of clocks of other granularity
    text = tool("checkpoint", "inspect", "run/checkpoints").out.splitlines()
    assert re.match(r" +4 .*damaged", text[1])
    assert re.match(r" +6 .*sound", text[2])
    tool("checkpoint", "inspect", "run", "--arrays", status=ExitStatus.CONFIG)


def test_one_checkpoint_tells_what_it_is(tool, trained):
    told = tool("checkpoint", "inspect", "run/checkpoints/step_00000006", "--json", "--arrays")
    found = json.loads(told.out)
    assert (found["step"], found["samples"], found["seed"]) == (6, 36, 0)
    assert found["loss"] == trained[1].result["loss"]
    assert {"python", "numpy", "h5py"} <= found["versions"].keys()
    assert found["optimizer"] == {"name": "AdamW", "slots": ["exp_avg", "exp_avg_sq"], "step_count": 6}
    assert found["layout"]["strategy"] == "ZeRO-2"
    assert found["configuration"]["model"]["dim"] == 16
    assert found["parameter_bytes"] == 4 * trained[1].result["parameter_count"]
    assert found["bytes"] == 3 * found["parameter_bytes"] == sum(row["bytes"] for row in found["table"])
    assert all("norm" not in row for row in found["table"])
    text = tool("checkpoint", "inspect", "run/checkpoints/step_00000006").out
    assert all(
        re.search(line, text) for line in (r"step +6\n", r"samples +36\n", r"model .*dim 16", r"layout .*ZeRO-2")
    )
    with mz.ShardingConfig(comm="self", tiles=2) as config, mz.DDPModel(mz.nn.MLP(3, (4,), 2), config) as model:
        model.save_model("tiled")
    assert re.search(r"layout .*tensor 1\n +tiles +context 1, tensor 2\n", tool("checkpoint", "inspect", "tiled").out)


def test_statistics_and_patterns(tool):
    inspect = partial(tool, "checkpoint", "inspect", "run/checkpoints/step_00000006")
    told = inspect("--statistics", "--pattern", "head.norm.*")
    table = told.out.split("\n\n")[1].splitlines()
    assert table[0].split() == ["name", "type", "shape", "bytes", "minimum", "maximum", "mean", "norm", "not", "finite"]
    assert [line.split()[0] for line in table[1:]] == ["parameters/head.norm.bias", "parameters/head.norm.weight"]
    nothing = inspect("--pattern", "nothing*", status=ExitStatus.CONFIG)
    assert "--pattern nothing*: fits none of the 48 arrays" in nothing.err


def test_a_checkpoint_without_training_is_described_as_well(tool):
    values = np.float32([1, np.nan])
    array = checkpoint.LocalArray("parameters/w", (2,), values.dtype, ((0, values),))
    checkpoint.write("plain", [array], {"text": "ä", "list": [1, {"a": None}]})
    text = tool("checkpoint", "inspect", "plain", "--statistics").out
    assert re.search(r"text +ä\n", text)
    row = json.loads(tool("checkpoint", "inspect", "plain", "--statistics", "--json").out)["table"][0]
    assert (row["norm"], row["not_finite"]) == (1.0, 1)


def test_a_stored_checkpoint_of_version_1_is_described_and_verified(tool):
    path = str(Path(__file__).resolve().parents[1] / "checkpoint" / "stored" / "version1")
    found = json.loads(tool("checkpoint", "inspect", path, "--statistics", "--json").out)
    assert (found["arrays"], len(found["table"]), found["attributes"]) == (6, 6, {"step": 3, "text": "ä"})
    assert "sound: 6 arrays" in tool("checkpoint", "verify", path).out


def test_verify_names_the_damaged_array_and_goes_on_to_the_others(tool):
    assert tool("checkpoint", "verify", "run", "--all").out.count(": sound: 48 arrays") == 2
    damage(4)
    told = tool("checkpoint", "verify", "run", "--all", status=ExitStatus.DATA)
    assert "1 of 2 not sound: " in told.err
    assert "array 'optimizer/exp_avg/blocks.0.attention.projection.bias': checksum mismatch" in told.err
    assert re.search(r"step_00000004: damaged\n.*step_00000006: sound", told.out)
    tool("checkpoint", "verify", "run")  # the newest


def test_what_cannot_be_opened_is_not_called_damaged(tool):
    (Path("run/checkpoints/step_00000004") / "state.h5").unlink()
    told = tool("checkpoint", "verify", "run", "--all", status=ExitStatus.DATA)
    assert re.search(r"step_00000004: unreadable\n.*step_00000006: sound", told.out)
    assert re.match(r" +4 .*unreadable", tool("checkpoint", "inspect", "run").out.splitlines()[1])
    (first, _) = json.loads(tool("checkpoint", "inspect", "run", "--json").out)["checkpoints"]
    assert (first["sound"], first["damaged"]) == (False, False)


def test_verify_takes_the_newest_whether_it_is_good_or_not_other_commands_an_older_one_and_say_so(tool):
    manifest = Path("run/checkpoints/step_00000006/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    for words in (("export", "run", "out.npz", "--format", "npz"), ("diff", "run", "run")):
        told = tool("checkpoint", *words)
        assert re.search(r"checkpoint passed over: .*step_00000006.*\n.*taken instead: .*step_00000004", told.err)
    for path in ("run", "run/checkpoints/step_00000006"):
        tool("checkpoint", "verify", path, status=ExitStatus.DATA)


def test_diff_tells_what_differs(tool):
    two = ("checkpoint", "diff", "run/checkpoints/step_00000004", "run")
    found = json.loads(tool(*two, "--json", status=1).out)
    assert not found["equal"]
    assert len(found["arrays"]) == 48
    assert found["attributes"]["training.step"] == [4, 6]
    text = tool(*two, status=1).out
    assert re.search(r"head.norm.bias: 16 of 16 elements differ, by at most .* first at \[0\]: ", text)
    assert "attribute training.step: 4 in A, 6 in B" in text
    biases = tool(*two, "--pattern", "*.bias", status=1)
    assert biases.err == ""
    assert "21 of other values" in biases.out
    tool(*two, "--arrays-only", "--tolerance", "10")
    tool(*two, "--tolerance", "-1", status=ExitStatus.CONFIG)


def test_what_was_exported_is_imported_bit_for_bit(tool):
    pytest.importorskip("safetensors")
    tool("checkpoint", "export", "run", "all.safetensors", "--state")
    tool("checkpoint", "import", "all.safetensors", "back", "--like", "run")
    for name in ("manifest.json", "state.h5"):
        assert Path("back", name).read_bytes() == Path("run/checkpoints/step_00000006", name).read_bytes()


def test_imported_parameters_write_the_same_text_and_are_trained_on(tool, on_threads):
    """From a file in bfloat16, with other names and turned matrices, as other programs have them."""
    numpy = pytest.importorskip("safetensors.numpy")
    tool("checkpoint", "export", "run", "model.safetensors", "--format", "safetensors")
    tensors = {f"h.{name}": value for name, value in numpy.load_file("model.safetensors").items()}
    turned = "h.blocks.0.attention.qkv.weight"
    tensors[turned] = np.ascontiguousarray(tensors[turned].T)
    numpy.save_file(tensors, "theirs.safetensors")
    words = ["checkpoint", "import", "theirs.safetensors", "new/checkpoints/step_00000000", "--config", "tiny.toml"]
    told = tool(*words, status=ExitStatus.DATA)
    assert "theirs.safetensors holds another model: missing: " in told.err
    told = tool(*words, "--map", "h.*=*", status=ExitStatus.DATA)
    assert "--transpose blocks.0.attention.qkv.weight" in told.err
    tool(*words, "--map", "h.*=*", "--transpose", "*.qkv.weight")
    tool("checkpoint", "diff", "new", "run", "--pattern", "parameters/*", "--arrays-only")
    before = on_threads(1, "generate", "run", "--prompt", "ab", "--length", "5")
    assert on_threads(1, "generate", "new", "--prompt", "ab", "--length", "5").out == before.out != ""
    told = on_threads.train(1, "checkpoint.folder=new/checkpoints", "train.steps=1", flags=["--resume"])
    assert told.result["steps"] == 1
    assert "resuming from" in told.err


def test_an_import_like_a_checkpoint_resumes_at_its_step(tool, on_threads):
    pytest.importorskip("safetensors")
    tool("checkpoint", "export", "run", "model.safetensors", "--format", "safetensors", "--dtype", "bfloat16")
    words = ["checkpoint", "import", "model.safetensors", "new/checkpoints/step_00000006", "--like", "run"]
    assert "--dtype float32 converts" in tool(*words, status=None).err
    tool(*words, "--dtype", "float32")
    told = on_threads.train(1, "checkpoint.folder=new/checkpoints", "train.steps=7", flags=["--resume"])
    assert told.result["steps"] == 7
    assert [line["step"] for line in on_threads.metrics("new")] == [7]


@pytest.mark.slow
def test_of_several_ranks_one_works_and_the_job_has_its_status(trained):
    told = ThreadCommands(trained[0].folder)(2, "checkpoint", "verify", "run")
    assert told.out.count("sound: 48 arrays") == 1, told
    told = trained[0](2, "checkpoint", "verify", "nothing", status=ExitStatus.DATA)
    assert len(told.told) == 1, told


# ---------------------------------------------------------------------- text of others

#: Escape sequences, line ends, a direction override, half a pair of surrogates; and ordinary text.
FOREIGN = "\x1b]0;t\x07\x1b[2J\nall is well\r\x9b1m\u202e\ud800 漢ä"
SHOWN = r"\u001b]0;t\u0007\u001b[2J\nall is well\r\u009b1m\u202e\ud800 漢ä"


def foreign(name: str, step: int = 0) -> None:
    """Write a checkpoint with such text wherever a checkpoint may have text."""
    values = np.arange(3, dtype=np.float32)
    array = checkpoint.LocalArray("parameters/w", (3,), values.dtype, ((0, values),))
    own = {"optimizer": {FOREIGN: FOREIGN}, "layout": {FOREIGN: [FOREIGN]}, "step_number": FOREIGN}
    training = {
        "step": FOREIGN,
        "loss": FOREIGN,
        "seed": {FOREIGN: 1},
        "config": {"model": {"name": "gpt", FOREIGN: FOREIGN}, FOREIGN: {FOREIGN: step}},
        "data": FOREIGN,
        "versions": {FOREIGN: FOREIGN},
    }
    checkpoint.write(name, [array], {FOREIGN: {FOREIGN: step}, "training": training, "mpizero": own})


def test_what_a_checkpoint_says_cannot_move_the_cursor_nor_forge_a_line(tool):
    foreign("a", 0)
    foreign("b", 1)
    foreign("many/step_00000001")
    for words in ("inspect a", "inspect a --statistics", "diff a b", "inspect many"):
        differs = int(words.startswith("diff"))
        shown = tool("checkpoint", *words.split(), status=differs)
        assert not shown.err
        assert SHOWN in shown.out
        told = tool("checkpoint", *words.replace("--statistics", "--arrays").split(), "--json", status=differs)
        assert not told.err
        for out in (shown.out, told.out):
            assert out.replace("\n", "").isprintable()
            assert "\nall is well" not in out
            out.encode()
        if words.startswith("inspect a"):
            assert json.loads(told.out)["attributes"][FOREIGN] == {FOREIGN: 0}


def test_an_error_about_a_checkpoint_of_others_is_printable(tool):
    foreign("a")
    like = ["checkpoint", "import", "nothing.safetensors", "out", "--like", f"a{FOREIGN[:-3]}"]
    for command in (["generate", "a"], like):
        told = tool(*command, status=None)
        assert told.status in (ExitStatus.DATA, ExitStatus.CONFIG)
        assert told.err.strip().isprintable()


def test_attributes_whose_dotted_names_are_alike_are_not_mistaken_for_each_other(tool):
    checkpoint.write("a", [], {"x.y": 1, "x": {"y": 2}})
    checkpoint.write("b", [], {"x.y": 1, "x": {"y": 3}})
    told = tool("checkpoint", "diff", "a", "b", status=1)
    assert "attribute x.y: 2 in A, 3 in B" in told.out


def test_a_terminal_without_some_letters_gets_them_escaped(tool, monkeypatch):
    """Where the encoding of the output lacks a letter, the command says so instead of ending in a traceback."""
    checkpoint.write("a", [], {"text": "漢"})
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["checkpoint", "inspect", "a"], as_communicator("self")) == 0
    terminal.flush()
    assert rb"text        \u6f22" in terminal.buffer.getvalue()


def test_a_model_writes_to_a_file_what_it_likes_and_to_a_terminal_what_shows(capsys, monkeypatch):
    with InMemoryCommunicator.group(1)[0] as comm:
        FirstRankWriter(comm).say("a\x1b[2J\tb\n")
        assert capsys.readouterr().out == "a\x1b[2J\tb\n"
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        FirstRankWriter(comm).say("a\x1b[2J\tb\n")
        assert capsys.readouterr().out == "a\\u001b[2J\tb\n"


def test_a_configuration_of_impossible_sizes_ends_at_once(tool):
    """The error that names the divisors of a width looks at few of them, however wide a file says that a model is."""
    config = {"model": {"name": "gpt", "dim": 10**18, "heads": 7, "layers": 1}}
    training = {"step": 0, "loss": None, "config": config, "data": ""}
    checkpoint.write("wide", [], {"training": training})
    told = tool("generate", "wide", status=ExitStatus.DATA)
    assert "must divide model.dim" in told.err
