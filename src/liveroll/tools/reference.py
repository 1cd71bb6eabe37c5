"""What `model.generate` says to each prompt alone: the tokens that every route is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from liveroll.model.generate_arguments import to_generation_config
from liveroll.model.guard import ModelGuard
from liveroll.model.versions import prepared_for_generate
from liveroll.types import ResolvedSampling, RolloutBatch


@dataclass(frozen=True)
class Reference:
    """How much of a workload is checked: eager generation of one prompt after another is slow.

    Args:
        prompts: prompts of a workload, spread over its lengths; None for all.
        tokens: the first tokens of each response; None for all.
    """

    prompts: int | None = None
    tokens: int | None = None

    def of(self, model: PreTrainedModel, prompts: Sequence[list[int]], budget: int) -> dict[int, list[int]]:
        """Greedy responses to the prompts that are checked, by their position.

        Args:
            model: the model; left as found.
            prompts: the workload's.
            budget: tokens to generate, at most; stop tokens are off.
        """
        count = budget if self.tokens is None else min(budget, self.tokens)
        settings = ResolvedSampling(
            max_new_tokens=count,
            min_new_tokens=0,
            n=1,
            do_sample=False,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            stop_token_ids=(),
            stop=(),
            seed=None,
            logprobs=False,
            pad_token_id=0,
        )
        responses: dict[int, list[int]] = {}
        with ModelGuard(model, training=False).rollout():
            for index in self._chosen(prompts):
                ids = torch.tensor([prompts[index]], device=model.device)
                with prepared_for_generate(model, to_generation_config(settings)):
                    output = model.generate(ids, attention_mask=torch.ones_like(ids))
                responses[index] = output[0, ids.shape[1] :].tolist()
        return responses

    def agreement(self, expected: dict[int, list[int]], batch: RolloutBatch) -> float:
        """Share of the checked tokens of a batch that are as expected."""
        same = total = 0
        for index, response in expected.items():
            tokens = batch.completions[index].token_ids
            checked = response[: len(tokens)]
            same += sum(a == b for a, b in zip(checked, tokens, strict=False))
            total += len(checked)
        return same / total if total else 1.0

    def _chosen(self, prompts: Sequence[list[int]]) -> list[int]:
        """Positions of prompts evenly spread over their lengths, the shortest and the longest among them."""
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        if self.prompts is None or self.prompts >= len(prompts):
            return by_length
        if self.prompts <= 1:
            return by_length[len(prompts) - self.prompts :]
        step = (len(prompts) - 1) / (self.prompts - 1)
        return [by_length[round(place * step)] for place in range(self.prompts)]
