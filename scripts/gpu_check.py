"""Check on a real GPU, within nine minutes, what this library does there; `gpu_check.sh` starts this script.

Every part runs in processes of its own with a limit of its own, so that one that hangs, crashes or cannot be imported
costs only itself. OUT/results.json is whole after each part, OUT/log.txt has what all parts printed. Nothing of the
GPU's settings is changed. The exit status is 0 if every part is right, 1 if one is not, 69 without a GPU.

    scripts/gpu_check.sh out                        # on a machine with a GPU
    scripts/gpu_check.sh --parts failed out         # once more the parts that were not right
    scripts/gpu_check.sh --rehearse out             # small sizes in Numba's simulator, without a GPU
    python scripts/gpu_check.py --page out          # docs/gpu.md gets the table of out/results.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from gpu_checking.__main__ import simulate_if_asked
from gpu_checking.page import write_page
from gpu_checking.parts import PARTS, REHEARSED, Part
from gpu_checking.running import GOOD, ROOT, Results, read, run_part, table

#: How many times its limit a part may take in a rehearsal, whose machine may be busy and may compile kernels first.
PATIENCE = 5
#: The parts that would compile kernels, one after the other, if these were not compiled before.
COMPUTING = {part.name for part in PARTS} - {"facts", "compiling"}
#: Compiled kernels of the checks.
CACHE = ROOT / "build" / "gpu-check" / "cache"
KNOWN = {part.name: part for part in PARTS} | REHEARSED


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    shown = "\n".join(f"  {part.name:10} {part.limit:4} s  {part.shows}" for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description=__doc__,
        epilog=f"parts, and their limits:\n{shown}\n\nThese fail, to rehearse that: {', '.join(REHEARSED)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of results.json and log.txt; made if missing")
    parser.add_argument("--budget", type=float, default=540, help="seconds of all parts (default: %(default)g)")
    parser.add_argument(
        "--parts", default="", help="names, separated by commas; or 'failed': those that are not right in OUT"
    )
    parser.add_argument("--rehearse", action="store_true", help="run in Numba's simulator with small sizes")
    parser.add_argument("--page", action="store_true", help="run nothing: write the table of OUT to docs/gpu.md")
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(names: str, results: Results) -> list[Part]:
    """Return the parts that ``--parts`` names, all of them for ""; end the script if there is none of a name."""
    if names == "failed":
        found = [KNOWN[name] for name in results.wrong() if name in KNOWN]
        return found or sys.exit("--parts failed: no part of OUT/results.json is wrong")
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in KNOWN]:
        sys.exit(f"--parts: unknown {', '.join(unknown)}; expected {', '.join(KNOWN)}, or failed")
    return [part for part in KNOWN.values() if part.name in wanted] if wanted else list(PARTS)


def reason_without_gpu() -> str:
    """Return why this machine has no GPU to train on, or "" if it has one or simulates one."""
    try:
        simulate_if_asked()
        from mpizero.kernels.gpu import available_gpus
    except ImportError as error:
        return f"mpizero cannot be imported: {error}"
    return available_gpus()[1]


def main() -> int:
    """Run the chosen parts, print the table, and return the exit status."""
    args = arguments()
    args.out = args.out.absolute()
    if args.page:
        return write_page(ROOT / "docs" / "gpu.md", read(args.out / "results.json"))
    os.environ["NUMBA_ENABLE_CUDASIM"] = str(int(args.rehearse))
    args.out.mkdir(parents=True, exist_ok=True)
    patience = PATIENCE if args.rehearse else 1
    until = args.began + args.budget * patience
    absent = reason_without_gpu()
    facts = {"began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(args.began)), "rehearsal": args.rehearse}
    results = Results(args.out / "results.json", facts)
    ran = []
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    parts = chosen(args.parts, results)
    if not args.rehearse:  # a cache of its own, which the part "compiling" fills from nothing, and later checks use
        os.environ["MPIZERO_CACHE_DIR"] = str(CACHE)
        computing = [part for part in parts if part.name in COMPUTING and not (part.gpu and absent)]
        if computing and not CACHE.exists() and KNOWN["compiling"] not in parts:
            parts.insert(0, KNOWN["compiling"])
    try:
        with (args.out / "log.txt").open("a", encoding="utf-8") as log:
            for part in parts:
                limit = min(part.limit * patience, until - time.time())
                row = run_part(part, limit, args.rehearse, folder, log, absent)
                results.add(row)
                ran.append(row)
                print(f"{row['part']:10} {row['seconds']:7.1f}  {row['verdict']:9}  {row['figure']}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + table(results.rows, list(KNOWN)))
    if absent:
        print(f"no GPU: {absent}")
        return os.EX_UNAVAILABLE
    return 0 if all(row["verdict"] in GOOD for row in ran) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
