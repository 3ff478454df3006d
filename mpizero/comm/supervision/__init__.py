"""Watch over running collectives: record them, compare them, and report those that do not return."""
