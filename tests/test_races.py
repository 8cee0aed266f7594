"""A race that the simulator finds ends a call of `decode`; what else is said meanwhile is passed on."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from launching import anew, random_model

from megakernel import LoadedModel, RaceError, decode, stream
from megakernel.__main__ import main
from megakernel.backends import simulator
from megakernel.races import refuse_races, watch_races


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return random_model(num_hidden_layers=2, mla_layers=(1,))


def copied(x: jax.Array, waits: bool) -> jax.Array:
    """A kernel that copies into its output, and reads it before the copy is done unless it waits."""

    def kernel(source, out, twice, done) -> None:
        copy = pltpu.make_async_copy(source, out, done)
        copy.start()
        if waits:
            copy.wait()
        twice[...] = 2 * out[...]
        if not waits:
            copy.wait()

    space = pl.BlockSpec(memory_space=pltpu.VMEM)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(
        kernel, in_specs=[space], out_specs=[space, space], out_shape=[shape, shape],
        scratch_shapes=[pltpu.SemaphoreType.DMA], interpret=simulator("eager"),
    )  # fmt: skip
    return jax.block_until_ready(call(x)[1])


def into_the_first_window(vectors: stream.Vectors, index: jax.Array) -> list[Any]:
    """The next tables are fetched over those in use."""
    table = lax.rem(index, vectors.tables)
    return [
        pltpu.make_async_copy(vectors.hbm[name].at[table], vectors.windows[name].at[0], vectors.done[name].at[0])
        for name in vectors.hbm
    ]


X = jnp.ones((8, 128), jnp.float32)


def test_a_race_is_refused_with_both_its_accesses() -> None:
    message = r"found 1 race, .* The first: (read|write) of .*, (read|write) of "
    with pytest.raises(RaceError, match=message) as caught, refuse_races():
        copied(X, waits=False)
    assert len(caught.value.races) == 1
    with refuse_races():
        np.testing.assert_array_equal(copied(X, waits=True), 2 * X)


def test_a_race_comes_before_what_it_leads_to() -> None:
    def failing(waits: bool) -> None:
        with refuse_races():
            copied(X, waits)
            raise ValueError("not a number")

    with pytest.raises(RaceError) as caught:
        failing(waits=False)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="not a number"):
        failing(waits=True)


def test_other_words_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with watch_races() as races:
        print("hello")
        print("RACE DETECTED\n  read of c\n  write of d")
        logging.getLogger("jax").warning("RACE DETECTED\n  read of a\n  clock: 1\n  write of b\n  clock: 2\n")
        logging.getLogger("jax").warning("something else")
    assert races.messages == ["read of c, write of d", "read of a, write of b"]
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.slow
def test_decode_raises_what_the_simulator_finds(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = decode(anew(small), [3, 4], max_new_tokens=2, backend="simulate")
    assert found.tokens == decode(anew(small), [3, 4], max_new_tokens=2, backend="interpret").tokens
    monkeypatch.setattr(stream.Vectors, "_copies", into_the_first_window)
    with pytest.raises(RaceError, match="backend 'simulate' found"):
        decode(anew(small), [3, 4], max_new_tokens=2, backend="simulate")


def test_the_command_line_says_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def raced(*_: object) -> None:
        raise RaceError(["read of a, write of b"])

    monkeypatch.setattr("megakernel.generate.Session", raced)
    assert main(["generate", "Call me", "--backend", "simulate"]) == 2
    assert "one-launch: backend 'simulate' found 1 race, " in capsys.readouterr().err
