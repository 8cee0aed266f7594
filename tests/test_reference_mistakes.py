"""Every classic mistake in this architecture gives an error far above the tolerance of `test_reference.py`.

Each mistake is made on purpose, alone, in float32 on `tests/data/tiny_stable_mxfp4`, in the model or in its weights.
Beside it stands the error that others measured for the same mistake; ours must be of that size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_reference import TINY, TOLERANCE, error, prompts, reference

import model.kda as kda
from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from model.mla import MLA
from model.moe import MoE, Router
from model.primitives import HIGHEST, linear, linear_f32, rms_norm
from model.reference import Model, forward, load_model
from model.residual import ResidualStream

pytestmark = pytest.mark.slow


class Setup:
    """What a mistake may change: config and weights before the model is built, code, and the model itself."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.config = ModelConfig.from_file(TINY)
        self.weights: dict[str, np.ndarray] = dict(open_checkpoint(TINY))
        self.after: Callable[[Model], None] = lambda model: None

    def change_weights(self, part: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        for name, value in self.weights.items():
            if part in name:
                self.weights[name] = change(value)

    def set_on(self, kind: type, **attributes: Any) -> None:
        def after(model: Model) -> None:
            for layer in model.layers:
                if isinstance(layer.self_attn, kind):
                    for name, value in attributes.items():
                        setattr(layer.self_attn, name, value)

        self.after = after


def latent_norm_eps(s: Setup) -> None:
    s.config = dataclasses.replace(s.config, mla_latent_norm_eps=1e-5)


def decay_is_a_clamped_softplus(s: Setup) -> None:
    def log_decay(raw: Any, a_log: Any, dt_bias: Any, bound: float) -> jax.Array:
        return jnp.maximum(-jnp.exp(a_log[...])[:, None] * jax.nn.softplus(raw + dt_bias), bound)

    s.patch.setattr(kda, "log_decay", log_decay)


def a_log_is_per_channel(s: Setup) -> None:
    def log_decay(raw: Any, a_log: Any, dt_bias: Any, bound: float) -> jax.Array:
        padded = jnp.pad(a_log[...], (0, raw.shape[-1] - a_log[...].shape[0]))
        return bound * jax.nn.sigmoid(jnp.exp(padded) * (raw + dt_bias))

    s.patch.setattr(kda, "log_decay", log_decay)


def _recurrence(s: Setup, update: Callable[..., tuple[jax.Array, jax.Array]]) -> None:
    s.patch.setattr(kda, "kda_update", update)
    s.patch.setattr(kda, "kda_chunkwise", lambda *inputs, bounded: kda.kda_recurrent(*inputs[:6]))


def decay_after_the_update(s: Setup) -> None:
    def update(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        u = v - jnp.sum(k[..., None] * state, axis=-2)
        state = state + (beta[..., None] * k)[..., None] * u[..., None, :]
        state = jnp.exp(g)[..., None] * state
        return jnp.sum(q[..., None] * state, axis=-2), state

    _recurrence(s, update)


def read_out_before_the_update(s: Setup) -> None:
    def update(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        state = jnp.exp(g)[..., None] * state
        o = jnp.sum(q[..., None] * state, axis=-2)
        u = v - jnp.sum(k[..., None] * state, axis=-2)
        return o, state + (beta[..., None] * k)[..., None] * u[..., None, :]

    _recurrence(s, update)


def no_query_scale(s: Setup) -> None:
    right = kda.kda_chunkwise

    def chunkwise(q: jax.Array, *rest: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        return right(q * q.shape[-1] ** 0.5, *rest, **options)

    s.patch.setattr(kda, "kda_chunkwise", chunkwise)


def l2_norm_eps_on_the_mean(s: Setup) -> None:
    def l2_norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6 * x.shape[-1])

    s.patch.setattr(kda, "l2_norm", l2_norm)


def conv_taps_reversed(s: Setup) -> None:
    s.change_weights("conv1d", lambda w: w[..., ::-1])


def nibbles_swapped(s: Setup) -> None:
    s.change_weights("weight_packed", lambda w: w >> 4 | w << 4)


def gate_and_up_swapped(s: Setup) -> None:
    s.weights = {
        name: s.weights[name.replace(".w1.", ".W.").replace(".w3.", ".w1.").replace(".W.", ".w3.")]
        for name in s.weights
    }


def swi_glu_instead_of_situ(s: Setup) -> None:
    s.config = dataclasses.replace(s.config, hidden_act="silu")


def biased_router_weights(s: Setup) -> None:
    def call(self: Router, x: jax.Array, trace: object = None) -> tuple[jax.Array, jax.Array]:
        biased = jax.nn.sigmoid(linear_f32(x, self.weight)) + self.e_score_correction_bias[...]
        best, chosen = lax.top_k(biased, self.top_k)
        return chosen, best / jnp.sum(best, axis=-1, keepdims=True)

    s.patch.setattr(Router, "__call__", call)


def router_bias_not_used(s: Setup) -> None:
    s.change_weights("e_score_correction_bias", np.zeros_like)


def no_shared_experts(s: Setup) -> None:
    s.change_weights("shared_experts.down_proj", np.zeros_like)


def latent_norm_before_the_experts(s: Setup) -> None:
    def call(self: MoE, x: jax.Array, chosen_only: bool, trace: object = None) -> jax.Array:
        z = rms_norm(linear(x, self.routed_expert_down_proj), self.routed_expert_norm, self.eps)
        routed = self._all_experts(z, *self.gate(x))
        return linear(routed, self.routed_expert_up_proj) + self.shared_experts(x)

    s.patch.setattr(MoE, "__call__", call)


def normalised_entries_are_mixed(s: Setup) -> None:
    def read(self: ResidualStream, norm: Any, proj: Any) -> jax.Array:
        entries = [v * lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + self.eps) for v in (*self.snapshots, self.prefix)]
        scores = [jnp.einsum("...d,d->...", v, norm[...] * proj[...][0], precision=HIGHEST) for v in entries]
        weights = jax.nn.softmax(jnp.stack(scores, axis=-1), axis=-1)
        return sum(weights[..., j, None] * v for j, v in enumerate(entries))

    s.patch.setattr(ResidualStream, "read", read)


def snapshot_after_attention(s: Setup) -> None:
    def freeze(self: ResidualStream) -> None:
        self.late = True

    def add(self: ResidualStream, output: jax.Array) -> None:
        if getattr(self, "late", False):
            self.snapshots.append(self.prefix + output)
            self._sum, self.late = output, False
        else:
            self._sum = self.prefix + output

    s.patch.setattr(ResidualStream, "freeze", freeze)
    s.patch.setattr(ResidualStream, "add", add)


def prefix_not_restarted(s: Setup) -> None:
    s.patch.setattr(ResidualStream, "freeze", lambda self: self.snapshots.append(self.prefix))


def snapshot_of_the_mixed_stream(s: Setup) -> None:
    right = ResidualStream.read

    def read(self: ResidualStream, norm: Any, proj: Any) -> jax.Array:
        self.mixed = right(self, norm, proj)
        return self.mixed

    def freeze(self: ResidualStream) -> None:
        self.snapshots.append(getattr(self, "mixed", self.prefix) if self.snapshots else self.prefix)
        self._sum = None

    s.patch.setattr(ResidualStream, "read", read)
    s.patch.setattr(ResidualStream, "freeze", freeze)


def no_output_mix(s: Setup) -> None:
    right = Model._read
    s.patch.setattr(
        Model,
        "_read",
        lambda self, stream, owner, name: stream.prefix if owner is self else right(self, stream, owner, name),
    )


def same_weights_for_both_reads(s: Setup) -> None:
    s.weights = {name: s.weights[name.replace("self_attention_res", "mlp_res")] for name in s.weights}


def mla_scale_of_the_nope_part(s: Setup) -> None:
    s.set_on(MLA, scale=s.config.qk_nope_head_dim**-0.5)


def extra_dimensions_dropped(s: Setup) -> None:
    def change(w: np.ndarray) -> np.ndarray:
        by_head = w.reshape(s.config.num_attention_heads, s.config.qk_head_dim, -1).copy()
        by_head[:, s.config.qk_nope_head_dim :] = 0
        return by_head.reshape(w.shape)

    s.change_weights("q_b_proj", change)


def no_mla_gate(s: Setup) -> None:
    s.set_on(MLA, gated=False)


MISTAKES = [
    (latent_norm_eps, 5.9e-3),
    (decay_is_a_clamped_softplus, 0.11),
    (a_log_is_per_channel, 0.070),
    (decay_after_the_update, 0.17),
    (read_out_before_the_update, 0.20),
    (no_query_scale, 0.049),
    (conv_taps_reversed, 0.28),
    (nibbles_swapped, 0.49),
    (gate_and_up_swapped, 0.42),
    (swi_glu_instead_of_situ, 0.28),
    (biased_router_weights, 0.31),
    (router_bias_not_used, 0.073),
    (no_shared_experts, 0.48),
    (latent_norm_before_the_experts, 0.15),
    (normalised_entries_are_mixed, 0.20),
    (snapshot_after_attention, 0.35),
    (prefix_not_restarted, 0.48),
    (snapshot_of_the_mixed_stream, 0.39),
    (no_output_mix, 1.3),
    (same_weights_for_both_reads, 0.37),
    (mla_scale_of_the_nope_part, 0.013),
    (extra_dimensions_dropped, 0.049),
    (no_mla_gate, 0.097),
    (l2_norm_eps_on_the_mean, 0.014),
]


@pytest.mark.parametrize(("mistake", "known_error"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_mistake_shows(monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Setup], None], known_error: float) -> None:
    setup = Setup(monkeypatch)
    mistake(setup)
    model = load_model(setup.weights, setup.config)
    setup.after(model)
    tokens, lengths = prompts()
    logits = jax.jit(lambda model, tokens: forward(model, tokens))(model, tokens[:1, : lengths[0]])
    ours = error(logits[0], reference()["f32.p0.logits_full"])
    assert ours > 100 * TOLERANCE["f32"]
    assert known_error / 2 < ours < known_error * 2
