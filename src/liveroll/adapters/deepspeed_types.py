"""DeepSpeed's rollout requests and batches, by its names and in its order."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from liveroll import types
from liveroll.errors import PromptError


@dataclass
class RolloutRequest:
    """Prompts, padded on the left.

    Attributes:
        prompt_ids: `[B, T_p]` int64 token ids.
        prompt_attention_mask: `[B, T_p]`, nonzero at the tokens of prompts.

    Raises:
        PromptError: a shape that is not that.
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(ids.shape) for ids in (self.prompt_ids, self.prompt_attention_mask)]
        if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
            raise PromptError(f"prompt_ids {shapes[0]} and prompt_attention_mask {shapes[1]} must both be [B, T_p]")


@dataclass
class RolloutBatch:
    """What `HybridEngineRollout.generate` returns.

    Attributes:
        input_ids: `[B', T_p + T_r]` int64: the prompts as they were given, then the responses, right-padded.
        attention_mask: `[B', T_p + T_r]`: the mask as it was given, then 1 at every response token.
        response_start_idx: `[B']` int64: T_p for every row.
        rollout: the same with more: completions, log-probabilities, statistics.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor
    rollout: types.RolloutBatch | None = field(default=None, repr=False)

    @property
    def batch_size(self) -> int:
        """Rows: prompts times samples of each."""
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """Tokens of a row, padding included."""
        return int(self.input_ids.shape[1])
