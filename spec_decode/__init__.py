"""Draft, verify, accept: drafters that run inside the launch and leave its output as it is."""

from spec_decode.ngram import NGramDrafter

__all__ = ["NGramDrafter"]
