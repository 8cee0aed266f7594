"""Draft, verify, accept: drafters that run inside the launch and leave its output as it is.

from megakernel import decode, load

decode(load("k3-nano"), "Fellow-Citizens", draft="dspark", draft_tokens=7)
"""

from spec_decode.choose import choose_drafter
from spec_decode.dspark.drafter import DSparkDrafter
from spec_decode.ngram import NGramDrafter

__all__ = ["DSparkDrafter", "NGramDrafter", "choose_drafter"]
