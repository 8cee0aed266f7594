"""Text to training windows.

The corpus is a folder with `train.txt.xz` (or `train.txt`) and `valid.txt`, documents separated by a line
`<|endoftext|>`. All documents become one stream of token ids, each preceded by the end-of-text token.
"""

from __future__ import annotations

import dataclasses
import lzma
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from model.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>\n"


def read_documents(corpus: Path, name: str) -> list[str]:
    packed = corpus / f"{name}.txt.xz"
    raw = lzma.decompress(packed.read_bytes()) if packed.exists() else (corpus / f"{name}.txt").read_bytes()
    text = raw.decode()
    return [document.strip() for document in text.split(SEPARATOR) if document.strip()]


def encode_documents(documents: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids of each document, without the end-of-text token."""
    with ThreadPoolExecutor() as pool:
        return [np.asarray(ids, np.int32) for ids in pool.map(tokenizer.encode, documents)]


@dataclasses.dataclass(frozen=True)
class Stream:
    """tokens: `[N]` int32, `eos doc eos doc ...`. paragraph: `[N]`, the next position at or after each that begins a
    paragraph or a document."""

    tokens: np.ndarray
    paragraph: np.ndarray
    eos: int

    @classmethod
    def of(cls, documents: list[np.ndarray], eos: int, line_break: int) -> Stream:
        tokens = np.concatenate([np.concatenate([[eos], ids]) for ids in documents]).astype(np.int32)
        after_break = np.zeros(len(tokens), bool)
        after_break[2:] = (tokens[:-2] == line_break) & (tokens[1:-1] == line_break) & (tokens[2:] != line_break)
        after_break[1:] |= tokens[:-1] == eos
        position = np.where(after_break, np.arange(len(tokens)), len(tokens))
        return cls(tokens, np.minimum.accumulate(position[::-1])[::-1], eos)

    def epoch(self, rng: np.random.Generator, length: int, paragraph_share: float) -> tuple[np.ndarray, np.ndarray]:
        """Windows that cover the stream once, in random order.

        Returns `starts [W]` and `fresh [W]`. A fresh window begins with the end-of-text token and then the beginning
        of a paragraph: it teaches the model to start from nothing, as a prompt does.
        """
        last = len(self.tokens) - length - 1
        starts = rng.permutation(np.arange(rng.integers(length), last, length))
        snapped = self.paragraph[starts]
        fresh = (rng.random(len(starts)) < paragraph_share) & (snapped < np.minimum(starts + length // 2, last))
        return np.where(fresh, snapped, starts).astype(np.int32), fresh


def evaluation_windows(documents: list[np.ndarray], eos: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows `[W, length+1]` and which of their `length` targets count `[W, length]`.

    Every token of a document counts once. The first window begins with the end-of-text token; later ones overlap
    by half, so that each token sees at least `length / 2` tokens before it, or its document's beginning.
    """
    windows, counts, half = [], [], length // 2
    for ids in documents:
        text = np.concatenate([[eos], ids])
        begin, done = 0, 0  # `done` targets of this document are counted
        while done < len(ids):
            part = text[begin : begin + length + 1]
            window = np.full(length + 1, eos, np.int32)
            window[: len(part)] = part
            count = np.zeros(length, bool)
            count[done - begin : len(part) - 1] = True
            windows.append(window)
            counts.append(count)
            done = begin + len(part) - 1
            begin += half
    return np.stack(windows), np.stack(counts)
