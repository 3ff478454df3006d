"""The configuration of a run: its sections, the file, the checks, and the objects built from it."""
