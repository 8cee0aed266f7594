"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from megakernel import PlanError, SamplingParams, decode, find_target, load, make_plan
from megakernel.__main__ import find_config, main, weight_bytes
from megakernel.doctor import doctor, tiny_model
from megakernel.loading import SHIPPED
from megakernel.report import size
from megakernel.target import CPU
from model.config import ModelConfig
from model.presets import PRESETS

ROOT = Path(__file__).parent.parent
PROMPT = "Fellow-Citizens of the Senate"


def run_module(*arguments: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "megakernel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, **kwargs)


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "arguments are required: COMMAND"),
        (["generate"], "arguments are required: text"),
        (["translate"], "invalid choice: 'translate'"),
        (["generate", PROMPT, "--model", "nobody"], "'nobody' is neither a folder nor a shipped model"),
        (["generate", PROMPT, "--temperature", "-1"], "temperature = -1.0"),
        (["generate", PROMPT, "--top-p", "0"], "top_p = 0.0"),
        (["generate", PROMPT, "--top-k", "1.5"], "--top-k: invalid int value: '1.5'"),
        (["generate", PROMPT, "--repetition-penalty", "0"], "repetition_penalty = 0.0"),
        (["generate", PROMPT, "--logit-bias", "17"], "--logit-bias: '17'; expected a token id and a number"),
        (["generate", PROMPT, "--logit-bias", "17=200"], "logit_bias = {17: 200.0}"),
        (["generate", PROMPT, "--logit-bias", "9999=1"], "logit_bias holds token id 9999"),
        (["generate", PROMPT, "--max-new-tokens", "0"], "max_new_tokens = 0"),
        (["generate", PROMPT, "--seed", "-4"], "seed = -4"),
        (["generate", PROMPT, "--stop", ""], "stop holds an empty string"),
        (["generate", PROMPT, "--backend", "gpu"], "invalid choice: 'gpu'"),
        (["generate", PROMPT, "--backend", "tpu"], "backend 'tpu' needs a TPU"),
        (["generate", ""], "prompt 0 is empty"),
        (["generate", PROMPT, "--draft", "nobody"], "draft = 'nobody': no drafter for k3-nano"),
        (["generate", PROMPT, "--draft-tokens", "3"], "draft_tokens = 3 with draft='none'"),
        (["generate", PROMPT, "--draft", "ngram", "--draft-tokens", "16"], "draft_tokens = 16; drafter 'ngram'"),
        (["generate", PROMPT, "--draft", "ngram", "--backend", "reference"], "backend 'reference' decodes token by"),
        (["generate", PROMPT, "--cores", "-1"], "cores = -1; expected a positive integer"),
        (["generate", PROMPT, "--cores", "16"], "cores = 16, and JAX sees 8 devices"),
        (["generate", PROMPT, "--cores", "2", "--backend", "reference"], "cores = 2: backend 'reference' runs on one"),
        (["generate", PROMPT, "--wire", "int8"], "wire = 'int8': with cores = 1 nothing travels"),
        (["plan", "k3-nano", "--draft", "ngram", "--sequences", "8", "--draft-tokens", "3"], "need 32 rows"),
        (["plan", "nobody"], "'nobody' is neither a folder nor a known model"),
        (["plan", "k3-nano", "--target", "v9"], "target 'v9' is not known"),
        (["plan", "k3-nano", "--target", "v6e:2x2", "--cores", "5"], "cores = 5; v6e:2x2 has 4"),
        (["plan", "k3-nano", "--sequences", "17"], "sequences = 17"),
        (["plan", "k3-nano", "--ring-depth", "1"], "ring_depth = 1"),
        (["plan", "k3-nano", "--context", "5000"], "context = 5000"),
        (["plan", "kimi-k3"], "kimi-k3 on one core of v7x needs"),
        (["plan", "k3-nano", "--cores", "0"], "cores = 0; expected a positive integer"),
        (["plan", "k3-nano", "--cores", "4", "--expert-groups", "3"], "4 cores cannot share experts of width 128"),
        (["plan", "k3-nano", "--target", "cpu", "--compile"], "target 'cpu' has no ahead-of-time compiler"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, words, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    lines = captured.err.splitlines()
    assert len(lines) == 1, "announced before it was refused"
    assert lines[0].startswith("one-launch: ")
    assert words in lines[0]


def test_a_process_that_fails_shows_no_traceback(tmp_path):
    done = run_module("plan", "kimi-k3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_damaged_checkpoint_is_an_error_that_names_the_file(tmp_path, capsys):
    folder = tmp_path / "damaged"
    shutil.copytree(SHIPPED / "k3-nano", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert main(["generate", PROMPT, "--model", str(folder)]) == 2
    message = capsys.readouterr().err
    assert str(weights) in message
    assert len(message.splitlines()) == 1


def test_reader_that_leaves_early_is_not_an_error(tmp_path):
    command = f"{sys.executable} -m megakernel plan k3-nano | true; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.strip() == "0"
    assert done.stderr == ""


# ---- plan ----


@pytest.mark.parametrize("model", sorted(PRESETS))
@pytest.mark.parametrize("target", ["cpu", "v5e", "v5p", "v6e", "v7x"])
def test_plan_prints_or_refuses_every_preset(model, target, capsys):
    try:
        make_plan(ModelConfig.preset(model), find_target(target))
        refusal = None
    except PlanError as error:
        refusal = str(error)
    assert refusal or model != "kimi-k3", "2.8T parameters on one core?"
    assert not refusal or model.startswith("kimi-"), "the small models fit everywhere"

    assert main(["plan", model, "--target", target]) == (2 if refusal else 0)
    captured = capsys.readouterr()
    if refusal:
        assert captured.out == ""
        assert captured.err == f"one-launch: {refusal}\n"
        assert re.search(r"needs [\d,.]+ MiB of \w+, [\d,.]+ MiB may be used", refusal)
    else:
        assert captured.err == ""
        assert captured.out.startswith(f"{model} on one core of {target}\n")


def test_plan_passes_its_options_on(capsys):
    options = ["--target", "v6e", "--sequences", "8", "--context", "1024", "--ring-depth", "5", "--expert-slots", "3"]
    assert main(["plan", "k3-nano", *options]) == 0
    text = capsys.readouterr().out
    plan = make_plan(
        ModelConfig.preset("k3-nano"), find_target("v6e"), sequences=8, context=1024, ring_depth=5, expert_slots=3
    )
    assert "8 sequences in a tile of 8 rows; 1,024 positions" in text
    assert f"streamed: 5 blocks in flight ({size(5 * plan.block_bytes)})" in text
    assert "3 slots" in text
    assert f"VMEM: {size(sum(plan.vmem_map.values()))} of 128.0 MiB" in text


def test_plan_of_one_of_several_cores(capsys):
    assert main(["plan", "kimi-k3", "--cores", "32", "--expert-groups", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("kimi-k3 on one of 32 cores of v7x\n")
    assert re.search(r"\n  2 x 16 .*  chosen\n", text)


def test_plan_shows_a_drafter(capsys):
    assert main(["plan", "k3-nano", "--draft", "dspark", "--draft-tokens", "5"]) == 0
    text = capsys.readouterr().out
    assert "drafter  dspark: 5 tokens drafted and verified a round, 6 rows" in text
    assert "A round, drafting included, of 6 rows on one core of v7x" in text
    assert re.search(r"\n  drafting  .*\nPredicted round: [\d.]+ us; bound by ", text)
    assert "tokens/s at most if every draft is accepted" in text


def test_plan_takes_folders_and_shipped_models(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(SHIPPED / "k3-nano" / "config.json", folder)
    assert find_config(str(folder)).hidden_size == ModelConfig.preset("k3-nano").hidden_size
    assert find_config("k3-nano") == ModelConfig.preset("k3-nano")


@pytest.mark.slow
def test_plan_compiles_for_a_tpu_that_is_not_there(capsys):
    pytest.importorskip("libtpu")
    assert main(["plan", "k3-mini", "--target", "v7x", "--compile"]) == 0
    text = capsys.readouterr().out
    assert "Compiled for 1 core of tpu7x:1x1x1 by the TPU compiler" in text
    assert "(predicted; bundles compiled" in text
    assert re.search(r"\n +round +[\d,]+", text)
    assert re.search(r"\n +MoE +[\d,]+", text)


# ---- generate ----


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["--stream", "--no-stream"])
def test_generate_prints_what_decode_returns(streaming, capsys):
    options = ["--max-new-tokens", "40", "--temperature", "0.7", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01"]
    assert main(["generate", PROMPT, *options, "--seed", "11", streaming, "--logprobs"]) == 0
    captured = capsys.readouterr()
    expected = decode(
        load("k3-nano"),
        PROMPT,
        max_new_tokens=40,
        sampling=SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01),
        seed=11,
        logprobs=True,
    )
    assert captured.out == expected.text + "\n"
    shown = [float(line.split()[0]) for line in captured.err.splitlines() if re.match(r" +-?\d+\.\d{3}  ['\"]", line)]
    assert shown == pytest.approx(expected.logprobs, abs=5e-4 + 1e-9)
    assert "seed 11" in captured.err
    assert re.search(r"40 tokens.*; [\d,]+ tokens/s, [\d.]+ GB/s of weights \(measured on this machine: ", captured.err)


@pytest.mark.slow
def test_generate_with_a_drafter_prints_the_same_text(capsys):
    assert main(["generate", PROMPT, "--temperature", "0", "--max-new-tokens", "40", "--draft", "ngram"]) == 0
    assert capsys.readouterr().out == decode(load("k3-nano"), PROMPT, max_new_tokens=40).text + "\n"


def test_warnings_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "megakernel.__main__.find_machine", lambda *_: warnings.warn("too slow", stacklevel=1) or (CPU, 1)
    )
    assert main(["plan", "k3-mini"]) == 0
    assert capsys.readouterr().err == "one-launch: too slow\n"


@pytest.mark.slow
def test_generate_stops_before_a_stop_string(capsys):
    assert main(["generate", PROMPT, "--temperature", "0", "--max-new-tokens", "64", "--stop", "Repre"]) == 0
    text = capsys.readouterr().out
    full = decode(load("k3-nano"), PROMPT, max_new_tokens=64).text
    assert "Repre" in full  # else this test says nothing
    assert text == full.split("Repre")[0] + "\n"


@pytest.mark.slow
def test_generate_reads_the_prompt_from_standard_input(tmp_path):
    done = run_module("generate", "-", "--temperature", "0", "--max-new-tokens", "8", cwd=tmp_path, input=PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == decode(load("k3-nano"), PROMPT, max_new_tokens=8).text + "\n"


def test_weight_bytes_count_one_sequence():
    config = ModelConfig.preset("k3-nano")
    one, eight = (make_plan(config, sequences=sequences) for sequences in (1, 8))
    experts = config.num_experts_per_token * 5 * one.expert_bytes
    tables = 7 * 4 * sum(rows * lanes for rows, lanes in one.vector_tables.values())
    assert weight_bytes(one) == one.tape_bytes + experts + tables
    assert weight_bytes(eight) == weight_bytes(one)


# ---- doctor ----


def test_quick_doctor_reports_versions_and_models(capsys):
    assert main(["doctor", "--quick"]) == 0
    text = capsys.readouterr().out
    for package in ("python", "jax", "jaxlib", "libtpu"):
        assert re.search(rf"^{package} +\S+", text, re.MULTILINE)
    assert re.search(r"^  k3-nano +ok, [\d.]+ MiB, with tokenizer$", text, re.MULTILINE)
    assert re.search(r"^  k3-nano-dspark +ok, [\d.]+ MiB, drafts up to 8 tokens for k3-nano$", text, re.MULTILINE)
    assert "interpret" not in text.split("shipped models")[1]


def test_doctor_reports_a_broken_model_and_goes_on(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    shutil.copytree(SHIPPED / "k3-nano", tmp_path / "whole")
    monkeypatch.setattr("megakernel.doctor.SHIPPED", tmp_path)
    lines = [line.split(maxsplit=1) for line in doctor(run=False) if line.startswith("  ")]
    assert [name for name, _ in lines] == ["broken", "whole", "k3-nano-dspark"]
    assert lines[0][1].startswith("no: ")
    assert lines[1][1].startswith("ok, ")
    assert lines[2][1].startswith("no: "), "its model is not there"


def test_without_libtpu_it_is_said_how_to_install_it(monkeypatch, capsys):
    find_spec, version = importlib.util.find_spec, importlib.metadata.version

    def no_version(name):
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name))
    monkeypatch.setattr(importlib.metadata, "version", no_version)
    hint = 'pip install "one-launch[tpu]"'
    assert main(["generate", PROMPT, "--backend", "tpu"]) == 2
    assert hint in capsys.readouterr().err
    assert main(["plan", "k3-mini", "--compile"]) == 2
    assert hint in capsys.readouterr().err
    assert main(["doctor", "--quick"]) == 0
    assert f"libtpu       not installed: {hint}\n" in capsys.readouterr().out
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "one-launch"
    assert "tpu" in project["optional-dependencies"]


@pytest.mark.parametrize("found", ["nothing", "a file", "a folder without container.json"])
def test_check_of_what_is_no_container_says_what_is_there(found, tmp_path, capsys):
    path = tmp_path / "NOPE"
    if found == "a file":
        path.touch()
    if found.startswith("a folder"):
        path.mkdir()
    assert main(["check", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"one-launch: {path}: expected a packed model; found {found}. To pack one: ")
    assert "Error" not in message


@pytest.mark.slow
def test_doctor_tries_every_backend_and_generation():
    found = {line.split()[0]: line for line in doctor() if line.startswith("  ")}
    for name in ("interpret", "simulate", "reference"):
        assert re.match(rf"  {name} +ok, [\d.]+ s$", found[name]), found[name]
    assert "no: backend 'tpu' needs a TPU" in found["tpu"]
    compilers = "ok, " if importlib.util.find_spec("libtpu") else "no: the TPU compiler (libtpu) is not installed"
    for name in ("v5e", "v5p", "v6e", "v7x"):
        assert compilers in found[name], found[name]


def test_the_doctor_s_model_has_every_kind_of_layer():
    config = tiny_model().config
    kinds = {(config.layer_kind(layer), config.is_moe(layer)) for layer in range(config.num_hidden_layers)}
    assert kinds == {("kda", False), ("mla", True)}
