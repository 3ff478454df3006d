"""Disturb saves of checkpoints in every way (kills, failing disks, damaged files), and print a table of the results.

In a case, one thing goes wrong. Ranks are killed at every system call by which a save changes files, and at random
moments. The disk becomes full or read-only, or its folder is removed. Bytes of the files are flipped, cut off or made
up. After each case the newest committed checkpoint must load with the bits that were saved, and it must not be older
than the last save that has returned. No process and no temporary file may be left. A resumed training must end with the
result of an uninterrupted one. The exit status is 1 if a case fails.

The parts are syscalls (left out without strace), kills, damage and disk (some cases need root and Linux's mount
namespaces). The cases are repeated for each way to save: by the back end ``direct``, in the background of training,
and, if a second MPI with parallel HDF5 is given, by the back end ``mpio``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # avoids system calls that do not belong to saves
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.jobs import add_mpis, mpis_of
from harness.options import plain
from torturing import damage, disk, syscalls, training
from torturing.cases import Torture

PARTS = ("syscalls", "kills", "damage", "disk")


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = plain(__doc__)
    parser.add_argument("--short", action="store_true", help="a sample of each part, in about a minute")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--ranks", type=int, default=2, help="of each job (default: %(default)s)")
    parser.add_argument("--kills", type=int, help="at random moments, in all (default: 200; 4 with --short)")
    parser.add_argument("--flips", type=int, help="single flipped bytes (default: 200; 40 with --short)")
    parser.add_argument("--cuts", type=int, help="truncations, and tails of zeros (default: 100; 20 with --short)")
    parser.add_argument("--mutations", type=int, help="of manifests (default: 10000; 500 with --short)")
    parser.add_argument("--window", type=float, default=0.12, help="seconds after a save in which a kill comes")
    add_mpis(parser)
    parser.add_argument("--limit", type=float, default=120, help="seconds a launch may take (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where it happens (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="keep the files of every case")
    options = parser.parse_args()
    for name, full, short in (("kills", 200, 4), ("flips", 200, 40), ("cuts", 100, 20), ("mutations", 10_000, 500)):
        if getattr(options, name) is None:
            setattr(options, name, short if options.short else full)
    return options


def main() -> None:
    """Run the requested parts, and print the table; exit with status 1 if a case has failed."""
    options = arguments()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-", dir=options.folder) as folder:
        torture, good = Torture(options, Path(folder), mpis_of(options)), False
        try:
            run_parts(torture, options.only or PARTS)
        finally:  # also when it is interrupted
            good = torture.table.show("what was done to saves")
    print(f"seed {options.seed}, {options.ranks} ranks, {time.monotonic() - started:.0f} s", flush=True)
    sys.exit(not good)


def run_parts(torture: Torture, parts: Sequence[str]) -> None:
    """Run the parts of these names.

    All parts except "syscalls" compare results with an undisturbed training, which runs before them.
    """
    if "syscalls" in parts:
        at_system_calls(torture)
    if set(parts) - {"syscalls"}:
        print("an undisturbed training, to compare with", flush=True)
        reference = training.Reference(torture)
    if "kills" in parts:
        at_random_moments(torture, reference)
    if "damage" in parts:
        on_disk(torture, reference)
    if "disk" in parts:
        on_bad_disks(torture, reference)


def ways(torture: Torture) -> list[str]:
    """Return the ways to save that are tested: "direct", "background", and with a second MPI also "mpio"."""
    return ["direct", "background", *(["mpio"] if "second" in torture.mpis else [])]


def at_system_calls(torture: Torture) -> None:
    """Run the part "syscalls": kill a rank at a system call, let calls fail or last long, and check their order."""
    if reason := syscalls.have_strace():
        torture.table.row("faults at system calls", reason)
        return
    short = torture.options.short
    for how in ways(torture):
        print(f"system calls of saves, {how}", flush=True)
        syscalls.check_order(torture, how)
        syscalls.kill_everywhere(torture, how, 2 if short else 0)
        syscalls.refuse_everywhere(torture, how, 1 if short else 0)
        if not short:
            syscalls.slow_rank(torture, how)


def at_random_moments(torture: Torture, reference: training.Reference) -> None:
    """Run the part "kills": kill ranks of trainings at random moments, equally often for each way to save."""
    hows, left = ways(torture), torture.options.kills
    for number, how in enumerate(hows):
        share = left // (len(hows) - number)
        left -= share
        print(f"{share} kills at random moments, {how}", flush=True)
        training.kill_at_random(torture, reference, how, share)


def on_disk(torture: Torture, reference: training.Reference) -> None:
    """Run the part "damage": damage checkpoint files, change manifests, and resume from damaged checkpoints."""
    print("damaged and made-up files", flush=True)
    damage.damage_files(torture, reference, torture.options.flips, torture.options.cuts)
    damage.fuzz_manifests(torture, reference, torture.options.mutations)
    damage.resume_past_damage(torture, reference, 2 if torture.options.short else 6)


def on_bad_disks(torture: Torture, reference: training.Reference) -> None:
    """Run the part "disk": save to folders that are full, read-only or removed, and from two jobs at once."""
    short = torture.options.short
    for how in ways(torture)[: 1 if short else None]:
        print(f"bad disks, {how}", flush=True)
        disk.small_files(torture, reference, how)
        if reason := disk.have_namespaces():
            torture.table.row(f"a full or read-only disk, {how}", reason)
        else:
            disk.full_disks(torture, reference, how, 1 if short else 6)
        if not short and not reason:
            disk.read_only(torture, reference, how)
        disk.deleted(torture, reference, how)
    if not short:
        disk.two_jobs(torture, reference)


if __name__ == "__main__":
    main()
