"""Several hosts, as processes of this machine: the same tokens as on one; missing and differing hosts are named."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from launching import random_model
from on_host import CORES, PROMPTS, SAMPLING

from megakernel import HostsError, PlanError, decode, make_plan
from megakernel.container_write import write_container
from megakernel.distributed import agree, start
from megakernel.mesh import core_mesh
from megakernel.rollcall import roll_call

HERE = Path(__file__).parent


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def together(*calls: Callable[[], object]) -> list[Any]:
    """Runs calls in threads of their own; what each returned or raised."""
    came: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            came[number] = calls[number]()
        except HostsError as error:
            came[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return came


# ---- decoding ----


@pytest.mark.slow
def test_two_hosts_decode_as_one(tmp_path: Path) -> None:
    """Each has the packed arrays of its own core only, and draws seeds that the other must not use."""
    model = random_model()
    write_container(tmp_path / "host0", make_plan(model.config, cores=CORES), model)
    shutil.copytree(tmp_path / "host0", tmp_path / "host1")
    shutil.rmtree(tmp_path / "host0" / "core-001")
    shutil.rmtree(tmp_path / "host1" / "core-000")
    address = free_address()
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(jax.config.jax_compilation_cache_dir or tmp_path / "jax")  # type: ignore[attr-defined]
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "on_host.py", address, "2", str(host), tmp_path / f"host{host}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        came = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, came, strict=True):
        assert process.returncode == 0, errors
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in came)

    assert [one["tokens"] for one in first["generations"]] == [one["tokens"] for one in second["generations"]]
    seeds = [one["seed"] for one in first["generations"]]
    assert seeds == [one["seed"] for one in second["generations"]]
    expected = decode(model, PROMPTS, max_new_tokens=8, sampling=SAMPLING, seed=seeds, logprobs=True, cores=CORES)
    for ours, theirs in zip(first["generations"], expected, strict=True):
        assert tuple(ours["tokens"]) == theirs.tokens
        assert ours["logprobs"] == pytest.approx(theirs.logprobs, abs=1e-5)

    for refused in (first["refused"], second["refused"]):
        assert refused[0].endswith("ask for something else than host 0: host 1: seed")
        assert refused[1].endswith("ask for something else than host 0: host 1: prompts, stop")
    assert "host 1 of 2 did not come to call 4 of decode within 1 s" in first["refused"][2]


def test_one_host_agrees_with_itself() -> None:
    assert agree({"prompts": [1]}, [5]) == [5]


class Device:
    def __init__(self, host: int):
        self.process_index = host


def test_a_host_without_a_core_is_refused() -> None:
    devices = [Device(host) for host in (0, 0, 1, 1)]
    assert core_mesh(4, devices).size == 4
    assert core_mesh(1, devices).size == 1
    with pytest.raises(PlanError, match=r"cores = 2 are all on 1 of .* hosts; JAX sees 4 devices: use cores = 4"):
        core_mesh(2, devices)


# ---- who is there ----


def test_all_hosts_arrive() -> None:
    address = free_address()
    assert together(*(lambda host=host: roll_call(address, 3, host, 20) for host in (2, 0, 1))) == [None] * 3
    assert (
        together(*(lambda host=host: roll_call(address, 2, host, 20) for host in (1, 0))) == [None] * 2
    )  # at once again


def test_a_host_that_never_comes_is_named_on_every_other() -> None:
    address = free_address()
    missing = "2 of 4 hosts arrived within 1 s; missing: host 1, host 3; start them, or raise timeout_s"
    came = together(*(lambda host=host: roll_call(address, 4, host, 1) for host in (0, 2)))
    assert [str(error) for error in came] == [missing, f"host 2 of 4: {missing}"]
    with pytest.raises(HostsError, match=r"1 of 2 hosts arrived within 0\.5 s; missing: host 1;"):
        start(address, 2, 0, timeout_s=0.5)


def test_a_missing_coordinator_is_named() -> None:
    address, started = free_address(), time.monotonic()
    with pytest.raises(HostsError, match=rf"host 1 of 2: host 0 did not answer at {address} within 0.5 s"):
        roll_call(address, 2, 1, 0.5)
    assert time.monotonic() - started < 5


def test_hosts_that_count_differently_are_named() -> None:
    address = free_address()
    came = together(lambda: roll_call(address, 3, 0, 20), lambda: roll_call(address, 2, 1, 20))
    assert all("host 1 was started with hosts = 2, host 0 with hosts = 3" in str(error) for error in came)
    twice = together(*(lambda host=host: roll_call(address, 3, host, 20) for host in (0, 1, 1)))
    assert all("host 1 arrived twice" in str(error) for error in twice)


def test_strangers_are_left_waiting() -> None:
    """Something that is not a host connects first."""
    address = free_address()

    def stranger() -> None:
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\n\r\n")

    def late() -> None:
        time.sleep(0.6)
        roll_call(address, 2, 1, 20)

    assert together(lambda: roll_call(address, 2, 0, 20), stranger, late) == [None] * 3


def test_a_silent_stranger_keeps_nobody_out() -> None:
    """A connection that is opened and says nothing, as a port scanner's."""
    address = free_address()

    def stranger() -> None:
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))):
            time.sleep(6)

    def late() -> None:
        time.sleep(0.6)
        roll_call(address, 2, 1, 20)

    assert together(lambda: roll_call(address, 2, 0, 20), stranger, late) == [None] * 3


@pytest.mark.parametrize(
    ("coordinator", "hosts", "host", "message"),
    [
        ("here", 2, 0, "coordinator = 'here'; expected ADDRESS:PORT"),
        ("127.0.0.1:1", 2, 2, "host = 2 of hosts = 2; expected 0 to 1"),
    ],
)
def test_wrong_arguments(coordinator: str, hosts: int, host: int, message: str) -> None:
    with pytest.raises(HostsError, match=message):
        roll_call(coordinator, hosts, host, 1)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(HostsError, match=f"host 0 cannot listen on port {port} .* choose another port"):
            roll_call(f"127.0.0.1:{port}", 2, 0, 1)
