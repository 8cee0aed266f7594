"""Tokenizer: golden ids, pre-tokenisation rules, special tokens, incremental detokenising, damaged files.

`data/k3_nano_tokens.json` holds ids that the Hugging Face `tokenizers` library gives for the same vocabulary.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model
from model.tokenizer import PATTERNS, Tokenizer, TokenizerError

NANO = Path(model.__file__).parent / "checkpoints" / "k3-nano"
GOLDEN = json.loads((Path(__file__).parent / "data" / "k3_nano_tokens.json").read_text())
BYTES = [bytes([byte]) for byte in range(256)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return Tokenizer.from_folder(NANO)


def split(text: str, pattern: str) -> list[str]:
    """The pieces that a pattern cuts a short text into: with each substring a token, each piece becomes one token."""
    data = text.encode()
    substrings = {data[i:j] for i in range(len(data)) for j in range(i + 2, len(data) + 1)}
    tokenizer = Tokenizer([*BYTES, *sorted(substrings, key=len)], {}, pattern)
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


def write_tokenizer(folder: Path, base: list[bytes], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(base)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["text"][:20])
def test_golden_ids(nano: Tokenizer, golden: dict[str, Any]):
    assert nano.encode(golden["text"], allow_special=True) == golden["ids"]
    assert nano.decode(golden["ids"]) == golden["text"]


def test_vocabulary(nano: Tokenizer):
    assert nano.vocab_size == 4096
    assert dict(nano.special_tokens) == {END: 4095}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("你好世界, hello你好", ["你好世界", ",", " hello", "你好"]),
        ("かな漢字한글", ["かな", "漢字", "한글"]),
        ("Don't they're I'LL he'd", ["Don't", " they're", " I'LL", " he'd"]),
        ("'tis x'y", ["'tis", " x", "'y"]),
        ("camelCase HTMLParser ABC", ["camel", "Case", " HTMLParser", " ABC"]),
        ("1234567 12", ["123", "456", "7", " ", "12"]),
        ("$100 (hello) \thello", ["$", "100", " (", "hello", ")", " ", "\thello"]),
        ("end.\n\nNext", ["end", ".\n\n", "Next"]),
        ("x \n\n  y", ["x", " \n\n", " ", " y"]),
        ("a   b   ", ["a", "  ", " b", "   "]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
        ("½Ⅷ²३", ["½Ⅷ²", "३"]),
    ],
)
def test_k3_pattern(text: str, pieces: list[str]):
    assert split(text, "k3") == pieces


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("Don't I'LL", ["Don", "'t", " I", "'", "LL"]),
        ("camelCase 你好x", ["camelCase", " 你好x"]),
        ("1234 5678", ["123", "4", " 567", "8"]),
        ("end.\n\nNext \n x", ["end", ".", "\n\n", "Next", " \n", " x"]),
        ("a   b   ", ["a", "  ", " b", "   "]),
        ("e\u0301", ["e", "\u0301"]),
    ],
)
def test_gpt2_lines_pattern(text: str, pieces: list[str]):
    assert split(text, "gpt2-lines") == pieces


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_each_pattern_keeps_every_character(pattern: str):
    rng = np.random.default_rng(0)
    tokenizer = Tokenizer(BYTES, {}, pattern)
    for _ in range(200):
        points = rng.choice([rng.integers(0, 0x80), rng.integers(0xA0, 0xD7FF), rng.integers(0x1F300, 0x1F700)], 30)
        text = "".join(map(chr, points)) + "".join(rng.choice(["\n", "\r", " ", "\t", "é", "9", "'"], 10))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_user_text_never_yields_a_special_id(nano: Tokenizer):
    text = f"a{END}b"
    plain = nano.encode(text)
    assert 4095 not in plain
    assert nano.decode(plain) == text
    assert nano.encode(text, allow_special=True) == [*nano.encode("a"), 4095, *nano.encode("b")]
    assert nano.encode(END * 2, allow_special=True) == [4095, 4095]


def test_longest_special_token_wins():
    tokenizer = Tokenizer(BYTES, {"<a>": 256, "<a><b>": 257}, "k3")
    assert tokenizer.encode("<a><a><b>", allow_special=True) == [256, 257]


def test_lone_surrogate_becomes_the_replacement_character(nano: Tokenizer):
    assert nano.decode(nano.encode("\ud800x")) == "\ufffdx"


def test_official_limits():
    """A run is cut after 25,000 characters and a text after 400,000, so no token spans the cut."""
    tokenizer = Tokenizer([*BYTES, b"ab", b"\t "], {}, "k3")
    for filler, pair, break_ in (("b", "ab", " "), (" ", "\t ", ".")):
        whole, cut = tokenizer.encode(pair), list(pair.encode())
        assert len(whole) == 1
        assert tokenizer.encode(filler * 24_998 + pair)[24_998:] == whole
        assert tokenizer.encode(filler * 24_999 + pair)[24_999:] == cut
        assert tokenizer.encode(filler * 49_999 + pair)[49_999:] == cut
        assert tokenizer.encode(filler * 20_000 + break_ + filler * 20_000 + pair)[-1:] == whole
    words = "bbbb bbb " * 44_444
    assert tokenizer.encode(words + "bb" + "ab")[-1:] == tokenizer.encode("ab")
    assert tokenizer.encode(words + "bbb" + "ab")[-2:] == list(b"ab")


def test_reserved_tokens_of_the_k3_vocabulary(tmp_path: Path):
    added = {"256": {"content": "[BOS]"}, "259": {"content": "<|open|>", "special": False}}
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path, BYTES, added_tokens_decoder=added, bos_token="[BOS]"))
    assert tokenizer.vocab_size == 512
    assert len(tokenizer.special_tokens) == 256
    assert tokenizer.decode([256, 257, 259, 511]) == "[BOS]<|reserved_token_257|><|open|><|reserved_token_511|>"
    assert tokenizer.encode("<|open|>") == list(b"<|open|>")
    assert tokenizer.encode("<|open|>", allow_special=True) == [259]
    assert tokenizer.encode("中文") == list("中文".encode())


@pytest.mark.parametrize("token_id", [-1, 4096, 163_840])
def test_id_out_of_range(nano: Tokenizer, token_id: int):
    with pytest.raises(TokenizerError, match=rf"ids\[1\] = {token_id}; expected an id from 0 to 4095"):
        nano.decode([3, token_id])
    stream = nano.stream()
    with pytest.raises(TokenizerError, match=str(token_id)):
        stream.push([3, token_id])
    assert stream.push([3]) == nano.decode([3])


def test_ids_may_be_an_array(nano: Tokenizer):
    ids = np.array(nano.encode("an array of ids"), np.int32)
    assert nano.decode(ids) == "an array of ids"
    with pytest.raises(TypeError):
        nano.decode([1.5])  # type: ignore[list-item]


def test_stream_holds_back_half_a_character():
    stream = Tokenizer(BYTES, {}, "k3").stream()
    assert [stream.push([byte]) for byte in "é😀x".encode()] == ["", "é", "", "", "", "😀", "x"]
    assert stream.push("😀".encode()[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push("é".encode()) == "é"


def test_stream_replaces_invalid_bytes_as_soon_as_they_are_known():
    stream = Tokenizer(BYTES, {}, "k3").stream()
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.push(b"x") == "\ufffdx"
    assert stream.push([0xFF]) == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_stream_pieces_join_to_the_whole(nano: Tokenizer, seed: int):
    rng = np.random.default_rng(seed)
    text = "".join(map(chr, rng.choice([0x41, 0x20, 0xE9, 0x4F60, 0x1F600, 0x200D], 40)))
    ids = nano.encode(text) + rng.integers(0, 4096, 40).tolist() + rng.integers(0, 256, 40).tolist()
    whole = nano.decode(ids)
    stream = nano.stream()
    emitted = ""
    while ids:
        take = int(rng.integers(0, 5))
        emitted += stream.push(ids[:take])
        ids = ids[take:]
        assert whole.startswith(emitted)
    assert emitted + stream.flush() == whole


def test_missing_files(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: no such file"):
        Tokenizer.from_folder(tmp_path)
    write_tokenizer(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: no such file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("line", ["AAAA", "AAAA 7", "AAA 3", "!! 3", "AAAA x", "AAAA 3 4"])
def test_damaged_model_file(tmp_path: Path, line: str):
    write_tokenizer(tmp_path, BYTES[:3])
    with (tmp_path / "tiktoken.model").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: line 4: expected 'base64\(bytes\) 3'"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("base", "config", "message"),
    [
        (BYTES[:255], {}, "byte 0xff has no token"),
        ([*BYTES, b"a"], {}, "token b'a' has two ids, 256 and 97|token b'a' has two ids, 97 and 256"),
        (BYTES, {"pattern": "gpt9"}, "pattern = 'gpt9' is not known; known: k3, gpt2-lines"),
        (BYTES, {"pattern": ["k3"]}, "is not known"),
        (BYTES, {"added_tokens_decoder": []}, "expected JSON with added_tokens_decoder"),
        (BYTES, {"added_tokens_decoder": {"256": "x"}}, "expected JSON with added_tokens_decoder"),
        # Ids beyond the 256 reserved ones would lie outside of the embedding table.
        (BYTES, {"added_tokens_decoder": {"512": {"content": "x"}}}, "gives 'x' the id 512; expected 256 to 511"),
        (BYTES, {"pattern": "gpt2-lines", "added_tokens_decoder": {"257": {"content": "x"}}}, "expected .* id 256"),
        (BYTES, {"added_tokens_decoder": {"256": {"content": "x"}, "257": {"content": "x"}}}, "'x' has two ids"),
    ],
)
def test_refused_vocabulary(tmp_path: Path, base: list[bytes], config: dict[str, Any], message: str):
    write_tokenizer(tmp_path, base, **config)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)
