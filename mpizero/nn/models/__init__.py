"""Provide models made of layers, MLP and GPT, and functions for any model of blocks."""
