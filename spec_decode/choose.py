"""From what a user writes to a drafter with its weights, checked against the target."""

from __future__ import annotations

from pathlib import Path

from megakernel.drafting import Draft
from megakernel.limits import PlanError
from megakernel.loading import LoadedModel
from spec_decode.dspark.checkpoint import load_drafter
from spec_decode.dspark.drafter import DSparkDrafter
from spec_decode.ngram import NGramDrafter

SHIPPED = Path(__file__).parent / "checkpoints"


def choose_drafter(draft: str | Path, model: LoadedModel) -> Draft | None:
    """Finds a drafter for `model`.

    Args:
      draft: "none"; "ngram" (prompt lookup, no weights); "dspark" (the shipped drafter of this model); or the folder of
        a DSpark checkpoint.

    Raises:
      PlanError: no such drafter, or it does not fit the model (the message has the two numbers).
      DrafterError, ConfigError: its folder is damaged or asks for something that is not implemented.
    """
    if draft == "none":
        return None
    if draft == "ngram":
        return Draft(NGramDrafter(), {})
    folder = SHIPPED / f"{model.config.name}-dspark" if draft == "dspark" else Path(draft)
    if not folder.is_dir():
        shipped = ", ".join(sorted(path.name for path in SHIPPED.glob("*-dspark")))
        raise PlanError(
            f"draft = {str(draft)!r}: no drafter for {model.config.name}; known: 'none', 'ngram', 'dspark' "
            f"for a model that has one (shipped: {shipped}) and the folder of a DSpark checkpoint"
        )
    key = ("drafter", str(folder.resolve()))
    if key not in model.derived:
        config, weights = load_drafter(folder)
        model.derived[key] = Draft(DSparkDrafter(config), weights)
    found: Draft = model.derived[key]
    found.drafter.check(model.config)
    return found
