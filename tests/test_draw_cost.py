"""Pictures of a predicted step."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("matplotlib")

from megakernel import find_target, make_plan
from megakernel.cost import predict
from megakernel.draw_cost import draw_spans, sublayers
from model.config import ModelConfig


@pytest.fixture(scope="module")
def cost():
    return predict(make_plan(ModelConfig.preset("k3-nano"), find_target("v7x"), cores=4, context=1024))


def test_sublayers_follow_each_other_through_every_layer(cost):
    found, config = sublayers(cost), cost.plan.config
    names = [name for name, *_ in found]
    assert names.count("KDA") == len(config.kda_layers)
    assert names.count("MLA") == len(config.mla_layers)
    assert names.count("MoE") == cost.plan.moe_layers
    assert names[-1] == "LM head"
    assert all(a[2] == b[1] for a, b in itertools.pairwise(found))
    assert found[-1][2] == cost.seconds


def test_a_stretch_of_time_shows_what_runs_and_what_is_exchanged(cost):
    _, begin, end = next(sublayer for sublayer in sublayers(cost) if sublayer[0] == "MoE")
    (axes,) = draw_spans(cost, begin, end).axes
    assert axes.get_xlim() == pytest.approx((0, (end - begin) * 1e6))
    rows = [round(bar.get_y() + bar.get_height() / 2) for bar in axes.patches]
    assert rows.count(0) >= 3
    assert rows.count(1) > 4
    assert axes.get_xlabel() == "us (predicted)"
