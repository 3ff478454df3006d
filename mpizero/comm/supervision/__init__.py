"""Supervise a job: compare the ranks' collectives, report hanging ones, and end all ranks when one fails."""
