"""Tokens -> text as they come: stop strings, and nothing shown that might still be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from model.tokenizer import Tokenizer


class TextStream:
    """Turns the new tokens of one sequence into text and watches for stop strings.

    Text that might be the beginning of a stop string is held back until it is clear.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop_strings: Sequence[str]):
        self._detokenizer = tokenizer.stream() if tokenizer else None
        self._stops = list(stop_strings)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is certain after this token; sets `stopped` when a stop string is complete."""
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.push([token])
        return self._release()

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self._detokenizer is None or self.stopped:
            return ""
        self._held += self._detokenizer.flush()
        sure = self._release()
        if self.stopped:
            return sure
        rest, self._held = self._held, ""
        return sure + rest

    def _release(self) -> str:
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            sure, self._held = self._held[: min(found)], ""
            return sure
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        sure, self._held = self._held[:cut], self._held[cut:]
        return sure


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
