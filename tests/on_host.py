"""One host of several, as `test_hosts.py` starts it: python on_host.py COORDINATOR HOSTS HOST CONTAINER

Prints one line of JSON: what this host came to.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax

from megakernel import HostsError, LoadedModel, SamplingParams, decode, distributed, load

PROMPTS = [[7, 45, 300, 122, 9], [11, 3]]
SAMPLING = SamplingParams(temperature=0.9, top_p=0.9)
CORES = 2


def main(coordinator: str, hosts: int, host: int, container: Path) -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", CORES // hosts)
    distributed.start(coordinator, hosts, host, timeout_s=120)
    model = load(container)
    found = decode(model, PROMPTS, max_new_tokens=8, sampling=SAMPLING, logprobs=True, cores=CORES)
    refused = [
        refusal(model, PROMPTS, seed=host),
        refusal(model, [[1 + host]], stop=host),
    ]
    if host == 0:
        distributed._started["timeout_s"] = 1
        refused.append(refusal(model, PROMPTS))
    return {"generations": [dataclasses.asdict(one) for one in found], "refused": refused}


def refusal(model: LoadedModel, prompts: list[list[int]], **arguments: Any) -> str:
    """What `decode` says when the hosts do not agree."""
    try:
        decode(model, prompts, max_new_tokens=8, cores=CORES, **arguments)
    except HostsError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
