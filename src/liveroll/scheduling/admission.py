"""When slots are refilled, and in which order requests are admitted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from liveroll.scheduling.request import Request

REFILL_SHARE = 0.25
"""Free slots are refilled once they are this share of all.

A refill costs one prefill of c steps' time however many prompts it takes, and a slot waits idle for it. With S
slots and answers of L tokens, refilling k slots at once loses c / k + k L / (2 S²) steps a prompt, least at
k = S √(2 c / L): about a quarter of the slots for answers of some hundred tokens and prefills of a few steps.
A sample whose prompt has been run needs no prefill, and waits for no other.
"""


def refill_of(slots: int) -> int:
    """Free slots, of so many, at which a scheduler asks its source for more requests."""
    return math.ceil(REFILL_SHARE * slots)


def order_of_admission(requests: Sequence[Request]) -> list[Request]:
    """Requests with the most tokens left to sample first, equal ones as given, but those of one prompt together.

    Long rows that start early leave a short tail (Graham 1969, doi:10.1137/0117039), and samples that follow one
    another share what is there.
    """
    return sorted(requests, key=lambda request: (-request.left, request.group))
