"""`python -m megakernel`, also installed as `one-launch`: generate text, plan, pack models, check the machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import secrets
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import jax

from megakernel.aot import AotError, compile_for
from megakernel.backends import NAMES
from megakernel.call import checked_call, find_draft
from megakernel.container import Check, ContainerError, check_container, cores_of_host, is_container, read_manifest
from megakernel.container_write import write_container
from megakernel.cost import predict
from megakernel.cost_report import compares, comparison_text, cost_text
from megakernel.drafting import Drafter
from megakernel.draw import DrawingError, draw_plan
from megakernel.loading import SHIPPED, LoadedModel, load
from megakernel.messages import WIRE_BYTES
from megakernel.plan import Plan, make_plan
from megakernel.races import RaceError
from megakernel.report import machine_name, plan_text, plural
from megakernel.result import Generation, NumericsError, Piece
from megakernel.target import TARGETS
from megakernel.topology import TOPOLOGIES, find_machine
from model.config import ConfigError, ModelConfig
from model.presets import PRESETS
from model.sampling import SamplingParams

_USER_ERRORS = (ValueError, OSError, NumericsError, RaceError, AotError, DrawingError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 2 after a message of one line on standard error."""
    options = _parser().parse_args(arguments)
    _leave_absent_tpus_alone()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _note(f"one-launch: {message}")
            options.run(options)
        sys.stdout.flush()
    except _USER_ERRORS as error:
        if isinstance(error, BrokenPipeError):  # whoever reads the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        _note(f"one-launch: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        _note("")
        return 130
    return 0


# ---- generate ----


def _generate(options: argparse.Namespace) -> None:
    _make_cpu_devices(options.cores)
    numbers = {field.name: getattr(options, field.name) for field in dataclasses.fields(SamplingParams)}
    sampling = SamplingParams(**numbers | {"logit_bias": dict(options.logit_bias or ())})
    seed = secrets.randbits(32) if options.seed is None else options.seed
    model = load(options.model)
    prompt = sys.stdin.read() if options.text == "-" else options.text
    call = checked_call(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop=options.stop,
        logprobs=options.logprobs,
        seed=seed,
        backend=options.backend,
        draft=options.draft,
        draft_tokens=options.draft_tokens,
        cores=options.cores,
        wire=options.wire,
        stream=options.stream,
    )
    backend = call.backend.name
    _note(f"{model.config.name}, backend {backend}, seed {seed}; the first run compiles, which takes seconds")
    if sys.stdout.isatty():
        print(prompt, end="", flush=True)
    done = _stream(call.pieces()) if options.stream else _whole(*call.generations())
    if options.logprobs:
        _print_logprobs(model, done)
    # With drafts a round reads the weights for many tokens; with several cores each reads its own.
    reads_once = backend != "reference" and options.draft == "none" and options.cores == 1
    _note(f"{done.summary}{_speed(call.groups[0][0] if reads_once else None, done.rate)}")


def _make_cpu_devices(cores: int) -> None:
    """Virtual devices for several cores, where JAX has not been used yet; a TPU has its own."""
    if cores > 1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cores)


@dataclasses.dataclass
class _Done:
    """What a generation came to; `rate` is in tokens a second, None where nothing could be timed."""

    tokens: list[int]
    logprobs: list[float]
    summary: str
    rate: float | None


def _stream(pieces: Iterator[Piece]) -> _Done:
    """Prints pieces as they come. The rate is the median piece's, so that compiling does not count."""
    started = last = time.perf_counter()
    done = _Done([], [], "", None)
    times: list[float] = []
    rates: list[float] = []
    for piece in pieces:
        print(piece.text, end="", flush=True)
        now = time.perf_counter()
        if times:
            rates.append(len(piece.tokens) / (now - last))
        times.append(now - started)
        last = now
        done.tokens += piece.tokens
        done.logprobs += piece.logprobs or ()
    print(flush=True)
    done.summary = f"{plural(len(done.tokens), 'token')}, the first ones after {times[0]:.1f} s"
    done.rate = statistics.median(rates) if rates else None
    return done


def _whole(generation: Generation) -> _Done:
    print(generation.text, flush=True)
    timing = generation.timing
    launches = "1 launch" if timing.launches == 1 else f"{timing.launches} launches"
    summary = f"{plural(timing.tokens, 'token')} in {launches}, compiled in {timing.compile:.1f} s"
    if generation.speculation:
        summary += f", {generation.speculation.tokens_per_round:.2f} tokens a round"
    return _Done(list(generation.tokens), list(generation.logprobs or ()), summary, timing.tokens_per_second or None)


def _speed(plan: Plan | None, rate: float | None) -> str:
    """`; N tokens/s` measured here, and beside it the weights read; nothing where nothing could be timed."""
    if rate is None:
        return ""
    weights = "" if plan is None else f", {rate * weight_bytes(plan) / 1e9:.1f} GB/s of weights"
    return f"; {rate:,.0f} tokens/s{weights} (measured on this machine: {machine_name()})"


def weight_bytes(plan: Plan) -> int:
    """Bytes of weights that one row of a step multiplies by, wherever they lie: tape, vectors and experts."""
    return plan.tape_bytes + plan.step_bytes["vectors"] + plan.step_bytes["experts"] // plan.live_rows


def _print_logprobs(model: LoadedModel, done: _Done) -> None:
    for token, logprob in zip(done.tokens, done.logprobs, strict=True):
        text = model.tokenizer.decode([token]) if model.tokenizer else str(token)
        _note(f"{logprob:9.3f}  {text!r}")
    _note(f"{statistics.mean(done.logprobs):9.3f}  mean")


# ---- plan ----


def _plan(options: argparse.Namespace) -> None:
    config = find_config(options.model)
    target, cores = find_machine(options.target, options.cores)
    plan_of = functools.partial(
        make_plan,
        config,
        target,
        cores=cores,
        expert_groups=options.expert_groups,
        context=options.context,
        launch_steps=options.launch_steps,
        ring_depth=options.ring_depth,
        expert_slots=options.expert_slots,
        drafter=_drafter(config, options.draft),
        draft_tokens=options.draft_tokens,
        wire=options.wire,
    )
    plan = plan_of(sequences=options.sequences)
    print(plan_text(plan), flush=True)
    if options.draw:
        draw_plan(plan).savefig(options.draw, dpi=100)
        _note(f"drawn to {options.draw}")
    compiled = compile_for(plan, schedule=True) if options.compile else None
    if compiled:
        print(f"\n{compiled}")
    if target.hbm_bytes_per_s:
        cost = predict(plan, schedule=compiled.schedule if compiled else None)
        print(f"\n{cost_text(cost)}")
        if compares(plan):
            print(f"\n{comparison_text(lambda rows: plan_of(sequences=rows), cost)}")


def _drafter(config: ModelConfig, draft: str) -> Drafter | None:
    chosen = find_draft(LoadedModel(config, {}), draft)
    return chosen.drafter if chosen else None


def find_config(name: str) -> ModelConfig:
    """The configuration of a preset, a shipped model or a checkpoint folder; no weights are needed."""
    if name in PRESETS:
        return ModelConfig.preset(name)
    for folder in (Path(name), SHIPPED / name):
        if is_container(folder):
            return read_manifest(folder).config
        if folder.is_dir():
            return ModelConfig.from_file(folder)
    raise ConfigError(f"{name!r} is neither a folder nor a known model; known: {', '.join(sorted(PRESETS))}")


# ---- containers ----


def _pack(options: argparse.Namespace) -> None:
    model, started = load(options.model), time.perf_counter()
    target, cores = find_machine(options.target, options.cores)
    plan = make_plan(model.config, target, cores=cores, expert_groups=options.expert_groups)
    manifest, written = write_container(
        options.out, plan, model, host=options.host, hosts=options.hosts, workers=options.workers
    )
    seconds = time.perf_counter() - started
    own = plural(manifest.cores // options.hosts, "core")
    _note(
        f"{options.out}: {own} of {manifest.core_bytes / 1e6:,.1f} MB each; wrote {written / 1e6:,.1f} MB in "
        f"{seconds:,.1f} s ({written / 1e6 / seconds:,.0f} MB/s)"
    )


def _check(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    if not is_container(folder):
        found = "a folder without container.json" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        raise ContainerError(
            f"{folder}: expected a packed model; found {found}. "
            "To pack one: python -m megakernel pack MODEL OUT --cores N"
        )
    cores = cores_of_host(read_manifest(folder).cores, options.host, options.hosts)
    check: Check = "quick" if options.quick else "full"
    manifest, verified = check_container(folder, cores, check)
    what = "sizes and journals" if options.quick else "every hash"
    print(
        f"{folder}: {manifest.config.name}, {plural(len(cores), 'core')}, {verified / 1e6:,.1f} MB: {what} as expected"
    )


# ---- doctor ----


def _doctor(options: argparse.Namespace) -> None:
    from megakernel.doctor import doctor

    for line in doctor(run=not options.quick):
        print(line, flush=True)


# ---- arguments ----


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"one-launch: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="one-launch", description="A Mixture-of-Experts decoder in one kernel launch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    defaults = SamplingParams(temperature=0.8, top_p=0.95)  # small models repeat themselves when greedy
    hints = {
        "temperature": "0 takes the likeliest token",
        "top_k": "0 keeps all",
        "top_p": "1 keeps all",
        "min_p": "0 keeps all",
        "repetition_penalty": "of tokens of prompt and text; 1 is none",
        "presence_penalty": "of tokens of the text; 0 is none",
        "frequency_penalty": "the same, each time they occur; 0 is none",
    }

    generate = commands.add_parser("generate", help="continue a text", description="Continues a text.")
    generate.add_argument("text", help="the prompt; - reads it from standard input")
    generate.add_argument("--model", default="k3-nano", help="a shipped model or a checkpoint folder (%(default)s)")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="most new tokens (%(default)s)")
    for name, hint in hints.items():
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        generate.add_argument(option, type=type(default), default=default, metavar="X", help=f"{hint} (%(default)s)")
    generate.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=X", help="added to a token's logit; -inf forbids it"
    )
    generate.add_argument("--seed", type=int, help="0 to 2**64 - 1; the same seed gives the same text again")
    generate.add_argument("--stop", action="append", metavar="TEXT", help="ends the text; may be given several times")
    _add_draft_options(generate)
    generate.add_argument("--cores", type=int, default=1, metavar="N", help="cores that share the model (%(default)s)")
    _add_wire_option(generate)
    generate.add_argument("--backend", choices=NAMES, default="auto", help="where to run (%(default)s)")
    generate.add_argument("--logprobs", action="store_true", help="list each token's log-probability at the end")
    generate.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="show text as it comes")
    generate.set_defaults(run=_generate)

    plan = commands.add_parser("plan", help="show the kernel's plan of a model", description="Shows a plan.")
    plan.add_argument("model", help=f"{', '.join(sorted(PRESETS))}, or a checkpoint folder")
    machines = ", ".join([*TARGETS, *TOPOLOGIES])
    plan.add_argument("--target", default="v7x", help=f"a kind of core, or a machine: {machines} (%(default)s)")
    plan.add_argument("--cores", type=int, metavar="N", help="cores that share the model (1, or all of a machine)")
    _add_wire_option(plan)
    plan.add_argument("--expert-groups", type=int, metavar="N", help="groups of whole experts (whatever reads least)")
    plan.add_argument(
        "--sequences", "--rows", type=int, default=1, metavar="N", help="sequences together (%(default)s)"
    )
    plan.add_argument("--context", type=int, metavar="N", help="positions of a sequence (the model's, at most 4096)")
    plan.add_argument("--launch-steps", type=int, metavar="N", help="tokens a launch (the context, at most 4096)")
    plan.add_argument("--ring-depth", type=int, metavar="N", help="tape blocks in flight (as many as fit)")
    plan.add_argument("--expert-slots", type=int, metavar="N", help="experts in VMEM at once (a quarter of it)")
    _add_draft_options(plan)
    plan.add_argument("--compile", action="store_true", help="compile it with the TPU compiler; needs no TPU")
    plan.add_argument("--draw", metavar="FILE", help="draw it: a picture in any format of matplotlib, by the suffix")
    plan.set_defaults(run=_plan)

    pack = commands.add_parser("pack", help="pack a checkpoint for several cores", description="Writes a container.")
    pack.add_argument("model", help="a checkpoint folder, or a shipped model")
    pack.add_argument("out", help="the container's folder; one that was begun is gone on with")
    pack.add_argument("--cores", type=int, required=True, metavar="N", help="cores that share the model")
    pack.add_argument("--expert-groups", type=int, metavar="N", help="groups of whole experts (whatever reads least)")
    pack.add_argument("--target", default="v7x", help=f"{', '.join(TARGETS)} (%(default)s)")
    pack.add_argument("--workers", type=int, default=4, metavar="N", help="cores packed at a time (%(default)s)")
    _add_host_options(pack)
    pack.set_defaults(run=_pack)

    check = commands.add_parser("check", help="check a packed model", description="Verifies a container.")
    check.add_argument("folder", help="the container")
    check.add_argument("--quick", action="store_true", help="sizes and journals only; hash nothing")
    _add_host_options(check)
    check.set_defaults(run=_check)

    doctor = commands.add_parser("doctor", help="what this machine can run", description="Checks this machine.")
    doctor.add_argument("--quick", action="store_true", help="versions and models only; run and compile nothing")
    doctor.set_defaults(run=_doctor)
    return parser


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a token id and a number, as 17=-2.5") from None


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", type=int, default=0, metavar="I", help="this host, from 0: does its share of cores")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="hosts that share the work (%(default)s)")


def _add_wire_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wire", choices=WIRE_BYTES, help="format of partial sums between cores (that of activations)")


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", default="none", metavar="NAME", help="none, ngram, dspark or a folder (%(default)s)")
    parser.add_argument("--draft-tokens", type=int, metavar="K", help="tokens drafted in a round (as many as fit)")


def _leave_absent_tpus_alone() -> None:
    """Keeps JAX from looking for a TPU, at length and aloud, on a machine that has libtpu installed but no TPU."""
    platforms = getattr(jax.config, "jax_platforms")  # noqa: B009  (an attribute that type checkers cannot see)
    if not platforms and not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").is_dir():
        jax.config.update("jax_platforms", "cpu")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
