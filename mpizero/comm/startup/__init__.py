"""Start a job: find the launched ranks, wait for them, and compare their software."""
