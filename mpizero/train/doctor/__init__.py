"""Examine what training needs on this machine: ``mpizero doctor``."""
