"""Which part of the model each core holds: heads, columns, experts and vocabulary divided over the mesh axis `tp`.

What every core needs whole is gathered in pieces: core c owns entries `c * piece` to `(c + 1) * piece` of a vector, as
far as there are any, so the last cores may own less, or nothing. Heads and columns that do not divide evenly are padded
with zero weights. Experts are split two ways at once: into `expert_groups` groups of whole experts, and each expert's
width into `expert_parts` parts; core c holds part `c % expert_parts` of group `c // expert_parts`.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from megakernel.program import LANES, power_of_two, round_up
from megakernel.vocabulary import SEGMENTS, vocabulary_shape
from model.config import ModelConfig

_FEW = 8
"""Columns of a folded panel, of which narrower ones are rarely worth a panel of their own."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The shares of one core; with one core, everything whole.

    Attributes:
      config: the whole model.
      cores: cores on the mesh axis `tp`.
      expert_groups: groups of experts; divides `cores`.
    """

    config: ModelConfig
    cores: int = 1
    expert_groups: int = 1

    @property
    def expert_parts(self) -> int:
        return self.cores // self.expert_groups

    @property
    def heads(self) -> int:
        """MLA heads of one core."""
        return -(-self.config.num_attention_heads // self.cores)

    @property
    def kda_heads(self) -> int:
        return -(-self.config.kda_num_heads // self.cores)

    @property
    def kda_width(self) -> int:
        return self.kda_heads * self.config.kda_head_dim

    @property
    def dense_width(self) -> int:
        return self.share(self.config.intermediate_size)

    @property
    def shared_width(self) -> int:
        """Width of the shared experts' part."""
        return self.share(self.config.shared_intermediate_size)

    @property
    def expert_width(self) -> int:
        """Width of one part of a routed expert."""
        return self.config.moe_intermediate_size // self.expert_parts

    @property
    def experts(self) -> int:
        """Routed experts of a layer of which one core holds a part."""
        return -(-self.config.num_experts // self.expert_groups)

    @property
    def vocabulary(self) -> int:
        """Vocabulary entries of which one core computes the logits."""
        vocab = self.config.vocab_size
        return vocab if self.cores == 1 else SEGMENTS * vocabulary_shape(vocab, self.cores)[1]

    @property
    def hidden(self) -> int:
        """Entries of the residual stream that one core sums and keeps."""
        return self.sum_piece(self.config.hidden_size)

    @cached_property
    def low_offsets(self) -> dict[str, int]:
        """Where the parts of an MLA layer's low-rank vector begin."""
        config, offsets, at = self.config, {}, 0
        widths = {"latent": config.kv_lora_rank, "query": config.q_lora_rank or 0, "extra": config.qk_rope_head_dim}
        for name, width in widths.items():
            offsets[name] = at
            at += round_up(width, LANES)
        return offsets | {"end": at}

    @property
    def low_width(self) -> int:
        return self.low_offsets["end"]

    def piece(self, width: int) -> int:
        """Columns of one core's piece of a vector that is gathered: eights, or a power of two below."""
        return width if self.cores == 1 else _narrow(-(-width // self.cores))

    def sum_piece(self, width: int) -> int:
        """Columns of one core's piece of a vector that is summed over cores: whole tiles."""
        return width if self.cores == 1 else round_up(-(-width // self.cores), LANES)

    def narrow_lanes(self, width: int) -> int:
        """Lanes of a narrow column: whole tiles on one core, else as few as a piece of that width."""
        return round_up(width, LANES) if self.cores == 1 else _narrow(width)

    def expected_load(self, rows: int) -> float:
        """Weights that the busiest core is expected to read of the routed experts of one layer, in whole experts.

        Rows are taken to choose independently and uniformly. The busiest group is the mean of 4,000 random draws, which
        is within one percent.
        """
        config, groups = self.config, self.expert_groups
        unchosen = (1 - config.num_experts_per_token / config.num_experts) ** rows
        distinct = max(1, round(config.num_experts * (1 - unchosen)))
        sizes = [min(self.experts, max(0, config.num_experts - g * self.experts)) for g in range(groups)]
        draws = np.random.default_rng(0).multivariate_hypergeometric(sizes, distinct, size=4000)
        return float(draws.max(axis=1).mean()) / self.expert_parts

    def share(self, width: int) -> int:
        """Of the width of a feed-forward network."""
        return width if self.cores == 1 else round_up(-(-width // self.cores), 16)


def _narrow(width: int) -> int:
    """Columns that panels of powers of two hold without much padding."""
    return power_of_two(width) if width < _FEW else round_up(width, _FEW)


def split_choices(config: ModelConfig, cores: int) -> list[Split]:
    """Every way to divide the experts of `config` over `cores`: parts keep MXFP4 groups of 32 whole."""
    width = config.moe_intermediate_size
    groups = [g for g in range(1, cores + 1) if cores % g == 0 and (g == cores or width % (32 * cores // g) == 0)]
    return [Split(config, cores, g) for g in groups]
