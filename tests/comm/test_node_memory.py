"""The memory that a process may take is that of the node, of its control groups and of its job, whichever is least."""

from __future__ import annotations

import os

import pytest

from mpizero.comm.startup import available_memory

GIB = 1 << 30


@pytest.fixture
def system(tmp_path):
    """Make a system: ``system(cgroup, mounts, groups)``, whose node has 64 GiB available."""

    def make(cgroup="", mounts="", groups=None, resident=0):
        own = tmp_path / "proc" / "self"
        own.mkdir(parents=True)
        (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {64 << 20} kB\n")
        (own / "cgroup").write_text(cgroup)
        (own / "mountinfo").write_text(mounts.format(top=tmp_path / "top"))
        (own / "statm").write_text(f"99 {resident // os.sysconf('SC_PAGE_SIZE')} 1 1 0 1 0\n")
        for folder, files in (groups or {}).items():
            (tmp_path / "top" / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "top" / folder / name).write_text(f"{text}\n")
        return lambda **environment: available_memory(str(tmp_path / "proc"), environment)

    return make


def group2(limit, used, cache=0, shared=0):
    stat = f"file {cache + shared}\nshmem {shared}\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def group1(limit, used, cache=0):
    stat = f"cache 7\ninactive_file 7\ntotal_inactive_file {cache}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


MOUNT2 = "31 23 0:28 / {top} rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
MOUNT1 = "35 31 0:32 / {top} rw,relatime - cgroup cgroup rw,memory\n"
NO_LIMIT1 = 9223372036854771712


def test_without_groups_it_is_what_the_node_has(system):
    assert system()() == 64 * GIB


def test_a_limit_of_version_2_counts_less_what_is_taken_but_not_the_page_cache(system):
    groups = {"job_7": group2(8 * GIB, 6 * GIB, cache=3 * GIB, shared=GIB)}
    assert system("0::/job_7\n", MOUNT2, groups)() == 5 * GIB


def test_of_all_groups_above_the_least_counts(system):
    groups = {
        "slurm": group2("max", 9 * GIB),
        "slurm/job_7": group2(8 * GIB, 7 * GIB),
        "slurm/job_7/step_0": group2(16 * GIB, GIB),
        "slurm/job_7/step_0/task_1": group2("max", GIB),
    }
    assert system("0::/slurm/job_7/step_0/task_1\n", MOUNT2, groups)() == GIB


def test_limits_of_version_1_are_found_beside_version_2(system):
    groups = {
        "": group1(NO_LIMIT1, 30 * GIB),
        "slurm/job_7": group1(4 * GIB, 3 * GIB, cache=GIB),
        "slurm/job_7/step_0": group1(NO_LIMIT1, GIB),
    }
    cgroup = "9:name=systemd:/\n4:cpu,memory:/slurm/job_7/step_0\n0::/\n"
    assert system(cgroup, MOUNT1, groups)() == 2 * GIB


def test_a_container_sees_its_own_group_at_the_mount_point(system):
    mounts = "35 31 0:32 /docker/abc {top} ro - cgroup cgroup rw,memory\n"
    assert system("4:memory:/docker/abc\n", mounts, {"": group1(2 * GIB, GIB)})() == GIB


def test_a_group_that_is_full_leaves_nothing(system):
    assert system("0::/a\n", MOUNT2, {"a": group2(GIB, 2 * GIB)})() == 0


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({"SLURM_MEM_PER_NODE": "10240"}, 9),
        ({"SLURM_MEM_PER_NODE": "10240", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 6),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "3"}, 5),
        ({"SLURM_MEM_PER_NODE": "0"}, 64),  # all of the node
        ({"SLURM_MEM_PER_NODE": "much"}, 64),
    ],
)
def test_the_memory_of_a_job_of_slurm_counts_less_what_its_ranks_take(system, environment, left):
    assert system(resident=GIB)(**environment) == left * GIB


def test_this_process_may_take_something():
    found = available_memory()
    assert found is None or found > 0
