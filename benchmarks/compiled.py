"""What the TPU compiler makes of a model's launch on each TPU generation, as a Markdown table; no TPU is used.

Bundles are *compiled*: VLIW instructions of one turn of each loop, from the compiler's schedule. The floor of a step is
*predicted*: the bytes that it is expected to move, over the peak bandwidth of one core's memory.

    python benchmarks/compiled.py [--model k3-nano] [--context 4096] [--sequences 1 8]
"""

from __future__ import annotations

import argparse

import jax
from tqdm import tqdm

from megakernel import TARGETS, PlanError, make_plan
from megakernel.__main__ import find_config
from megakernel.aot import AotError, compile_for
from megakernel.cost import predict
from megakernel.report import duration, size

_LOOPS = ("round", "layer", "KDA", "MLA", "MoE", "dense", "draw (if sampled)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles a launch for each TPU generation.")
    parser.add_argument("--model", default="k3-nano")
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    config = find_config(options.model)
    targets = [target for target in TARGETS.values() if target.topology]
    print(f"{config.name}, JAX {jax.__version__}\n")
    head = ["target", "sequences", "VMEM planned", "floor of a step (predicted)", *_LOOPS]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for target in tqdm(targets, desc="target", leave=False, disable=None):
        for sequences in options.sequences:
            cells = [target.name, str(sequences)]
            try:
                plan = make_plan(config, target, sequences=sequences, context=options.context)
                report = compile_for(plan, schedule=True)
            except (PlanError, AotError) as error:
                print(f"| {' | '.join(cells)} | refused: {error} |")
                continue
            assert report.schedule is not None
            loops = {loop.name: f"{loop.total:,}" for _, loop in report.schedule.walk()}
            cells += [size(report.vmem_planned), duration(predict(plan).floor_seconds)]
            print(f"| {' | '.join([*cells, *(loops.get(name, '-') for name in _LOOPS)])} |")


if __name__ == "__main__":
    main()
