"""Containers: a model packed for one division over cores, on disk; what is in them, and reading it.

    FOLDER/container.json        the manifest: model, division, arrays and pieces of every core
    FOLDER/core-000/tape.bin     one core's array, raw, as it lies in HBM; one file for each array
    FOLDER/core-000/pieces.jsonl the journal: one line for each finished piece, with its hash
    FOLDER/tiktoken.model, ...   the tokenizer, if the checkpoint has one

A piece is a range of an array's first axis. The journal of a core that holds every piece makes the core complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from tqdm import tqdm

from megakernel.memory import weight_buffers
from megakernel.plan import Plan
from megakernel.stages import Span, stages
from model.config import ModelConfig

MANIFEST, JOURNAL = "container.json", "pieces.jsonl"
FORMAT, VERSION = "one-launch container", 3
_DTYPES = {
    "float32": np.dtype(np.float32),
    "uint32": np.dtype(np.uint32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_PACK = "python -m megakernel pack"
_HASHED_AT_ONCE = 16 << 20
Check = Literal["quick", "full"]


class ContainerError(ValueError):
    """A container that cannot be used, or not by this plan; the message has the numbers and says what helps."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One core's array: `shape` and `dtype` (a key of numpy or ml_dtypes)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def entry_bytes(self) -> int:
        """Bytes of one index of the first axis."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * _DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.entry_bytes


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `container.json` says.

    Attributes:
      layout: what a plan must agree on, see `layout_of`.
      arrays: of one core, by name.
      pieces: of one core, in the order of packing.
      source: fingerprint of the checkpoint, see `container_write.fingerprint`.
    """

    config: ModelConfig
    layout: Mapping[str, Any]
    arrays: Mapping[str, Stored]
    pieces: tuple[Span, ...]
    source: str

    @property
    def cores(self) -> int:
        return int(self.layout["cores"])

    @property
    def core_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "name": self.config.name,
                "config": self.config.to_dict(),
                "layout": self.layout,
                "arrays": {name: {"shape": a.shape, "dtype": a.dtype} for name, a in self.arrays.items()},
                "pieces": [[span.array, span.first, span.count] for span in self.pieces],
                "source": self.source,
            },
        )


def layout_of(plan: Plan) -> dict[str, Any]:
    """Everything about a plan that decides how bytes lie in its arrays."""
    return {
        "cores": plan.split.cores,
        "expert_groups": plan.split.expert_groups,
        "block": [plan.block_rows, plan.block_lanes],
        "weights": plan.weights,
        "fp4_as": plan.target.fp4_as if plan.config.expert_format == "mxfp4" else None,
    }


def manifest_of(plan: Plan, source: str) -> Manifest:
    """The manifest of a container for a plan; its drafter, if it has one, is left out."""
    bare = without_drafter(plan)
    buffers = weight_buffers(bare)
    return Manifest(
        config=plan.config,
        layout=layout_of(plan),
        arrays={name: Stored(b.shape, _on_disk(b.dtype)) for name, b in buffers.items()},
        pieces=tuple(span for stage in stages(bare) for span in stage.spans),
        source=source,
    )


def without_drafter(plan: Plan) -> Plan:
    return dataclasses.replace(plan, drafter=None, tokens=1)


def is_container(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Reads `container.json`.

    Raises:
      ContainerError: it is missing, damaged or of another format version.
    """
    file = folder / MANIFEST
    try:
        found = json.loads(file.read_text())
        if (found["format"], found["version"]) != (FORMAT, VERSION):
            raise ContainerError(
                f"{file}: format {found['format']!r}, version {found['version']}; this release reads {FORMAT!r}, "
                f"version {VERSION}: pack the checkpoint again"
            )
        return Manifest(
            config=ModelConfig.from_dict(found["config"], found["name"]),
            layout=found["layout"],
            arrays={name: Stored(tuple(a["shape"]), a["dtype"]) for name, a in found["arrays"].items()},
            pieces=tuple(Span(*piece) for piece in found["pieces"]),
            source=found["source"],
        )
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ContainerError(f"{file}: expected the manifest of a container; found {error!r}") from error


@dataclasses.dataclass(frozen=True)
class Container:
    """An opened container. `check`: what reading a core verifies first, see `check_core`."""

    folder: Path
    manifest: Manifest
    check: Check = "quick"

    def plan_choices(self, cores: int) -> dict[str, Any]:
        """Arguments with which `make_plan` chooses this container's layout; none for another number of cores."""
        layout = self.manifest.layout
        same = cores == self.manifest.cores
        return {"expert_groups": layout["expert_groups"], "block": tuple(layout["block"])} if same else {}

    def core_arrays(self, plan: Plan, core: int) -> dict[str, np.ndarray]:
        """One core's arrays as `pack` would make them for the plan without its drafter; mapped, read when touched.

        Raises:
          ContainerError: made for another plan, half written, a missing core, or damaged.
        """
        check_plan(self.folder, self.manifest, plan)
        check_core(self.folder, self.manifest, core, self.check)
        buffers = weight_buffers(without_drafter(plan))
        return {
            name: np.memmap(array_file(self.folder, core, name), _dtype(buffer.dtype), "r", shape=buffer.shape)
            for name, buffer in buffers.items()
        }


def open_container(folder: Path, check: Check = "quick") -> Container:
    """Reads the manifest only.

    Args:
      check: "quick" compares sizes and journals when a core is read; "full" also hashes every piece.

    Raises:
      ContainerError: the manifest is damaged or of another version.
    """
    if check not in ("quick", "full"):
        raise ContainerError(f"check = {check!r}; expected 'quick' or 'full'")
    return Container(folder, read_manifest(folder), check)


# ---- checks ----


def check_plan(folder: Path, manifest: Manifest, plan: Plan) -> None:
    """Raises ContainerError unless the container was made for this model and this layout."""
    for field in dataclasses.fields(ModelConfig):
        packed, wanted = getattr(manifest.config, field.name), getattr(plan.config, field.name)
        if packed != wanted and field.name != "name":
            raise ContainerError(
                f"{folder}: packed from a model with {field.name} = {packed!r}, the plan's {plan.config.name} has "
                f"{wanted!r}; pack this model's own checkpoint"
            )
    wanted_layout = layout_of(plan)
    others = [name for name in wanted_layout if manifest.layout.get(name) != wanted_layout[name]]
    if others:
        packed_for = ", ".join(f"{name} = {manifest.layout.get(name)}" for name in others)
        asked = ", ".join(f"{name} = {wanted_layout[name]}" for name in others)
        other_cores = f"Use it with cores={manifest.cores}, or p" if "cores" in others else "P"
        raise ContainerError(
            f"{folder}: packed for {packed_for}; the plan has {asked}. {other_cores}ack the checkpoint again: "
            f"{_PACK} MODEL OUT --cores {plan.split.cores} --target {plan.target.name}"
        )
    for name, buffer in weight_buffers(without_drafter(plan)).items():
        found = manifest.arrays.get(name)
        if found != Stored(buffer.shape, _on_disk(buffer.dtype)):
            raise ContainerError(
                f"{folder}: {name} is {found}, the plan has {list(buffer.shape)} {_on_disk(buffer.dtype)}; it was made "
                "by another release: pack the checkpoint again"
            )


def check_core(folder: Path, manifest: Manifest, core: int, check: Check = "full", progress: Any = None) -> None:
    """Verifies one core: its files' sizes and its journal; with "full" also the hash of every piece.

    Args:
      progress: a tqdm bar that counts bytes, or None.

    Raises:
      ContainerError: the first fault, with file, piece, and what was expected and found.
    """
    home = core_folder(folder, core)
    if not home.is_dir():
        present = sorted(path.name for path in folder.glob("core-*"))
        raise ContainerError(
            f"{home}: missing; this container has {len(present)} of {manifest.cores} cores "
            f"({', '.join(present[:4])}{', ...' if len(present) > 4 else ''}); pack it, or copy it from where it was"
        )
    done = read_journal(folder, manifest, core)
    missing = [span for span in manifest.pieces if span not in done]
    if missing:
        raise ContainerError(
            f"{home}: half written: {len(manifest.pieces) - len(missing)} of {len(manifest.pieces)} pieces are there; "
            f"run the same {_PACK} again, it goes on with {describe(missing[0])}"
        )
    for name, array in manifest.arrays.items():
        check_size(array_file(folder, core, name), array)
    if check == "full":
        for span in manifest.pieces:
            expected, found_hash = done[span], _hash_of_file(folder, manifest, core, span, progress)
            if expected != found_hash:
                raise ContainerError(
                    f"{array_file(folder, core, span.array)}: piece {describe(span)} is damaged: expected hash "
                    f"{expected}; found {found_hash}{_REPAIR.format(home)}"
                )


def check_size(file: Path, array: Stored) -> None:
    """Raises ContainerError unless the file has the array's size."""
    found = f"{file.stat().st_size:,}" if file.is_file() else "nothing there"
    if found != f"{array.nbytes:,}":
        raise ContainerError(f"{file}: expected {array.nbytes:,} bytes; found {found}{_REPAIR.format(file.parent)}")


_REPAIR = "; delete {} and pack again, which writes that core only"


def check_container(folder: Path, cores: range | None = None, check: Check = "full") -> tuple[Manifest, int]:
    """Verifies cores of a container, all of them by default; returns its manifest and the bytes that were verified.

    Raises:
      ContainerError: the first fault.
    """
    manifest = read_manifest(folder)
    chosen = range(manifest.cores) if cores is None else cores
    total = len(chosen) * manifest.core_bytes
    with tqdm(total=total, desc="check", unit="B", unit_scale=True, disable=None if check == "full" else True) as bar:
        for core in chosen:
            check_core(folder, manifest, core, check, bar)
    return manifest, total


# ---- files ----


def cores_of_host(cores: int, host: int, hosts: int) -> range:
    """The cores that one of several hosts packs and checks.

    Raises:
      ContainerError: no such host, or cores that do not divide evenly.
    """
    if hosts < 1 or not 0 <= host < hosts:
        raise ContainerError(f"host = {host} of hosts = {hosts}; expected 0 to {max(hosts - 1, 0)}")
    if cores % hosts:
        raise ContainerError(f"{cores} cores do not divide evenly over hosts = {hosts}")
    share = cores // hosts
    return range(host * share, (host + 1) * share)


def core_folder(folder: Path, core: int) -> Path:
    return folder / f"core-{core:03d}"


def array_file(folder: Path, core: int, name: str) -> Path:
    return core_folder(folder, core) / f"{name}.bin"


def read_journal(folder: Path, manifest: Manifest, core: int) -> dict[Span, str]:
    """Finished pieces and their hashes. A last line without its end was being written when its writer was killed."""
    file = core_folder(folder, core) / JOURNAL
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    try:
        entries = (json.loads(line) for line in lines)
        return {Span(*piece): digest for *piece, digest in entries}
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ContainerError(f"{file}: damaged: {error}{_REPAIR.format(core_folder(folder, core))}") from error


def describe(span: Span) -> str:
    return f"{span.array}[{span.first}:{span.first + span.count}]"


def digest_of(parts: Iterator[Any]) -> str:
    """The hash of a piece's bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:32]


def _hash_of_file(folder: Path, manifest: Manifest, core: int, span: Span, progress: Any) -> str:
    size = manifest.arrays[span.array].entry_bytes

    def parts() -> Iterator[bytes]:
        with array_file(folder, core, span.array).open("rb") as file:
            file.seek(span.first * size)
            left = span.count * size
            while left:
                part = file.read(min(left, _HASHED_AT_ONCE))
                if not part:
                    return
                left -= len(part)
                if progress is not None:
                    progress.update(len(part))
                yield part

    return digest_of(parts())


def _on_disk(dtype: str) -> str:
    """The stored type of an array: what a plan calls "uint16" are the bits of bfloat16."""
    return "bfloat16" if dtype == "uint16" else dtype


def _dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.uint16) if dtype == "uint16" else _DTYPES[dtype]
