"""The public API: what goes in, what comes out, what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from megakernel import LoadedModel, NumericsError, PlanError, SamplingParams, decode, load
from megakernel.request import make_jobs, make_stop
from megakernel.text import TextStream
from model.config import ModelConfig
from model.reference import random_weights

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18]]


@pytest.fixture(scope="module")
def mini() -> LoadedModel:
    config = ModelConfig.preset("k3-mini")
    return LoadedModel(config, random_weights(config, 0))


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("k3-nano")


# ---- what comes out ----


def test_one_prompt_gives_one_generation_and_several_give_a_list(mini: LoadedModel) -> None:
    one = decode(mini, PROMPTS[0], max_new_tokens=4, seed=1)
    many = decode(mini, PROMPTS, max_new_tokens=4, seed=1)
    assert isinstance(many, list)
    assert [g.prompt_tokens for g in many] == [tuple(p) for p in PROMPTS]
    assert many[0].tokens == one.tokens  # type: ignore[union-attr]
    assert all(len(g.tokens) == 4 and g.finish_reason == "length" and g.logprobs is None for g in many)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, top_k=40, top_p=0.9, min_p=0.01)])
def test_the_reference_backend_gives_the_same_tokens_and_logprobs(mini: LoadedModel, sampling: SamplingParams) -> None:
    kernel, reference = (
        decode(mini, PROMPTS, max_new_tokens=12, sampling=sampling, seed=3, logprobs=True, backend=backend)
        for backend in ("interpret", "reference")
    )
    for a, b in zip(kernel, reference, strict=True):  # type: ignore[arg-type]
        assert a.tokens == b.tokens
        # float32 maths in two orders of summation: a few times the 1e-6 relative error of logits of size about 5
        assert np.allclose(a.logprobs, b.logprobs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 64, 65, 257])
def test_a_prompt_of_any_length_takes_one_launch(mini: LoadedModel, length: int) -> None:
    prompt = np.random.default_rng(length).integers(3, 380, length).tolist()
    kernel = decode(mini, prompt, max_new_tokens=6)
    reference = decode(mini, prompt, max_new_tokens=6, backend="reference")
    assert kernel.timing.launches == 1  # type: ignore[union-attr]
    assert kernel.tokens == reference.tokens  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_prompt_of_a_thousand_tokens_takes_one_launch(nano: LoadedModel) -> None:
    text = "The President of the United States has the power to grant pardons. " * 90
    prompt = nano.tokenizer.encode(text)[:1000]  # type: ignore[union-attr]
    generation = decode(nano, prompt, max_new_tokens=8)
    assert (generation.timing.launches, generation.timing.steps) == (1, 8)  # type: ignore[union-attr]
    assert generation.tokens == decode(nano, prompt, max_new_tokens=8, backend="reference").tokens  # type: ignore[union-attr]


def test_more_prompts_than_rows_are_decoded_in_groups(mini: LoadedModel) -> None:
    prompts = [[3 + i, 5] for i in range(19)]
    generations = decode(mini, prompts, max_new_tokens=3, seed=0)
    assert [g.prompt_tokens for g in generations] == [tuple(p) for p in prompts]  # type: ignore[union-attr]
    assert generations[18].tokens == decode(mini, prompts[18], max_new_tokens=3).tokens  # type: ignore[index, union-attr]


def test_streamed_pieces_make_up_the_text(nano: LoadedModel) -> None:
    whole = decode(nano, "The Congress of", max_new_tokens=40, seed=0)
    pieces = list(decode(nano, "The Congress of", max_new_tokens=40, seed=0, stream=True))
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum((piece.tokens for piece in pieces), ()) == whole.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_last_piece_of_a_sequence_carries_its_generation(mini: LoadedModel, backend: str) -> None:
    """Also of one that ends before its neighbours, and with the seed that was drawn for it."""
    prompts, warm = [[3, 5], [9], [4, 4, 4]], SamplingParams(temperature=1.0)
    whole = decode(mini, prompts, max_new_tokens=20, sampling=warm, seed=7)
    stop = whole[1].tokens[2]  # type: ignore[index]
    how: dict[str, Any] = {"max_new_tokens": 20, "sampling": warm, "stop": stop, "backend": backend}
    pieces = list(decode(mini, prompts, stream=True, seed=7, **how))
    carried = {piece.index: piece.generation for piece in pieces if piece.generation}
    assert sorted(carried) == [0, 1, 2]
    assert all((piece.generation is None) == (piece.finish_reason is None) for piece in pieces)
    for index, expected in enumerate(decode(mini, prompts, seed=7, **how)):
        found = carried[index]
        assert (found.tokens, found.finish_reason, found.seed) == (expected.tokens, expected.finish_reason, 7)
        assert found.timing.decode > 0
        assert found.timing.tokens >= len(found.tokens)
    *_, last = decode(mini, prompts[0], stream=True, **how)
    again = decode(mini, prompts[0], seed=last.generation.seed, **how)  # type: ignore[union-attr]
    assert again.tokens == last.generation.tokens  # type: ignore[union-attr]


def test_a_stop_string_ends_the_text_before_it(nano: LoadedModel) -> None:
    whole = decode(nano, "The Congress of", max_new_tokens=40).text
    stop = whole[20:27]
    stopped = decode(nano, "The Congress of", max_new_tokens=40, stop=stop)
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index(stop)]


def test_a_stop_token_is_the_last_token_and_no_text(mini: LoadedModel) -> None:
    whole = decode(mini, PROMPTS[0], max_new_tokens=10).tokens  # type: ignore[union-attr]
    stopped = decode(mini, PROMPTS[0], max_new_tokens=10, stop=whole[4])
    first = whole.index(whole[4])
    assert stopped.tokens == whole[: first + 1]  # type: ignore[union-attr]
    assert stopped.finish_reason == "stop"  # type: ignore[union-attr]


def test_the_models_own_end_of_sequence_stops(mini: LoadedModel) -> None:
    whole = decode(mini, PROMPTS[0], max_new_tokens=10).tokens  # type: ignore[union-attr]
    ending = LoadedModel(ModelConfig(**{**vars(mini.config), "eos_token_ids": (whole[3],)}), mini.weights)
    assert decode(ending, PROMPTS[0], max_new_tokens=10).tokens == whole[: whole.index(whole[3]) + 1]  # type: ignore[union-attr]


def test_a_seed_repeats_and_another_differs(mini: LoadedModel) -> None:
    warm = SamplingParams(temperature=1.0)
    first, again, other = (decode(mini, [5, 6], max_new_tokens=16, sampling=warm, seed=s) for s in (7, 7, 8))
    assert first.tokens == again.tokens != other.tokens  # type: ignore[union-attr]


def test_without_a_seed_each_prompt_draws_its_own(mini: LoadedModel) -> None:
    jobs, _ = make_jobs(mini, [[5], [5], [5]], 4, None, None)
    assert len({job.seed for job in jobs}) == 3


class _Letters:
    """A tokenizer whose ids are characters."""

    def stream(self) -> _Letters:
        return self

    def push(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [("abcabd", ["abd"], "abc"), ("abcab", ["abd"], "abcab"), ("xyz", ["z", "y"], "x"), ("aab", ["ab"], "a")],
)
def test_text_that_may_begin_a_stop_string_is_held_back(text: str, stops: list[str], shown: str) -> None:
    stream = TextStream(_Letters(), stops)  # type: ignore[arg-type]
    pieces = []
    for letter in text:
        pieces.append(stream.push(ord(letter)))
        assert shown.startswith("".join(pieces))
        if stream.stopped:
            break
    assert "".join(pieces) + stream.flush() == shown


# ---- what is refused ----

_BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": [[]]}, "prompt 0 is empty"),
    ({"prompts": [5, 384]}, "token id 384; expected 0 to 383"),
    ({"prompts": [5, -1]}, "token id -1; expected 0 to 383"),
    ({"prompts": [[5, 1.5]]}, "1.5"),
    ({"prompts": "text"}, "has no tokenizer"),
    ({"prompts": [5] * 510, "max_new_tokens": 10}, "510 tokens and max_new_tokens = 10.*context of 512.*to 2"),
    ({"max_new_tokens": 0}, "max_new_tokens = 0"),
    ({"max_new_tokens": 2.5}, "max_new_tokens = 2.5"),
    ({"seed": -1}, "seed = -1"),
    ({"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
    ({"stop": 999}, "token id 999"),
    ({"stop": ""}, "empty string"),
    ({"stop": list(range(3, 12))}, "stop tokens"),
    ({"backend": "gpu"}, "backend 'gpu' is not known; known: auto, interpret, simulate, tpu, reference"),
    ({"backend": "tpu"}, "needs a TPU"),
    ({"draft": "medusa"}, "medusa"),
    ({"draft_tokens": 3}, "draft_tokens = 3 with draft='none'"),
]


@pytest.mark.parametrize(("arguments", "message"), _BAD)
def test_a_bad_argument_is_named_with_its_value(mini: LoadedModel, arguments: dict[str, Any], message: str) -> None:
    call = {"prompts": [5, 6], "max_new_tokens": 4, **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        decode(mini, **call)


@pytest.mark.parametrize(
    "values",
    [{"temperature": math.nan}, {"temperature": -1.0}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.5},
     {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 2.0}, {"top_k": -1}, {"top_k": 1.5}],
)  # fmt: skip
def test_sampling_values_out_of_range_are_named(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=re.escape(f"{name} = {value}")):
        SamplingParams(**values)


def test_a_stream_is_refused_before_its_first_piece_is_asked_for(mini: LoadedModel) -> None:
    with pytest.raises(PlanError, match="cores = 16, and JAX sees 8 devices"):
        decode(mini, [1, 2], cores=16, stream=True)


def test_too_many_stop_tokens_count_the_models_own(mini: LoadedModel) -> None:
    assert make_stop(mini, [5, 6]).tokens == (1, 5, 6)


_POISONED = [
    ("model.embed_tokens.weight", "layer 0"),
    ("model.layers.0.mlp.down_proj.weight", "layer 0 .KDA, dense."),
    ("model.layers.1.self_attn.dt_bias", "layer 1 .KDA, MoE."),
    ("model.layers.2.block_sparse_moe.gate.weight", "layer 2"),
    ("model.layers.2.block_sparse_moe.gate.e_score_correction_bias", "layer 2"),
    ("model.layers.3.self_attn.kv_b_proj.weight", "layer 3 .MLA, MoE."),
    ("model.layers.4.post_attention_layernorm.weight", "layer 4"),
    ("lm_head.weight", "LM head"),
]


@pytest.mark.parametrize(("name", "where"), _POISONED)
def test_nan_in_a_weight_raises_and_names_layer_and_tensor(mini: LoadedModel, name: str, where: str) -> None:
    tensor = np.array(mini.weights[name], copy=True)
    tensor[...] = np.nan
    model = LoadedModel(mini.config, {**mini.weights, name: tensor})
    model.derived = {key: value for key, value in mini.derived.items() if key[0] == "launch"}  # compiled already
    with pytest.raises(NumericsError, match=f"{where}.*{re.escape(name)}"):
        decode(model, PROMPTS[0], max_new_tokens=8)
