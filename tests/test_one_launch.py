"""A whole generation is one kernel launch, and what is compiled does not grow with its length or the model's depth."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from launching import anew, equations, launch_jaxpr, pallas_calls, random_model

import megakernel
import model
import spec_decode
from megakernel import Generation, LoadedModel, decode, kernel, make_plan
from megakernel.session import Session
from model.config import ModelConfig

PROMPT = [5, 9, 300]
MINI = ModelConfig.preset("k3-mini")


def kernel_equations(config: ModelConfig, **knobs: Any) -> list[str]:
    """Names of the kernel's equations, after checking that the launch holds exactly one kernel."""
    plan = make_plan(config, **{"sequences": 2, "context": 256, "launch_steps": 64, "ring_depth": 4} | knobs)
    (call,) = pallas_calls(launch_jaxpr(plan).jaxpr)
    return [equation.primitive.name for equation in equations(call.params["jaxpr"])]


def depth(layers: int, mla_layers: tuple[int, ...], residual_block: int) -> ModelConfig:
    return dataclasses.replace(
        MINI, num_hidden_layers=layers, mla_layers=mla_layers, attn_res_block_size=residual_block
    )


# ---- one kernel ----


def test_counting_sees_calls_inside_loops_branches_and_functions() -> None:
    """The measure itself."""

    def double(x: jax.Array) -> jax.Array:
        def body(before: Any, after: Any) -> None:
            after[...] = before[...] * 2

        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    def several(x: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, 3, lambda _, y: double(y), x)
        x = jax.lax.cond(x[0] > 0, double, lambda y: y, x)
        x = jax.lax.while_loop(lambda y: y[0] < 9, lambda y: double(y), x)
        return jax.jit(double)(x)

    assert len(pallas_calls(jax.make_jaxpr(several)(jnp.ones(8)).jaxpr)) == 4


@pytest.mark.parametrize("launch_steps", [1, 64, 512])
@pytest.mark.parametrize("interpret", [True, False])
def test_a_launch_is_one_kernel_and_nothing_else(launch_steps: int, interpret: bool) -> None:
    plan = make_plan(MINI, sequences=2, context=512, launch_steps=launch_steps)
    names = [equation.primitive.name for equation in launch_jaxpr(plan, interpret).jaxpr.eqns]
    assert names == ["pallas_call"]


@pytest.mark.parametrize("interpret", [True, False])
def test_a_launch_on_several_cores_is_the_same_kernel_on_each(interpret: bool) -> None:
    (over_cores,) = launch_jaxpr(make_plan(MINI, cores=4, context=64), interpret).jaxpr.eqns
    assert over_cores.primitive.name == "shard_map"
    assert [equation.primitive.name for equation in over_cores.params["jaxpr"].eqns] == ["pallas_call"]


def test_the_kernel_does_not_grow_with_the_length() -> None:
    assert len({tuple(kernel_equations(MINI, context=n, launch_steps=n)) for n in (32, 256, 512)}) == 1


def test_the_kernel_does_not_grow_with_the_depth() -> None:
    """Layers are rolled: 5, 9 and 13 layers of the same kinds, and with as many residual snapshots, are equal."""
    configs = [depth(5, (3, 4), 2), depth(9, (3, 7, 8), 3), depth(13, (3, 7, 11, 12), 5)]
    assert {config.num_snapshots for config in configs} == {3}
    assert len({tuple(kernel_equations(config)) for config in configs}) == 1


def test_another_snapshot_costs_a_few_equations() -> None:
    """What does grow with the depth: beside the last exchange of each of the four kinds of sublayer every snapshot is
    scored and weighed, about 70 equations each."""
    more = len(kernel_equations(depth(9, (3, 7, 8), 2))) - len(kernel_equations(depth(9, (3, 7, 8), 3)))
    assert 0 <= more < 4 * 80


def test_unrolled_layers_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rolled = jax.lax.fori_loop

    def unroll_layers(start: Any, stop: Any, body: Any, carry: Any) -> Any:
        if getattr(body, "func", None) is not kernel.layer:
            return rolled(start, stop, body, carry)
        for number in range(stop):
            carry = body(jnp.int32(number), carry)
        return carry

    with monkeypatch.context() as patch:
        patch.setattr(kernel.lax, "fori_loop", unroll_layers)
        unrolled = [len(kernel_equations(c)) for c in (depth(3, (1, 2), 1), depth(5, (3, 4), 2))]
    assert unrolled[1] > 1.3 * unrolled[0]


# ---- one launch, compiled once ----


def generate(loaded: LoadedModel, new: int, prompt: list[int] = PROMPT) -> Generation:
    found = decode(loaded, prompt, max_new_tokens=new, seed=0, backend="interpret")
    assert isinstance(found, Generation)
    return found


@pytest.fixture
def endless() -> LoadedModel:
    """No token ends a sequence; nothing is compiled yet."""
    return anew(random_model("k3-mini", eos_token_ids=()))


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    launches, launch = [], Session.launch
    monkeypatch.setattr(Session, "launch", lambda self, asks: launches.append(self) or launch(self, asks))
    return launches


@pytest.mark.slow
def test_one_launch_and_one_compilation_for_any_length(endless: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 and 200 new tokens, prompts of 1 to 60 tokens: one trace, one compilation, one launch each."""
    traces, launches = [], count_launches(monkeypatch)
    monkeypatch.setattr(kernel, "layer_table", lambda plan, make=kernel.layer_table: traces.append(plan) or make(plan))
    short = generate(endless, 5)
    assert (short.timing.launches, len(short.tokens), len(traces)) == (1, 5, 1)
    assert short.timing.compile > 0
    long = generate(endless, 200)
    others = [generate(endless, new, prompt) for new, prompt in ((1, [7]), (17, [8] * 60))]
    assert long.tokens[:5] == short.tokens
    assert [len(g.tokens) for g in (long, *others)] == [200, 1, 17]
    assert [g.timing.launches for g in (long, *others)] == [1, 1, 1]
    assert [g.timing.compile for g in (long, *others)] == [0, 0, 0]
    assert (len(traces), len(launches)) == (1, 4)


def test_every_launch_is_counted(endless: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed text comes from several launches: both counts see them all."""
    launches = count_launches(monkeypatch)
    pieces = list(decode(endless, PROMPT, max_new_tokens=40, seed=0, backend="interpret", stream=True))
    assert sum(len(piece.tokens) for piece in pieces) == 40
    assert len(launches) == len(pieces) > 1


# ---- importing ----


def test_importing_starts_no_backend() -> None:
    """With a platform that does not exist, starting a backend fails: importing must work, and computing must not."""
    root = Path(megakernel.__file__).parent.parent
    names = [package.__name__ for package in (model, megakernel, spec_decode)]
    files = [file for name in names for file in sorted((root / name).rglob("*.py")) if not file.name.startswith("__")]
    names += [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    assert len(names) > 50
    code = f"""
import importlib, jax
for name in {names}:
    importlib.import_module(name)
try:
    jax.devices()
except RuntimeError:
    print("no backend was started")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "nonexistent", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "no backend was started"
