"""Trains and exports `k3-nano`, the small Kimi-K3-shaped model that ships with the library.

    python -m training.k3_nano --corpus CORPUS --out FOLDER

`--corpus` holds `train.txt.xz` and `valid.txt`; `--out` holds the tokenizer's two files and gets the weights and the
configuration in the official layout. The forward pass is the reference itself, in bfloat16 over float32 master
weights; from `--quantize-from` on the routed experts pass through MXFP4, rounded exactly as the export rounds them,
with straight-through gradients. Experts are balanced without an auxiliary loss: after every step the router bias of an
overloaded expert sinks and that of an idle one rises.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from model.checkpoint import open_checkpoint
from model.checkpoint_save import save_checkpoint
from model.config import ModelConfig
from model.reference import Model, init_cache, jit_prefill, jit_step, load_model, model_weights, random_weights
from model.tokenizer import Tokenizer
from training.data import Stream, encode_documents, read_documents
from training.evaluate import bits_per_byte
from training.trainer import BIAS, Recipe, Trainer, schedule


def initial_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights before training, by official name."""
    rng = np.random.default_rng(seed)
    weights = random_weights(config, seed)
    for name, value in weights.items():
        if name.endswith(("weight_packed", "weight_scale")):
            continue  # already at the scale of their input
        if name.endswith("res_proj.weight") or name.endswith(BIAS):  # every read begins as a plain average
            new = np.zeros(value.shape)
        elif name.endswith("embed_tokens.weight"):
            new = rng.normal(0.0, 0.05, value.shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "expert_up_proj.weight")):
            new = rng.normal(0.0, 0.02, value.shape)
        elif name.endswith(".A_log"):
            new = np.zeros(value.shape)
        elif name.endswith(".dt_bias"):
            new = rng.uniform(-7.0, -1.0, value.shape)
        elif name.endswith("conv1d.weight"):
            new = rng.normal(0.0, 0.1, value.shape) + (np.arange(value.shape[-1]) == value.shape[-1] - 1)
        elif value.ndim == 1:
            new = np.ones(value.shape)
        else:
            continue
        weights[name] = new.astype(value.dtype)
    return weights


PROMPTS = (
    "",
    "The President of the United States",
    "It is a truth universally acknowledged, that",
    "To create a new table in the database,",
    "And God said,",
    "The whale",
    "def main(",
)


def train(trainer: Trainer, evaluate: Callable[[Model], float], until: float, every: int = 500) -> list[str]:
    """Runs the recipe and returns the log.

    If the pace of steps 100 to 200 says that the recipe would not end at the time `until`, it is shortened to do so.
    """
    log: list[str] = []
    began = mark = time.time()
    seen = 0

    def note(text: str) -> None:
        log.append(f"{time.time() - began:.0f} s: {text}")
        print(log[-1], flush=True)

    for number, (starts, fresh) in enumerate(trainer.batches()):
        recipe = trainer.recipe
        if number == recipe.steps:
            break
        quantize = number >= recipe.quantize_from * recipe.steps
        loss, loads = trainer.step(starts, fresh, schedule(number, recipe), quantize)
        if number + 1 in (100, 200):
            loss.block_until_ready()
            if number + 1 == 200:
                pace = (time.time() - mark) / 100
                steps = min(recipe.steps, 200 + int((until - time.time()) / pace / 1.03))
                trainer.recipe = dataclasses.replace(recipe, steps=steps)
                note(f"{pace * 1000:.1f} ms a step; {steps} steps")
            mark, seen = time.time(), number + 1
        if (number + 1) % every == 0 or number + 1 == trainer.recipe.steps:
            load = np.asarray(loads) * trainer.config.num_experts
            text = f"step {number + 1} loss {float(loss):.4f} load {load.min():.2f} to {load.max():.2f} of the mean"
            pace = (number + 1 - seen) * recipe.batch * recipe.length / (time.time() - mark)
            note(f"{text}, {pace:.0f} tokens/s, held-out {evaluate(trainer.model(quantize)):.4f} bits per byte")
            mark, seen = time.time(), number + 1
    return log


def sample(model: Model, tokenizer: Tokenizer, prompt: str, temperature: float, count: int = 80, seed: int = 0) -> str:
    """A continuation of `prompt`, token by token."""
    eos, key = model.config.eos_token_ids[0], jax.random.key(seed)
    ids = [eos, *tokenizer.encode(prompt)]
    cache = init_cache(model.config, 1, len(ids) + count, model.dtype)
    logits, cache = jit_prefill(model, jnp.asarray([ids]), jnp.asarray([len(ids)]), cache)
    written: list[int] = []
    for _ in range(count):
        key, now = jax.random.split(key)
        choice = jax.random.categorical(now, logits[0] / temperature) if temperature else jnp.argmax(logits[0])
        written.append(int(choice))
        if written[-1] == eos:
            break
        logits, cache = jit_step(model, choice[None], cache)
    return tokenizer.decode([*ids[1:], *written])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.txt.xz and valid.txt")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder; holds the tokenizer's two files")
    parser.add_argument("--minutes", type=float, default=60, help="shorten the run to fit into this time")
    parser.add_argument("--no-samples", action="store_true", help="write no sample text at the end")
    for field in dataclasses.fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    recipe = Recipe(**{field.name: arguments[field.name] for field in dataclasses.fields(Recipe)})
    corpus, out = arguments["corpus"], arguments["out"]
    print(recipe, jax.devices(), flush=True)

    config, began = ModelConfig.preset("k3-nano"), time.time()
    until = began + 60 * arguments["minutes"]
    tokenizer = Tokenizer.from_folder(out)
    eos, line_break = config.eos_token_ids[0], tokenizer.encode("\n")[0]
    training_ids = encode_documents(read_documents(corpus, "train"), tokenizer)
    valid = read_documents(corpus, "valid")
    stream = Stream.of(training_ids, eos, line_break)
    print(f"{len(stream.tokens)} tokens, read in {time.time() - began:.0f} s", flush=True)

    trainer = Trainer(load_model(initial_weights(config, recipe.seed), config, jnp.bfloat16), recipe, stream)
    evaluate = functools.partial(bits_per_byte, documents=valid, tokenizer=tokenizer, eos=eos, batch=32)
    log = train(trainer, evaluate, until)

    master = load_model(model_weights(trainer.model()), config, jnp.float32)  # the right tree; its numbers are replaced
    unrounded = jax.tree.unflatten(
        jax.tree.structure(master), [trainer.params[name] for name in trainer.skeleton.names]
    )
    save_checkpoint(out, config, model_weights(unrounded))
    exported = {
        dtype: load_model(open_checkpoint(out), config, dtype) for dtype in ("float32", "bfloat16")
    }  # what a user loads
    results = {"unrounded weights, float32": evaluate(unrounded)}
    results |= {f"checkpoint, {dtype}": evaluate(model) for dtype, model in exported.items()}
    for what, value in results.items():
        log.append(f"held-out bits per byte, {what}: {value:.4f}")
        print(log[-1], flush=True)
    (out / "training.log").write_text("\n".join([repr(trainer.recipe), *log, ""]))
    for prompt in () if arguments["no_samples"] else PROMPTS:
        for temperature in (0.0, 0.7):
            text = sample(exported["bfloat16"], tokenizer, prompt, temperature)
            print(f"--- temperature {temperature}: {text}", flush=True)


if __name__ == "__main__":
    main()
