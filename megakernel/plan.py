"""All static numbers of one kernel: block shape, ring depth, windows, memory maps. Pure Python.

A plan is hashable: it is the static argument of the compiled launch. Whatever a machine cannot do is refused here,
with the numbers and the knob to turn, before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

from megakernel import bank, program, visits
from megakernel.drafting import Drafter
from megakernel.limits import (
    MAX_ROWS,
    POSITION_GROUP,
    VMEM_SHARE,
    PlanError,
    check_counters,
    check_memory,
    check_request,
)
from megakernel.messages import WIRE_BYTES, faster_in_one_hop, total_widths
from megakernel.program import LANES, Matrix, power_of_two, round_up
from megakernel.search import choose_block, choose_split
from megakernel.split import Split
from megakernel.target import CPU, MIB, Number, Target
from megakernel.tiling import Tiling, lay_out
from model.config import ModelConfig
from model.layout import tensor_specs

BYTES = {"float32": 4, "bfloat16": 2}
_EXPERT_SHARE = 0.25
"""Part of VMEM for experts on their way, unless a plan asks for a number of slots."""
_DEEPEST_RING = 64
"""Most blocks in flight: what is fetched while an exchange or the experts keep the tape waiting."""
_USUAL_CONTEXT = 4096
"""Most positions, and tokens of a launch, that a plan has room for unless it is asked for more."""
_PAGES_IN_FLIGHT, _PAGES_BYTES = 8, 2 * MIB
"""A small page is computed with in less time than a copy of it takes to begin; of large ones two are enough."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """See `make_plan`; every size below derives from these fields, and counts one core."""

    config: ModelConfig
    split: Split
    target: Target
    sequences: int
    context: int
    launch_steps: int
    page: int
    activations: Number
    weights: Number
    block_rows: int
    block_lanes: int
    ring_depth: int
    expert_slots: int
    keep_logits: bool
    tokens: int
    drafter: Drafter | None
    penalties: bool = False
    wire: str = "float32"
    one_hop: frozenset[int] = frozenset()
    """Widths of the sums over cores that go in one hop; all others go in two."""

    @property
    def live_rows(self) -> int:
        """Rows that may hold a token. Row `t * sequences + s` is token t of sequence s."""
        return self.sequences * self.tokens

    def __str__(self) -> str:
        from megakernel.report import plan_text

        return plan_text(self)

    @cached_property
    def rows(self) -> int:
        """Rows of the tile that every product computes on; rows past the live ones are padding."""
        return max(self.target.min_row_tile, round_up(self.live_rows, 8))

    @property
    def product_rows(self) -> int:
        """Rows that products compute: the live ones, or the fewest that the target allows."""
        return max(self.target.min_product_rows, self.live_rows)

    @property
    def wire_rows(self) -> int:
        """Rows that travel between cores: the live ones, in a tile of as few sublanes as hold them."""
        return power_of_two(self.live_rows)

    def hops(self, width: int) -> int:
        """Exchanges that a sum over cores of so many entries a row takes."""
        return 1 if width in self.one_hop else 2

    @cached_property
    def head_group(self) -> int:
        """KDA heads whose states are updated together: as many as one MiB holds, dividing the number of heads."""
        head_bytes = 4 * self.sequences * self.config.kda_head_dim**2
        most = max(1, MIB // head_bytes)
        return max(group for group in range(1, most + 1) if self.split.kda_heads % group == 0)

    @property
    def group_positions(self) -> int:
        """Cache positions of the tiles that hold one round's tokens of a sequence."""
        return POSITION_GROUP if self.tokens == 1 else 2 * POSITION_GROUP

    @property
    def cache_positions(self) -> int:
        """Positions of the MLA cache: the context, whole pages, and room for the last round's tiles."""
        return round_up(self.context + 2 * POSITION_GROUP, self.page)

    @property
    def page_windows(self) -> int:
        """Pages of the MLA cache in flight at once."""
        page_bytes = self.page * self.latent_lanes * BYTES[self.activations]
        most = max(2, min(_PAGES_IN_FLIGHT, _PAGES_BYTES // page_bytes))
        return min(most, self.sequences * (self.cache_positions // self.page))

    def pages(self, position: int) -> int:
        """Pages of one sequence that a step reads whose first token is at `position`."""
        return (position + self.tokens - 1) // self.page + 1

    # ---- tape ----

    @cached_property
    def sections(self) -> dict[str, tuple[Matrix, ...]]:
        """Matrices of each section of the tape."""
        drafts = self.drafter.matrices(self.split) if self.drafter else ()
        return program.sections(self.split) | ({"draft": drafts} if drafts else {})

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        return {matrix.name: matrix for matrices in self.sections.values() for matrix in matrices}

    @cached_property
    def _layouts(self) -> dict[str, tuple[dict[str, Tiling], int]]:
        return {name: lay_out(matrices, self.block_rows, self.block_lanes) for name, matrices in self.sections.items()}

    @cached_property
    def tilings(self) -> dict[str, Tiling]:
        """How each matrix lies in its section, by name."""
        return {name: tiling for found, _ in self._layouts.values() for name, tiling in found.items()}

    def section_blocks(self, section: str) -> int:
        return self._layouts[section][1]

    @cached_property
    def layer_starts(self) -> tuple[tuple[int, int], ...]:
        """First tape block of each layer's attention and FFN; last, of the LM head."""
        starts, block = [], 0
        for section in program.section_order(self.config):
            starts.append(block)
            block += self.section_blocks(section)
        layers = zip(starts[::2], starts[1::2], strict=False)
        return (*layers, (starts[-1], starts[-1]))

    @cached_property
    def tape_blocks(self) -> int:
        return self.draft_start + (self.section_blocks("draft") if "draft" in self.sections else 0)

    @cached_property
    def draft_start(self) -> int:
        """First tape block of the drafter."""
        return self.layer_starts[-1][0] + self.section_blocks("head")

    @property
    def storage(self) -> str:
        """Element type of weights in memory. Where products are in float32, bfloat16 is kept as bits: a shift widens
        it, and XLA's CPU backend takes twice as long over its own conversion."""
        return "uint16" if self.target.multiplies_float32 else self.weights

    @property
    def block_bytes(self) -> int:
        return self.block_rows * self.block_lanes * BYTES[self.weights]

    @property
    def tape_bytes(self) -> int:
        return self.tape_blocks * self.block_bytes

    @property
    def tape_is_resident(self) -> bool:
        """The whole tape fits in the ring: it is read from HBM once a launch, not once a step."""
        return self.ring_depth >= self.tape_blocks

    @cached_property
    def tape_parameters(self) -> int:
        """Weights on the tapes of all cores, each counted once and without padding."""
        on_tape, specs = program.tape_tensors(self.split), tensor_specs(self.config)
        target = sum(math.prod(spec.shape) for name, spec in specs.items() if program.relative(name) in on_tape)
        drafts = self.drafter.matrices(Split(self.config)) if self.drafter else ()
        return target + sum(matrix.parameters for matrix in drafts)

    # ---- widths of buffers ----

    @cached_property
    def operand_width(self) -> int:
        return max(matrix.groups * self.tilings[name].k_padded for name, matrix in self.matrices.items())

    def output_width(self, matrix: Matrix) -> int:
        """Lanes of a product's output."""
        return matrix.groups * self.group_width(matrix)

    def group_width(self, matrix: Matrix) -> int:
        """Distance between the outputs of two groups."""
        return self.tilings[matrix.name].group_lanes

    @cached_property
    def vector_places(self) -> dict[str, tuple[str, int]]:
        """Table and row of each small vector."""
        return program.vector_places(self.config)

    @cached_property
    def vector_tables(self) -> dict[str, tuple[int, int]]:
        """Shapes of one layer's tables of small vectors by name."""
        return program.vector_tables(self.split)

    @cached_property
    def latent_lanes(self) -> int:
        """Lanes of one cached MLA position: latent, then the extra key, each padded to whole lanes."""
        return round_up(self.config.kv_lora_rank, LANES) + round_up(self.config.qk_rope_head_dim, LANES)

    # ---- experts ----

    @property
    def moe_layers(self) -> int:
        return sum(self.config.is_moe(layer) for layer in range(self.config.num_hidden_layers))

    @cached_property
    def expert_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and lanes of one expert's two pieces, see `megakernel.bank`."""
        return bank.expert_shapes(self.split)

    @cached_property
    def expert_rows(self) -> int:
        """Rows of a tile of the experts' products, see `megakernel.visits`."""
        return visits.tile_rows(self)

    @property
    def expert_tiles(self) -> int:
        return -(-self.live_rows // self.expert_rows)

    @property
    def experts_held(self) -> int:
        """Slots in use at once: two where the second product of one visit runs beside the first of the next, which
        leaves a slot for an expert on its way."""
        overlaps = self.expert_slots >= min(3, self.max_distinct_experts) and not self.target.multiplies_float32
        return 2 if overlaps and self.expert_slots > 1 else 1

    @property
    def expert_bytes(self) -> int:
        size = BYTES[self.weights] if self.config.expert_format == "bf16" else 4
        return size * sum(rows * lanes for rows, lanes in self.expert_shapes)

    @property
    def max_distinct_experts(self) -> int:
        """Of those that one core holds a part of."""
        return min(self.split.experts, self.live_rows * self.config.num_experts_per_token)

    @property
    def max_expert_visits(self) -> int:
        """Of the experts that one core holds a part of."""
        rows_of_tile = min(self.expert_rows, self.live_rows)
        return self.expert_tiles * min(self.split.experts, rows_of_tile * self.config.num_experts_per_token)

    # ---- memory maps, in bytes ----

    @cached_property
    def vmem_map(self) -> dict[str, int]:
        from megakernel.memory import vmem_map

        return vmem_map(self)

    @cached_property
    def hbm_map(self) -> dict[str, int]:
        from megakernel.memory import hbm_map

        return hbm_map(self)

    @cached_property
    def smem_map(self) -> dict[str, int]:
        from megakernel.memory import smem_map

        return smem_map(self)

    @cached_property
    def step_bytes(self) -> dict[str, int]:
        from megakernel.memory import step_bytes

        return step_bytes(self)


def make_plan(
    config: ModelConfig,
    target: Target = CPU,
    *,
    cores: int = 1,
    expert_groups: int | None = None,
    sequences: int = 1,
    context: int | None = None,
    launch_steps: int | None = None,
    activations: Number | None = None,
    ring_depth: int | None = None,
    block: tuple[int, int] | None = None,
    page: int = 128,
    expert_slots: int | None = None,
    keep_logits: bool = False,
    drafter: Drafter | None = None,
    draft_tokens: int | None = None,
    penalties: bool = False,
    wire: str | None = None,
    hops: int | None = None,
) -> Plan:
    """Chooses every static number of the kernel.

    Args:
      config: the model.
      target: the machine (`megakernel.target`).
      cores: cores that share the model, on the mesh axis `tp`.
      expert_groups: groups into which routed experts are divided, each expert being split over the cores of a group;
        default: the division whose busiest core is expected to read least.
      sequences: sequences decoded together; each has one row in a step, and one more for every drafted token.
      context: positions that a sequence may reach, prompt included; default: the model's, at most 4,096.
      launch_steps: most tokens, given and new, that one launch takes a sequence on; default: `context`, at most 4,096.
      activations: number format between phases; default: the target's.
      ring_depth: blocks of the tape kept in flight; default: as many as fit, the whole tape if it fits.
      block: `(rows, lanes)` of a tape block; default: the shape that wastes least.
      page: positions of one MLA cache page.
      expert_slots: experts kept in VMEM at once; default: a quarter of VMEM, or fewer if a step cannot choose so many.
      keep_logits: write the logits of every round to HBM (tests and teacher forcing).
      drafter: proposes tokens for the next round; None decodes one token a step.
      draft_tokens: tokens drafted and verified in a round, K; default: as many as the drafter makes and rows allow.
      penalties: keep what penalties and logit bias need: two arrays of the vocabulary in VMEM for each sequence.
      wire: number format in which partial sums travel between cores, one of `messages.WIRE_BYTES`; those of eight bits
        take a scale a row; default: `activations`.
      hops: exchanges that a sum over cores takes, 1 or 2, with the same bits; default: for each width what is
        predicted to take less.

    Raises:
      PlanError: the request cannot be served; the message says which number is too large and which knob helps.
    """
    context = min(config.max_position_embeddings, _USUAL_CONTEXT) if context is None else context
    for name, given, known in (("activations", activations, BYTES), ("wire", wire, WIRE_BYTES), ("hops", hops, (1, 2))):
        if given not in (None, *known):
            raise PlanError(f"{name} = {given!r}; expected one of {', '.join(map(str, known))}")
    if cores == 1 and (wire or hops):
        given = f"wire = {wire!r}" if wire else f"hops = {hops}"
        raise PlanError(f"{given}: with cores = 1 nothing travels; leave it out or raise cores")
    tokens = 1 + _draft_tokens(config, sequences, drafter, draft_tokens)
    check_request(config, target, sequences, tokens, context, page, ring_depth, expert_slots)
    launch_steps = min(context, _USUAL_CONTEXT) if launch_steps is None else launch_steps
    weights = target.weights
    split = choose_split(config, cores, expert_groups, sequences * tokens)
    if drafter:
        drafter.check_split(split, target)
    block_rows, block_lanes = block or choose_block(split, BYTES[weights])
    if block_lanes % LANES or block_rows % LANES or min(block_rows, block_lanes) <= 0:
        raise PlanError(f"block = {block_rows}x{block_lanes}; rows and lanes must be positive multiples of {LANES}")
    plan = Plan(
        config=config,
        split=split,
        target=target,
        sequences=sequences,
        context=round_up(context, page),
        launch_steps=launch_steps,
        page=page,
        activations=activations or target.activations,
        weights=weights,
        block_rows=block_rows,
        block_lanes=block_lanes,
        ring_depth=ring_depth or 1,
        expert_slots=expert_slots or 1,
        keep_logits=keep_logits,
        tokens=tokens,
        drafter=drafter,
        penalties=penalties,
        wire=wire or activations or target.activations,
    )
    if cores > 1 and hops != 2:
        plan = dataclasses.replace(plan, one_hop=frozenset(total_widths(plan)) if hops else faster_in_one_hop(plan))
    slots = expert_slots or max(1, int(target.vmem_bytes * _EXPERT_SHARE) // plan.expert_bytes)
    plan = dataclasses.replace(plan, expert_slots=min(slots, plan.max_distinct_experts))
    depth = _deepest_ring(plan) if ring_depth is None else min(ring_depth, plan.tape_blocks)
    plan = dataclasses.replace(plan, ring_depth=depth)
    check_counters(plan)
    check_memory(plan)
    return plan


def _draft_tokens(config: ModelConfig, sequences: int, drafter: Drafter | None, asked: int | None) -> int:
    if drafter is None:
        if asked:
            raise PlanError(f"draft_tokens = {asked} without a drafter; choose one")
        return 0
    drafter.check(config)
    if asked is None:
        return max(1, min(drafter.max_drafts, MAX_ROWS // sequences - 1))
    if not 1 <= asked <= drafter.max_drafts:
        raise PlanError(f"draft_tokens = {asked}; drafter {drafter.name!r} makes 1 to {drafter.max_drafts}")
    return asked


def _deepest_ring(plan: Plan) -> int:
    free = int(plan.target.vmem_bytes * VMEM_SHARE) - sum(plan.vmem_map.values()) + plan.block_bytes
    if free >= plan.tape_bytes:
        return plan.tape_blocks
    return max(2, min(_DEEPEST_RING, free // plan.block_bytes))
