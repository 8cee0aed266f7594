"""What this machine can run, found out by trying: each check is a line, and none of them stops the others."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from megakernel import aot, backends
from megakernel.call import find_draft
from megakernel.compile_cache import use_compile_cache
from megakernel.decode import BackendName, decode
from megakernel.loading import SHIPPED, LoadedModel, load
from megakernel.plan import make_plan
from megakernel.report import plural, size
from megakernel.target import TARGETS
from model.config import ModelConfig
from model.weights import random_weights

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "numpy")
_NAME = 16
"""Width of a model's name."""
_BACKENDS: tuple[BackendName, ...] = ("interpret", "simulate", "tpu", "reference")


def doctor(run: bool = True) -> Iterator[str]:
    """Yields the findings line by line.

    Args:
      run: also decode with each backend and compile for each TPU generation; up to a minute.
    """
    yield from _versions()
    yield ""
    yield from _models()
    yield from _drafters()
    if not run:
        return
    yield ""
    yield "backends, each on a random two-layer model (compiling counts):"
    for name in _BACKENDS:
        yield f"  {name:<11}{_try_backend(name)}"
    yield ""
    yield "ahead-of-time compilation of the same model, no TPU needed:"
    for target in TARGETS.values():
        if target.topology is not None:
            yield f"  {target.name:<11}{_try_compiler(target.name)}"


def tiny_model() -> LoadedModel:
    """The smallest model with every kind of layer: KDA, MLA, dense and MoE; random weights."""
    config = dataclasses.replace(ModelConfig.preset("k3-mini"), name="two-layers", num_hidden_layers=2, mla_layers=(1,))
    return LoadedModel(config, random_weights(config, 0))


def _versions() -> Iterator[str]:
    yield f"{'python':<13}{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed" + (f": {backends.INSTALL_LIBTPU}" if package == "libtpu" else "")
        yield f"{package:<13}{version}"
    yield f"{'devices':<13}{', '.join(f'{device.device_kind} {device.id}' for device in jax.devices())}"
    yield f"{'auto':<13}backend {backends.resolve_backend('auto').name!r}"
    use_compile_cache()
    folder = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009  (an attribute that type checkers cannot see)
    yield f"{'cache':<13}{folder or 'switched off'}"


def _models() -> Iterator[str]:
    yield f"shipped models, in {SHIPPED}:"
    yield from _try_folders(SHIPPED, lambda folder: "with tokenizer" if load(folder).tokenizer else "without tokenizer")


def _drafters() -> Iterator[str]:
    from spec_decode.choose import SHIPPED as DRAFTERS  # built on this package, see `call.find_draft`

    def fits(folder: Path) -> str:
        model = load(SHIPPED / folder.name.removesuffix("-dspark"))
        draft = find_draft(model, folder)
        assert draft is not None
        return f"drafts up to {plural(draft.drafter.max_drafts, 'token')} for {model.config.name}"

    yield f"shipped drafters, in {DRAFTERS}:"
    yield from _try_folders(DRAFTERS, fits)


def _try_folders(parent: Path, describe: Callable[[Path], str]) -> Iterator[str]:
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()):
        try:
            found = describe(folder)
            yield f"  {folder.name:<{_NAME}}ok, {size(sum(file.stat().st_size for file in folder.iterdir()))}, {found}"
        except (ValueError, OSError) as error:
            yield f"  {folder.name:<{_NAME}}no: {_one_line(error)}"


def _try_backend(name: BackendName) -> str:
    started = time.perf_counter()
    try:
        decode(tiny_model(), [3, 4, 5], max_new_tokens=2, backend=name)
    except Exception as error:  # the answer, whatever it is
        return f"no: {_one_line(error)}"
    return f"ok, {time.perf_counter() - started:.1f} s"


def _try_compiler(target: str) -> str:
    try:
        report = aot.compile_for(make_plan(tiny_model().config, TARGETS[target]))
    except Exception as error:
        return f"no: {_one_line(error)}"
    return f"ok, {report.lower_seconds + report.compile_seconds:.1f} s"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
