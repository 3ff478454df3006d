"""Compare objects between ranks, and find the part in which they differ."""

from mpizero.fingerprint.describe import qualified_name, shown, words
from mpizero.fingerprint.parts import DEEPEST, LARGEST_ARRAY, Fingerprint, Parts

__all__ = ["DEEPEST", "LARGEST_ARRAY", "Fingerprint", "Parts", "qualified_name", "shown", "words"]
