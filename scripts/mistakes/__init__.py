"""Typical mistakes of users, a file for each topic; ``scripts/mistake_table.py`` makes them."""
