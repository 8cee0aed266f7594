"""Whole rounds with drafters in simulated TPU memories: no races, and the same tokens; compiled for a TPU, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from against_plain import MINI_DRAFTER, drafter_weights, mini
from speculating import Ask, open_session, run

from megakernel import make_plan, stream
from megakernel.aot import compile_for
from megakernel.loading import LoadedModel
from megakernel.races import watch_races
from megakernel.session import Session
from megakernel.target import find_target
from model.config import ModelConfig
from model.sampling import SamplingParams
from spec_decode import DSparkDrafter, NGramDrafter
from spec_decode.dspark.config import DSparkConfig

pytestmark = pytest.mark.slow

TINY_DRAFTER = dataclasses.replace(MINI_DRAFTER, block_size=2, sliding_window=8)
ASKS = [Ask([5, 6, 7, 8, 5, 6, 7], 3, SamplingParams(temperature=1.0), 1), Ask([9, 8, 9, 9], 3)]
"""Read three tokens a round, each prompt ends with a single one, beside which there are drafts already."""
DRAFTERS = {"ngram": NGramDrafter(shortest=1), "dspark": DSparkDrafter(TINY_DRAFTER)}


PENALISED = [
    dataclasses.replace(ask, sampling=dataclasses.replace(ask.sampling, presence_penalty=1.0, logit_bias={5: 2.0}))
    for ask in ASKS
]


def opened(name: str, simulate: str | None, penalties: bool = False) -> Session:
    """Two sequences, two drafts, the tape streamed through three blocks, one slot for all experts."""
    drafter: Any = DRAFTERS[name]
    weights = drafter_weights(TINY_DRAFTER) if name == "dspark" else None
    sizes = {"context": 32, "launch_steps": 16, "page": 16, "ring_depth": 3, "expert_slots": 1}
    model = LoadedModel(mini().config, mini().weights)
    return open_session(model, drafter, 2, 2, simulate=simulate, draft_weights=weights, penalties=penalties, **sizes)


@pytest.mark.parametrize(
    ("name", "simulate", "asks"),
    [
        ("ngram", "eager", ASKS),
        ("dspark", "on_wait", ASKS),
        ("dspark", "eager", ASKS),
        ("ngram", "on_wait", PENALISED),
        ("dspark", "eager", PENALISED),
    ],
    ids=lambda value: value if isinstance(value, str) else "penalised" if value is PENALISED else "",
)
def test_no_races_and_the_same_tokens(name: str, simulate: str, asks: list[Ask]) -> None:
    penalties = asks is PENALISED
    plain = opened(name, None, penalties)
    expected = run(plain, asks)
    simulated = opened(name, simulate, penalties)
    with watch_races() as races:
        found = run(simulated, asks)
        caches = {n: np.asarray(value) for n, value in simulated.caches.items()}
    assert races.messages == []
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert simulated.results["proposed"].sum() > 0
    for n in ("states", "conv_tails", "latents"):
        np.testing.assert_allclose(caches[n], np.asarray(plain.caches[n]), rtol=1e-4, atol=1e-5, err_msg=n)


def test_a_window_that_is_read_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows for replay are read before the last layer's have been written: nobody waits for the write."""
    start = stream.Window.start_read

    def hasty(self: stream.Window, layer: Any, has_written: Any) -> None:
        if self.write_from is self.window:
            start(self, layer, has_written)
        else:
            self._read(layer).start()

    monkeypatch.setattr(stream.Window, "start_read", hasty)
    simulated = opened("ngram", "eager")
    with watch_races() as races:
        run(simulated, ASKS)
    assert races.messages


NANO_DRAFTER = DSparkConfig(
    name="nano", block_size=8, tap_layers=(2, 4, 6), mask_token_id=4094, vocab_size=4096, markov_rank=64,
    confidence_head=False, hidden_size=256, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=128,
    intermediate_size=512, rms_norm_eps=1e-5, sliding_window=512, rope_theta=1e4, target_hidden_size=256,
    shares_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("drafter", [NGramDrafter(), DSparkDrafter(NANO_DRAFTER)], ids=lambda drafter: drafter.name)
def test_compiles_for_v7x(drafter: Any) -> None:
    pytest.importorskip("libtpu")
    target = find_target("v7x")
    plan = make_plan(ModelConfig.preset("k3-nano"), target, context=1024, drafter=drafter, draft_tokens=7)
    report = compile_for(plan)
    print(f"{drafter.name}: compiled in {report.compile_seconds:.0f} s")
    assert report.vmem_planned <= report.vmem_limit
