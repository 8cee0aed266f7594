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

import exchanging
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanging import Script, exchange_scratch, expected, run
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from launching import relative_error

from megakernel.backends import simulator
from megakernel.collectives import Exchange
from megakernel.control import when
from megakernel.messages import EIGHT_BITS
from megakernel.races import watch_races
from megakernel.wire import join3, scaled, split3, unscaled

SCRIPTS = {
    "one core": Script(1, columns=128, width=128, narrow=32, narrow_total=32, lanes=256),
    "two cores": Script(2, columns=200, width=128, narrow=64, narrow_total=100, lanes=256),
    "three cores, one owns nothing": Script(3, columns=40, width=24, narrow=16, narrow_total=48, lanes=256),
    "four cores, one owns nothing": Script(4, columns=300, width=128, narrow=32, narrow_total=120, lanes=256),
    "eight cores": Script(8, columns=192, width=24, narrow=8, narrow_total=64, lanes=256),
}
"""With columns short of what the cores own; pieces of whole tiles, of parts of one, and across two."""
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


# ---- planted faults ----

Fault = Callable[[pytest.MonkeyPatch], None]


def not_waited_for(method: str) -> Fault:
    return lambda patch: patch.setattr(Exchange, method, lambda self, half: None)


def one_half(patch: pytest.MonkeyPatch) -> None:
    """Pieces of the next exchange land where others still read."""
    patch.setattr(Exchange, "_other", staticmethod(lambda half: half))


def nothing_for_who_owns_nothing(patch: pytest.MonkeyPatch) -> None:
    """In a scatter the last core receives no pieces, and so runs ahead of the others."""
    start_scatter, send, wait_received = Exchange.start_scatter, Exchange._send, Exchange._wait_received
    owners = FOUR.cores - 1
    scattering = []

    def start(self: Exchange, partial: Any, width: int) -> None:
        scattering.append(True)
        start_scatter(self, partial, width)

    def send_to_owners(self: Exchange, half: Any, piece_for: Any) -> None:
        visit_each = self._for_each_peer
        if scattering:
            self._for_each_peer = lambda visit: visit_each(lambda peer: when(peer < owners)(lambda: visit(peer)))
        send(self, half, piece_for)
        self._for_each_peer = visit_each

    def wait_if_owner(self: Exchange, half: Any) -> None:
        @when((self.me == owners) & bool(scattering))
        def zeros() -> None:
            self.inbox[half] = jnp.zeros(self.inbox.shape[1:], self.inbox.dtype)

        when((self.me < owners) | (not scattering))(lambda: wait_received(self, half))

    def wait_sent(self: Exchange, half: Any) -> None:
        def wait_for(pieces: int) -> None:
            sent = self.inbox.at[half, pl.ds(0, pieces), :, pl.ds(0, self._travelling)]
            pltpu.make_async_copy(sent, sent, self.sent.at[0]).wait()

        everyone = (self.me == owners) | (not scattering)
        when(everyone)(lambda: wait_for(self.cores - 1))
        when(jnp.logical_not(everyone))(lambda: wait_for(self.cores - 2))
        scattering.clear()

    patch.setattr(Exchange, "start_scatter", start)
    patch.setattr(Exchange, "_send", send_to_owners)
    patch.setattr(Exchange, "_wait_received", wait_if_owner)
    patch.setattr(Exchange, "_wait_sent", wait_sent)


FAULTS: dict[str, Fault] = {
    "pieces read before they have arrived": not_waited_for("_wait_received"),
    "pieces overwritten before they have left": not_waited_for("_wait_sent"),
    "one half of the inbox for every exchange": one_half,
    "cores that own nothing receive nothing": nothing_for_who_owns_nothing,
}


def symptoms(fault: Fault, mode: str) -> set[str]:
    script = dataclasses.replace(FOUR, wire="bfloat16")
    with pytest.MonkeyPatch.context() as patch, watch_races() as races:
        fault(patch)
        found = run(script, simulator(mode))
    same = all(np.array_equal(found[name], value) for name, value in expected(script).items())
    return ({"race"} if races.messages else set()) | (set() if same else {"values"})


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, mode: str) -> None:
    """A copy that nobody waits for may never happen: then its values are missed; all else is a race."""
    missed = name == "pieces read before they have arrived" and mode == "on_wait"
    assert ("values" if missed else "race") in symptoms(FAULTS[name], mode)


def test_sum_in_another_order_differs_between_cores() -> None:
    def from_me_on(script: Script, exchange: Exchange) -> jax.Array:
        (pieces,) = exchange.finish()
        total = jnp.zeros(pieces.shape[1:], jnp.float32)
        for distance in range(script.cores):
            total = total + pieces[lax.rem(exchange.me + distance, script.cores)].astype(jnp.float32)
        return total[:, : script.width]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanging, "total_of", from_me_on)
        found = run(dataclasses.replace(FOUR, rounds=1), True)["added"]
    assert any(not np.array_equal(found[0], other) for other in found[1:])
    np.testing.assert_allclose(found[1:], np.stack([found[0]] * 3), rtol=1e-4, atol=1e-5)


def trace(body: Callable[[Exchange], None]) -> None:
    def kernel(out: Any, *scratch: Any) -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)
        body(Exchange("tp", 1, *scratch))

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    jax.make_jaxpr(pl.pallas_call(kernel, out_shape=shape, scratch_shapes=exchange_scratch(1, 8, 128, jnp.float32)))()


def test_starts_and_finishes_alternate() -> None:
    piece = jnp.zeros((8, 128), jnp.float32)
    with pytest.raises(AssertionError, match="while an exchange is in flight"):
        trace(lambda exchange: [exchange.start_gather(piece) for _ in range(2)])
    with pytest.raises(AssertionError, match="finish without a start"):
        trace(lambda exchange: exchange.finish())


def test_too_much_is_refused() -> None:
    with pytest.raises(AssertionError, match="pieces of 256 lanes in a buffer of 128"):
        trace(lambda exchange: exchange.start_gather(jnp.zeros((8, 128)), jnp.zeros((8, 1))))
    with pytest.raises(AssertionError, match="300 columns are more than 1 cores own"):
        trace(lambda exchange: exchange.start_scatter(jnp.zeros((8, 300)), 128))


# ---- number formats of the wire ----


def test_split3_is_exact_on_a_bfloat16_wire() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.append(values[np.isfinite(values) & (np.abs(values) >= 2.0**-103)], np.float32([0, 1, -1, 2**24 - 1]))

    @jax.jit
    def over_the_wire(x: jax.Array) -> jax.Array:
        return join3(*(part.astype(jnp.bfloat16) for part in split3(x)))

    np.testing.assert_array_equal(np.asarray(over_the_wire(values)), values)
    assert not np.isfinite(np.asarray(over_the_wire(np.float32([np.inf, -np.inf, np.nan])))).any()


@pytest.mark.parametrize(("wire", "error"), [("bfloat16", 0.002), ("int8", 0.013), ("float8_e4m3fn", 0.028)])
def test_error_of_a_wire(wire: str, error: float) -> None:
    """Relative rms error of normal values in rows of 256 of very different size."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((512, 256)) * 2.0 ** rng.uniform(-60, 60, (512, 1))
    x = np.concatenate([x, np.zeros((1, 256))]).astype(np.float32)

    @jax.jit
    def over_the_wire(x: jax.Array) -> jax.Array:
        if wire == "bfloat16":
            return x.astype(wire)
        values, exponents = scaled(x, wire)
        return unscaled(values.astype(wire), exponents.astype(wire))

    arrived = np.asarray(over_the_wire(x), np.float32)
    np.testing.assert_array_equal(arrived[-1], 0)
    sizes = np.sqrt(np.mean(x[:-1] ** 2, axis=1, keepdims=True, dtype=np.float64))
    found = relative_error(arrived[:-1] / sizes, x[:-1] / sizes)
    print(wire, found)
    assert 0.5 * error < found < error


@pytest.mark.parametrize("interpret", [True, "on_wait"])
@pytest.mark.parametrize("wire", EIGHT_BITS)
def test_gather_over_eight_bits(wire: str, interpret: Any) -> None:
    script = Script(4, columns=120, width=32, narrow=0, narrow_total=0, lanes=256, wire=wire)
    with watch_races() as races:
        found = run(script, simulator(interpret) if interpret == "on_wait" else interpret)["state"]
    assert races.messages == []
    mine = np.hstack(list(script.start()[:, :, : script.width]))[:, : script.columns]
    assert all(np.array_equal(found[0], other) for other in found)
    assert relative_error(found[0, :, : script.columns], mine) < 0.03
    assert not found[0, :, script.columns :].any()


# ---- the TPU compiler ----

SMALL = Script(0, columns=256, width=128, narrow=32, narrow_total=64, lanes=256, wire="bfloat16")
LARGE = Script(0, columns=28 * 128, width=128, narrow=32, narrow_total=28 * 32, lanes=256, wire="bfloat16")
"""Of the 32 cores 28 own something."""


@pytest.mark.parametrize(
    ("topology", "cores", "script"),
    [
        ("tpu7x:4x4x1", 32, LARGE),
        ("tpu7x:1x1x1", 2, SMALL),
        ("v6e:2x2", 4, SMALL),
        ("v5p:2x2x1", 4, SMALL),
        ("v5e:2x2", 4, SMALL),
        *(("tpu7x:4x4x1", 32, dataclasses.replace(LARGE, wire=wire)) for wire in EIGHT_BITS),
    ],
    ids=lambda value: value.wire if isinstance(value, Script) else None,
)
@pytest.mark.slow
def test_compiles(topology: str, cores: int, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": str(here.parent),
    }
    command = [sys.executable, str(here / "exchanging.py"), topology, json.dumps(dataclasses.asdict(script))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\nexchanges on {topology}, {script.wire}: compiled in {report['compile_seconds']:.1f} s")
    assert report["cores"] == cores
