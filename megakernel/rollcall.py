"""Who is there: hosts find each other before JAX starts, because JAX ends the process when one never comes.

Host 0 listens at the coordinator's address. Every other host connects and says which it is; host 0 answers all of them
at once, with what is wrong or with nothing, and frees the address for JAX's own coordinator.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

_RETRY_S = 0.2
_ANSWER_SLACK_S = 10
_PATIENCE_S = 2.0
"""A host that has connected waits so much longer than its own time-out for host 0, which may have started later."""


class HostsError(RuntimeError):
    """Hosts that did not arrive, or do not agree; the message says which."""


def roll_call(coordinator: str, hosts: int, host: int, timeout_s: float) -> None:
    """Returns once all hosts are there.

    Args:
      coordinator: `address:port` of host 0, the same on every host.
      timeout_s: how long to wait for the others.

    Raises:
      HostsError: hosts are missing after `timeout_s`, or two say that they are the same, or count hosts differently.
    """
    address, _, port = coordinator.rpartition(":")
    if not address or not port.isdigit():
        raise HostsError(f"coordinator = {coordinator!r}; expected ADDRESS:PORT of host 0")
    if hosts < 1 or not 0 <= host < hosts:
        raise HostsError(f"host = {host} of hosts = {hosts}; expected 0 to {max(hosts - 1, 0)}")
    deadline = time.monotonic() + timeout_s
    if host == 0:
        _call(int(port), hosts, timeout_s, deadline)
    else:
        _answer(address.strip("[]"), int(port), hosts, host, timeout_s, deadline)


def _call(port: int, hosts: int, timeout_s: float, deadline: float) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(port))
        arrived: dict[int, socket.socket] = {}
        others: list[socket.socket] = []
        fault = ""
        while len(arrived) < hosts - 1 and not fault:
            caller, found = _next_caller(listener, deadline)
            if caller is None:
                missing = sorted(set(range(1, hosts)) - set(arrived))
                fault = (
                    f"{1 + len(arrived)} of {hosts} hosts arrived within {timeout_s:g} s; missing: "
                    f"{', '.join(f'host {number}' for number in missing)}; start them, or raise timeout_s"
                )
                break
            others.append(stack.enter_context(caller))
            fault = _fault_of(found, hosts, arrived)
            if not fault:
                arrived[found["host"]] = caller
        for caller in others:
            _send(caller, {"fault": fault})
        for caller in others:  # whoever closes first keeps the address busy for a while: not this side
            caller.settimeout(_RETRY_S)
            _receive(caller)
    if fault:
        raise HostsError(fault)


def _fault_of(found: dict[str, int], hosts: int, arrived: dict[int, socket.socket]) -> str:
    if found["hosts"] != hosts:
        return f"host {found['host']} was started with hosts = {found['hosts']}, host 0 with hosts = {hosts}"
    if found["host"] in arrived:
        return f"host {found['host']} arrived twice; every host needs a number of its own"
    return ""


def _listener(port: int) -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise HostsError(f"host 0 cannot listen on port {port} ({error}); choose another port") from error


def _next_caller(listener: socket.socket, deadline: float) -> tuple[socket.socket | None, dict[str, int]]:
    """The next host that says who it is, or None at the deadline; whoever says something else is not a host."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            break
        caller.settimeout(_PATIENCE_S)  # a host says who it is at once; whoever is silent must not keep others out
        found = _receive(caller)
        if found.keys() == {"host", "hosts"}:
            return caller, found
        caller.close()
    return None, {}


def _answer(address: str, port: int, hosts: int, host: int, timeout_s: float, deadline: float) -> None:
    found: dict[str, str] = {}
    while "fault" not in found:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HostsError(
                f"host {host} of {hosts}: host 0 did not answer at {address}:{port} within {timeout_s:g} s; is it "
                "running, and is that its address? Start it, or raise timeout_s"
            )
        try:
            with socket.create_connection((address, port), timeout=left) as caller:
                caller.settimeout(left + _ANSWER_SLACK_S)
                _send(caller, {"host": host, "hosts": hosts})
                found = _receive(caller)
        except OSError:
            pass
        if "fault" not in found:
            time.sleep(_RETRY_S)
    if found["fault"]:
        raise HostsError(f"host {host} of {hosts}: {found['fault']}")


def _send(to: socket.socket, message: object) -> None:
    to.sendall(f"{json.dumps(message)}\n".encode())


def _receive(caller: socket.socket) -> dict:
    """One message; an empty one if there is none that can be read."""
    try:
        found = json.loads(caller.makefile("rb").readline() or b"{}")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
