"""Attention in plain torch: runs anywhere, serves every trait, and is what other backends are held to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liveroll.attention.layout import LikeLengths, LikeRows, PackedLayout, PagedLayout
from liveroll.model.geometry import AttentionTraits


class ReferenceAttention:
    """An `AttentionBackend` of torch operations."""

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionBackend.packed`."""
        rows, width = len(layout.known), layout.longest
        if rows * width == len(query):
            dense = (rows, width)
            return _attend_causally(
                query.unflatten(0, dense), key.unflatten(0, dense), value.unflatten(0, dense), traits, sinks
            ).flatten(0, 1)
        parts = [
            _attend_causally(_spread(query, group), _spread(key, group), _spread(value, group), traits, sinks)
            for group in layout.groups
        ]
        # Under autocast products are of another dtype than what they are of.
        output = parts[0].new_empty(*query.shape[:-1], value.shape[-1])
        for group, padded in zip(layout.groups, parts, strict=True):
            output[group.token] = padded[group.row, group.column]
        return output

    def paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: PagedLayout,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionBackend.paged`."""
        for stored, given in ((keys, key), (values, value)):
            stored.flatten(0, 1).index_copy_(0, layout.index, given.to(stored.dtype))
        size, output = keys.shape[1], None
        for group in layout.groups(size):
            asked = query if group.rows is None else query[group.rows]
            answered = _attend_pages(asked, keys, values, group, size, traits, sinks)
            if group.rows is None:
                return answered
            if output is None:
                output = answered.new_empty(*query.shape[:-1], value.shape[-1])
            output[group.rows] = answered
        assert output is not None
        return output

    def rows_together(self, group: int, dtype: torch.dtype) -> int:
        """See `AttentionBackend.rows_together`: every row reads all its keys."""
        return 1


def _attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    group: LikeRows,
    page_size: int,
    traits: AttentionTraits,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one token of each row of a group over the row's pages."""
    rows, pages = len(query), group.pages
    for window in (None, traits.window):
        if window not in group.masks:
            position = torch.arange(len(pages) // rows * page_size, device=query.device)
            group.masks[window] = _causal(group.lengths[:, None] - 1, position, window)[:, None]
    beyond = ~group.masks[None].view(rows, -1, 1, 1)

    def gather(stored: Tensor) -> Tensor:
        # What an earlier owner of a page left behind may be NaN or infinite, which no mask can hide.
        return stored.index_select(0, pages).view(rows, -1, *stored.shape[2:]).masked_fill_(beyond, 0)

    return _attend(query[:, None], gather(keys), gather(values), group.masks[traits.window], traits, sinks)[:, 0]


def _spread(packed: Tensor, group: LikeLengths) -> Tensor:
    """Sequences of a group side by side, `[rows, width, ...]`, padding behind them."""
    padded = packed.new_zeros(group.rows, group.width, *packed.shape[1:])
    padded[group.row, group.column] = packed[group.token]
    return padded


def _attend_causally(
    query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits, sinks: Tensor | None
) -> Tensor:
    """`_attend` within rows. Padding stands behind sequences, so the causal mask alone keeps it from being seen."""
    position = torch.arange(query.shape[1], device=query.device)
    return _attend(query, key, value, _causal(position, position, traits.window), traits, sinks)


def _causal(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """`[..., Q, K]`: which keys a query sees. A window of w is the token and the w - 1 before it."""
    ahead = query[..., None] - key
    return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, traits: AttentionTraits, sinks: Tensor | None
) -> Tensor:
    """Attention of `[B, Q, query_heads, dim]` over `[B, K, kv_heads, dim]` under a mask `[..., Q, K]`."""
    batch, width, heads, dim = query.shape
    groups = heads // key.shape[2]
    # The query heads of one KV head become more queries of it, which needs no copy of the keys.
    query = query.reshape(batch, width, -1, groups, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    # A mask of one query broadcasts over the groups; one of several repeats for each group.
    mask = mask if width == 1 else mask.repeat(groups, 1)
    if traits.softcap is None and sinks is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=traits.scale)
    else:
        scores = (query @ key.transpose(-1, -2)) * traits.scale
        if traits.softcap is not None:
            scores = traits.softcap * torch.tanh(scores / traits.softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            column = sinks.view(-1, groups, 1, 1).expand(-1, groups, width, 1).flatten(1, 2)
            scores = torch.cat([scores, column.expand(batch, *column.shape).to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[2]]
        output = weights.to(value.dtype) @ value
    output = output.reshape(batch, -1, groups, width, output.shape[-1])
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3)
