"""What a user asks of sampling, and the plain definition of it: sort, cut, draw.

The kernel draws the same tokens without sorting (`megakernel.phases.sample`); this is its oracle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

_LEAST, _MOST = 1e-30, 1e30
"""Of temperature, and the first of top_p too: logits over it, and probabilities times it, stay inside float32."""
MAX_BIASES = 1024
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn from the logits.

    First `logit_bias` is added to the raw logits. Then the logits of tokens that stand in prompt or output are divided
    by `repetition_penalty` if they are positive, else multiplied by it. Then `frequency_penalty` times the number of
    times that a token stands in the output, and `presence_penalty` if it stands there at all, are subtracted. This also
    holds for greedy decoding. Log-probabilities are of the raw logits.

    What comes out is divided by `temperature`; then `min_p` drops entries less likely than `min_p` times the likeliest,
    `top_k` keeps the k likeliest of what is left, and `top_p` keeps the smallest set of the likeliest whose
    probability, within what is left, reaches p. Equal logits rank by lowest index.

    Attributes:
      temperature: 0 takes the likeliest token (greedy); else 1e-30 to 1e30, which float32 can divide by.
      top_k: 0 keeps all.
      top_p: from 1e-30; 1 keeps all.
      min_p: in [0, 1]; 0 keeps all.
      repetition_penalty: 0.01 to 100; 1 changes nothing, more makes known tokens less likely.
      presence_penalty, frequency_penalty: -2 to 2; 0 changes nothing, more makes tokens of the output less likely.
      logit_bias: by token id, -100 to 100, or -inf, which forbids the token; at most 1,024 tokens.

    Raises:
      ValueError: a value outside its range, by name and value.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is None or isinstance(value, (str, bytes, bool)):
                raise ValueError(f"{name} = {value!r}; expected a number")
        if self.temperature != 0 and not _LEAST <= self.temperature <= _MOST:
            raise ValueError(f"temperature = {self.temperature}; expected 0 (greedy) or {_LEAST} to {_MOST}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or not 0 <= self.top_k < 1 << 31:
            raise ValueError(f"top_k = {self.top_k!r}; expected an integer from 0 (keep all) to 2**31 - 1")
        if not _LEAST <= self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; expected a number from {_LEAST} to 1 (keep all)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p}; expected a number from 0 (keep all) to 1")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"repetition_penalty = {self.repetition_penalty}; expected 0.01 to 100; 1 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} = {getattr(self, name)}; expected -2 to 2; 0 is none")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether there is a bias or a penalty."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1, 0, 0)


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias = {bias!r}; expected a mapping of token ids to numbers")
    if len(bias) > MAX_BIASES:
        raise ValueError(f"logit_bias = {len(bias)} entries; expected at most {MAX_BIASES}")
    checked = {}
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
            raise ValueError(f"logit_bias = {{{token!r}: {value!r}}}; expected token ids (integers) as keys")
        if not (value == -math.inf or -100 <= value <= 100):
            raise ValueError(f"logit_bias = {{{token}: {value}}}; expected -100 to 100, or -inf to forbid the token")
        checked[int(token)] = float(value)
    return checked


def adjusted_logits(
    logits: jax.Array, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> jax.Array:
    """Raw logits with bias and penalties, given the tokens so far.  # [V] f32 -> [V] f32"""
    if not params.adjusts_logits:
        return logits
    size = logits.shape[-1]
    times = np.bincount(np.asarray(output, np.int64), minlength=size)
    known = times + np.bincount(np.asarray(prompt, np.int64), minlength=size) > 0
    bias = np.zeros(size, np.float32)
    bias[list(params.logit_bias)] = list(params.logit_bias.values())
    x = logits + bias
    x = jnp.where(known, jnp.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
    x = x - params.frequency_penalty * times.astype(np.float32)
    return x - jnp.where(times > 0, params.presence_penalty, 0.0)


def kept_logits(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Logits over the temperature, with -inf where min-p, top-k or top-p drops an entry.  # [V] f32 -> [V] f32

    The probabilities that sampling draws from are the softmax of this. `params` must not be greedy.
    """
    x = logits / params.temperature
    x = jnp.where(jnp.exp(x - jnp.max(x)) < params.min_p, -jnp.inf, x)
    order = jnp.argsort(-x, stable=True)  # likeliest first, ties by index
    ranked = x[order]
    if params.top_k:
        ranked = jnp.where(jnp.arange(len(x)) < params.top_k, ranked, -jnp.inf)
    if np.float32(params.top_p) < 1.0:
        mass = jnp.exp(ranked - ranked[0])
        before = jnp.concatenate([jnp.zeros(1), jnp.cumsum(mass)[:-1]])
        ranked = jnp.where(before < params.top_p * jnp.sum(mass), ranked, -jnp.inf)
    return jnp.zeros_like(x).at[order].set(ranked)


def gumbel_noise(seed: int, position: int | jax.Array, vocab_size: int) -> jax.Array:
    """Noise of one position: Threefry-2x32 keyed by the seed, counting (position, entry).  # [V] f32

    -log(-log1p(-v)) with v = (24 bits + 1/2) / 2^24, at most 1 - 2^-24, so that it is finite.
    """
    key = jnp.array([seed & 0xFFFFFFFF, seed >> 32], jnp.uint32)
    entries = jnp.arange(vocab_size, dtype=jnp.uint32)
    positions = jnp.full((vocab_size,), position, jnp.uint32)
    bits = threefry_2x32(key, jnp.concatenate([positions, entries]))[:vocab_size]
    v = jnp.minimum(((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-v))


def sample(logits: jax.Array, params: SamplingParams, seed: int, position: int | jax.Array) -> jax.Array:
    """The token at `position` of a sequence with this seed (Gumbel-max).  # logits [V] f32 -> [] i32"""
    if params.greedy:
        return jnp.argmax(logits).astype(jnp.int32)
    noisy = kept_logits(logits, params) + gumbel_noise(seed, position, logits.shape[-1])
    return jnp.argmax(noisy).astype(jnp.int32)
