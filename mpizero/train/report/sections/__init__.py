"""Compose the sections of a report, each from one kind of record."""
