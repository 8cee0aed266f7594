"""One step as the model of time sees it: the phases of `layers` and `kernel`, in their order, on a `Pipeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from megakernel import memory
from megakernel.cost_record import Cost, PhaseCost
from megakernel.limits import POSITION_GROUP
from megakernel.messages import WIRE_BYTES, exact_lanes, total_message
from megakernel.phase_bundles import PHASES
from megakernel.pipeline import KINDS, Pipeline, Span
from megakernel.plan import BYTES, Plan
from megakernel.program import LANES, round_up
from megakernel.rates import (
    CHOICE_BUNDLES,
    LOGIT_BUNDLES,
    MIX_BUNDLES,
    NORM_BUNDLES,
    PAGE_BUNDLES,
    PIECE_BUNDLES,
    REGISTER,
    SEND_BUNDLES,
    STATE_BUNDLES,
    TILE,
    TILE_BUNDLES,
    Rates,
)
from megakernel.visits import bundles, expected_experts, expected_visits

_SUBLANES = 8  # of float32 numbers


class StepModel:
    """Walks one step as the kernel does. Methods are named like the kernel's functions."""

    def __init__(self, plan: Plan, rates: Rates, position: int, scales: Mapping[str, float]):
        self.plan, self.rates, self.position, self.scales = plan, rates, position, scales
        resident = plan.tape_is_resident
        self.pipe = Pipeline(rates, 0 if resident else plan.ring_depth, 0 if resident else plan.block_bytes)
        self.bundles = dict.fromkeys(PHASES, 0.0)
        self.caches = memory.cache_buffers(plan)

    def run(self) -> Cost:
        """The second of two steps: the first one begins with a full ring and an idle memory."""
        self.step()
        begin = self.pipe.start_over()
        self.bundles = dict.fromkeys(PHASES, 0.0)
        self.step()
        pipe = self.pipe
        phases = (
            PhaseCost(
                name,
                pipe.moved[name],
                self.bundles[name],
                pipe.exchanges[name],
                pipe.sent[name],
                {kind: pipe.spent[name, kind] for kind in KINDS},
            )
            for name in PHASES
            if self.bundles[name] or pipe.moved[name]
        )
        moved = (_moved(pipe.spans, begin), _moved(pipe.flights, begin))
        return Cost(self.plan, self.rates, self.position, False, pipe.now - begin, tuple(phases), *moved)

    def step(self) -> None:
        config = self.plan.config
        self.embed()
        for layer in range(config.num_hidden_layers):
            self.read_vectors()
            self.norm()
            self.kda_attention() if config.layer_kind(layer) == "kda" else self.mla_attention()
            self.norm()
            self.moe_ffn() if config.is_moe(layer) else self.dense_ffn()
        self.lm_head()

    # ---- phases ----

    def embed(self) -> None:
        plan = self.plan
        self.pipe.phase = "ends of a step"
        self.pipe.read("embedding", plan.live_rows * POSITION_GROUP * plan.split.hidden * BYTES[plan.weights])
        self.pipe.wait("embedding")
        self.start_gather("prefix", [plan.split.hidden])()

    def read_vectors(self) -> None:
        """The vectors of the next layer are on their way while this one runs."""
        self.pipe.phase = "between sublayers"
        self.pipe.wait("vectors")
        tables = (memory.weight_buffers(self.plan)[f"{name}_tables"] for name in self.plan.vector_tables)
        self.pipe.read("vectors", sum(t.padded_bytes / t.shape[0] for t in tables))

    def norm(self) -> None:
        self.pipe.phase = "between sublayers"
        self.vector("norm", NORM_BUNDLES * self.registers(self.plan.config.hidden_size))

    def mix(self, entries: int) -> None:
        self.vector("mix", MIX_BUNDLES * entries * self.registers(self.plan.config.hidden_size))

    def mix_beside(self, finish: Callable[[], None]) -> None:
        """The snapshots while an exchange is under way, then the prefix."""
        self.mix(self.plan.config.num_snapshots)
        finish()
        self.mix(1)

    def kda_attention(self) -> None:
        plan, config, split = self.plan, self.plan.config, self.plan.split
        self.pipe.phase = "KDA"
        windows = [name for name in ("states", "conv_tails", "pending_rows") if name in self.caches]
        for name in windows:
            self.pipe.read(name, self.layer_bytes(name))
        self.product("kda_narrow")
        piece, lows = split.piece(config.kda_head_dim), 1 if config.use_full_rank_gate else 2
        finish = self.start_gather("low-rank vectors", [piece] * lows)
        self.product("kda_in")
        finish()
        self.product("kda_decay")
        if not config.use_full_rank_gate:
            self.product("kda_gate")
        for name in windows:
            self.pipe.wait(name)
        replays = 2 if plan.tokens > 1 else 1
        state = split.kda_heads * plan.sequences * config.kda_head_dim**2 / REGISTER
        self.vector("delta rule", STATE_BUNDLES * replays * plan.tokens * state)
        for name in windows:
            self.pipe.write(self.layer_bytes(name))
        self.product("kda_out")
        self.mix_beside(self.start_total("attention", config.hidden_size))

    def mla_attention(self) -> None:
        plan, config = self.plan, self.plan.config
        self.pipe.phase = "MLA"
        entry = plan.sequences * plan.latent_lanes * BYTES[plan.activations]
        self.pipe.read("latest latents", plan.group_positions * entry)
        self.start_pages()
        self.product("mla_low")
        finish = self.start_gather("low-rank vectors", [plan.split.piece(plan.split.low_width)])
        if "mla_in" in plan.matrices:
            self.product("mla_in")
        finish()
        if config.q_lora_rank is not None:
            self.product("mla_query")
        self.product("mla_absorb")
        self.attend()
        self.pipe.wait("latest latents")
        self.pipe.write(plan.group_positions * entry)
        self.product("mla_value")
        self.product("mla_out")
        self.mix_beside(self.start_total("attention", config.hidden_size))

    def start_pages(self) -> None:
        for order in range(min(self.plan.page_windows, self.page_count())):
            self.read_page(order)

    def attend(self) -> None:
        for order in range(self.page_count()):
            self.pipe.wait(f"page {order}")
            self.vector("attention", PAGE_BUNDLES)
            if order + self.plan.page_windows < self.page_count():
                self.read_page(order + self.plan.page_windows)

    def page_count(self) -> int:
        return self.plan.sequences * self.plan.pages(self.position)

    def read_page(self, order: int) -> None:
        self.pipe.read(f"page {order}", self.plan.page * self.plan.latent_lanes * BYTES[self.plan.activations])

    def dense_ffn(self) -> None:
        self.pipe.phase = "dense"
        self.product("dense_in")
        self.product("dense_out")
        self.mix_beside(self.start_total("dense", self.plan.config.hidden_size))

    def moe_ffn(self) -> None:
        config = self.plan.config
        self.pipe.phase = "MoE"
        moe = self.latent_moe if config.latent_experts else self.full_width_moe
        moe(shared=config.num_shared_experts > 0)

    def latent_moe(self, shared: bool) -> None:
        config, split = self.plan.config, self.plan.split
        self.product("router")
        finish = self.start_gather("router", [self.router_lanes(), split.piece(config.routed_expert_hidden_size)])
        if shared:
            self.product("shared_in")
        finish()
        widths = [split.shared_width] if shared else []
        finish_shared = self.start_gather("shared experts", widths)
        self.route()
        self.run_experts()
        finish_shared()
        finish_total = self.start_total("routed experts", config.routed_expert_hidden_size)
        if shared:
            self.product("shared_out")
        finish_total()
        self.product("routed_up")
        self.mix_beside(self.start_gather("prefix", [split.hidden]))

    def full_width_moe(self, shared: bool) -> None:
        self.product("router")
        finish = self.start_gather("router", [self.router_lanes()])
        if shared:
            self.product("shared_in")
        finish()
        self.route()
        if shared:
            self.product("shared_out")
        self.run_experts()
        self.mix_beside(self.start_total("experts", self.plan.config.hidden_size * (2 if shared else 1)))

    def router_lanes(self) -> int:
        return exact_lanes(self.plan, self.plan.split.piece(self.plan.config.num_experts))

    def route(self) -> None:
        self.vector("route", CHOICE_BUNDLES * self.plan.config.num_experts_per_token)
        self.start_experts()

    def start_experts(self) -> None:
        for number, part in list(enumerate(self.expert_parts()))[: self.plan.expert_slots]:
            self.pipe.read(f"expert {number}", part * self.plan.expert_bytes)

    def run_experts(self) -> None:
        """The busiest core's share."""
        plan, parts = self.plan, self.expert_parts()
        visits = expected_visits(plan) / expected_experts(plan)
        self.pipe.phase = "experts"
        for number, part in enumerate(parts):
            ahead = number + plan.expert_slots - plan.experts_held
            if plan.expert_slots <= ahead < len(parts):
                self.pipe.read(f"expert {ahead}", parts[ahead] * plan.expert_bytes)
            self.pipe.wait(f"expert {number}")
            self.vector("expert", part * visits * self.visit_bundles())
        self.pipe.phase = "MoE"

    def expert_parts(self) -> list[float]:
        """The experts of which the busiest core reads its part; the last one counts as far as it is expected."""
        count = expected_experts(self.plan)
        return [min(1.0, count - number) for number in range(-int(-count // 1))]

    def lm_head(self) -> None:
        plan, config = self.plan, self.plan.config
        self.read_vectors()
        self.pipe.phase = "LM head"
        self.product("head")
        self.pipe.phase = "sampling"
        cores = plan.split.cores
        logits = LOGIT_BUNDLES * config.vocab_size / REGISTER
        for _ in range(-(-plan.live_rows // cores)) if cores > 1 else ():
            shard = self.plan.split.vocabulary * 4
            self.pipe.start_exchange("logits", shard, cores)
            self.pipe.finish_exchange()
            self.vector("choose", logits)
        if cores == 1:
            self.vector("choose", plan.live_rows * logits)
        else:
            self.start_gather("tokens", [9])()

    # ---- what phases are made of ----

    def start_gather(self, name: str, pieces: Sequence[int]) -> Callable[[], None]:
        plan = self.plan
        if not pieces:
            return lambda: None
        lanes = sum(round_up(piece, LANES) for piece in pieces)
        return self._exchange(name, plan.wire_rows, lanes, BYTES[plan.activations], whole=True)

    def start_total(self, name: str, width: int) -> Callable[[], None]:
        plan = self.plan
        if plan.split.cores == 1:
            return lambda: None
        hops = plan.hops(width)
        finish = self._exchange(name, *total_message(plan, width, hops), WIRE_BYTES[plan.wire], whole=hops == 1)

        def finish_both() -> None:
            finish()
            self.start_gather(name, [plan.split.sum_piece(width)])()

        return finish if hops == 1 else finish_both

    def _exchange(self, name: str, rows: int, lanes: int, item_bytes: int, whole: bool) -> Callable[[], None]:
        """`whole`: everyone gets the same; otherwise pieces for all cores are laid out before they leave."""
        cores = self.plan.split.cores
        if cores == 1:
            return lambda: None
        handled = PIECE_BUNDLES * cores * round_up(rows, _SUBLANES) * lanes / REGISTER
        self.vector(f"send {name}", SEND_BUNDLES * (cores - 1) + (0 if whole else handled))
        self.pipe.start_exchange(name, rows * lanes * item_bytes, cores)

        def finish() -> None:
            self.pipe.finish_exchange()
            self.vector(f"take {name}", handled)

        return finish

    def product(self, matrix: str) -> None:
        """A matrix's cuts; blocks are waited for by the first cut that reads them."""
        cuts = [cut for panel in self.plan.tilings[matrix].panels for cut in panel.cuts]
        units = 2 if self.plan.target.sums_in_matrix_unit else min(2, max(1, self.plan.block_lanes // 256))
        tiles = sum(cut.rows for cut in cuts) * self.plan.block_lanes / TILE
        pushing = self.rates.tile_seconds * self.rates.clock_hz / units
        seconds = self.spend(tiles * max(pushing, TILE_BUNDLES))
        blocks = sum(cut.first for cut in cuts)
        for _ in range(blocks):
            self.pipe.block(seconds / blocks, matrix)
        if not blocks:
            self.pipe.compute(seconds, matrix)

    def vector(self, name: str, bundles: float) -> None:
        self.pipe.compute(self.spend(bundles), name)

    def spend(self, bundles: float) -> float:
        """Counts bundles of the current phase; their seconds."""
        scaled = bundles * self.scales.get(self.pipe.phase, 1.0)
        self.bundles[self.pipe.phase] += scaled
        return scaled / self.rates.clock_hz

    def registers(self, lanes: int) -> float:
        return self.plan.rows * lanes / REGISTER

    def visit_bundles(self) -> float:
        config, (_, in_lanes), (_, out_lanes) = self.plan.config, *self.plan.expert_shapes
        weights = config.routed_expert_hidden_size * in_lanes + self.plan.split.expert_width * out_lanes
        if config.expert_format == "bf16":
            return weights / TILE * self.rates.tile_seconds * self.rates.clock_hz
        return bundles(self.plan.expert_rows) * weights / REGISTER

    def layer_bytes(self, cache: str) -> float:
        return self.caches[cache].padded_bytes / self.caches[cache].shape[0]


def _moved(spans: Sequence[Span], begin: float) -> tuple[Span, ...]:
    return tuple(dataclasses.replace(s, begin=s.begin - begin, end=s.end - begin) for s in spans)
