"""The kernel against the reference on models that differ from the shipped ones in every field that changes a phase.

Each model changes several fields at once, and each value of a field occurs in at least one of them; sizes are odd on
purpose. Same bound as `against_reference`, there derived: 2e-5 covers every gain that occurs here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from launching import Ask, launch_once, open_session, relative_error, slot_caches

from megakernel import LoadedModel
from model.config import ModelConfig
from model.reference import init_cache, jit_step, load_model, random_weights

BASE = dataclasses.replace(ModelConfig.preset("k3-mini"), num_hidden_layers=3, mla_layers=(2,))
CHANGES: dict[str, dict[str, Any]] = {
    "only KDA, dense, no residual mixing": {
        "mla_layers": (), "first_k_dense_replace": 3, "attn_res_block_size": 0, "kda_head_dim": 48, "kda_num_heads": 3,
        "short_conv_kernel_size": 2, "gate_lower_bound": None, "tie_word_embeddings": True, "intermediate_size": 200,
    },
    "only MLA, only MoE, no shared experts": {
        "mla_layers": (0, 1, 2), "first_k_dense_replace": 0, "num_shared_experts": 0, "kv_lora_rank": 320,
        "num_attention_heads": 3, "qk_nope_head_dim": 40, "qk_rope_head_dim": 24, "v_head_dim": 72, "q_lora_rank": 80,
        "attn_res_block_size": 1,
    },
    "direct queries, no gate, plain experts": {
        "q_lora_rank": None, "mla_use_output_gate": False, "expert_format": "bf16", "latent_experts": False,
        "latent_moe_use_norm": False, "routed_expert_hidden_size": 128, "moe_intermediate_size": 72,
        "hidden_act": "silu", "moe_renormalize": False, "routed_scaling_factor": 2.5, "mla_layers": (1,),
    },
    "low-rank gate, all experts chosen, odd vocabulary": {
        "use_full_rank_gate": False, "num_experts": 3, "num_experts_per_token": 3, "vocab_size": 301,
        "attn_res_block_size": 3, "num_shared_experts": 1, "short_conv_kernel_size": 5, "latent_moe_use_norm": False,
        "gate_lower_bound": -2.0,
    },
    "hidden width that no block divides": {
        "hidden_size": 144, "routed_expert_hidden_size": 96, "moe_intermediate_size": 160, "num_experts": 13,
        "num_experts_per_token": 5, "kda_num_heads": 1, "num_attention_heads": 1, "intermediate_size": 1100,
        "attn_res_block_size": 2, "activation_situ_beta": 2.0, "activation_situ_linear_beta": 7.0,
        "rms_norm_eps": 1e-3,
    },
}  # fmt: skip
PROMPTS = [[7, 45, 290, 122, 9, 17, 200, 31], [5], [11, 250, 19]]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_kernel_and_reference_agree(change: str) -> None:
    """Logits, greedy tokens and caches of three sequences, over more than a page of the cache."""
    config = dataclasses.replace(BASE, **CHANGES[change])
    model = LoadedModel(config, random_weights(config, 1))
    session = open_session(model, 3, page=16, ring_depth=3, block=(128, 128), expert_slots=2)
    reference = load_model(model.weights, config)
    for slot, ran in enumerate(launch_once(session, [Ask(prompt, new=14) for prompt in PROMPTS])):
        assert ran is not None
        cache, logits = init_cache(config, 1, 64), []
        for token in ran.fed:
            now, cache = jit_step(reference, jnp.asarray([token]), cache)
            logits.append(np.asarray(now[0]))
        assert relative_error(ran.logits, np.stack(logits)) < 2e-5
        assert ran.tokens == np.stack(logits)[len(PROMPTS[slot]) - 1 :].argmax(-1).tolist()
        found = slot_caches(session, slot, len(ran.fed))
        theirs = {"kda_state": cache.kda_state, "conv_tail": cache.conv_tail, "latents": cache.latents}
        for kind, expected in theirs.items():
            assert len(found[kind]) == len(expected)
            for mine, layer in zip(found[kind], expected, strict=True):
                assert relative_error(mine, np.asarray(layer[0])[: len(mine)]) < 2e-5


def test_every_field_that_changes_a_phase_is_changed() -> None:
    sizes_only = {"name", "max_position_embeddings", "num_hidden_layers", "mla_latent_norm_eps"}
    tokens = {"eos_token_ids", "bos_token_id", "pad_token_id"}
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    changed = {field for change in CHANGES.values() for field in change}
    assert fields - changed == sizes_only | tokens
