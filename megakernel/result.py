"""What a generation gives back."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of the group of sequences that a sequence was decoded with.

    Attributes:
      compile: tracing and compiling, zero when the launch was compiled before in this process.
      prefill: prompts through the reference model, compilation of it included.
      decode: launches, prompts that the kernel itself reads included.
      launches: kernel launches; 1 unless streaming or stop strings split the generation.
      steps: tokens that the longest sequence was taken on by, its prompt included where the kernel read it.
      tokens: new tokens of the whole group.
    """

    compile: float
    prefill: float
    decode: float
    launches: int
    steps: int
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the whole group per second of `decode`."""
        return self.tokens / self.decode if self.decode else 0.0


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How drafting went for one sequence.

    Attributes:
      drafter: its name.
      rounds: rounds that made new tokens.
      tokens: new tokens of those rounds, the target's own bonus token of each round counted.
      proposed, accepted: drafts by place in the round, first draft first.
      draft_share: the drafter's part of the tape that a round streams (computed from the plan, not a time).
    """

    drafter: str
    rounds: int
    tokens: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_share: float

    @property
    def tokens_per_round(self) -> float:
        """New tokens a round, the bonus token counted: 1.0 is plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Part of the proposed drafts that was accepted, by place in the round."""
        return tuple(a / p if p else 0.0 for a, p in zip(self.accepted, self.proposed, strict=True))


@dataclasses.dataclass(frozen=True)
class Generation:
    """One decoded sequence.

    Attributes:
      text: new text; ends before a stop string or stop token. Empty without a tokenizer.
      tokens: new tokens; the last one is the stop token if there was one.
      finish_reason: "stop" (end of sequence, stop token or stop string) or "length".
      logprobs: log-probability of each new token under the model, of the raw logits; None if not asked.
      prompt_tokens: the prompt as the model saw it.
      seed: with it, the same prompt and sampling give the same tokens again, in any batch.
      speculation: how drafting went; None without a drafter.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None
    prompt_tokens: tuple[int, ...]
    seed: int
    timing: Timing
    speculation: Speculation | None = None

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a streamed generation: `text` is never half a character nor the start of a stop string.

    Attributes:
      index: of the prompt.
      finish_reason: set on the last piece of a sequence.
      generation: the whole sequence, with timing up to this piece, seed and statistics; on its last piece only.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason | None
    generation: Generation | None = None

    def __str__(self) -> str:
        return self.text


class NumericsError(FloatingPointError):
    """The model produced NaN or infinity; the message names the layer and, if it is a weight's fault, the tensor."""
