"""Trains and exports `k3-nano-dspark`, the block drafter of `k3-nano`.

    python -m training.k3_nano_dspark --corpus CORPUS --target FOLDER --out FOLDER

The text is the target's own: it continues prefixes of the corpus greedily and at temperatures 0.8 and 1.0, which is
what it will be asked to do when its drafter matters. On that text the drafter learns the target's distribution, at the
temperature of the text, in every slot of blocks that begin anywhere in a continuation: 0.1 cross entropy + 0.9 total
variation, slot k weighted by exp(-k / 4). The forward pass is the reference itself, in bfloat16 over float32 masters.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from model.moe import MoE
from model.reference import Model, init_cache, load_model, prefill, step
from model.tokenizer import Tokenizer
from spec_decode.dspark.checkpoint import load_drafter, save_drafter
from spec_decode.dspark.config import DSparkConfig, dspark_specs
from spec_decode.dspark.reference import (
    base_logits,
    block_hidden,
    context_features,
    context_kv,
    draft,
    drafter_params,
    markov_bias,
    target_taps,
)
from training.data import Stream, encode_documents, read_documents
from training.optimizer import Optimizer, Params

CONFIG = DSparkConfig(
    name="k3-nano-dspark",
    block_size=8,
    tap_layers=(2, 4, 6),
    mask_token_id=4095,  # the end of the text, which is never an anchor
    vocab_size=4096,
    markov_rank=64,
    confidence_head=False,
    hidden_size=256,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    intermediate_size=512,
    rms_norm_eps=1e-5,
    sliding_window=512,
    rope_theta=10000.0,
    target_hidden_size=256,
    shares_embeddings=True,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of a run; the defaults are those of the shipped drafter.

    batch: sequences a step. anchors: blocks drawn from each. prefix: most tokens of corpus before a continuation.
    written: tokens of a continuation. together: sequences that the target writes at once.
    greedy: share of greedy continuations; two thirds of the rest are at temperature 0.8, one third at 1.0.
    continuations: how many the target writes, in no more than a third of the run's time.
    """

    steps: int = 7242
    batch: int = 32
    anchors: int = 128
    prefix: int = 512
    written: int = 256
    together: int = 4096
    greedy: float = 0.6
    continuations: int = 73728
    rate: float = 8e-3
    adam_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup: int = 200
    decay_from: float = 0.2
    cross_entropy: float = 0.1
    position_decay: float = 4.0
    coldest: float = 0.05
    chunk: int = 32
    seed: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chains:
    """tokens: `[N, prefix + written]`. lengths: `[N]`, tokens of the prefix. temperature: `[N]` of the continuation."""

    tokens: jax.Array
    lengths: jax.Array
    temperature: jax.Array

    def __getitem__(self, index: Any) -> Chains:
        return jax.tree.map(lambda x: x[index], self)


# Text


def draw_prefixes(stream: Stream, rng: np.random.Generator, recipe: Recipe, count: int) -> Chains:
    """Beginnings of texts: most start a paragraph, as a prompt does; short ones are as likely as long ones."""
    last = len(stream.tokens) - recipe.prefix - 1
    starts = rng.integers(1, last, count)
    snapped = stream.paragraph[starts]
    fresh = (rng.random(count) < 0.7) & (snapped < last)
    index = np.where(fresh, snapped - 1, starts)[:, None] + np.arange(recipe.prefix)
    tokens = np.pad(stream.tokens[index], ((0, 0), (0, recipe.written)))
    tokens[fresh, 0] = stream.eos
    lengths = np.exp(rng.uniform(np.log(4), np.log(recipe.prefix + 1), count)).astype(np.int32)
    kinds = [recipe.greedy, (1 - recipe.greedy) * 2 / 3, (1 - recipe.greedy) / 3]
    temperature = rng.choice(np.array([0.0, 0.8, 1.0], np.float32), count, p=kinds)
    return Chains(tokens.astype(np.int32), lengths, temperature)  # type: ignore[arg-type]


def write(recipe: Recipe, model: Model, chains: Chains, key: jax.Array) -> Chains:
    """The target continues every prefix."""
    rows, group = chains.tokens.shape[0], min(256, chains.tokens.shape[0])

    def read(part: Chains) -> Any:
        cache = init_cache(model.config, group, recipe.prefix + recipe.written, model.dtype)
        return prefill(model, part.tokens[:, : recipe.prefix], part.lengths, cache, chunk=recipe.chunk)

    by_group = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), chains)
    logits, cache = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), lax.map(read, by_group))

    def one(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = carry
        noise = chains.temperature[:, None] * jax.random.gumbel(key, logits.shape)
        token = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
        with mock.patch.object(MoE, "_chosen_only", MoE._all_experts):  # many rows: every expert has work
            return step(model, token, cache), token

    _, written = lax.scan(one, (logits, cache), jax.random.split(key, recipe.written))
    at = chains.lengths[:, None] + jnp.arange(recipe.written)
    tokens = chains.tokens.at[jnp.arange(rows)[:, None], at].set(written.T)
    return dataclasses.replace(chains, tokens=tokens)


# Drafter


def initial_weights(config: DSparkConfig, final_norm: jax.Array, seed: int) -> Params:
    """Weights before training: layers that add nothing yet, read out through the target's own final norm."""
    rng = np.random.default_rng(seed)
    weights: Params = {}
    for name, spec in dspark_specs(config).items():
        if name == "norm.weight":
            new = np.asarray(final_norm, np.float32)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            new = rng.normal(0.0, 0.02, spec.shape)
        elif name.endswith("markov_w1.weight"):
            new = rng.normal(0.0, 0.3, spec.shape)
        elif name.endswith("markov_w2.weight"):
            new = np.zeros(spec.shape)
        elif len(spec.shape) == 1:
            new = np.ones(spec.shape)
        else:
            new = rng.standard_normal(spec.shape) / spec.shape[-1] ** 0.5
        weights[name] = jnp.asarray(new, jnp.float32)
    return weights


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight") or name == "fc.weight"


def target_pass(recipe: Recipe, config: DSparkConfig, model: Model, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`tokens [B, T]` to taps `[B, T, taps * D]` and normed hidden states `[B, T, D]`."""
    trace: dict[str, list[jax.Array]] = {}
    hidden, _ = model.hidden(tokens, None, None, "sequence", recipe.chunk, trace)
    return target_taps(config, trace), hidden


def in_bfloat16(params: Params, model: Model) -> Params:
    table = model.embed_tokens[...]
    shared = {"embed_tokens.weight": table, "lm_head.weight": table}
    return {name: value.astype(jnp.bfloat16) for name, value in (params | shared).items()}


def losses(
    recipe: Recipe,
    config: DSparkConfig,
    params: Params,
    model: Model,
    chain: Chains,
    taps: jax.Array,
    hidden: jax.Array,
    at: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Of one sequence and its blocks anchored `at [A]`: loss, and where draft and target agree `[A, S]`."""
    positions, slots = jnp.arange(chain.tokens.shape[0]), at[:, None] + jnp.arange(config.block_size)
    keys, values = context_kv(params, config, context_features(params, config, taps), positions)
    blocks = jax.vmap(block_hidden, (None, None, 0, 0, None, None, None))
    drafted = blocks(params, config, chain.tokens[at], at, keys, values, positions)
    logits = base_logits(params, drafted) + markov_bias(params, chain.tokens[slots])  # [A, S, V]
    official = model.logits(hidden[slots])
    wanted = jax.nn.softmax(official / jnp.maximum(chain.temperature, recipe.coldest), axis=-1)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    cross_entropy = -jnp.sum(wanted * log_q, axis=-1)
    total_variation = 1 - jnp.sum(jnp.minimum(wanted, jnp.exp(log_q)), axis=-1)
    loss = recipe.cross_entropy * cross_entropy + (1 - recipe.cross_entropy) * total_variation
    weight = jnp.exp(-jnp.arange(config.block_size) / recipe.position_decay)
    return jnp.mean(loss * weight), jnp.argmax(logits, -1) == jnp.argmax(official, -1)


def train_step(
    recipe: Recipe,
    config: DSparkConfig,
    optimizer: Optimizer,
    params: Params,
    state: Any,
    model: Model,
    chains: Chains,
    key: jax.Array,
    rate: jax.Array,
) -> tuple[Params, Any, jax.Array, jax.Array]:
    """One optimiser step on `chains [B]`; also the loss and each slot's agreement with the target `[S]`."""
    taps, hidden = target_pass(recipe, config, model, chains.tokens)
    first = chains.lengths[:, None] - 1
    count = recipe.written - config.block_size + 1
    at = first + jax.random.randint(key, (chains.tokens.shape[0], recipe.anchors), 0, count)

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        rows = jax.vmap(losses, (None, None, None, None, 0, 0, 0, 0))
        loss, agree = rows(recipe, config, in_bfloat16(params, model), model, chains, taps, hidden, at)
        return jnp.mean(loss), jnp.mean(agree, axis=(0, 1))

    (value, agree), grads = jax.value_and_grad(loss, has_aux=True)(params)
    params, state = optimizer.update(params, grads, state, rate * recipe.rate, rate * recipe.adam_rate)
    return params, state, value, agree


def schedule(number: int, recipe: Recipe) -> float:
    """Share of the full rate: warm-up, plateau, linear decay to zero."""
    decay = (recipe.steps - number) / (recipe.steps * (1 - recipe.decay_from))
    return max(0.0, min(1.0, (number + 1) / recipe.warmup, decay))


# Measurement


def accepted(recipe: Recipe, config: DSparkConfig, params: Params, model: Model, chains: Chains) -> jax.Array:
    """How many drafts of a block anchored at each continuation token the target would accept: `[B, written - S]`.

    `params` in bfloat16. One draft fewer than slots is verified. A greedy continuation is the target's choice after any
    of its prefixes; a sampled one accepts a draft exactly as often as rejection sampling does.
    """

    def row(chain: Chains) -> jax.Array:
        taps, _ = target_pass(recipe, config, model, chain.tokens[None])
        positions = jnp.arange(chain.tokens.shape[0])
        keys, values = context_kv(params, config, context_features(params, config, taps[0]), positions)
        at = chain.lengths + jnp.arange(recipe.written - config.block_size)
        drafts, _ = jax.vmap(draft, (None, None, 0, 0, None, None, None))(
            params, config, chain.tokens[at], at, keys, values, positions
        )
        right = drafts[:, :-1] == chain.tokens[at[:, None] + 1 + jnp.arange(config.block_size - 1)]
        return jnp.sum(jnp.cumprod(right, axis=-1), axis=-1)

    return lax.map(row, chains, batch_size=min(16, chains.tokens.shape[0]))


def tokens_per_round(counts: np.ndarray, most: int, tokens: int | None = None) -> dict[str, Any]:
    """Plays generations round by round from `accepted`: each round yields the accepted drafts and one more token.

    `tokens`: play only this many tokens of each continuation. `by_position[k]`: how often draft k is accepted in a
    round in which all before it were.
    """
    rounds: list[int] = []
    for row in counts:
        place = 0
        while place < min(tokens or len(row), len(row)):
            rounds.append(int(row[place]))
            place += rounds[-1] + 1
    got = np.bincount(rounds, minlength=most + 1)
    reached = got[::-1].cumsum()[::-1]  # rounds that accepted at least k
    by_position = [round(float(reached[k + 1] / max(1, reached[k])), 3) for k in range(most)]
    return {"tokens_per_round": round(float(np.mean(rounds)) + 1, 3), "by_position": by_position}


class Judge:
    """Held-out prompts, continued by the target, and the drafter's rounds on them."""

    def __init__(self, recipe: Recipe, config: DSparkConfig, model: Model, chains: Chains, params: Params) -> None:
        self.config, self.model, self.chains = config, model, chains
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        self.counts = jax.jit(functools.partial(accepted, recipe, config)).lower(rows, model, chains).compile()

    def __call__(self, params: Params) -> dict[str, Any]:
        """`params` in bfloat16."""
        counts, temperature = np.asarray(self.counts(params, self.model, self.chains)), self.chains.temperature
        most = self.config.block_size - 1
        groups = {t: counts[np.asarray(temperature) == np.float32(t)] for t in (0.0, 0.8, 1.0)}
        return {f"temperature {t}": tokens_per_round(rows, most) for t, rows in groups.items() if len(rows)} | {
            f"temperature {t}, first 64": tokens_per_round(rows, most, 64) for t, rows in groups.items() if len(rows)
        }


def streams(corpus: Path, tokenizer: Tokenizer, eos: int) -> tuple[Stream, Stream]:
    line_break = tokenizer.encode("\n")[0]
    train, valid = (encode_documents(read_documents(corpus, name), tokenizer) for name in ("train", "valid"))
    return Stream.of(train, eos, line_break), Stream.of(valid, eos, line_break)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.txt.xz and valid.txt")
    parser.add_argument("--target", type=Path, required=True, help="checkpoint of k3-nano, with its tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="gets config.json, model.safetensors and a log")
    parser.add_argument("--minutes", type=float, default=60, help="shorten the run to fit into this time")
    parser.add_argument("--held-out", type=int, default=512, help="held-out prompts of the measurement")
    parser.add_argument("--every", type=int, default=2000, help="steps between measurements")
    for field in dataclasses.fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    recipe = Recipe(**{field.name: arguments[field.name] for field in dataclasses.fields(Recipe)})
    out, began, log = arguments["out"], time.time(), []
    until = began + 60 * arguments["minutes"]

    def note(text: object) -> None:
        log.append(f"{time.time() - began:.0f} s: {text}")
        print(log[-1], flush=True)

    note(f"{recipe} {jax.devices()}")
    target = ModelConfig.from_file(arguments["target"])
    model = load_model(open_checkpoint(arguments["target"]), target, jnp.bfloat16)
    optimizer = Optimizer(is_matrix, lambda name: "norm" not in name, recipe.weight_decay)
    params = initial_weights(CONFIG, model.norm[...].astype(jnp.float32), recipe.seed)
    state, rng, keys = optimizer.init(params), np.random.default_rng(recipe.seed), jax.random.key(recipe.seed)

    def shapes(rows: int) -> Chains:
        tokens = jax.ShapeDtypeStruct((rows, recipe.prefix + recipe.written), jnp.int32)
        one = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return Chains(tokens, one, jax.ShapeDtypeStruct((rows,), jnp.float32))  # type: ignore[arg-type]

    writing = jax.jit(functools.partial(write, recipe)).lower(model, shapes(recipe.together), keys)
    learning = jax.jit(functools.partial(train_step, recipe, CONFIG, optimizer), donate_argnums=(0, 1))
    learning = learning.lower(params, state, model, shapes(recipe.batch), keys, jnp.float32(0))
    with ThreadPoolExecutor() as pool:
        compiled_write, compiled_learn = pool.submit(writing.compile), pool.submit(learning.compile)
        corpus, held_out = streams(
            arguments["corpus"], Tokenizer.from_folder(arguments["target"]), target.eos_token_ids[0]
        )
        note(f"{len(corpus.tokens)} tokens of corpus")
        writer = compiled_write.result()
        note("the target can write")
        judged = writer(model, draw_prefixes(held_out, np.random.default_rng(1), recipe, recipe.together), keys)
        judging = pool.submit(Judge, recipe, CONFIG, model, judged[: arguments["held_out"]], in_bfloat16(params, model))
        pools: list[Chains] = []
        enough = -(-recipe.continuations // recipe.together)
        while not pools or (len(pools) < enough and time.time() < until - 40 * arguments["minutes"]):
            keys, now = jax.random.split(keys)
            pools.append(writer(model, draw_prefixes(corpus, rng, recipe, recipe.together), now))
            pools[-1].tokens.block_until_ready()
        chains = jax.tree.map(lambda *parts: jnp.concatenate(parts), *pools)
        count = chains.tokens.shape[0]
        note(f"{count * recipe.written} tokens written in {count} continuations")
        learn, judge = compiled_learn.result(), judging.result()
    note("the drafter can learn")

    mark, number, order = time.time(), 0, np.zeros(0, np.int64)
    while number < recipe.steps:
        if len(order) < recipe.batch:
            order = rng.permutation(count)
        part, order = order[: recipe.batch], order[recipe.batch :]
        keys, now = jax.random.split(keys)
        rate = jnp.float32(schedule(number, recipe))
        params, state, loss, agree = learn(params, state, model, chains[part], now, rate)
        number += 1
        if number in (50, 150):
            loss.block_until_ready()
            if number == 150:
                pace = (time.time() - mark) / 100
                recipe = dataclasses.replace(
                    recipe, steps=min(recipe.steps, 150 + int((until - time.time()) / pace / 1.08))
                )
                note(f"{pace * 1000:.1f} ms a step; {recipe.steps} steps")
            mark = time.time()
        if number % 500 == 0 or number == recipe.steps:
            note(f"step {number} loss {float(loss):.4f} agreement {np.asarray(agree).round(3).tolist()}")
        if number % arguments["every"] == 0 or number == recipe.steps:
            save_drafter(out, CONFIG, params)
            note(json.dumps(judge(in_bfloat16(params, model))))

    table = model.embed_tokens[...]
    exported = drafter_params(CONFIG, load_drafter(out)[1], jnp.bfloat16, (table, table))
    note(f"exported: {json.dumps(judge(exported))}")
    (out / "training.log").write_text("\n".join([*log, ""]))


if __name__ == "__main__":
    main()
