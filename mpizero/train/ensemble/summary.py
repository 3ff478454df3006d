"""Write the outcome of each member of an ensemble, and one summary of all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpizero.errors import DataError

#: Name of the file with the outcome of one member, in its folder, and of the summary.
OUTCOME, SUMMARY = "member.json", "ensemble.json"
#: How a member has ended; a member without an outcome is unfinished: it runs, or was killed.
COMPLETE, FAILED, UNFINISHED = "complete", "failed", "unfinished"


def member_folder(run: str | Path, number: int) -> Path:
    """Return the folder of a member's run in the folder ``run`` of the ensemble."""
    return Path(run) / f"member_{number:04d}"


def write_outcome(folder: Path, outcome: Mapping[str, Any]) -> None:
    """Write the outcome of a member into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / OUTCOME, outcome)


def forget_outcome(folder: Path) -> None:
    """Remove the outcome of an earlier run of a member, which is unfinished from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OUTCOME).unlink(missing_ok=True)


def summarize_members(run: str | Path, members: int | None = None) -> dict[str, Any]:
    """Read the outcomes of all members in the folder ``run``, write the summary ``ensemble.json``, and return it.

    The members may have run in one job or in many. Not collective.

    Parameters
    ----------
    run : path
        Folder of the ensemble.
    members : int or None
        Number of members; None counts up to the last one that has a folder.

    Returns
    -------
    dict
        "members": one dictionary each, with "member", "status" ("complete", "failed" or "unfinished") and "result" or
        "error". "counts": the number of members of each status. "figures": for each number in the results of all
        complete members, its "mean", "deviation" (of the members, divisor n), "least" and "largest".

    Raises
    ------
    DataError
        If the folder holds no member, or an outcome cannot be read.

    Examples
    --------
    >>> import mpizero as mz
    >>> def train(member):
    ...     return {"loss": 1.0 + member.number}
    >>> for number in range(2):  # as two jobs do
    ...     _ = mz.run_members(train, 2, "self", run="ensemble", only=number)
    >>> mz.summarize_members("ensemble")["figures"]["loss"]["mean"]
    1.5
    """
    if members is None:  # up to the last that has a folder
        numbers = [path.name.removeprefix("member_") for path in Path(run).glob("member_*")]
        members = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
    if not members:
        raise DataError(f"{run}: holds no folder of a member, such as {member_folder(run, 0).name}")
    found = [{"member": number, **_outcome(member_folder(run, number))} for number in range(members)]
    statuses = [one["status"] for one in found]
    summary = {
        "members": found,
        "counts": {status: statuses.count(status) for status in (COMPLETE, FAILED, UNFINISHED)},
        "figures": _figures([one["result"] for one in found if one["status"] == COMPLETE]),
    }
    _replace(Path(run) / SUMMARY, summary)
    return summary


def _outcome(folder: Path) -> dict[str, Any]:
    path = folder / OUTCOME
    try:
        found = json.loads(path.read_bytes())
        return {"status": str(found["status"]), **found}
    except FileNotFoundError:
        return {"status": UNFINISHED}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the outcome of a member: {error}") from None


def _figures(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in results[0] if results else ():
        values = [result.get(name) for result in results]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            column = np.array(values, np.float64)
            figures = {"mean": column.mean(), "deviation": column.std(), "least": column.min(), "largest": column.max()}
            found[name] = {key: float(value) for key, value in figures.items()}
    return found


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON to a file that is whole whenever it is read."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
