"""Exchanges between cores: values, bits, races, planted faults, and the TPU compiler's word."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanging import Script, expected, run
from launching import watch_races

from megakernel.backends import simulator
from megakernel.collectives import Exchange, join3, split3

SCRIPTS = {
    "one core": Script(1, columns=128, width=128, narrow=32, narrow_total=32, lanes=256),
    "two cores": Script(2, columns=200, width=128, narrow=64, narrow_total=100, lanes=256),
    "three cores, one owns nothing": Script(3, columns=40, width=24, narrow=16, narrow_total=48, lanes=56),
    "four cores, one owns nothing": Script(4, columns=300, width=128, narrow=32, narrow_total=120, lanes=256),
    "eight cores": Script(8, columns=192, width=24, narrow=8, narrow_total=64, lanes=40),
}
"""With columns short of what the cores own, and buffers of whole tiles and others."""
FOUR = SCRIPTS["four cores, one owns nothing"]


def check(found: dict[str, np.ndarray], script: Script) -> None:
    """Every bit as NumPy has it; so the cores agree in what they share."""
    for name, value in expected(script).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_plainly_interpreted(name: str, wire: str) -> None:
    script = dataclasses.replace(SCRIPTS[name], wire=wire, rounds=20)
    found = run(script, True)
    check(found, script)
    assert script.cores < 3 or 1 < found["rounds"][0, 0] < 20, "the values should have stopped it"


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("name", [name for name in SCRIPTS if not name.startswith("eight")])
def test_simulated_without_races(name: str, mode: str) -> None:
    script = dataclasses.replace(SCRIPTS[name], wire="bfloat16", rounds=2)
    with watch_races() as races:
        found = run(script, simulator(mode))
    assert races.messages == []
    check(found, script)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_eight_cores_simulated_without_races(mode: str) -> None:
    with watch_races() as races:
        found = run(SCRIPTS["eight cores"], simulator(mode))
    assert races.messages == []
    check(found, SCRIPTS["eight cores"])
