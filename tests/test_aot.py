"""The launch through the real TPU compiler, for every generation, without a TPU."""

from __future__ import annotations

import pytest

from megakernel import PlanError, make_plan
from megakernel.aot import compile_for
from megakernel.target import TARGETS, find_target
from model.config import ModelConfig
from tests.launching import DATA

GENERATIONS = [name for name, target in TARGETS.items() if target.topology]


@pytest.mark.slow
@pytest.mark.parametrize("target", GENERATIONS)
@pytest.mark.parametrize(("sequences", "ring_depth"), [(1, None), (16, 3)])
def test_k3_nano_compiles_for_one_core(
    target: str, sequences: int, ring_depth: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(
        ModelConfig.preset("k3-nano"),
        find_target(target),
        sequences=sequences,
        context=1024,
        ring_depth=ring_depth,
    )
    assert plan.tape_is_resident == (ring_depth is None)
    report = compile_for(plan)
    used = sum(plan.vmem_map.values())
    with capsys.disabled():
        print(f"\nk3-nano on {target}, {sequences} sequences: VMEM {used / 2**20:.1f} MiB planned; {report}")
    assert used <= 0.9 * plan.target.vmem_bytes


@pytest.mark.slow
@pytest.mark.parametrize("penalties", [False, True])
def test_a_vocabulary_of_real_size_compiles(penalties: bool) -> None:
    """163,840 tokens: a value of that size would be spilled whole, and once was."""
    plan = make_plan(
        ModelConfig.preset("kimi-linear-48b"), find_target("v7x"), context=1024, expert_slots=1, penalties=penalties
    )
    report = compile_for(plan, schedule=True)
    assert report.schedule is not None
    (draw,) = (loop for _, loop in report.schedule.walk() if loop.name == "draw (if sampled)")
    assert max(loop.spills for _, loop in draw.walk()) < 100


def test_a_model_with_narrow_heads_is_refused_for_a_tpu_with_the_reason() -> None:
    config = ModelConfig.from_file(DATA / "tiny_stable_mxfp4")
    with pytest.raises(PlanError, match=r"linear_attn_config.head_dim = 32 is not a multiple of the 128 lanes of v7x"):
        make_plan(config, find_target("v7x"))


@pytest.mark.parametrize("target", GENERATIONS)
def test_a_model_that_is_too_large_is_refused_with_the_numbers(target: str) -> None:
    with pytest.raises(
        PlanError, match=r"kimi-k3 on one core of \w+ needs [\d,.]+ MiB of VMEM, [\d,.]+ MiB may be used"
    ):
        make_plan(ModelConfig.preset("kimi-k3"), find_target(target))
