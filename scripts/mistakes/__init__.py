"""Make typical mistakes of users, a file for each topic: for ``scripts/mistake_table.py``."""
