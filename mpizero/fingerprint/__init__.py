"""What makes up an object, in a form that is equal wherever the objects are: how ranks find out in what they differ."""

from mpizero.fingerprint.parts import DEEPEST, LARGEST_ARRAY, Fingerprint, Parts
from mpizero.fingerprint.told import shown, words

__all__ = ["DEEPEST", "LARGEST_ARRAY", "Fingerprint", "Parts", "shown", "words"]
