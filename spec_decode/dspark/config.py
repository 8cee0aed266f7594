"""Configuration and tensors of a DSpark drafter, in the public checkpoint format of the Kimi K3 speculator."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.config import ConfigError
from model.layout import TensorSpec


@dataclasses.dataclass(frozen=True)
class DSparkConfig:
    """A block drafter: few attention layers over projected hidden states of the target.

    Attributes:
      block_size: slots of one block, the anchor and `block_size - 1` masks; slot k predicts position p + k + 1.
      tap_layers: completed target layers whose prefix streams, side by side, are its input.
      shares_embeddings: the checkpoint holds no `embed_tokens` and `lm_head`; the target's are used.
    """

    name: str
    block_size: int
    tap_layers: tuple[int, ...]
    mask_token_id: int
    vocab_size: int
    markov_rank: int
    confidence_head: bool
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    sliding_window: int
    rope_theta: float
    target_hidden_size: int
    shares_embeddings: bool

    @classmethod
    def from_file(cls, folder: str | Path) -> DSparkConfig:
        """Reads `config.json` of a drafter's folder.

        Raises:
          ConfigError: a missing key, or a value that is not implemented, by name and value.
        """
        file = Path(folder) / "config.json"
        if not file.is_file():
            raise ConfigError(f"{file}: no such file; a drafter's folder holds a config.json")
        return cls.from_dict(json.loads(file.read_text()), Path(folder).name)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], name: str = "dspark") -> DSparkConfig:
        layer = _require(config, "transformer_layer_config")
        for key, only in {
            "speculators_model_type": "dspark", "markov_head_type": "vanilla", "confidence_head_with_markov": True,
            "sample_from_anchor": True, "sliding_window_non_causal": False,
        }.items():  # fmt: skip
            if config.get(key, only) != only:
                raise ConfigError(f"{key} = {config[key]!r} is not implemented; the only implemented value is {only!r}")
        for kind in layer.get("layer_types", ["sliding_attention"]):
            if kind != "sliding_attention":
                raise ConfigError(f"layer_types holds {kind!r}; only 'sliding_attention' is implemented")
        rope = layer.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_parameters.rope_type = {rope['rope_type']!r} is not implemented; use 'default'")
        vocab = config.get("draft_vocab_size") or _require(layer, "vocab_size")
        return cls(
            name=name,
            block_size=_require(config, "block_size"),
            tap_layers=tuple(_require(config, "aux_hidden_state_layer_ids")),
            mask_token_id=_require(config, "mask_token_id"),
            vocab_size=vocab,
            markov_rank=_require(config, "markov_rank"),
            confidence_head=bool(config.get("enable_confidence_head", "confidence_head_with_markov" in config)),
            hidden_size=_require(layer, "hidden_size"),
            num_layers=_require(layer, "num_hidden_layers"),
            num_heads=_require(layer, "num_attention_heads"),
            num_kv_heads=_require(layer, "num_key_value_heads"),
            head_dim=_require(layer, "head_dim"),
            intermediate_size=_require(layer, "intermediate_size"),
            rms_norm_eps=float(_require(layer, "rms_norm_eps")),
            sliding_window=_require(layer, "sliding_window"),
            rope_theta=float(rope.get("rope_theta") or layer.get("rope_theta") or 10000.0),
            target_hidden_size=config.get("target_hidden_size") or _require(layer, "hidden_size"),
            shares_embeddings=bool(config.get("share_target_embeddings", False)),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "block_size": self.block_size,
            "aux_hidden_state_layer_ids": list(self.tap_layers),
            "mask_token_id": self.mask_token_id,
            "draft_vocab_size": self.vocab_size,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
            "sliding_window_non_causal": False,
            "target_hidden_size": self.target_hidden_size,
            "share_target_embeddings": self.shares_embeddings,
            "transformer_layer_config": {
                "model_type": "qwen3",
                "hidden_size": self.hidden_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "intermediate_size": self.intermediate_size,
                "vocab_size": self.vocab_size,
                "rms_norm_eps": self.rms_norm_eps,
                "sliding_window": self.sliding_window,
                "layer_types": ["sliding_attention"] * self.num_layers,
                "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            },
        }


def dspark_specs(config: DSparkConfig) -> dict[str, TensorSpec]:
    """Every tensor of a drafter's checkpoint, `[out, in]`, all BF16."""
    hidden, dim, rank, vocab = config.hidden_size, config.head_dim, config.markov_rank, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if not config.shares_embeddings:
        shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    shapes |= {
        "fc.weight": (hidden, len(config.tap_layers) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
    }
    if config.confidence_head:
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (config.num_heads * dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (config.num_kv_heads * dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (config.num_kv_heads * dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, config.num_heads * dim),
            f"{prefix}self_attn.q_norm.weight": (dim,),
            f"{prefix}self_attn.k_norm.weight": (dim,),
            f"{prefix}mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{prefix}mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
    return {name: TensorSpec(shape, "BF16") for name, shape in shapes.items()}


def _require(section: Mapping[str, Any], key: str) -> Any:
    if section.get(key) is None:
        raise ConfigError(f"{key} is missing from the drafter's configuration; expected that of a DSpark checkpoint")
    return section[key]
