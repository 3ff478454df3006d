"""Make typical mistakes of users, one function for each: run by ``scripts/mistake_table.py``."""
