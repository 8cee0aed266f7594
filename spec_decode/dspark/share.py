"""Which part of a drafter each core holds: heads, columns and vocabulary, divided like the target's.

Every core holds whole query heads and the key-value heads that they read, so that attention needs no other core; some
neighbours may hold the same key-value head. In buffers a head takes whole tiles of lanes, zero beyond its dimension; on
the tape heads lie side by side without padding.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

from megakernel.program import LANES, Column, Matrix, round_up
from megakernel.split import Split
from spec_decode.dspark.config import DSparkConfig


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of one core; with one core, everything whole."""

    config: DSparkConfig
    split: Split

    @cached_property
    def heads(self) -> int:
        """Query heads of one core: the fewest whose key-value heads are whole or one; the last cores may have none."""
        readers = self.config.num_heads // self.config.num_kv_heads
        heads = -(-self.config.num_heads // self.split.cores)
        while heads % readers and readers % heads:
            heads += 1
        return heads

    @property
    def readers(self) -> int:
        """Query heads of one core that read the same key-value head."""
        return self.heads // self.kv_heads

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads * self.config.num_kv_heads // self.config.num_heads)

    @property
    def kv_holders(self) -> int:
        """Neighbouring cores that hold the same key-value heads."""
        return max(1, self.config.num_heads // self.config.num_kv_heads // self.heads)

    @property
    def head_lanes(self) -> int:
        """Lanes of one head in a buffer."""
        return round_up(self.config.head_dim, LANES)

    @property
    def value_lane(self) -> int:
        """Lanes of a cached position before its values."""
        return self.kv_heads * self.head_lanes

    @property
    def cache_lanes(self) -> int:
        """Lanes of one cached position: the keys of all key-value heads, then their values."""
        return 2 * self.value_lane

    @property
    def width(self) -> int:
        """Of the feed-forward network."""
        return self.split.share(self.config.intermediate_size)

    @property
    def features(self) -> int:
        """Context features that one core makes."""
        return self.split.piece(self.config.hidden_size)

    @property
    def hidden(self) -> int:
        """Entries of the residual stream that one core sums and keeps."""
        return self.split.sum_piece(self.config.hidden_size)


def matrices(share: Share) -> tuple[Matrix, ...]:
    """What a proposal streams, in order of use."""
    config = share.config
    taps = len(config.tap_layers) * config.target_hidden_size
    layers = range(config.num_layers)
    keys_values = [column for layer in layers for column in _keys_values(share, layer, suffix=str(layer))]
    features = Column("features", share.features, "fc.weight", lanes=share.split.narrow_lanes(share.features))
    head = "target.lm_head" if config.shares_embeddings else "lm_head.weight"
    return (
        Matrix("draft_fc", taps, (features,)),
        Matrix("draft_context", config.hidden_size, tuple(keys_values)),
        *(matrix for layer in layers for matrix in _layer_matrices(share, layer)),
        Matrix("draft_head", config.hidden_size, (Column("logits", share.split.vocabulary, head),)),
    )


def _keys_values(share: Share, layer: int, suffix: str) -> list[Column]:
    width, holders = share.kv_heads * share.config.head_dim, share.kv_holders
    return [
        Column(f"{part}{suffix}", width, f"layers.{layer}.self_attn.{part}_proj.weight", lanes=width, shared_by=holders)
        for part in ("k", "v")
    ]


def _layer_matrices(share: Share, layer: int) -> tuple[Matrix, ...]:
    hidden, queries = share.config.hidden_size, share.heads * share.config.head_dim
    attention, mlp, name = f"layers.{layer}.self_attn", f"layers.{layer}.mlp", f"draft{layer}"
    query = Column("q", queries, f"{attention}.q_proj.weight", lanes=queries)
    gate_up = tuple(Column(p, share.width, f"{mlp}.{p}_proj.weight", lanes=share.width) for p in ("gate", "up"))
    out, down = (Column("out", hidden, f"{tensor}.weight") for tensor in (f"{attention}.o_proj", f"{mlp}.down_proj"))
    return (
        Matrix(f"{name}_in", hidden, (query, *_keys_values(share, layer, suffix="")), output="draft_in"),
        Matrix(f"{name}_out", queries, (out,), own_inputs=True, output="draft_out"),
        Matrix(f"{name}_gate_up", hidden, gate_up, output="draft_gate_up"),
        Matrix(f"{name}_down", share.width, (down,), own_inputs=True, output="draft_out"),
    )
