"""Text to token ids and back: rank BPE (`tiktoken`), special tokens, incremental detokenising.

A tokenizer is two files of a checkpoint folder:

`tiktoken.model`: one line for each base token, `base64(bytes) rank`; the ranks 0, 1, 2, ... are the ids.

`tokenizer_config.json`: the special tokens in `added_tokens_decoder` (id -> {"content": text}), as Hugging Face writes
them, and one key of this library's own, `pattern`: the name in `PATTERNS` of the rule that cuts text into pieces
before merging. A file without this key is an official one of the Kimi family and means "k3". With "k3", the 256 ids
that follow the base tokens are special tokens, called `<|reserved_token_ID|>` unless `added_tokens_decoder` renames
them. Other keys are not read.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tiktoken

MODEL_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "k3": "|".join(
            (
                r"\p{Han}+",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
        "gpt2-lines": (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
    }
)
"""Pre-tokenisation rules by name: "k3" is Kimi K3's; "gpt2-lines" is GPT-2's with at most three digits a piece and line
breaks apart from other white space."""

RESERVED_TOKENS = {"k3": 256}
"""Special ids that follow the base tokens, by pattern; other patterns have those of `added_tokens_decoder` only."""

MAX_PIECE_CHARS = 400_000
"""Longer text is cut into pieces of this many characters before merging, as the official wrapper does."""
MAX_RUN_CHARS = 25_000
"""So are longer runs of white space, or of anything else, that nothing interrupts."""


class TokenizerError(ValueError):
    """A tokenizer file or a token id that cannot be used; the message says which, what was expected and what found."""


class Tokenizer:
    """Text <-> ids of one vocabulary. Immutable, so threads may share it.

    Attributes:
      vocab_size: the number of ids; each id from 0 to `vocab_size - 1` has a token.
      special_tokens: text -> id of every special token.
    """

    def __init__(self, base: Iterable[bytes], special_tokens: Mapping[str, int], pattern: str) -> None:
        """Builds a tokenizer from its parts (see `from_folder`).

        Args:
          base: the bytes of tokens 0, 1, 2, ...; all 256 single bytes must be among them.
          special_tokens: text -> id; the ids continue those of `base` without a gap.
          pattern: a key of `PATTERNS`.

        Raises:
          TokenizerError: an unknown pattern, a doubled token, a single byte without a token, a gap between ids.
        """
        if pattern not in PATTERNS:
            raise TokenizerError(f"pattern = {pattern!r} is not known; known: {', '.join(PATTERNS)}")
        self._bytes = list(base)
        ranks = {token: rank for rank, token in enumerate(self._bytes)}
        if len(ranks) < len(self._bytes):
            rank = next(rank for rank, token in enumerate(self._bytes) if ranks[token] != rank)
            raise TokenizerError(f"token {self._bytes[rank]!r} has two ids, {rank} and {ranks[self._bytes[rank]]}")
        for byte in range(256):
            if bytes([byte]) not in ranks:
                raise TokenizerError(f"byte {byte:#04x} has no token; expected a token for each of the 256 bytes")
        ordered = sorted(special_tokens.items(), key=operator.itemgetter(1))
        for expected, (text, token_id) in enumerate(ordered, start=len(self._bytes)):
            if token_id != expected or not text:
                raise TokenizerError(
                    f"special token {text!r} has id {token_id}; expected a text with id {expected}: "
                    f"special ids follow the {len(self._bytes)} base tokens without a gap"
                )
            self._bytes.append(text.encode())
        self.vocab_size = len(self._bytes)
        self.special_tokens: Mapping[str, int] = MappingProxyType(dict(ordered))
        self._special = re.compile("|".join(re.escape(t) for t in sorted(self.special_tokens, key=len, reverse=True)))
        self._merge = tiktoken.Encoding(
            pattern, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=dict(ordered)
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads `tiktoken.model` and `tokenizer_config.json` of a checkpoint folder.

        Raises:
          TokenizerError: a file is missing or damaged; the message names the file and the line or key.
        """
        folder = Path(folder)
        base = _read_base(folder / MODEL_FILE)
        file = folder / CONFIG_FILE
        try:
            config = json.loads(_read(file))
            added = {int(key): entry["content"] for key, entry in config.get("added_tokens_decoder", {}).items()}
            pattern = config.get("pattern", "k3")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(
                f'{file}: expected JSON with added_tokens_decoder {{id: {{"content": text}}}}; found {error!r}'
            ) from error
        if pattern not in tuple(PATTERNS):
            raise TokenizerError(f"{file}: pattern = {pattern!r} is not known; known: {', '.join(PATTERNS)}")
        reserved = range(len(base), len(base) + RESERVED_TOKENS.get(pattern, 0))
        for token_id, text in added.items():
            if reserved and token_id not in reserved:
                raise TokenizerError(
                    f"{file}: added_tokens_decoder gives {text!r} the id {token_id}; expected {reserved.start} to "
                    f"{reserved.stop - 1}, the special ids of pattern {pattern!r} after {len(base)} base tokens"
                )
        names = {token_id: f"<|reserved_token_{token_id}|>" for token_id in reserved} | added
        special: dict[str, int] = {}
        for token_id, text in names.items():
            if special.setdefault(text, token_id) != token_id:
                raise TokenizerError(f"{file}: special token {text!r} has two ids, {special[text]} and {token_id}")
        try:
            return cls(base, special, pattern)
        except TokenizerError as error:
            raise TokenizerError(f"{folder}: {error}") from error

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of a text; nothing is added before or after it.

        Args:
          text: any string. A lone surrogate is encoded as U+FFFD.
          allow_special: False encodes the text of a special token like any other text, so text from outside cannot
            yield a special id. True turns it into the special id; for text that the program itself wrote.
        """
        ids: list[int] = []
        end = 0
        if allow_special and self.special_tokens:
            for match in self._special.finditer(text):
                ids += self._encode_plain(text[end : match.start()])
                ids.append(self.special_tokens[match.group()])
                end = match.end()
        return ids + self._encode_plain(text[end:])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD; special tokens appear as their text.

        Raises:
          TokenizerError: an id outside 0 to `vocab_size - 1`.
        """
        return self.token_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, one after the other.

        Raises:
          TokenizerError: an id outside 0 to `vocab_size - 1`.
        """
        parts = []
        for position, token_id in enumerate(ids):
            index = operator.index(token_id)
            if not 0 <= index < self.vocab_size:
                raise TokenizerError(f"ids[{position}] = {index}; expected an id from 0 to {self.vocab_size - 1}")
            parts.append(self._bytes[index])
        return b"".join(parts)

    def stream(self) -> Detokenizer:
        """A detokenizer for ids that arrive bit by bit."""
        return Detokenizer(self)

    def _encode_plain(self, text: str) -> list[int]:
        return [token_id for piece in _pieces(text) for token_id in self._merge.encode_ordinary(piece)]


class Detokenizer:
    """Turns ids that arrive bit by bit into text, never into half a character.

    The bytes of an unfinished UTF-8 character are held back until they are complete or known to be invalid. All
    pieces joined, the one of `flush` included, equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete (perhaps none).

        Raises:
          TokenizerError: an id out of range; nothing of this call is taken then.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(ids))

    def flush(self) -> str:
        """What was held back, as U+FFFD; the detokenizer is as new afterwards."""
        return self._decoder.decode(b"", final=True)


def _pieces(text: str) -> Iterator[str]:
    """Cuts text at the official wrapper's limits; most text comes back whole."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        part = text[start : start + MAX_PIECE_CHARS]
        begin = 0
        if len(part) > MAX_RUN_CHARS:
            for run in re.finditer(r"\s+|\S+", part):
                for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield part[begin:cut]
                    begin = cut
        yield part[begin:]


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise TokenizerError(f"{file}: no such file; a tokenizer is {MODEL_FILE} and {CONFIG_FILE}")
    return file.read_bytes()


def _read_base(file: Path) -> list[bytes]:
    base: list[bytes] = []
    for number, line in enumerate(_read(file).splitlines(), start=1):
        fields: list[Any] = line.split()
        if not fields:
            continue
        try:
            token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
            well_formed = len(fields) == 2 and rank == len(base)
        except (IndexError, ValueError, binascii.Error):
            well_formed = False
        if not well_formed:
            raise TokenizerError(
                f"{file}: line {number}: expected 'base64(bytes) {len(base)}' (ranks in order); found {line[:60]!r}"
            )
        base.append(token)
    return base
