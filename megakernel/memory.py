"""Every buffer of the kernel by name: what lives in VMEM, SMEM and HBM. The kernel allocates from these lists."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from megakernel.program import LANES, round_up
from megakernel.vocabulary import SEGMENTS, vocabulary_shape

if TYPE_CHECKING:
    from megakernel.plan import Plan

_ITEM_BYTES = {"float32": 4, "uint32": 4, "int32": 4, "bfloat16": 2, "uint16": 2, "int8": 1, "float8_e4m3fn": 1}
MAX_STOP_TOKENS = 8
LAYER_NUMBERS = 9
"""Numbers of one layer in the layer table, see `megakernel.kernel.layer_table`."""
TOTALS = {1: "one_hop", 2: "two_hops"}
"""The exchange of sums over cores that take so many hops."""
EXCHANGES = ("pieces", *TOTALS.values(), "logits")
"""What cores exchange, each with buffers of its own: pieces of vectors, partial sums, logits."""
ROW_OF_LOGITS = ("row_logits", "scaled_logits", "logit_mass")
"""What the sampler holds of the row that it is at, see `phases.sample`."""
KDA_PLANES, KDA_KEPT_PLANES = 8, 7
"""Planes of `kda_rows` (see `phases.kda`), and how many of them replay needs."""

# Small integers in SMEM, one column or row a sequence.
START, GIVEN, WANTED = range(3)
"""`request`: position of the first given token, number of given tokens, most new tokens."""
TAKEN, NEW, REASON, BAD_LAYER, ROUNDS = range(5)
"""`status`: tokens taken on, new tokens, why it ended, first bad layer or -1, rounds with new tokens."""
RUNNING, STOPPED, FULL, BROKEN = range(4)
"""`status[REASON]`: still running, stop token, enough tokens, not finite."""
TOKEN, POSITION, ACTIVE, COUNT, COMMIT, DRAFTS = range(6)
"""`current`: last known token not yet run, its position, 1 while decoding, rows of this round, rows accepted in the
last round and not yet in the states, tokens drafted for the next round."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    shape: tuple[int, ...]
    dtype: str

    @property
    def padded_bytes(self) -> int:
        """Bytes with the two minor dimensions padded to whole tiles, as VMEM holds them."""
        size = _ITEM_BYTES[self.dtype]
        *major, second, minor = (1, *self.shape) if len(self.shape) == 1 else self.shape
        return math.prod(major) * round_up(second, 32 // size) * round_up(minor, LANES) * size

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def vmem_buffers(plan: Plan) -> dict[str, Buffer]:
    """Scratch of one launch. `out_NAME` is the output of the streamed product NAME."""
    from megakernel.limits import POSITION_GROUP

    config, split, rows, sequences = plan.config, plan.split, plan.rows, plan.sequences
    hidden, activations = config.hidden_size, plan.activations
    head_dim, taps = config.kda_head_dim, config.short_conv_kernel_size
    buffers = {
        "ring": Buffer((plan.ring_depth, plan.block_rows, plan.block_lanes), plan.storage),
        **{f"{name}_vectors": Buffer((2, *shape), "float32") for name, shape in plan.vector_tables.items()},
        "embedding_rows": Buffer((plan.live_rows, POSITION_GROUP, split.hidden), plan.storage),
        "stream": Buffer((config.num_snapshots + 1, rows, hidden), "float32"),
        "mixture": Buffer((rows, hidden), "float32"),
        "operand": Buffer((rows, plan.operand_width), activations),
        **{name: Buffer(vocabulary_shape(config.vocab_size, split.cores), "float32") for name in ROW_OF_LOGITS},
        **_product_outputs(plan),
    }
    if config.attn_res_block_size:
        buffers["mixture_shares"] = Buffer((2, rows, LANES), "float32")
    buffers["out_head"] = head_output(plan, "head")
    if config.kda_layers:
        buffers |= {
            "state": Buffer((split.kda_heads, sequences, head_dim, head_dim), "float32"),
            "tails": Buffer((taps - 1, sequences, 3 * split.kda_width), "float32"),
            "kda_rows": Buffer((KDA_PLANES, plan.tokens, sequences, split.kda_width), "float32"),
            "trial_state": Buffer((plan.head_group * sequences, head_dim, head_dim), "float32"),
            "kda_read": Buffer((plan.tokens, sequences, split.kda_width), "float32"),
        }
    if config.kda_layers and plan.tokens > 1:
        buffers |= {
            "pending": Buffer((KDA_KEPT_PLANES, plan.tokens, sequences, split.kda_width), "float32"),
        }
    if config.mla_layers:
        latent, heads = plan.latent_lanes, split.heads
        buffers |= {
            "page": Buffer((plan.page_windows, plan.page, latent), activations),
            "latent_group": Buffer((sequences, plan.group_positions, latent), activations),
            "fresh": Buffer((rows, latent), "float32"),
            "queries": Buffer((rows, heads, latent), "float32"),
            "contexts": Buffer((rows, heads, config.kv_lora_rank), "float32"),
        }
    if plan.moe_layers:
        expert = plan.storage if config.expert_format == "bf16" else "uint32"
        (in_rows, in_lanes), (out_rows, out_lanes) = plan.expert_shapes
        buffers |= {
            "expert_in": Buffer((plan.expert_slots, in_rows, in_lanes), expert),
            "expert_out": Buffer((plan.expert_slots, out_rows, out_lanes), expert),
            "expert_weights": Buffer((rows, round_up(config.num_experts, LANES)), "float32"),
            "expert_input": Buffer((rows, config.routed_expert_hidden_size), "float32"),
            "expert_sum": Buffer((rows, out_lanes), "float32"),
        }
    if split.cores > 1:
        buffers |= _exchange_buffers(plan)
    if plan.penalties:
        shape = (sequences, *vocabulary_shape(config.vocab_size, split.cores))
        buffers["token_counts"] = Buffer(shape, "int32")
    if plan.drafter:
        buffers |= plan.drafter.vmem(plan)
        if plan.drafter.taps:
            buffers["taps"] = Buffer((len(plan.drafter.taps), rows, hidden), "float32")
    return buffers


def _exchange_buffers(plan: Plan) -> dict[str, Buffer]:
    from megakernel.messages import gather_lanes, hops_of_sums, totals_inbox

    cores = plan.split.cores
    shard = (SEGMENTS, plan.split.vocabulary // SEGMENTS)
    buffers = {
        "pieces_inbox": Buffer((2, cores, plan.wire_rows, gather_lanes(plan)), plan.activations),
        "logits_inbox": Buffer((2, cores, *shard), "float32"),
        "logits_outbox": Buffer((cores, *shard), "float32"),
    }
    for hops in hops_of_sums(plan):
        partial = totals_inbox(plan, hops)
        buffers[f"{TOTALS[hops]}_inbox"] = Buffer((2, cores, *partial), plan.wire)
        if hops == 2:
            buffers[f"{TOTALS[hops]}_outbox"] = Buffer((cores, *partial), plan.wire)
    return buffers


def _product_outputs(plan: Plan) -> dict[str, Buffer]:
    widths: dict[str, int] = {}
    for matrix in plan.matrices.values():
        widths[matrix.output_buffer] = max(widths.get(matrix.output_buffer, 0), plan.output_width(matrix))
    return {name: Buffer((plan.rows, width), "float32") for name, width in widths.items()}


def head_output(plan: Plan, matrix: str) -> Buffer:
    """Output of an LM head, wide enough to be read in segments of `megakernel.vocabulary`."""
    segments, lanes = vocabulary_shape(plan.config.vocab_size, plan.split.cores)
    own = segments * lanes // plan.split.cores
    return Buffer((plan.rows, max(plan.output_width(plan.matrices[matrix]), own)), "float32")


def smem_scratch(plan: Plan) -> dict[str, Buffer]:
    return {
        "chosen_experts": Buffer((max(plan.max_distinct_experts, 1),), "int32"),
        "expert_visits": Buffer((plan.max_expert_visits + 1,), "int32"),
        "current": Buffer((6, plan.sequences), "int32"),
        "window": Buffer((plan.live_rows,), "int32"),
        "drafts": Buffer((plan.live_rows,), "int32"),
        "bad_layer": Buffer((1,), "int32"),
        "row_tokens": Buffer((plan.live_rows,), "int32"),
        "row_logprobs": Buffer((plan.live_rows,), "float32"),
        **({f"{name}_half": Buffer((1,), "int32") for name in EXCHANGES} if plan.split.cores > 1 else {}),
    }


def semaphore_counts(plan: Plan) -> dict[str, int]:
    counts = {"ring_done": plan.ring_depth, "embedding_done": 1}
    counts |= {f"{name}_vectors_done": 2 for name in plan.vector_tables}
    if plan.config.kda_layers:
        counts |= {"state_in": 1, "state_out": 1, "tails_in": 1, "tails_out": 1}
        if plan.tokens > 1:
            counts |= {"pending_in": 1, "pending_out": 1}
    if plan.config.mla_layers:
        counts |= {"page_done": plan.page_windows, "group_in": 1, "group_out": 1}
    if plan.moe_layers:
        counts |= {"expert_in_done": plan.expert_slots, "expert_out_done": plan.expert_slots}
    if plan.split.cores > 1:
        counts |= {f"{name}_sent": 1 for name in EXCHANGES} | {f"{name}_received": 2 for name in EXCHANGES}
    if plan.keep_logits:
        counts["logits_done"] = 1
    if plan.penalties:
        counts["counts_done"] = 1
    return counts | (plan.drafter.semaphores(plan) if plan.drafter else {})


def weight_buffers(plan: Plan) -> dict[str, Buffer]:
    """Read-only HBM arrays that the packer fills."""
    from megakernel.limits import POSITION_GROUP

    config = plan.config
    buffers = {
        "tape": Buffer((plan.tape_blocks, plan.block_rows, plan.block_lanes), plan.storage),
        **{
            f"{name}_tables": Buffer((config.num_hidden_layers + 1, *shape), "float32")
            for name, shape in plan.vector_tables.items()
        },
        "embedding": Buffer((round_up(config.vocab_size, POSITION_GROUP), plan.split.hidden), plan.storage),
    }
    if plan.moe_layers:
        expert = plan.storage if config.expert_format == "bf16" else "uint32"
        experts = plan.moe_layers * plan.split.experts
        shape_in, shape_out = plan.expert_shapes
        buffers |= {"bank_in": Buffer((experts, *shape_in), expert), "bank_out": Buffer((experts, *shape_out), expert)}
    return buffers | (plan.drafter.weights(plan) if plan.drafter else {})


def cache_buffers(plan: Plan) -> dict[str, Buffer]:
    """HBM arrays that outlive a launch: KDA states and conv tails, MLA latents, what the drafter keeps.

    Between launches `pending` means nothing: a launch ends with every accepted token in the states.
    """
    config, sequences = plan.config, plan.sequences
    buffers: dict[str, Buffer] = {}
    if config.kda_layers:
        layers, dim = len(config.kda_layers), config.kda_head_dim
        taps = config.short_conv_kernel_size - 1
        buffers |= {
            "states": Buffer((layers, plan.split.kda_heads, sequences, dim, dim), "float32"),
            "conv_tails": Buffer((layers, taps, sequences, 3 * plan.split.kda_width), "float32"),
        }
        if plan.tokens > 1:
            kept = (layers, KDA_KEPT_PLANES, plan.tokens, sequences, plan.split.kda_width)
            buffers["pending_rows"] = Buffer(kept, "float32")
    if config.mla_layers:
        shape = (len(config.mla_layers), sequences, plan.cache_positions, plan.latent_lanes)
        buffers["latents"] = Buffer(shape, plan.activations)
    return buffers | (plan.drafter.caches(plan) if plan.drafter else {})


def request_buffers(plan: Plan) -> dict[str, Buffer]:
    """What the host writes for one launch: small numbers in SMEM, what drafter and penalties need elsewhere."""
    own = plan.drafter.request(plan) if plan.drafter else {}
    if plan.penalties:
        shape = (plan.sequences, *vocabulary_shape(plan.config.vocab_size, plan.split.cores))
        own |= {"logit_bias": Buffer(shape, "float32"), "known_counts": Buffer(shape, "int32")}
    return own | {
        "tokens": Buffer((plan.sequences, plan.launch_steps), "int32"),
        "request": Buffer((plan.sequences, 3), "int32"),
        "stop_tokens": Buffer((MAX_STOP_TOKENS,), "int32"),
        "sampling_floats": Buffer((plan.sequences, 6), "float32"),
        "sampling_ints": Buffer((plan.sequences, 3), "int32"),
    }


def result_buffers(plan: Plan) -> dict[str, Buffer]:
    """What the host reads after a launch (SMEM), and on request every round's logits (HBM)."""
    buffers = {
        "new_tokens": Buffer((plan.sequences, plan.launch_steps), "int32"),
        "logprobs": Buffer((plan.sequences, plan.launch_steps), "float32"),
        "status": Buffer((plan.sequences, 5), "int32"),
        "accepted": Buffer((plan.sequences, plan.tokens), "int32"),
        "proposed": Buffer((plan.sequences, plan.tokens), "int32"),
    }
    if plan.keep_logits:
        buffers["round_tokens"] = Buffer((plan.sequences, plan.launch_steps), "int32")
        buffers["step_logits"] = Buffer((plan.launch_steps, *head_output(plan, "head").shape), "float32")
    return buffers


SMEM_REQUEST = ("tokens", "request", "stop_tokens", "sampling_floats", "sampling_ints")
HBM_REQUEST = ("known_counts",)
SMEM_RESULT = ("new_tokens", "logprobs", "status", "accepted", "proposed", "round_tokens")


def vmem_map(plan: Plan) -> dict[str, int]:
    """Bytes of VMEM by buffer."""
    elsewhere = (*SMEM_REQUEST, *HBM_REQUEST)
    request = {name: buffer for name, buffer in request_buffers(plan).items() if name not in elsewhere}
    return {name: buffer.padded_bytes for name, buffer in (vmem_buffers(plan) | request).items()}


def smem_map(plan: Plan) -> dict[str, int]:
    """Bytes of SMEM by buffer."""
    buffers = smem_scratch(plan) | {"layer_table": Buffer((plan.config.num_hidden_layers, LAYER_NUMBERS), "int32")}
    buffers |= {name: request_buffers(plan)[name] for name in SMEM_REQUEST}
    buffers |= {name: buffer for name, buffer in result_buffers(plan).items() if name in SMEM_RESULT}
    return {name: buffer.bytes for name, buffer in buffers.items()}


def hbm_map(plan: Plan) -> dict[str, int]:
    """Bytes of HBM by array."""
    buffers = weight_buffers(plan) | cache_buffers(plan)
    buffers |= {name: buffer for name, buffer in request_buffers(plan).items() if name in HBM_REQUEST}
    if plan.keep_logits:
        buffers["step_logits"] = result_buffers(plan)["step_logits"]
    return {name: buffer.padded_bytes for name, buffer in buffers.items()}


def step_bytes(plan: Plan, position: int | None = None) -> dict[str, int]:
    """Bytes that one step moves between HBM and VMEM at `position` (default: half the context), at most.

    Experts count as if no two rows chose the same one. A resident tape counts zero.
    """
    from megakernel.limits import POSITION_GROUP
    from megakernel.plan import BYTES

    config, sequences = plan.config, plan.sequences
    position = plan.context // 2 if position is None else position
    caches = cache_buffers(plan)
    moved = {
        "tape": 0 if plan.tape_is_resident else plan.tape_bytes,
        "vectors": sum(weight_buffers(plan)[f"{name}_tables"].padded_bytes for name in plan.vector_tables),
        "experts": plan.moe_layers * plan.max_distinct_experts * plan.expert_bytes,
        "embedding": plan.live_rows * POSITION_GROUP * plan.split.hidden * BYTES[plan.weights],
    }
    if config.kda_layers:
        moved["KDA states"] = 2 * caches["states"].padded_bytes
        moved["conv tails"] = 2 * caches["conv_tails"].padded_bytes
        if plan.tokens > 1:
            moved["rows for replay"] = 2 * caches["pending_rows"].padded_bytes
    if config.mla_layers:
        positions = plan.pages(position) * plan.page + 2 * plan.group_positions
        moved["MLA latents"] = (
            len(config.mla_layers) * sequences * positions * plan.latent_lanes * BYTES[plan.activations]
        )
    return moved
