"""Two and four real hosts: the same bits as one process, the bytes that the library counts, nothing left behind.

scripts/two_hosts.sh makes the hosts, which needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mpizero as mz
from tests.parallel.two_hosts_program import STRATEGIES, gpt, train

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "two_hosts.sh"
PROGRAM = Path(__file__).with_name("two_hosts_program.py")
FAULTS = ROOT / "tests" / "faults" / "program.py"
#: Seconds for a whole case, which takes 45 on two cores that six programs share.
LIMIT = 300.0

pytestmark = pytest.mark.slow


def why_not():
    """Say why there can be no two hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if missing := [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} missing (iproute2, util-linux)"
    if not Path(sys.executable).with_name("mpiexec").exists():
        return "no mpiexec beside the interpreter"
    tried = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"], check=False)
    return "the kernel gives no namespaces" if tried.returncode else ""


if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


def start(*arguments, **environment):
    """Start the script in a session of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [SCRIPT, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
    )


def ended(process):
    """Wait for the end; return status, output and errors."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()  # the namespaces and all in them end with it
    return process.returncode, out, err


def marked(mark):
    """Return the processes that have ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (4, 1)])
def test_hosts_have_the_bits_of_one_process_and_send_what_is_counted(tmp_path, hosts, ranks):
    options = ("--hosts", str(hosts), "--ranks-per-host", str(ranks), "--unshaped", "--count-bytes")
    status, out, err = ended(start(*options, "--", sys.executable, str(PROGRAM), str(tmp_path)))
    assert status == 0, err
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    with mz.ShardingConfig(micro_batch=2) as config:
        expected = train(config, "ddp", tmp_path / "alone")["sha256"]
        restored = mz.DDPModel(gpt(), config)
        with restored:
            for strategy in (*STRATEGIES, "groups"):  # the checkpoints of all hosts are whole
                restored.load_model(tmp_path / strategy)
                assert restored.parameters_sha256() == expected
    assert [row["strategy"] for row in rows] == [*STRATEGIES, "2 x 2", "groups"]
    for row in rows:
        assert row["nodes"] == [[f"host{number}", ranks] for number in range(1, hosts + 1)]
        assert row["sha256"] == expected, row
        # headers, acknowledgements, and what ranks ask one another on a machine so busy that nothing moves for seconds
        assert row["counted"] <= row["by_interface"] < 1.1 * row["counted"] + 30_000, row
    assert len(re.findall(r"^host[1-4] sent \d+ bytes$", err, re.MULTILINE)) == hosts


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            lambda folder: (FAULTS, "exit_0", folder, "1"),
            r"\[rank 1/2 host2\] left early: .* rank 0 waits in barrier #6 'gradients' .* program.py:\d+ in train",
        ),
        (
            lambda folder: (PROGRAM, folder, "sleep"),
            r"stuck: barrier #\d+ 'gradients'.*: rank 1 not in it\n(.*\n)+"
            r".*rank 1 on host2: at work at two_hosts_program.py:\d+ in sleep_on_rank_1",
        ),
    ],
    ids=["exit", "sleep"],
)
def test_a_rank_that_fails_on_the_other_host_ends_the_job_and_is_named(tmp_path, command, said):
    arguments = map(str, (sys.executable, *command(tmp_path)))
    status, _, err = ended(start("--unshaped", "--ranks-per-host", "1", "--", *arguments))
    assert status != 0
    assert re.search(said, err), err


def test_nothing_is_left_behind():
    mark = f"two-hosts-{os.getpid()}-{time.monotonic_ns()}"
    status, out, err = ended(start("--unshaped", "--once", "--", "sh", "-c", "sleep 1234 & hostname", MARK=mark))
    assert (status, out) == (0, "host1\n"), err
    assert marked(mark) == []


def test_an_interrupt_ends_all_that_was_made():
    mark = f"two-hosts-{os.getpid()}-{time.monotonic_ns()}"
    process = start("--unshaped", "--once", "--", "sh", "-c", "echo ready; exec sleep 1234", MARK=mark)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] != 0
    assert marked(mark) == []
