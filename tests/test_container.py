"""Containers: what is read from one is what `pack` makes; kills are gone on from; damage and mix-ups are refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import Ask, launch_once, needs_nano, open_session, random_model
from safetensors.numpy import save_file

from megakernel import ContainerError, LoadedModel, Plan, SamplingParams, decode, load, make_plan
from megakernel import container_write as writing
from megakernel import stages as staging
from megakernel.__main__ import main
from megakernel.call import find_draft
from megakernel.container import check_container, open_container
from megakernel.container_write import write_container
from megakernel.memory import weight_buffers
from megakernel.pack import pack, pack_drafter
from megakernel.program import relative
from megakernel.session import _blame
from megakernel.stages import stages
from megakernel.target import find_target
from model.checkpoint import CheckpointError
from model.config import ModelConfig
from spec_decode.ngram import NGramDrafter


def plan_of(model: LoadedModel, cores: int = 1, **knobs: Any) -> Plan:
    return make_plan(model.config, find_target("cpu"), cores=cores, context=64, **knobs)


def packed_by(folder: Path, model: LoadedModel, cores: int = 1, **knobs: Any) -> Plan:
    plan = plan_of(model, cores, **knobs)
    write_container(folder, plan, model)
    return plan


def assert_packed(folder: Path, plan: Plan, model: LoadedModel) -> None:
    """Every core of the container holds the bytes that `pack` makes."""
    for core in range(plan.split.cores):
        found = open_container(folder, "full").core_arrays(plan, core)
        for name, expected in pack(plan, model.weights, core=core).items():
            assert (found[name].shape, found[name].dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(found[name].view(np.uint8), expected.view(np.uint8), err_msg=name)


def save_by_layer(folder: Path, model: LoadedModel) -> None:
    """As Kimi K3 is published: a shard for each layer, then the global tensors, the projector and the vision tower."""
    layers = model.config.num_hidden_layers
    shards: list[dict[str, np.ndarray]] = [{} for _ in range(layers + 3)]
    for name, tensor in model.weights.items():
        shard = int(name.split(".")[2]) if name != relative(name) else layers
        shards[shard][f"language_model.{name}"] = np.asarray(tensor)
    shards[layers + 1]["mm_projector.proj.0.weight"] = np.zeros((4, 4), np.float32)
    shards[layers + 2]["vision_tower.patch_embed.proj.weight"] = np.zeros((4, 3, 2, 2), np.float32)
    folder.mkdir()
    files = {f"model-{i:05d}-of-{len(shards):06d}.safetensors": shard for i, shard in enumerate(shards, start=1)}
    for file, shard in files.items():
        save_file(shard, folder / file)
    index = {name: file for file, shard in files.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))


def compiled_alike(packed: LoadedModel, model: LoadedModel) -> None:
    """Takes over what is compiled, and nothing that is packed."""
    packed.derived |= {key: value for key, value in model.derived.items() if key[0] == "launch"}


class Counted(Mapping[str, np.ndarray]):
    """Tensors that count how often each was asked for."""

    def __init__(self, weights: Mapping[str, np.ndarray]):
        self._weights, self.reads = weights, Counter[str]()

    def __getitem__(self, name: str) -> np.ndarray:
        self.reads[name] += 1
        return self._weights[name].copy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    packed_by(folder, random_model(), 2)
    return folder


# ---- what is in a container ----


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_a_container_holds_what_pack_makes(tmp_path: Path, cores: int) -> None:
    model = random_model()
    assert_packed(tmp_path, packed_by(tmp_path, model, cores), model)


@pytest.mark.parametrize(
    "changes",
    [
        {"first_k_dense_replace": 0},
        {"tie_word_embeddings": True, "vocab_size": 301},
        {"num_experts": 7, "num_attention_heads": 3, "kda_num_heads": 3, "attn_res_block_size": 0},
    ],
    ids=str,
)
def test_other_models_too(tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "EXPERT_STAGE_BYTES", 1 << 15)
    model = random_model(**changes)
    assert_packed(tmp_path, packed_by(tmp_path, model, 2), model)


@pytest.mark.parametrize("drafter", [None, NGramDrafter()])
@pytest.mark.parametrize("expert_bytes", [1, 1 << 15, 1 << 28])
def test_stages_cover_every_entry_once(
    drafter: NGramDrafter | None, expert_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "EXPERT_STAGE_BYTES", expert_bytes)
    plan = plan_of(random_model(), 4, drafter=drafter)
    seen = {name: np.zeros(buffer.shape[0], int) for name, buffer in weight_buffers(plan).items()}
    for stage in stages(plan):
        for span in stage.spans:
            seen[span.array][span.first : span.first + span.count] += 1
    assert all((count == 1).all() for count in seen.values())


def test_a_checkpoint_in_shards_by_layer(tmp_path: Path) -> None:
    """Through the command line, by two hosts into one folder; the packed model decodes as the checkpoint does."""
    model = random_model()
    save_by_layer(tmp_path / "official", model)
    out = str(tmp_path / "packed")
    for host in ("0", "1"):
        command = ["pack", str(tmp_path / "official"), out, "--cores", "2", "--target", "cpu"]
        assert main([*command, "--host", host, "--hosts", "2"]) == 0
    assert main(["check", out]) == 0
    assert_packed(tmp_path / "packed", plan_of(model, 2), model)
    packed, prompt = load(out, check="full"), list(range(5, 90))
    sampling = SamplingParams(temperature=0.9)
    expected = decode(model, prompt, max_new_tokens=6, sampling=sampling, seed=3, cores=2, logprobs=True)
    compiled_alike(packed, model)
    found = decode(packed, prompt, max_new_tokens=6, sampling=sampling, seed=3, cores=2, logprobs=True)
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


@needs_nano
def test_a_drafter_is_added_when_a_container_is_read(tmp_path: Path) -> None:
    model = load("k3-nano")
    draft = find_draft(model, "dspark")
    assert draft is not None
    plan = plan_of(model, drafter=draft.drafter)
    write_container(tmp_path, plan, model)
    packed = open_container(tmp_path).core_arrays(plan, 0)
    found = pack_drafter(plan, packed, model.weights, draft.weights, core=0)
    for name, expected in pack(plan, model.weights, draft.weights).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_what_needs_tensors_says_so(whole: Path, tmp_path: Path) -> None:
    packed = load(whole)
    with pytest.raises(ValueError, match="is a container; backend 'reference' needs the checkpoint"):
        decode(packed, [7], max_new_tokens=2, backend="reference")
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight': a container holds packed arrays only"):
        packed.weights["lm_head.weight"]
    with pytest.raises(ContainerError, match="already packed; pack the checkpoint"):
        packed_by(tmp_path, packed)
    assert _blame(packed, 3).endswith(f"look for damage: python -m megakernel check {whole}")


def test_a_plan_needs_no_weights(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(whole), "--cores", "2", "--context", "64"]) == 0
    assert "k3-mini" in capsys.readouterr().out


@needs_nano
def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    model = load("k3-nano")
    packed_by(tmp_path, model)
    packed = load(tmp_path)
    assert packed.config == model.config
    assert packed.tokenizer is not None
    assert packed.tokenizer.encode("Fellow-Citizens") == model.tokenizer.encode("Fellow-Citizens")  # type: ignore[union-attr]


# ---- streaming ----


def test_each_tensor_is_read_once_for_all_cores(tmp_path: Path) -> None:
    model = random_model()
    counted = Counted(model.weights)
    packed_by(tmp_path, LoadedModel(model.config, counted), 4)
    unused = "model.layers.0.self_attention_res"  # there is no snapshot yet that it could score
    assert counted.reads == Counter(dict.fromkeys((name for name in model.weights if not name.startswith(unused)), 1))


def test_memory_is_bounded_by_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the largest stage and some copies of one core's piece, not a core's arrays."""
    monkeypatch.setattr(staging, "EXPERT_STAGE_BYTES", 1 << 20)
    model = random_model(num_experts=128, routed_expert_hidden_size=256, moe_intermediate_size=256, vocab_size=4096)
    plan = plan_of(model, 2)
    arrays = sum(buffer.bytes for buffer in weight_buffers(plan).values())
    tensors = Counted(model.weights)
    largest = max(tensor.nbytes for tensor in model.weights.values())
    piece = max(
        span.count * buffer.bytes // buffer.shape[0]
        for stage in stages(plan)
        for span in stage.spans
        for buffer in [weight_buffers(plan)[span.array]]
    )
    tracemalloc.start()
    write_container(tmp_path, plan, LoadedModel(model.config, tensors), workers=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    bound = max(largest, 1 << 20) + 3 * piece + (3 << 20)
    assert peak < bound < arrays / 3, f"peak {peak:,}, bound {bound:,}, arrays {arrays:,}"


# ---- kills ----


class Killed(Exception):
    pass


def kill_after(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """The writer dies with the last of so many pieces half on the disk, every piece before being in the journal."""
    write, count = writing._CoreWriter._write_at, Counter[str]()

    def dying(self: Any, span: Any, data: memoryview) -> None:
        count["pieces"] += 1
        if count["pieces"] == pieces:
            write(self, span, data[: len(data) // 2])
            raise Killed
        write(self, span, data)

    monkeypatch.setattr(writing, "COMMIT_BYTES", 0)
    monkeypatch.setattr(writing._CoreWriter, "_write_at", dying)


def test_a_killed_run_is_gone_on_from(tmp_path: Path) -> None:
    model = random_model()
    plan = plan_of(model, 2)
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 24)
        with pytest.raises(Killed):
            write_container(tmp_path, plan, model)
    journals = [(tmp_path / f"core-00{core}" / "pieces.jsonl") for core in range(2)]
    finished = [journal.read_text().splitlines() for journal in journals]
    assert all(len(lines) > 5 for lines in finished)
    with pytest.raises(
        ContainerError, match=r"core-000: half written: \d+ of \d+ pieces .* goes on with \w+\[\d+:\d+]"
    ):
        check_container(tmp_path)
    with pytest.raises(ContainerError, match="half written"):
        open_session(load(tmp_path), cores=2)
    with journals[1].open("a") as journal:
        journal.write('["tape", 1')  # its writer was killed within a line

    counted, written = Counted(model.weights), []
    with pytest.MonkeyPatch.context() as patch:
        write = writing._CoreWriter._write_at
        patch.setattr(
            writing._CoreWriter,
            "_write_at",
            lambda self, span, data: written.append((self.core, span.array, span.first)) or write(self, span, data),
        )
        write_container(tmp_path, plan, LoadedModel(model.config, counted))
    before = {(core, *json.loads(line)[:2]) for core, lines in enumerate(finished) for line in lines}
    assert written
    assert not before & set(written)
    assert "model.layers.0.self_attn.q_proj.weight" not in counted.reads
    assert_packed(tmp_path, plan, model)
    assert write_container(tmp_path, plan, model)[1] == 0


def test_a_journal_torn_between_the_pieces_of_a_stage_mends(tmp_path: Path) -> None:
    """The two arrays of an expert batch are one stage: only the one that is missing is written, and once."""
    model = random_model()
    plan = plan_of(model, 1)
    write_container(tmp_path, plan, model)
    journal = tmp_path / "core-000" / "pieces.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if b"bank_in" in line)
    journal.write_bytes(b"".join(lines[: last + 1]) + b'["bank_ou')
    assert write_container(tmp_path, plan, model)[1] > 0
    for _ in range(2):
        assert write_container(tmp_path, plan, model)[1] == 0
        assert_packed(tmp_path, plan, model)


def test_a_run_killed_before_its_manifest_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"half")
    (tmp_path / ".container.json.4711").write_text("{")
    plan = plan_of(random_model(), 1)
    write_container(tmp_path, plan, random_model())
    check_container(tmp_path)


def test_a_full_disk_says_how_much_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, usage = random_model(), shutil.disk_usage(tmp_path)
    plan = plan_of(model, 2)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ContainerError, match=r"[\d,]+ bytes are to be written and the disk has 1,000 free"):
        write_container(tmp_path / "before", plan, model)
    monkeypatch.undo()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.os, "pwrite", full)
    with pytest.raises(ContainerError, match=r"tape.bin: the disk is full: .* finished pieces stay"):
        write_container(tmp_path / "within", plan, model)


# ---- damage and mix-ups ----


@pytest.fixture
def container(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "container"))


@pytest.mark.parametrize("array", ["tape", "bank_in", "bank_out", "embedding", "wide_tables", "heads_tables"])
def test_a_flipped_bit_is_found(container: Path, array: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = container / "core-001" / f"{array}.bin"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    damage = rf"core-001/{array}.bin: piece {array}\[\d+:\d+] is damaged: expected hash \w{{32}}; found \w{{32}}"
    with pytest.raises(ContainerError, match=damage):
        check_container(container)
    with pytest.raises(ContainerError, match="is damaged"):
        open_session(load(container, check="full"), cores=2)
    assert main(["check", str(container)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main(["check", str(container), "--quick"]) == 0
    assert main(["check", str(container), "--host", "0", "--hosts", "2"]) == 0
    shutil.rmtree(container / "core-001")
    packed_by(container, random_model(), 2)
    check_container(container)


def test_a_truncated_file_is_found_at_once(container: Path) -> None:
    file = container / "core-000" / "tape.bin"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 1)
    cut = rf"core-000/tape.bin: expected {size:,} bytes; found {size - 1:,}; delete"
    with pytest.raises(ContainerError, match=cut):
        open_session(load(container), cores=2)
    with pytest.raises(ContainerError, match=cut):
        packed_by(container, random_model(), 2)  # complete, so nothing would be written
    file.unlink()
    with pytest.raises(ContainerError, match=r"tape.bin: expected [\d,]+ bytes; found nothing there"):
        check_container(container, check="quick")


def test_a_missing_core_is_named(container: Path) -> None:
    shutil.rmtree(container / "core-001")
    with pytest.raises(ContainerError, match=r"core-001: missing; this container has 1 of 2 cores \(core-000\)"):
        check_container(container)


def test_another_plan_is_refused(whole: Path, tmp_path: Path) -> None:
    model = load(whole)
    with pytest.raises(ContainerError, match=r"packed for cores = 2.*; the plan has cores = 1.* cores=2"):
        decode(model, [1, 2, 3], max_new_tokens=2)
    with pytest.raises(ContainerError, match=r"packed for block = \[256, 256]; the plan has block = \[128, 256]"):
        open_session(model, cores=2, block=(128, 256))
    groups = 3 - plan_of(model, 2).split.expert_groups
    with pytest.raises(ContainerError, match=rf"packed for expert_groups = \d; the plan has expert_groups = {groups}"):
        model.container.core_arrays(plan_of(model, 2, expert_groups=groups), 0)  # type: ignore[union-attr]
    other = dataclasses.replace(model.config, num_experts=16)
    with pytest.raises(ContainerError, match=r"num_experts = 8, the plan's .* has 16"):
        model.container.core_arrays(make_plan(other, cores=2), 0)  # type: ignore[union-attr]
    with pytest.raises(ContainerError, match=r"num_experts = 8, the plan's .* has 16"):
        write_container(whole, make_plan(other, cores=2), LoadedModel(other, {}))


def test_another_checkpoint_or_folder_is_not_written_over(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_by_layer(tmp_path / f"seed{seed}", random_model(seed=seed))
    first, second = (load(tmp_path / f"seed{seed}") for seed in (0, 1))
    packed_by(tmp_path / "packed", first)
    with pytest.raises(ContainerError, match="begun with another checkpoint of this configuration"):
        packed_by(tmp_path / "packed", second)
    with pytest.raises(ContainerError, match="expected a container to go on with, an empty folder, or nothing"):
        packed_by(tmp_path / "seed1", first)


def test_manifests_of_other_versions_and_damaged_ones_are_refused(container: Path) -> None:
    file = container / "container.json"
    text = file.read_text()
    file.write_text(text.replace('"version": 3', '"version": 7'))
    with pytest.raises(ContainerError, match=r"version 7; this release reads .* version 3"):
        load(container)
    file.write_text(text[:-9])
    with pytest.raises(ContainerError, match=r"container.json: expected the manifest of a container; found JSONDecode"):
        load(container)


@pytest.mark.parametrize(
    ("host", "hosts", "message"), [(2, 2, "host = 2 of hosts = 2"), (0, 3, "4 cores do not divide")]
)
def test_hosts_share_the_cores_evenly(tmp_path: Path, host: int, hosts: int, message: str) -> None:
    model = random_model()
    with pytest.raises(ContainerError, match=message):
        write_container(tmp_path, plan_of(model, 4), model, host=host, hosts=hosts)


def test_a_session_reads_a_container_core_by_core(whole: Path) -> None:
    ask = Ask((7, 45, 300, 122, 9), new=8)
    model, packed = random_model(), load(whole)
    (expected,) = launch_once(open_session(model, cores=2), [ask])
    compiled_alike(packed, model)
    (found,) = launch_once(open_session(packed, cores=2), [ask])
    assert expected
    assert found
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.logits, expected.logits)


def test_the_codes_of_experts_lie_as_the_target_takes_them(whole: Path) -> None:
    """Arrays of equal shapes with other bytes: a container for a CPU would make a TPU decode nonsense."""
    plan = make_plan(ModelConfig.preset("k3-mini"), find_target("v7x"), cores=2, context=64)
    with pytest.raises(ContainerError, match=r"packed for fp4_as = float32; the plan has .* --target v7x"):
        open_container(whole).core_arrays(plan, 1)


def test_without_such_codes_every_target_reads_the_same_bytes(tmp_path: Path) -> None:
    """A CPU's "uint16" holds the bits of a TPU's bfloat16."""
    model = random_model(expert_format="bf16")
    packed_by(tmp_path, model, 2)
    plan = make_plan(model.config, find_target("v7x"), cores=2, context=64)
    assert open_container(tmp_path).core_arrays(plan, 1)["tape"].dtype == ml_dtypes.bfloat16
