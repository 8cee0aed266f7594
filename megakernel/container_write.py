"""Packing a checkpoint into a container, stage by stage, so that a core's arrays never lie in memory as a whole.

Stages are the outer loop and cores the inner one: a tensor is read once for all cores of this host. A stage's pieces
are written, synchronised with the disk in batches, and only then entered in the journals; whatever a killed run left
unfinished is written again by the next one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from megakernel.container import (
    JOURNAL,
    MANIFEST,
    ContainerError,
    Manifest,
    array_file,
    check_plan,
    check_size,
    core_folder,
    cores_of_host,
    digest_of,
    is_container,
    manifest_of,
    read_journal,
    read_manifest,
    without_drafter,
)
from megakernel.loading import LoadedModel
from megakernel.memory import weight_buffers
from megakernel.pack import pack_stage, zeros
from megakernel.plan import Plan
from megakernel.stages import Span, Stage, stages
from model.checkpoint import Checkpoint

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
COMMIT_BYTES = 1 << 30
"""Written bytes after which files are synchronised and journals brought up to date: the most that a kill costs."""
_SAMPLED = 64 << 10


def write_container(
    folder: str | Path, plan: Plan, model: LoadedModel, *, host: int = 0, hosts: int = 1, workers: int = 4
) -> tuple[Manifest, int]:
    """Packs a model for a plan; goes on where an earlier run with the same arguments stopped.

    Several hosts may write into one folder, or each into its own; host h packs an even, contiguous share of the cores.
    Memory: the tensors of one stage (at most `EXPERT_STAGE_BYTES` of experts, or one section of the tape, or the LM
    head), and three times one core's piece of it for each worker.

    Args:
      workers: cores packed at the same time, in threads.

    Returns:
      The manifest, and the bytes that this run wrote.

    Raises:
      ContainerError: the folder holds another container or something else, too little room on the disk, wrong `host`.
      CheckpointError (`model`): a tensor that cannot be used.
    """
    if model.container is not None:
        raise ContainerError(f"{model.container.folder}: already packed; pack the checkpoint that it was made from")
    folder, plan = Path(folder), without_drafter(plan)
    cores = cores_of_host(plan.split.cores, host, hosts)
    manifest = _begin(folder, plan, model)
    written = 0
    with ExitStack() as stack:
        writers = [stack.enter_context(_CoreWriter(folder, manifest, core)) for core in cores]
        left = sum(writer.missing_bytes for writer in writers)
        _check_room(folder, left)
        bar = stack.enter_context(tqdm(total=left, desc="pack", unit="B", unit_scale=True, disable=None))
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        since_commit = 0
        for stage in stages(plan):
            tensors = _ReadOnce(model.weights)

            def pack_core(writer: _CoreWriter, stage: Stage = stage, tensors: _ReadOnce = tensors) -> int:
                return writer.write(stage, _packed(plan, stage, tensors, writer.core))

            for size in pool.map(pack_core, [writer for writer in writers if writer.lacks(stage)]):
                written, since_commit = written + size, since_commit + size
                bar.update(size)
            if since_commit >= COMMIT_BYTES:
                list(pool.map(_CoreWriter.commit, writers))
                since_commit = 0
        list(pool.map(_CoreWriter.commit, writers))
    return manifest, written


def fingerprint(weights: Mapping[str, np.ndarray]) -> str:
    """Tells checkpoints of one configuration apart: from names, sizes and the last bytes of the files.

    The empty string for tensors that are not in files.
    """
    if not isinstance(weights, Checkpoint):
        return ""
    found = hashlib.sha256()
    for file in sorted({weights.file_of(name) for name in weights}):
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            stream.seek(max(0, size - _SAMPLED))
            found.update(stream.read())
    return found.hexdigest()[:32]


def _begin(folder: Path, plan: Plan, model: LoadedModel) -> Manifest:
    """Writes manifest and tokenizer, or makes sure that what is there is the same."""
    manifest = manifest_of(plan, fingerprint(model.weights))
    if is_container(folder):
        found = read_manifest(folder)
        check_plan(folder, found, plan)
        if (found.source, found.pieces) != (manifest.source, manifest.pieces):
            other = "another checkpoint" if found.source != manifest.source else "another release"
            raise ContainerError(f"{folder}: begun with {other} of this configuration; choose another folder")
        return found
    if folder.exists() and (not folder.is_dir() or any(not _begun(path) for path in folder.iterdir())):
        raise ContainerError(f"{folder}: expected a container to go on with, an empty folder, or nothing")
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model.weights, Checkpoint):
        for name in TOKENIZER_FILES:
            if (model.weights.folder / name).is_file():
                shutil.copyfile(model.weights.folder / name, folder / name)
    # The manifest comes last: where it is, everything above is.
    partial = folder / f".{MANIFEST}.{os.getpid()}"
    partial.write_text(manifest.to_json())
    partial.replace(folder / MANIFEST)
    return manifest


def _begun(path: Path) -> bool:
    """Whether a run that was killed before its manifest, or another host, may have left this file."""
    return path.name in TOKENIZER_FILES or path.name.startswith(f".{MANIFEST}.")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ContainerError(
            f"{folder}: {needed:,} bytes are to be written and the disk has {free:,} free; free {needed - free:,} more "
            "bytes, or choose another disk"
        )


def _packed(plan: Plan, stage: Stage, tensors: Mapping[str, np.ndarray], core: int) -> dict[str, np.ndarray]:
    buffers = weight_buffers(plan)
    parts = {
        span.array: zeros((span.count, *buffers[span.array].shape[1:]), buffers[span.array].dtype)
        for span in stage.spans
    }
    pack_stage(plan, stage, tensors, {}, core, parts)
    return parts


class _ReadOnce(Mapping[str, np.ndarray]):
    """Tensors that are kept once they were read; one of these lives as long as a stage."""

    def __init__(self, weights: Mapping[str, np.ndarray]):
        self._weights = weights
        self._held: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> np.ndarray:
        with self._lock:
            if name not in self._held:
                self._held[name] = self._weights[name]
            return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _CoreWriter:
    """The files of one core, open for writing; a piece counts once `commit` has entered it in the journal."""

    def __init__(self, folder: Path, manifest: Manifest, core: int):
        self.core = core
        self._folder, self._manifest = folder, manifest
        core_folder(folder, core).mkdir(exist_ok=True)
        self._done = read_journal(folder, manifest, core)
        self._finished: dict[Span, str] = {}
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> _CoreWriter:
        for name, array in self._manifest.arrays.items():
            file = array_file(self._folder, self.core, name)
            begun = any(span.array == name for span in self._done)
            if begun:
                check_size(file, array)
            self._files[name] = file.open("r+b" if begun else "w+b", buffering=0)
            self._files[name].truncate(array.nbytes)
        self._journal = (core_folder(self._folder, self.core) / JOURNAL).open("r+b" if self._done else "w+b")
        self._journal.seek(sum(len(_line(span, digest)) for span, digest in self._done.items()))
        self._journal.truncate()
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._files.values(), self._journal):
            file.close()

    @property
    def missing_bytes(self) -> int:
        arrays = self._manifest.arrays
        missing = (span for span in self._manifest.pieces if span not in self._done)
        return sum(span.count * arrays[span.array].entry_bytes for span in missing)

    def lacks(self, stage: Stage) -> bool:
        return any(span not in self._done for span in stage.spans)

    def write(self, stage: Stage, parts: Mapping[str, np.ndarray]) -> int:
        """Writes those of a stage's pieces that are not there yet; returns their bytes."""
        written = 0
        for span in stage.spans:
            if span in self._done:
                continue
            data = memoryview(parts[span.array].reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            self._write_at(span, data)
            self._finished[span] = digest_of(iter([data]))
            written += len(data)
        return written

    def commit(self) -> None:
        """Makes written pieces outlive a crash, then says so in the journal."""
        if not self._finished:
            return
        for name in {span.array for span in self._finished}:
            with self._disk_errors(array_file(self._folder, self.core, name)):
                os.fsync(self._files[name].fileno())
        with self._disk_errors(core_folder(self._folder, self.core) / JOURNAL):
            self._journal.write(b"".join(_line(span, digest) for span, digest in self._finished.items()))
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self._done |= self._finished
        self._finished = {}

    def _write_at(self, span: Span, data: memoryview) -> None:
        at = span.first * self._manifest.arrays[span.array].entry_bytes
        with self._disk_errors(array_file(self._folder, self.core, span.array)):
            while data:
                count = os.pwrite(self._files[span.array].fileno(), data, at)
                data, at = data[count:], at + count

    @contextmanager
    def _disk_errors(self, file: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ContainerError(
                f"{file}: the disk is full: {shutil.disk_usage(self._folder).free:,} bytes free, "
                f"{self.missing_bytes:,} still to be written for core {self.core}; make room and pack again, "
                "finished pieces stay"
            ) from error


def _line(span: Span, digest: str) -> bytes:
    return f"{json.dumps([span.array, span.first, span.count, digest])}\n".encode()
