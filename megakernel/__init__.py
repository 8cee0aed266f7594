"""How a model is decoded: a whole generation in one kernel launch.

from megakernel import load, decode, SamplingParams

model = load("k3-nano")
print(decode(model, "Fellow-Citizens of the Senate", max_new_tokens=64))
"""

from megakernel.container import ContainerError
from megakernel.decode import decode
from megakernel.distributed import HostsError
from megakernel.limits import PlanError
from megakernel.loading import LoadedModel, ModelNotFoundError, load
from megakernel.plan import Plan, make_plan
from megakernel.races import RaceError
from megakernel.result import Generation, NumericsError, Piece, Speculation, Timing
from megakernel.target import TARGETS, Target, find_target
from model.sampling import SamplingParams

__all__ = [
    "TARGETS",
    "ContainerError",
    "Generation",
    "HostsError",
    "LoadedModel",
    "ModelNotFoundError",
    "NumericsError",
    "Piece",
    "Plan",
    "PlanError",
    "RaceError",
    "SamplingParams",
    "Speculation",
    "Target",
    "Timing",
    "decode",
    "find_target",
    "load",
    "make_plan",
]
