"""Find out that a run should stop: signals, a file, the end of the job's time; all ranks decide together."""
