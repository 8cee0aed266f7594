"""What formats of the wire between cores do to k3-nano's numbers: `python benchmarks/wire.py [CORES] [TOKENS]`.

Held-out text is read token by token, so that every format sees the same; CPU devices stand for cores, in interpret mode
with a TPU's plan. Everything printed is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from megakernel import LoadedModel, find_target, load, make_plan
from megakernel.backends import Backend
from megakernel.messages import WIRE_BYTES
from megakernel.program import power_of_two
from megakernel.session import Session, SlotRequest
from model.sampling import SamplingParams

EXCERPT = Path(__file__).parents[1] / "tests" / "data" / "valid_excerpt.txt"
END_OF_TEXT = 4095
TARGET = find_target("v7x")


def read(model: LoadedModel, tokens: list[int], cores: int, wire: str | None) -> np.ndarray:
    """Logits after each token.  # [tokens, vocabulary] f32"""
    steps = power_of_two(len(tokens) + 1)
    plan = make_plan(model.config, TARGET, cores=cores, wire=wire, context=steps, launch_steps=steps, keep_logits=True)
    session = Session(model, plan, Backend("interpret", TARGET, True), ())
    asked = SlotRequest(given=tokens, position=0, known=tokens, wanted=1, sampling=SamplingParams(), seed=0)
    session.launch([asked])
    return np.asarray(session.results["step_logits"][: len(tokens), 0, : model.config.vocab_size], np.float64)


def bits_per_token(logits: np.ndarray, tokens: list[int]) -> float:
    """Of the tokens that follow, in bits."""
    highest = logits.max(axis=1, keepdims=True)
    log_sum = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=1))
    following = logits[np.arange(len(tokens) - 1), tokens[1:]]
    return float(np.mean(log_sum[:-1] - following) / np.log(2))


def difference(logits: np.ndarray, others: np.ndarray) -> float:
    """Relative, over all of both."""
    return float(np.linalg.norm(logits - others) / np.linalg.norm(others))


def main() -> None:
    given = [int(number) for number in sys.argv[1:]]
    cores, count = [*given, *(4, 256)[len(given) :]]
    jax.config.update("jax_num_cpu_devices", cores)
    model = load("k3-nano")
    assert model.tokenizer is not None
    tokens = [END_OF_TEXT, *model.tokenizer.encode(EXCERPT.read_text())][:count]
    one = read(model, tokens, 1, None)
    print(f"k3-nano on {cores} cores, {count} tokens of held-out text, activations {TARGET.activations}, measured")
    print(f"{'wire':<16}{'bytes':>6}{'difference':>12}{'same choice':>13}{'bits a token':>14}")
    print(f"{'one core':<16}{'':>6}{'':>12}{'':>13}{bits_per_token(one, tokens):>14.4f}")
    for wire, size in WIRE_BYTES.items():
        logits = read(model, tokens, cores, wire)
        same = np.mean(logits.argmax(axis=1) == one.argmax(axis=1))
        row = f"{difference(logits, one):>12.5f}{same:>13.1%}{bits_per_token(logits, tokens):>14.4f}"
        print(f"{wire:<16}{size:>6}{row}")


if __name__ == "__main__":
    main()
