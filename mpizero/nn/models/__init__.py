"""Provide the models MLP and GPT, and functions for any model that is made of blocks."""
