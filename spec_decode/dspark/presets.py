"""Configurations of public drafters, to plan and compile for without their weights."""

from __future__ import annotations

from spec_decode.dspark.config import DSparkConfig

KIMI_K3 = DSparkConfig(
    name="kimi-k3-dspark",
    block_size=8,
    tap_layers=(24, 48, 72, 88, 92),
    mask_token_id=163837,
    vocab_size=163840,
    markov_rank=256,
    confidence_head=True,
    hidden_size=7168,
    num_layers=5,
    num_heads=96,
    num_kv_heads=16,
    head_dim=64,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    sliding_window=2048,
    rope_theta=10000.0,
    target_hidden_size=7168,
    shares_embeddings=False,
)
"""RedHatAI/Kimi-K3-speculator.dspark."""
