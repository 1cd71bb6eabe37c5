"""Sampling in kernels: what `liveroll.decode.sampler` does in plain torch, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from liveroll.decode.sampler import Drawn, Variant
from liveroll.decode.state import RowState
from liveroll.kernels.draw import Source, draw
from liveroll.kernels.report import list_kept, rank
from liveroll.kernels.scores import score
from liveroll.kernels.truncate import find_bounds
from liveroll.scheduling.details import Wanted


def sample_fused(logits: Tensor, state: RowState, slots: Tensor, variant: Variant, wanted: Wanted) -> Drawn:
    """Draw one token a row; as `liveroll.decode.sampler.sample`.

    Two kernels draw by temperature alone. Penalties and filters take five more, whatever the settings of the rows, and
    return at once for rows without filters.
    """
    if variant is Variant.FULL:
        scores = score(logits, state, slots)
        source = Source(scores.values, state.sampled_size, find_bounds(scores, state, slots))
    else:
        source = Source(logits, state.sampled_size, None)
    details = torch.empty(wanted.rows, len(slots), dtype=torch.int32, device=logits.device)
    top, kept = int(wanted.raw), wanted.numbers - 1
    raw = details[0].view(torch.float32) if wanted.raw else None
    drawn = draw(logits, source, state, slots, raw, counted=wanted.kept > 0)
    if wanted.top:
        ids, logprobs = details[top : top + wanted.top], details[top + wanted.top : top + 2 * wanted.top]
        rank(source, drawn, state, slots, ids, logprobs.view(torch.float32))
    if wanted.kept:
        list_kept(source, drawn, state, slots, details[kept], details[kept + 1 :])
    return Drawn(drawn.tokens, drawn.logprobs, details if wanted.rows else None)
