"""List the commands that one process runs; under mpiexec that is rank 0."""

from __future__ import annotations

from mpizero.train.cli import ensemble_command, replay_command, report_command, watch_command

#: Modules with ``add_command(commands, run)`` and ``run(options)``, in the order in which ``--help`` shows them.
ONE_PROCESS = (replay_command, ensemble_command, report_command, watch_command)
