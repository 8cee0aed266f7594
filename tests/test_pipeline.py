"""The clock of the model of time, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from megakernel.pipeline import Pipeline
from megakernel.rates import rates_of
from megakernel.target import CPU, TARGETS, find_target

RATES = dataclasses.replace(
    rates_of(find_target("v7x")),
    hbm_bytes_per_s=10.0,
    exchange_seconds=3.0,
    off_chip_bytes_per_s=20.0,
    sibling_bytes_per_s=5.0,
)


def test_a_deep_ring_hides_computing_behind_the_memory() -> None:
    pipe = Pipeline(RATES, ring_blocks=2, block_bytes=10)  # a second a block
    for _ in range(10):
        pipe.block(0.25, "product")
    assert pipe.now == pytest.approx(10.25)
    assert pipe.spent["", "computing"] == pytest.approx(2.5)
    assert pipe.moved[""] == 120  # two are on their way


def test_a_ring_runs_ahead_of_an_exchange_by_no_more_than_its_blocks() -> None:
    pipe = Pipeline(RATES, ring_blocks=2, block_bytes=10)
    pipe.start_exchange("sum", 0, 32)
    pipe.finish_exchange()
    assert pipe.now == 3.0
    for _ in range(4):
        pipe.block(0.0, "product")
    assert pipe.now == pytest.approx(5.0)  # two blocks had arrived, two follow


def test_work_between_start_and_finish_hides_an_exchange() -> None:
    pipe = Pipeline(RATES)
    pipe.start_exchange("gather", 0, 4)
    pipe.compute(2.0, "work")
    pipe.finish_exchange()
    assert pipe.now == 3.0
    assert pipe.spent["", "waiting for an exchange"] == 1.0
    assert [(span.begin, span.end) for span in pipe.flights] == [(0.0, 3.0)]


def test_reads_follow_each_other_and_writes_take_their_turn() -> None:
    pipe = Pipeline(RATES)
    pipe.read("a", 10)
    pipe.write(20)
    pipe.read("b", 10)
    pipe.wait("a")
    assert pipe.now == 1.0
    pipe.wait("b")
    assert pipe.now == 4.0


def test_one_core_exchanges_nothing() -> None:
    pipe = Pipeline(RATES)
    pipe.start_exchange("sum", 1000, 1)
    pipe.finish_exchange()
    assert pipe.now == 0.0
    assert not pipe.exchanges


def test_pieces_to_the_sibling_and_to_other_chips_leave_side_by_side() -> None:
    assert RATES.exchange(10.0, 2) == pytest.approx(3.0 + 10 / 5)
    assert RATES.exchange(10.0, 32) == pytest.approx(3.0 + 30 * 10 / 20)


@pytest.mark.parametrize(("target", "gigahertz"), [("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75), ("v7x", 2.2)])
def test_clocks_follow_from_the_peaks(target: str, gigahertz: float) -> None:
    assert rates_of(find_target(target)).clock_hz / 1e9 == pytest.approx(gigahertz, rel=0.01)


def test_bandwidth_reached_is_below_the_peak_and_a_cpu_has_none() -> None:
    for target in TARGETS.values():
        if target is not CPU:
            rates = rates_of(target)
            assert 0.7 < rates.hbm_bytes_per_s / rates.peak_bytes_per_s < 0.9
    with pytest.raises(ValueError, match="no model of time for target 'cpu'"):
        rates_of(CPU)
