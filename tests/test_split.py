"""What each of several cores holds: pieces that cover everything once, and the bytes of the largest model's core."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from megakernel import PlanError, find_target, make_plan
from megakernel.bank import expert_shapes
from megakernel.program import LANES
from megakernel.report import busiest_weight_bytes, even_weight_bytes
from megakernel.split import Split, split_choices
from model.config import ModelConfig

MINI, NANO, K3 = (ModelConfig.preset(name) for name in ("k3-mini", "k3-nano", "kimi-k3"))
CORES = [1, 2, 3, 4, 7, 8, 12, 16, 31, 32, 64]
WIDTHS = [1, 2, 4, 7, 48, 127, 128, 129, 200, 256, 320, 384, 640, 896, 1536, 3584, 7168, 33792]


def owned(width: int, piece: int, cores: int) -> list[range]:
    return [range(min(c * piece, width), min((c + 1) * piece, width)) for c in range(cores)]


@pytest.mark.parametrize("cores", CORES)
def test_pieces_cover_every_vector_once(cores: int) -> None:
    split = Split(MINI, cores)
    for width in WIDTHS:
        for piece in (split.piece(width), split.sum_piece(width)):
            found = [entry for own in owned(width, piece, cores) for entry in own]
            assert found == list(range(width))


@pytest.mark.parametrize("cores", CORES[1:])
def test_pieces_can_be_sliced(cores: int) -> None:
    """Gathered pieces are eights or a power of two below; summed ones whole tiles."""
    split = Split(MINI, cores)
    for width in WIDTHS:
        piece, summed, share = split.piece(width), split.sum_piece(width), -(-width // cores)
        assert piece % 8 == 0 or piece in (1, 2, 4)
        assert split.narrow_lanes(piece) == piece
        assert summed % LANES == 0
        assert share <= piece < min(2 * share, share + 8)


@pytest.mark.parametrize("config", [MINI, NANO, K3], ids=lambda config: config.name)
@pytest.mark.parametrize("cores", [2, 3, 4, 8, 32])
def test_heads_experts_columns_and_vocabulary_are_all_held(config: ModelConfig, cores: int) -> None:
    for split in split_choices(config, cores):
        assert split.expert_groups * split.expert_parts == cores
        for whole, own in (
            (config.num_attention_heads, split.heads),
            (config.kda_num_heads, split.kda_heads),
            (config.intermediate_size, split.dense_width),
            (config.shared_intermediate_size, split.shared_width),
            (config.vocab_size, split.vocabulary),
            (config.hidden_size, split.hidden),
        ):
            assert cores * own >= whole > 0
        assert split.expert_groups * split.experts >= config.num_experts
        assert split.expert_parts * split.expert_width == config.moe_intermediate_size
        assert split.expert_width % 32 == 0


def test_one_core_holds_everything_unpadded() -> None:
    split = Split(K3)
    assert (split.heads, split.kda_heads, split.experts, split.expert_width) == (96, 96, 896, 3072)
    assert (split.dense_width, split.shared_width, split.vocabulary, split.hidden) == (33792, 6144, 163840, 7168)
    assert [split.piece(width) for width in WIDTHS] == [split.sum_piece(width) for width in WIDTHS] == WIDTHS


def test_parts_of_the_low_rank_vector_begin_at_whole_tiles() -> None:
    config = dataclasses.replace(MINI, kv_lora_rank=320, q_lora_rank=80, qk_rope_head_dim=24)
    offsets = Split(config, 4).low_offsets
    assert offsets == {"latent": 0, "query": 384, "extra": 512, "end": 640}
    assert Split(dataclasses.replace(config, q_lora_rank=None), 4).low_offsets["extra"] == 384


# ---- experts ----


def test_expected_load_of_one_row_without_groups_is_an_even_share() -> None:
    """Every core holds a part of every expert: as many whole experts as are chosen, over the cores."""
    assert Split(K3, 32, 1).expected_load(1) == pytest.approx(16 / 32)


def test_expected_load_is_that_of_a_lottery() -> None:
    """Two groups of 448: the larger share of 16 distinct experts, over its 16 parts, summed over the distribution."""
    from math import comb

    chances = [comb(448, k) * comb(448, 16 - k) / comb(896, 16) for k in range(17)]
    exact = sum(chance * max(k, 16 - k) for k, chance in enumerate(chances)) / 16
    assert Split(K3, 32, 2).expected_load(1) == pytest.approx(exact, rel=0.01)


def test_expected_load_counts_distinct_experts() -> None:
    """Against rows that choose: eight rows of four experts out of 32, in four groups."""
    rng, split = np.random.default_rng(1), Split(NANO, 4, 4)
    loads = []
    for _ in range(4000):
        chosen = {int(e) for _ in range(8) for e in rng.choice(32, 4, replace=False)}
        loads.append(max(sum(e // split.experts == group for e in chosen) for group in range(4)))
    assert split.expected_load(8) == pytest.approx(np.mean(loads), rel=0.03)


@pytest.mark.parametrize(("config", "cores"), [(MINI, 4), (NANO, 4), (K3, 32)], ids=["k3-mini", "k3-nano", "kimi-k3"])
def test_the_plan_divides_so_that_the_busiest_core_reads_least(config: ModelConfig, cores: int) -> None:
    plan = make_plan(config, find_target("v7x"), cores=cores)
    loads = {
        split.expert_groups: split.expected_load(1) * split.expert_parts * entry_words(split)
        for split in split_choices(config, cores)
    }
    assert plan.split.expert_groups == min(loads, key=loads.__getitem__)
    for groups in loads:
        other = make_plan(config, find_target("v7x"), cores=cores, expert_groups=groups, expert_slots=1)
        assert other.split == Split(config, cores, groups)


def entry_words(split: Split) -> int:
    """Words of one core's part of an expert, with the padding of the bank."""
    return sum(rows * lanes for rows, lanes in expert_shapes(split))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"cores": 0}, r"cores = 0; expected a positive integer"),
        ({"cores": True}, r"cores = True; expected a positive integer"),
        ({"cores": 2.0}, r"cores = 2.0; expected a positive integer"),
        ({"cores": 4, "expert_groups": 1}, r"4 cores cannot share experts of width 64 in 1 groups"),
        (
            {"cores": 4, "expert_groups": 3},
            r"4 cores cannot share experts of width 64 in 3 groups.*expert_groups may be 2 or 4",
        ),
    ],
)
def test_divisions_that_cannot_be_are_refused(knobs: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(MINI, **knobs)


# ---- Kimi K3 on 32 cores ----

K3_TAPE_BYTES = 111_107_440_640
"""Bytes of all matrices that every step of Kimi K3 reads, once and without padding, in bfloat16."""


def test_the_tape_of_kimi_k3_is_near_an_even_share() -> None:
    """Counted by hand, as inputs and columns of one core; what these panels hold is a multiple of 128 rows of a block.

    What is more than an even share: 72 of 68 columns of the low-rank vector, the router's 28 and the latents' 112
    together in 128 and 16, 256 of 224 columns of the output, and the last block of the only dense layer.
    """
    plan = make_plan(K3, find_target("v7x"), cores=32)
    held = {
        "kda": [(7168, 8), (7168, 4 * 384), (128, 512), (384, 7168)],
        "mla": [(7168, 64), (7168, 8), (7168, 384), (1536, 768), (128, 3 * 512), (512, 3 * 128), (384, 7168)],
        "moe": [(7168, 128), (7168, 16), (7168, 384), (6144, 256), (3584, 256)],
        "head": [(7168, 5120)],
    }
    for section, panels in held.items():
        rows = sum(128 * -(-k * columns // (128 * plan.block_lanes)) for k, columns in panels)
        assert plan.section_blocks(section) == -(-rows // plan.block_rows)
    assert 2 * plan.tape_parameters == K3_TAPE_BYTES
    assert 1 <= plan.tape_bytes / (K3_TAPE_BYTES / 32) <= 1.03


def test_kimi_k3_on_32_cores_is_planned() -> None:
    """It fits, and what the busiest core reads stays near an even division of all bytes of the step."""
    plan = make_plan(K3, find_target("v7x"), cores=32)
    whole_experts = 92 * 16 * 3 * 3584 * 3072 * (4 + 8 / 32) / 8
    assert even_weight_bytes(plan) == pytest.approx((K3_TAPE_BYTES + whole_experts) / 32)
    assert 1 < busiest_weight_bytes(plan) / even_weight_bytes(plan) < 1.1
    assert not plan.tape_is_resident
    with pytest.raises(PlanError, match="use more cores"):
        make_plan(K3, find_target("v7x"), cores=8)


def test_more_cores_read_less() -> None:
    bytes_of = [busiest_weight_bytes(make_plan(K3, find_target("v7x"), cores=cores)) for cores in (32, 48, 64, 96)]
    assert all(more > less for more, less in itertools.pairwise(bytes_of))
