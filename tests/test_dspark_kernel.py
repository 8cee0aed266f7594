"""The DSpark drafter inside the launch proposes what the plain reference proposes, round by round."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from safetensors.numpy import load_file
from speculating import Ask, open_session, run

from megakernel.layers import Step, column
from megakernel.loading import LoadedModel
from megakernel.memory import Buffer
from megakernel.plan import Plan
from model.checkpoint import open_checkpoint
from model.reference import forward, load_model
from model.tokenizer import Tokenizer
from spec_decode import DSparkDrafter
from spec_decode.dspark.checkpoint import load_drafter
from spec_decode.dspark.reference import context_features, context_kv, draft, drafter_params, target_taps

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Logged(DSparkDrafter):
    """Also writes every proposal to memory, where the test can read it."""

    def vmem(self, plan: Plan) -> dict[str, Buffer]:
        return super().vmem(plan) | {"log_row": Buffer((plan.rows, 128), "int32")}

    def caches(self, plan: Plan) -> dict[str, Buffer]:
        return super().caches(plan) | {"draft_log": Buffer((plan.launch_steps, plan.rows, 128), "int32")}

    def propose(self, step: Step, section: Any) -> None:
        super().propose(step, section)
        plan, refs = step.plan, step.refs
        drafts = [refs.drafts[row] for row in range(plan.live_rows - plan.sequences)]
        refs.log_row[...] = jnp.broadcast_to(column(drafts, plan.rows), refs.log_row.shape)
        copy = pltpu.make_async_copy(refs.log_row, refs.draft_log.at[step.number], refs.draft_done.at[0])
        copy.start()
        copy.wait()


def check_drafts(target: Path, drafter: Path, asks: list[Ask], drafts: int) -> float:
    """Compares every proposal of one launch; returns the tokens made a round."""
    checkpoint = open_checkpoint(target)
    config, tensors = load_drafter(drafter)
    sizes = {"context": 128, "launch_steps": 128, "page": 16, "draft_weights": tensors}
    loaded = LoadedModel(checkpoint.config, checkpoint)
    session = open_session(loaded, Logged(config), drafts, len(asks), **sizes)
    results = run(session, asks)
    log, counts = np.asarray(session.caches["draft_log"]), session.results["round_tokens"]

    model = load_model(checkpoint, checkpoint.config, jnp.float32)
    tables = None
    if config.shares_embeddings:
        tables = tuple(jnp.asarray(np.asarray(checkpoint[f"{name}.weight"], np.float32)) for name in (
            "model.embed_tokens", "model.embed_tokens" if checkpoint.config.tie_word_embeddings else "lm_head",
        ))  # fmt: skip
    params = drafter_params(config, tensors, "float32", tables)
    compared = 0
    for slot, (ask, result) in enumerate(zip(asks, results, strict=True)):
        fed = [*ask.prompt, *result.tokens]
        trace: dict[str, Any] = {}
        forward(model, jnp.asarray([fed[:-1]]), chunk=16, trace=trace)
        taps = target_taps(config, trace)[0]
        at = jnp.arange(len(taps))
        keys, values = context_kv(params, config, context_features(params, config, taps), at)
        position = 0
        for number, count in enumerate(counts[slot]):
            position += int(count)
            if position >= len(fed) - 1:
                break
            expected, _ = draft(params, config, jnp.asarray(fed[position]), jnp.asarray(position), keys, values, at)
            found = log[number, : drafts * len(asks), 0].reshape(drafts, len(asks))[:, slot]
            np.testing.assert_array_equal(found, np.asarray(expected)[:drafts], err_msg=f"anchor at {position}")
            compared += drafts
    assert compared >= 40
    rounds = session.results["status"][:, 4].sum()
    return sum(len(result.tokens) for result in results) / float(rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "sequences"), [(7, 1), (3, 2)])
def test_drafts_of_a_random_drafter(drafts: int, sequences: int) -> None:
    """Anchors before the end of the window of 16 positions, at it and past it."""
    ids = load_file(DATA / "dspark" / "ref.safetensors")["ids"].tolist()
    asks = [Ask(ids[: 12 - 5 * slot], 16 + 4 * slot) for slot in range(sequences)]
    check_drafts(DATA / "tiny_stable_mxfp4", DATA / "dspark", asks, drafts)


@pytest.mark.slow
def test_drafts_of_the_shipped_drafter() -> None:
    folder = ROOT / "model" / "checkpoints" / "k3-nano"
    text = (DATA / "valid_excerpt.txt").read_text()[:120]
    prompt = Tokenizer.from_folder(folder).encode(text)
    made = check_drafts(folder, ROOT / "spec_decode" / "checkpoints" / "k3-nano-dspark", [Ask(prompt, 40)], 7)
    print(f"{made:.2f} tokens a round")
    assert made > 1.5
