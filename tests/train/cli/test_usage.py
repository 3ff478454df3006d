"""Wrong options are refused before anything is done: one line, on every rank, that names the option."""

from __future__ import annotations

import pytest

from mpizero.errors import ExitStatus
from tests.train.conftest import ThreadCommands

#: Ranks, words of a command, what is said, and the status unless it is that of a wrong option.
WRONG = [
    (1, "bench checkpoint --bytes 1", "--bytes 1.0: must be from"),
    (1, "bench checkpoint --bytes nan", "--bytes nan"),
    (1, "bench checkpoint --repeat 0", "--repeat 0"),
    (1, "bench checkpoint --folder nowhere", "--folder nowhere"),
    (1, "bench checkpoint --backend mpio", 'backend="direct"'),
    (1, "bench machine --elements 0", "--elements 0: must be a whole number >= 2"),
    (1, "bench machine --elements nan", "--elements nan: must be a number"),
    (1, "bench machine --repeat 0", "--repeat 0"),
    (1, "bench machine --folder nowhere", "--folder: nowhere is no folder"),
    (1, "bench machine --output nowhere/machine.json", "--output: nowhere is no folder"),
    (1, "bench machine --heads 3", "--heads 3: must divide --dim 256"),
    (1, "bench machine --dim 0", "--dim 0"),
    (1, "bench machine --set model.dim=3", "needs a CONFIG.toml"),
    (1, "bench machine tiny.toml --dim 32", "--dim 32: tiny.toml gives the shapes"),
    (2, "bench memory --pipeline 3", "--pipeline 3: does not fit this job"),
    (2, "bench memory --pipeline 2 --micro-batches 0", "--micro-batches 0"),
    (2, "bench memory --pipeline 2 --schedule 2f2b", '--schedule "2f2b": must be one of'),
    (2, "bench memory --pipeline 2 --schedule interleaved", "--virtual-stages 1: does not fit --schedule"),
    (2, "bench memory --pipeline 2 --strategy zero4", "--strategies zero4: zero4 is none of"),
    (1, "bench memory --parameters 0", "--parameters 0.0"),
    (1, "bench memory --strategy ,", "must name at least one of"),
    (1, "bench memory --steps 0", "--steps 0"),
    (2, "bench step tiny.toml --steps 0", "--steps 0"),
    (1, "bench step tiny.toml --warm-up -1", "--warm-up -1"),
    (1, "bench step tiny.toml --trace none/t.json", "--trace none/t.json"),
    (1, "checkpoint verify text.txt", "text.txt: is a file", ExitStatus.DATA),
    (1, "checkpoint inspect .", "holds no checkpoint", ExitStatus.DATA),
    (1, "checkpoint export run x --format zip", "invalid choice: 'zip'"),
    (1, "checkpoint export run x.pt", "x.pt: the name tells no format: end it with"),
    (1, "checkpoint export run x.npz --dtype int8", "type 'int8': must be one of"),
    (1, "checkpoint export run text.txt --format npz", "--force"),
    (1, "checkpoint import text.txt x --like run", "text.txt: not a safetensors file", ExitStatus.DATA),
    (1, "checkpoint import text.txt x --map a", "map a=: must be OLD=NEW"),
    (1, "checkpoint import x y --like a --config b", "not allowed with argument"),
    (1, "generate .", "holds no checkpoint", ExitStatus.DATA),
    (1, "generate nothing", "nothing: no such file or folder", ExitStatus.DATA),
    (1, "generate run --length -1", "--length -1"),
    (1, "generate run --seed -1", "--seed -1"),
    (1, "generate run --temperature -1", "--temperature -1"),
    (1, "generate run --temperature nan", "--temperature nan"),
    (1, "generate run --top-k -1", "--top-k -1"),
    (2, "generate run --pipeline 3", "--pipeline 3: does not fit this job: 2 ranks"),
    (2, "generate run --strategy zero4", '--strategy "zero4": must be one of'),
    (1, "plan tiny.toml --ranks 2 --ranks-per-node 0", "--ranks-per-node 0"),
    (1, "plan tiny.toml --ranks 2 --memory-per-node much", "--memory-per-node much"),
    (1, "plan tiny.toml --ranks 2 --memory-per-node 100KiB", "--memory-per-node 100KiB"),  # the prefixes are k and Ki
    (1, "plan tiny.toml --ranks 2 --gflops -1", "--gflops -1"),
    (1, "plan tiny.toml --ranks 0", "--ranks 0"),
    (1, "train tiny.toml --resume-from=-1", "--resume-from"),
    (3, "train nothing.toml", "nothing.toml: cannot be read"),
    (1, "train tiny.toml --set checkpoint.best=perplexty", "no validation metric of this name (did you mean"),
    (1, "train tiny.toml --set checkpoint.best=perplexity --set train.validate_every=0", "validate_every > 0"),
    (1, "train tiny.toml --set train.patience=2 --set data.validation=0", "needs validation samples: set data.valid"),
    (1, "verify tiny.toml --layouts tensor=3", "'zero2*3, tensor=3' does not fit: parallel.tensor = 3: must divide"),
    (1, "verify tiny.toml --layouts pipeline=4", "more stages than layers"),
    (1, "verify tiny.toml --layouts ;", "names no layout"),
    (1, "verify tiny.toml --layouts zero9*2", "layout 'zero9*2': 'zero9*2' is not understood"),
    (1, "verify tiny.toml --steps 0", "--steps 0: must be a whole number >= 1"),
    (1, "verify tiny.toml --ranks 0", "--ranks 0: must be a whole number >= 1"),
    (1, "verify tiny.toml --tolerance -1", "--tolerance -1.0: must be a number from 0 to 1"),
    (2, "verify tiny.toml --layouts 3", "--layouts: 'zero2*3' needs 3 ranks, this job has 2"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[1])
def test_what_cannot_be_done_is_refused_by_the_options_name(trained, case):
    if "import" in case[1]:
        pytest.importorskip("safetensors")
    ranks, words, said, status = case if len(case) == 4 else (*case, ExitStatus.CONFIG)
    before = sorted(trained[0].folder.rglob("*"))
    outcome = ThreadCommands(trained[0].folder)(ranks, *words.split(), status=status)
    assert said in outcome.err, outcome.err
    assert "Traceback" not in outcome.err
    assert len(outcome.told) <= 1, outcome.err
    assert sorted(trained[0].folder.rglob("*")) == before
