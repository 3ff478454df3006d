"""Compare objects of different ranks, and find the part in which they differ."""

from mpizero.fingerprint.parts import DEEPEST, LARGEST_ARRAY, Fingerprint, Parts
from mpizero.fingerprint.told import shown, words

__all__ = ["DEEPEST", "LARGEST_ARRAY", "Fingerprint", "Parts", "shown", "words"]
