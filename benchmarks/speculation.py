"""Speculative decoding on held-out text: tokens a round and tokens/s of each drafter, for several K and temperatures.

Each line is a median over the prompts, measured here in interpret mode, where a round's time hardly grows with memory
traffic but does with rows: tokens/s say what pays on this machine, tokens a round what pays where weights are streamed.
A sample of the text and its share of distinct tokens stand beside each line: text that only repeats itself is easily
drafted. What drafting takes of a round is measured against launches that verify as many rows and draft nothing. Prints
and asserts nothing, except that no drafter changes a token.

    python benchmarks/speculation.py [--model k3-nano] [--tokens 96] [--prompts 4] [--drafts 1 3 7]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from megakernel import LoadedModel, SamplingParams, load, make_plan
from megakernel.backends import resolve_backend
from megakernel.drafting import Draft, Weightless
from megakernel.layers import Step
from megakernel.memory import DRAFTS, cache_buffers
from megakernel.plan import Plan
from megakernel.report import machine_name
from megakernel.session import Session, SlotRequest
from spec_decode import choose_drafter

_TEXT = Path(__file__).parents[1] / "tests" / "data" / "valid_excerpt.txt"
_PROMPT_TOKENS = 24
_SEED = 1


@dataclasses.dataclass
class Line:
    """What one drafter made at one temperature, prompt by prompt."""

    name: str
    drafts: int
    temperature: float
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    per_round: list[float] = dataclasses.field(default_factory=list)
    per_second: list[float] = dataclasses.field(default_factory=list)
    round_seconds: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Unhelpful(Weightless):
    """Proposes token 0 everywhere: its rounds are those of a drafter whose own work has been taken out."""

    name: str = "nothing drafted"
    max_drafts: int = 15
    taps: tuple[int, ...] = ()

    def propose(self, step: Step, section: Any) -> None:
        for sequence in range(step.plan.sequences):
            step.refs.current[DRAFTS, sequence] = jnp.int32(step.plan.tokens - 1)


def main() -> None:
    options = _options()
    model = load(options.model)
    prompts = held_out_prompts(model, options.prompts)
    print(f"{model.config.name} on {machine_name()}, JAX {jax.__version__}; {len(prompts)} prompts from held-out text,")
    print(f"{options.tokens} new tokens each, one sequence at a time; all measured on this machine\n")
    names = ("ngram", "dspark", Unhelpful.name)
    cases = [("none", 0), *((name, k) for name in names for k in options.drafts)]
    lines: list[Line] = []
    for name, drafts in tqdm(cases, desc="drafters", disable=not sys.stderr.isatty()):
        lines += _measure(model, name, drafts, prompts, options)
    _print_table(model, lines)
    _check_same(lines)
    _print_memory(model, cases, options.tokens)


def held_out_prompts(model: LoadedModel, count: int) -> list[list[int]]:
    """Beginnings of paragraphs that the model was not trained on."""
    assert model.tokenizer is not None
    start = model.config.bos_token_id
    paragraphs = [text for text in _TEXT.read_text().split("\n\n") if len(text) > 200][:count]
    return [[start, *model.tokenizer.encode(text)[: _PROMPT_TOKENS - 1]] for text in paragraphs]


def _draft(model: LoadedModel, name: str) -> Draft | None:
    return Draft(Unhelpful(), {}) if name == Unhelpful.name else choose_drafter(name, model)


def _plan(model: LoadedModel, name: str, drafts: int, tokens: int) -> Plan:
    draft = _draft(model, name)
    steps = 1 << (_PROMPT_TOKENS + tokens - 1).bit_length()
    return make_plan(
        model.config,
        context=max(steps, 128),
        launch_steps=steps,
        drafter=draft.drafter if draft else None,
        draft_tokens=drafts or None,
    )


def _measure(
    model: LoadedModel, name: str, drafts: int, prompts: list[list[int]], options: argparse.Namespace
) -> list[Line]:
    draft, plan = _draft(model, name), _plan(model, name, drafts, options.tokens)
    weights = draft.weights if draft else None
    lines = []
    for temperature in (0.0, 0.8):
        line, sampling = Line(name, drafts, temperature), SamplingParams(temperature=temperature)
        for number, prompt in enumerate(prompts):
            session = Session(model, plan, resolve_backend("interpret"), draft_weights=weights)
            request = SlotRequest(prompt, 0, prompt, options.tokens, sampling, _SEED + number)
            (result,) = session.launch([request])
            assert result is not None
            made = session.speculation(0, len(result.tokens))
            line.tokens.append(result.tokens)
            line.per_round.append(made.tokens_per_round if made else 1.0)
            line.per_second.append(len(result.tokens) / session.decode_seconds)
            rounds = int(session.rounds[0]) - 1 + -(-len(prompt) // plan.tokens)
            line.round_seconds.append(session.decode_seconds / rounds)
        lines.append(line)
    return lines


def _print_table(model: LoadedModel, lines: list[Line]) -> None:
    assert model.tokenizer is not None
    print(
        f"{'drafter':<16}{'K':>3}{'temp.':>7}{'tokens/round':>14}{'tokens/s':>10}{'ms/round':>10}{'drafting':>10}"
        f"{'distinct':>10}  sample"
    )
    bare = {(line.drafts, line.temperature): line for line in lines if line.name == Unhelpful.name}
    for line in lines:
        distinct = statistics.median(len(set(tokens)) / len(tokens) for tokens in line.tokens)
        text = model.tokenizer.decode(line.tokens[0][:16]).replace("\n", " ")
        print(
            f"{line.name:<16}{line.drafts or '':>3}{line.temperature:>7}{statistics.median(line.per_round):>14.2f}"
            f"{statistics.median(line.per_second):>10.1f}{1e3 * statistics.median(line.round_seconds):>10.2f}"
            f"{_share(line, bare.get((line.drafts, line.temperature))):>10}{distinct:>10.0%}  {text!r}"
        )
    print(
        f"\nDrafting: time of a round that {Unhelpful.name!r} with as many rows does without (measured, best prompt)."
    )
    print("Seconds include the prompt, which the kernel reads K + 1 tokens a round; compilation is not in them.")


def _share(line: Line, bare: Line | None) -> str:
    if bare is None or bare is line:
        return ""
    return f"{1 - min(bare.round_seconds) / min(line.round_seconds):.0%}"


def _check_same(lines: list[Line]) -> None:
    plain = {line.temperature: line.tokens for line in lines if line.name == "none"}
    for line in lines:
        assert line.tokens == plain[line.temperature], f"{line.name} with K = {line.drafts} changed the text"
    print("Every drafter left every token as it is without one.\n")


def _print_memory(model: LoadedModel, cases: list[tuple[str, int]], tokens: int) -> None:
    """From the plans, not measured: recurrent state, and what undoing rejected rows takes."""
    print("bytes of a sequence in HBM (from the plan)")
    print(f"{'drafter':<16}{'K':>3}{'states and tails':>18}{'rows for replay':>17}{'of the drafter':>16}")
    for name, drafts in cases:
        plan = _plan(model, name, drafts, tokens)
        held = {array: buffer.bytes // plan.sequences for array, buffer in cache_buffers(plan).items()}
        state, pending = held["states"] + held["conv_tails"], held.get("pending_rows", 0)
        own = sum(size for array, size in held.items() if array.startswith("draft"))
        print(f"{name:<16}{drafts or '':>3}{state:>18,}{pending:>17,}{own:>16,}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a round and tokens/s of speculative decoding.")
    parser.add_argument("--model", default="k3-nano")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 7])
    return parser.parse_args()


if __name__ == "__main__":
    main()
