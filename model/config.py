"""The architecture of one model, read from a checkpoint's `config.json`.

Every number that describes a model lives in `ModelConfig`; no other file holds a constant of one model.
Field names are the official keys of Moonshot's Kimi-K3 and Kimi-Linear configurations. Values that the
library does not implement are refused by key and value, so nothing in a configuration is silently ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["kda", "mla"]


class ConfigError(ValueError):
    """A configuration that this library cannot run; the message names the key, the value and what is expected."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One Mixture-of-Experts model of the Kimi K3 class (text part).

    Layer numbers are 0-based here; `config.json` lists `full_attn_layers` 1-based.
    `attn_res_block_size == 0` means an ordinary residual stream (Kimi-Linear);
    `routed_expert_hidden_size == hidden_size` together with `latent_experts == False` means that routed experts
    work on the full width.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    tie_word_embeddings: bool
    # FFN
    hidden_act: Literal["situ", "silu"]
    activation_situ_beta: float
    activation_situ_linear_beta: float
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    latent_experts: bool
    latent_moe_use_norm: bool
    moe_renormalize: bool
    routed_scaling_factor: float
    expert_format: Literal["mxfp4", "bf16"]
    # MLA
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool
    mla_layers: tuple[int, ...]
    # KDA
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    use_full_rank_gate: bool
    # attention residuals
    attn_res_block_size: int

    mla_latent_norm_eps: float = 1e-6
    """eps of `q_a_layernorm` and `kv_a_layernorm`: the official class default, no key of `config.json`."""

    def layer_kind(self, layer: int) -> LayerKind:
        return "mla" if layer in self.mla_layers else "kda"

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def writes_snapshot(self, layer: int) -> bool:
        return self.attn_res_block_size > 0 and layer % self.attn_res_block_size == 0

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.mla_layers)

    @property
    def num_snapshots(self) -> int:
        """Snapshots of the residual stream alive at the end of a forward pass."""
        if not self.attn_res_block_size:
            return 0
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    @property
    def kda_width(self) -> int:
        return self.kda_num_heads * self.kda_head_dim

    @property
    def mla_latent_width(self) -> int:
        """Numbers that the MLA cache keeps per position and layer: latent, then the shared extra key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    def to_dict(self) -> dict[str, Any]:
        """The configuration as the official nested `config.json` holds it (flat for Kimi-Linear)."""
        from model.config_json import to_official

        return to_official(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], name: str = "model") -> ModelConfig:
        """Reads an official configuration, nested under `text_config` or not.

        Raises:
          ConfigError: a missing key, an unknown key, or a value that is not implemented.
        """
        from model.config_json import from_official

        return from_official(config, name)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads `config.json` (or the folder that holds it)."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{file}: no such file; a checkpoint folder holds a config.json")
        try:
            config = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}: not valid JSON ({error})") from error
        return cls.from_dict(config, name=file.absolute().parent.name)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """A known model: see `model.presets.PRESETS`."""
        from model.presets import PRESETS

        if name not in PRESETS:
            raise ConfigError(f"preset {name!r} is not known; known: {', '.join(sorted(PRESETS))}")
        return PRESETS[name]
