"""Several hosts, each with some of the cores: starting them, and making sure that all of them ask for the same."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import jax

from megakernel.rollcall import HostsError, roll_call

__all__ = ["HostsError", "agree", "start"]
_WAIT_S = 300.0
_started: dict[str, float] = {"timeout_s": _WAIT_S}
_turns = itertools.count()


def start(coordinator: str, hosts: int, host: int, timeout_s: float = _WAIT_S) -> None:
    """Joins this process with those of the other hosts; before JAX is used, once, on every host.

    From then on `jax.devices()` are those of all hosts, and every host makes the same calls of `decode`, with the same
    arguments; each of them returns the result.

    Args:
      coordinator: `address:port` of host 0.
      hosts: how many there are.
      host: which one this is, from 0.
      timeout_s: how long to wait for the other hosts, here and before each `decode`.

    Raises:
      HostsError: hosts that did not arrive in time, by number.
    """
    roll_call(coordinator, hosts, host, timeout_s)
    jax.distributed.initialize(coordinator, hosts, host, initialization_timeout=max(1, round(timeout_s)))
    _started["timeout_s"] = timeout_s


def agree(asked: Mapping[str, Any], from_first: Any) -> Any:
    """Compares what every host asks for; returns host 0's `from_first`. On one host: its own, at once.

    Args:
      asked: by argument; compared by representation, which must not depend on the process.
      from_first: JSON, may differ between hosts.

    Raises:
      HostsError: hosts that ask for something else than host 0, and for what, or that do not come within `timeout_s`.
    """
    hosts, turn = jax.process_count(), next(_turns)
    if hosts == 1:
        return from_first
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in asked.items()}
    told = _tell_all(turn, json.dumps({"asked": digests, "first": from_first}))
    first = json.loads(told[0])
    others = {
        host: [name for name in digests if found["asked"].get(name) != first["asked"].get(name)]
        for host, found in enumerate(map(json.loads, told))
    }
    differing = {host: names for host, names in others.items() if names}
    if differing:
        which = "; ".join(f"host {host}: {', '.join(names)}" for host, names in differing.items())
        raise HostsError(f"all hosts must ask for the same, and these ask for something else than host 0: {which}")
    return first["first"]


def _tell_all(turn: int, message: str) -> list[str]:
    """This host's message to all others, and theirs, through JAX's coordinator."""
    from jax._src.distributed import global_state  # JAX has no public door to it

    client: Any = global_state.client
    hosts = jax.process_count()
    if turn >= 2:  # whoever has come to the turn before has read everything of the one before that
        client.key_value_delete(f"one-launch/{turn - 2}/{jax.process_index()}")
    client.key_value_set(f"one-launch/{turn}/{jax.process_index()}", message)
    told, timeout_s = [], _started["timeout_s"]
    for host in range(hosts):
        try:
            told.append(client.blocking_key_value_get(f"one-launch/{turn}/{host}", round(1000 * timeout_s)))
        except jax.errors.JaxRuntimeError as error:
            raise HostsError(
                f"host {host} of {hosts} did not come to call {turn + 1} of decode within {timeout_s:g} s; every host "
                "must make the same calls; see whether it stopped with an error"
            ) from error
    return told
