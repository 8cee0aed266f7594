"""Speed of decoding on this machine: the kernel in interpret mode against the jitted reference, token by token.

Prints a table and asserts nothing. Repetitions of all variants are interleaved, so that noise on the machine meets all
of them. Every figure is measured here unless the line says otherwise.

    python benchmarks/decode_speed.py [--model k3-nano] [--tokens 128] [--repetitions 9]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from tqdm import tqdm

from megakernel import LoadedModel, Plan, load, make_plan
from megakernel.__main__ import weight_bytes
from megakernel.backends import resolve_backend
from megakernel.prefill import reference_model
from megakernel.report import machine_name, plural
from megakernel.session import Session, SlotRequest
from model.cache import init_cache
from model.reference import jit_step
from model.sampling import SamplingParams

_PROMPT = (5,)
_STREAMED_DEPTH = 8


@dataclasses.dataclass
class Variant:
    """`run` decodes and returns (new tokens, seconds); `step_bytes` are the weights that one step multiplies by."""

    name: str
    sequences: int
    run: Callable[[], tuple[int, float]]
    step_bytes: int
    rates: list[float] = dataclasses.field(default_factory=list)  # tokens/s of all sequences together


def main() -> None:
    options = _options()
    if options.compile_once:
        _compile_once(options)
        return
    model = load(options.model)
    print(f"{model.config.name} on {machine_name()}, JAX {jax.__version__}; {options.tokens} tokens a sequence,")
    print(f"{options.repetitions} repetitions of each variant, interleaved; all measured on this machine\n")
    _print_compile_times(options)
    variants = _variants(model, options.tokens)
    for variant in variants:
        variant.run()  # compiles, and warms caches
    for _ in tqdm(range(options.repetitions), desc="repetition", leave=False, disable=None):
        for variant in variants:
            tokens, seconds = variant.run()
            variant.rates.append(tokens / seconds)
    _print_rates(variants)


def _print_rates(variants: list[Variant]) -> None:
    reference = variants[-1]
    print(f"{'':<40}{'tokens/s':>20}{'ms a step':>18}{'GB/s of':>9}{'ratio to the':>14}")
    print(f"{'':<40}{'median':>10}{'best':>10}{'median':>9}{'min':>9}{'weights':>9}{'reference':>14}")
    for variant in variants:
        median, best = statistics.median(variant.rates), max(variant.rates)
        ratio = statistics.median(a / b for a, b in zip(variant.rates, reference.rates, strict=True))
        times = [1e3 * variant.sequences / rate for rate in (median, best)]
        gigabytes = median / variant.sequences * variant.step_bytes / 1e9
        print(
            f"{variant.name:<40}{median:>10,.1f}{best:>10,.1f}{times[0]:>9.2f}{times[1]:>9.2f}"
            f"{gigabytes:>9.2f}{ratio:>14.2f}"
        )
    print("\nThe ratio compares tokens/s of all sequences together, repetition by repetition (median).")
    print("Weights: tape with padding, vectors and one sequence's experts; the reference's are unpadded float32.")


def _variants(model: LoadedModel, tokens: int) -> list[Variant]:
    variants = []
    for sequences in (1, 8):
        for depth, name in ((None, "resident"), (_STREAMED_DEPTH, f"streamed, {_STREAMED_DEPTH} blocks")):
            plan = _plan(model, sequences, tokens, depth)
            label = f"kernel, {name}, {plural(sequences, 'sequence')}"
            variants.append(Variant(label, sequences, _kernel_run(model, plan, tokens), weight_bytes(plan)))
    label = "reference, jitted step, 1 sequence"
    return [*variants, Variant(label, 1, _reference_run(model, tokens), _dense_bytes(model))]


def _plan(model: LoadedModel, sequences: int, tokens: int, depth: int | None) -> Plan:
    return make_plan(model.config, sequences=sequences, context=512, launch_steps=max(tokens, 16), ring_depth=depth)


def _kernel_run(model: LoadedModel, plan: Plan, tokens: int) -> Callable[[], tuple[int, float]]:
    """One launch that decodes `tokens` new tokens of every sequence, greedily; nothing stops it earlier."""
    session = Session(model, plan, resolve_backend("interpret"))
    request = _request(tokens)

    def run() -> tuple[int, float]:
        session.caches = jax.tree.map(jnp.zeros_like, session.caches)
        before = session.decode_seconds
        results = session.launch([request] * plan.sequences)
        return sum(len(result.tokens) for result in results if result), session.decode_seconds - before

    return run


def _request(tokens: int) -> SlotRequest:
    return SlotRequest(given=_PROMPT, position=0, known=_PROMPT, wanted=tokens, sampling=SamplingParams(), seed=0)


def _reference_run(model: LoadedModel, tokens: int) -> Callable[[], tuple[int, float]]:
    reference = reference_model(model, "float32")

    def run() -> tuple[int, float]:
        cache = init_cache(model.config, 1, 512, jnp.float32)
        token = jnp.array(_PROMPT, jnp.int32)
        started = time.perf_counter()
        for _ in range(tokens):
            logits, cache = jit_step(reference, token, cache)
            token = jnp.argmax(logits, -1).astype(jnp.int32)
        jax.block_until_ready(token)
        return tokens, time.perf_counter() - started

    return run


def _dense_bytes(model: LoadedModel) -> int:
    """Float32 weights that the reference multiplies by in a step, without padding: trunk and chosen experts."""
    config = model.config
    plan = make_plan(config)
    expert = 3 * config.moe_intermediate_size * config.routed_expert_hidden_size
    return 4 * (plan.tape_parameters + plan.moe_layers * config.num_experts_per_token * expert)


def _print_compile_times(options: argparse.Namespace) -> None:
    """One launch traced and compiled, each time in a new process: with nothing cached, then from the cache on disk."""
    command = [sys.executable, __file__, "--compile-once", "--model", options.model, "--tokens", str(options.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": folder, "JAX_ENABLE_COMPILATION_CACHE": "true"}
        runs = [subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True) for _ in range(2)]
    cold, warm = (float(run.stdout) for run in runs)
    print(f"compile time of a launch: {cold:.1f} s cold, {warm:.1f} s from the cache on disk (tracing included)\n")


def _compile_once(options: argparse.Namespace) -> None:
    model = load(options.model)
    session = Session(model, _plan(model, 1, options.tokens, None), resolve_backend("interpret"))
    session.launch([_request(1)])
    print(session.compile_seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of decoding on this machine.")
    parser.add_argument("--model", default="k3-nano")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--compile-once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
