"""The model of time on a kernel that was measured: Kimi K3 on 16 chips of v7x, published by others.

Source: github.com/Inferact/tpu-megakernels. What is known of it: 8 exchanges a layer, one after the other; router and
low-rank MLA weights on every core; routed experts kept as 8-bit floats, so twice the bytes of MXFP4; attention weights
share their place in VMEM with the experts, so HBM is idle while attention runs. That does not settle what overlaps with
what, so there are three readings. The one that is quoted first was chosen knowing roughly what each gives for one row:
its small error there is no evidence for the model, and the spread over readings is part of the error.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from megakernel.pipeline import Pipeline
from megakernel.rates import Rates
from model.config import ModelConfig

CORES = 32
Reading = Literal["attention weights come with the last exchanges", "one after the other", "all of the FFN overlaps"]
READINGS: tuple[Reading, ...] = get_args(Reading)
PUBLISHED_SECONDS = {1: 4.02e-3, 2: 5.10e-3, 4: 7.77e-3, 8: 9.25e-3}
"""By rows of a step: a row a sequence."""
PUBLISHED_VERIFY_SECONDS = 8.5e-3
"""8 rows of one sequence, "about"."""
PUBLISHED_FLOOR_SECONDS = {1: 1.16e-3, 2: 1.37e-3, 4: 1.79e-3, 8: 2.58e-3}
"""Bytes of all weights over the peak bandwidth of 32 cores."""
GOAL_SECONDS = {1: 2.0e-3, 8: 4.0e-3}
"""What this project aims at."""
_ATTENTION_EXCHANGES, _FFN_EXCHANGES = 4, 4
"""Of the 8 (chosen: half each)."""
_BEFORE_EXPERTS = 1
"""Exchanges of a feed-forward network before its experts are known (chosen); the others follow its products."""
_EXPERT_ITEM_BYTES, _ITEM_BYTES = 1, 2


@dataclasses.dataclass(frozen=True)
class Check:
    """A prediction beside what was published."""

    reading: Reading
    rows: int
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """(predicted - published) / published"""
        return self.predicted / self.published - 1


def check_rates(rates: Rates) -> list[Check]:
    """The model on the other kernel at every number of rows that was published, in every reading."""
    return [
        Check(reading, rows, other_kernel_seconds(rates, rows, reading), seconds)
        for reading in READINGS
        for rows, seconds in PUBLISHED_SECONDS.items()
    ]


def other_kernel_seconds(rates: Rates, rows: int, reading: Reading = READINGS[0]) -> float:
    """Predicted seconds of its step.

    In the first reading, per layer: attention with its weights in VMEM already, exchanges one after the other and HBM
    idle; then the weights of the feed-forward network beside one exchange, and the experts; the attention weights of
    the next layer arrive during the exchanges at the end. In the second, nothing runs beside anything else. In the
    third, the exchanges of the feed-forward network run beside all of its copies, those of attention beside none.
    """
    config, pipe = ModelConfig.preset("kimi-k3"), Pipeline(rates)
    distinct = config.num_experts * (1 - (1 - config.num_experts_per_token / config.num_experts) ** rows)
    expert = 3 * config.moe_intermediate_size * config.routed_expert_hidden_size * _EXPERT_ITEM_BYTES / CORES
    late, serial, overlapping = (reading == known for known in READINGS)
    for layer in range(config.num_hidden_layers):
        if not late:
            pipe.read("attention", _attention_bytes(config, layer, rows))
        pipe.wait("attention")
        _exchanges(pipe, _ATTENTION_EXCHANGES)
        pipe.read("feed-forward", _ffn_bytes(config, layer))
        if serial:
            pipe.wait("feed-forward")
        if overlapping:
            pipe.read("experts", config.is_moe(layer) * distinct * expert)
        _exchanges(pipe, _FFN_EXCHANGES if overlapping else _BEFORE_EXPERTS)
        pipe.wait("feed-forward")
        if not overlapping:
            pipe.read("experts", config.is_moe(layer) * distinct * expert)
        pipe.wait("experts")
        if late:
            pipe.read("attention", _attention_bytes(config, layer, rows))
        if not overlapping:
            _exchanges(pipe, _FFN_EXCHANGES - _BEFORE_EXPERTS)
    pipe.read("head", config.vocab_size * config.hidden_size * _ITEM_BYTES / CORES)
    pipe.wait("head")
    return pipe.now


def _exchanges(pipe: Pipeline, count: int) -> None:
    for _ in range(count):
        pipe.start_exchange("exchange", 0, CORES)
        pipe.finish_exchange()


def _attention_bytes(config: ModelConfig, layer: int, rows: int) -> float:
    """Weights and KDA states (read and written) of one core; latents are left out, their context is not published."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.layer_kind(layer) == "kda":
        width = config.kda_num_heads * config.kda_head_dim
        weights = 5 * hidden * width + config.kda_head_dim * (hidden + width) + hidden * config.kda_num_heads
        states = 2 * 4 * rows * width * config.kda_head_dim
        return (weights * _ITEM_BYTES + states) / CORES
    assert config.q_lora_rank is not None
    low = hidden * (config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim)
    query = config.q_lora_rank * heads * config.qk_head_dim
    key_value = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    gate_out = 2 * hidden * heads * config.v_head_dim
    return (low + (query + key_value + gate_out) / CORES) * _ITEM_BYTES


def _ffn_bytes(config: ModelConfig, layer: int) -> float:
    """Weights of one core without the routed experts."""
    hidden = config.hidden_size
    if not config.is_moe(layer):
        return 3 * hidden * config.intermediate_size * _ITEM_BYTES / CORES
    router = hidden * config.num_experts
    latent = 2 * hidden * config.routed_expert_hidden_size
    shared = 3 * hidden * config.shared_intermediate_size
    return (router + (latent + shared) / CORES) * _ITEM_BYTES
