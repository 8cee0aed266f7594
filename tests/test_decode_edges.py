"""Edges of the public API: kinds of arguments, numbers at the ends of float32, damage in every kind of tensor."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from launching import anew, needs_nano, random_model

from megakernel import Generation, LoadedModel, NumericsError, SamplingParams, decode, load
from megakernel.request import make_jobs, make_stop
from model.checkpoint import CheckpointError

PROMPT = [5, 6, 7]


def decoded(model: LoadedModel, prompt: Any = PROMPT, backend: Any = "interpret", **how: Any) -> Generation:
    found = decode(model, prompt, **{"max_new_tokens": 4, "seed": 0, "backend": backend} | how)
    assert isinstance(found, Generation)
    return found


# ---- kinds of arguments ----


@pytest.mark.parametrize(
    ("prompts", "tokens", "single"),
    [
        ((5, 6), [(5, 6)], True),
        (np.array([5, 6], np.int16), [(5, 6)], True),
        (jnp.array([5, 6]), [(5, 6)], True),
        ([np.int64(5), 6], [(5, 6)], True),
        (np.array([[5, 6], [7, 8]]), [(5, 6), (7, 8)], False),
        (np.array([[5], [7]]), [(5,), (7,)], False),
        ([jnp.array([5, 6]), np.array([7])], [(5, 6), (7,)], False),
        ([[5], (6, 7)], [(5,), (6, 7)], False),
    ],
)
def test_token_ids_may_come_in_any_container(prompts: Any, tokens: list[tuple[int, ...]], single: bool) -> None:
    jobs, is_single = make_jobs(random_model(), prompts, 4, None, None)
    assert [job.prompt for job in jobs] == tokens
    assert is_single == single
    assert all(type(token) is int for job in jobs for token in job.prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": None}, r"prompts = None; expected a string, a list of token ids, or a list of either"),
        ({"prompts": 5}, r"prompts = 5; expected"),
        ({"prompts": b"text"}, r"prompts = b'text'; expected"),
        ({"prompts": [1.5, 2]}, r"prompt 0 is 1.5; expected a string or a list of token ids"),
        ({"prompts": [[5], None]}, r"prompt 1 is None; expected"),
        ({"prompts": [[[5]]]}, r"prompt 0 holds \[5\]; expected token ids"),
        ({"prompts": [True, 5]}, r"prompt 0 is True; expected"),
        ({"seed": True}, r"seed = True; expected int"),
        ({"seed": [True]}, r"seed = \[True\]; expected int"),
        ({"seed": 1.0}, r"seed = 1.0; expected int"),
        ({"seed": "1"}, r"seed = .*1.*; expected int"),
        ({"sampling": []}, r"sampling has 0 entries for 1 prompts"),
        ({"sampling": {"temperature": 1.0}}, r"sampling = \{'temperature': 1.0\}; expected SamplingParams"),
        ({"max_new_tokens": True}, r"max_new_tokens = True; expected an integer"),
        ({"max_new_tokens": "4"}, r"max_new_tokens = '4'; expected an integer"),
        ({"stop": 1.5}, r"stop = 1.5; expected strings or token ids"),
        ({"stop": [1.5]}, r"stop holds 1.5; expected token ids"),
        ({"stop": True}, r"stop = True; expected strings or token ids"),
    ],
)
def test_other_kinds_are_refused_by_name_and_value(arguments: dict[str, Any], message: str) -> None:
    call = {"prompts": PROMPT, "max_new_tokens": 4, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        decode(random_model(), **call)


def test_integers_of_numpy_are_integers() -> None:
    jobs, _ = make_jobs(random_model(), [[5], [6]], np.int64(4), None, [np.int64(3), np.uint64(2**64 - 1)])  # type: ignore[arg-type, list-item]
    assert [job.seed for job in jobs] == [3, 2**64 - 1]
    assert make_jobs(random_model(), [5], 4, None, np.int32(7))[0][0].seed == 7  # type: ignore[arg-type]
    assert make_stop(random_model(), np.int64(9)).tokens == (1, 9)  # type: ignore[arg-type]


def test_what_is_not_a_number_or_not_a_model_is_named() -> None:
    for name, value in (("temperature", "hot"), ("top_p", None), ("min_p", True)):
        with pytest.raises(ValueError, match=f"{name} = {value!r}; expected a number"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model = 'k3-nano'; expected a loaded model: load\('k3-nano'\)"):
        decode("k3-nano", "Call me")  # type: ignore[arg-type]


# ---- numbers at the ends of float32 ----


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1e-31}, {"temperature": 1e-45}, {"temperature": 1e31}, {"temperature": 1e39},
        {"top_p": 1e-31}, {"top_p": 1e-46}, {"top_k": 2**31},
    ],
)  # fmt: skip
def test_what_float32_or_int32_cannot_hold_is_refused(values: dict[str, Any]) -> None:
    """Such a temperature would make logits infinite, such a top_p would keep nothing: token 0 for ever."""
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=re.escape(f"{name} = {value}; expected")):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=1e30),
        SamplingParams(temperature=1.0, top_p=1e-30),
        SamplingParams(temperature=1.0, top_p=1 - 1e-12),
        SamplingParams(temperature=1.0, top_k=2**31 - 1),
        SamplingParams(temperature=1.0, min_p=1e-46),
        SamplingParams(temperature=1.0, min_p=1.0),
    ],
)
def test_the_last_values_allowed_give_the_tokens_of_the_reference(sampling: SamplingParams) -> None:
    model = random_model()
    tokens = decoded(model, sampling=sampling).tokens
    assert tokens == decoded(model, sampling=sampling, backend="reference").tokens
    likeliest_only = sampling.temperature < 1e-20 or sampling.top_p < 1e-20 or sampling.min_p == 1
    assert (tokens == decoded(model).tokens) == likeliest_only


# ---- damage in every kind of tensor ----

SATURATING = ("f_a_proj", "f_b_proj", "b_proj", "g_proj", "gate_proj", "up_proj", "A_log", "dt_bias")
"""What feeds a sigmoid, a tanh or a softplus only: infinity there gives finite numbers, in the reference too."""


def one_of_each_kind() -> dict[str, list[str]]:
    """By kind of tensor, names of one layer: one tensor, or that of every expert."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in random_model().weights:
        kind = re.sub(r"layers\.(\d+)\.", r"L.", re.sub(r"experts\.\d+\.", "E.", name))
        layer = re.search(r"layers\.(\d+)\.", name)
        found.setdefault((kind, layer[1] if layer else ""), []).append(name)
    last = {kind: names for (kind, _), names in found.items()}
    return {names[0]: names for kind, names in last.items() if not kind.endswith("weight_packed")}


KINDS = one_of_each_kind()
NUMBERS = [name for name in KINDS if not name.endswith("weight_scale")]


def damaged(name: str, value: float) -> LoadedModel:
    """One number of the tensor replaced (of every expert's); what is compiled already stays so."""
    model, weights = random_model(), dict(random_model().weights)
    for one in KINDS[name]:
        tensor = np.array(weights[one])
        if name == "model.embed_tokens.weight":
            tensor[PROMPT[1], 3] = value
        else:
            tensor.reshape(-1)[min(5, tensor.size - 1)] = value
        weights[one] = tensor
    broken = LoadedModel(model.config, weights)
    broken.derived = {key: compiled for key, compiled in model.derived.items() if key[0] == "launch"}
    return broken


def where(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    if name == "model.embed_tokens.weight":
        return "layer 0"
    return f"layer {found[1]}" if found else "the final norm or the LM head"


@pytest.fixture(scope="module")
def compiled() -> LoadedModel:
    decoded(random_model())
    return random_model()


@pytest.mark.parametrize("name", NUMBERS)
def test_one_nan_in_a_tensor_is_blamed_on_it(name: str, compiled: LoadedModel) -> None:
    assert np.isfinite(np.asarray(compiled.weights[name], np.float32)).all()
    with pytest.raises(NumericsError, match=f"{where(name)}.*{re.escape(name)} holds NaN"):
        decoded(damaged(name, np.nan))


@pytest.mark.parametrize("name", NUMBERS)
def test_one_infinity_in_a_tensor_is_blamed_on_it_or_saturates(name: str, compiled: LoadedModel) -> None:
    broken = damaged(name, np.inf)
    if any(f".{part}" in name for part in SATURATING):
        assert decoded(broken).tokens == decoded(broken, backend="reference").tokens
        return
    with pytest.raises(NumericsError, match=f"{where(name)}.*{re.escape(name)} holds NaN or infinity"):
        decoded(broken)


@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith("weight_scale")])
def test_a_scale_byte_without_a_value_is_refused(name: str, byte: int, compiled: LoadedModel) -> None:
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}: expected MXFP4 scale bytes.*found {byte} at"):
        decoded(damaged(name, byte))


def test_nan_on_the_way_through_a_long_prompt(compiled: LoadedModel) -> None:
    """The prompt runs through the reference, whose caches then hold NaN; the message still names the tensor."""
    name = "model.layers.1.self_attn.k_proj.weight"
    model, tensor = anew(random_model()), np.array(random_model().weights["model.layers.1.self_attn.k_proj.weight"])
    tensor[0, 0] = np.nan
    model.weights = {**model.weights, name: tensor}
    with pytest.raises(NumericsError, match=re.escape(name)):
        decoded(model, [3 + i % 300 for i in range(100)])


def test_damage_that_no_token_meets_harms_nobody(compiled: LoadedModel) -> None:
    """A NaN in the embedding of a token that does not occur."""
    tensor = np.array(compiled.weights["model.embed_tokens.weight"])
    tokens = decoded(compiled).tokens
    unused = next(token for token in range(3, 384) if token not in {*PROMPT, *tokens})
    tensor[unused] = np.nan
    broken = LoadedModel(compiled.config, {**compiled.weights, "model.embed_tokens.weight": tensor}, None)
    broken.derived = {key: value for key, value in compiled.derived.items() if key[0] == "launch"}
    assert decoded(broken).tokens == tokens


# ---- stop strings across tokens and launches ----


@needs_nano
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_a_stop_string_may_begin_and_end_anywhere(length: int) -> None:
    """Every substring of a text as the stop string: the text ends before its first occurrence, streamed or not.

    Launches of 16 tokens: some strings cross a launch, most cross a token.
    """
    model, prompt = load_nano(), "The Congress shall have Power"
    whole = decoded(model, prompt, max_new_tokens=40)
    assert len(whole.text) > 60
    for start in range(0, len(whole.text) - length, 7):
        stop = whole.text[start : start + length]
        expected = whole.text[: whole.text.index(stop)]
        found = decoded(model, prompt, max_new_tokens=40, stop=stop)
        assert (found.text, found.finish_reason) == (expected, "stop")
        assert found.tokens == whole.tokens[: len(found.tokens)]
        pieces = list(decode(model, prompt, max_new_tokens=40, stop=stop, stream=True, backend="interpret"))
        assert "".join(piece.text for piece in pieces) == expected
        assert [piece.finish_reason for piece in pieces][-1] == "stop"


def load_nano(found: list[LoadedModel] = []) -> LoadedModel:  # noqa: B006  (one model for the file)
    if not found:
        found.append(load("k3-nano"))
    return found[0]
