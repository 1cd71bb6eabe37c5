"""A training step of GRPO in plain PyTorch, on what a rollout returned."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from liveroll.tools.grpo import group_advantages, grpo_loss, policy_logprobs, rollout_logprobs
from liveroll.types import RolloutBatch


class GRPOTrainer:
    """Trains a model on its own rollouts, with AdamW.

    Args:
        model: the causal language model that writes the rollouts.
        learning_rate: of AdamW, after the warm-up.
        warm_up: gradient steps over which the learning rate rises. The first steps of Adam are as long as the
            learning rate whatever the gradient, and a long step on a noisy gradient undoes what the model knows.
        mini_batches: gradient steps on one rollout. The first is on policy; the ratio and its clipping correct
            the others, whose answers were written a step or two ago.
        seed: of the split into mini-batches.
    """

    def __init__(
        self, model: Any, *, learning_rate: float = 1.5e-4, warm_up: int = 20, mini_batches: int = 2, seed: int = 0
    ) -> None:
        self.model = model
        self.mini_batches = mini_batches
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warm_up))
        self.generator = torch.Generator().manual_seed(seed)

    def learn(self, batch: RolloutBatch, rewards: torch.Tensor, group_size: int) -> float:
        """Take the gradient steps of one rollout, sampled at temperature 1.

        Args:
            batch: the rollout, with logprobs.
            rewards: `[N]` float, one for each row of it.
            group_size: answers to a prompt.

        Returns:
            The largest difference between a log-probability the engine sampled with and the one computed here
            before the first step: zero up to rounding as long as both see the same weights.
        """
        advantages = group_advantages(rewards, group_size).to(batch.input_ids.device)
        sampled_with = rollout_logprobs(batch)
        start = batch.response_start_idx
        gap = 0.0
        for step, rows in enumerate(self._split(advantages)):
            mask = batch.attention_mask[rows, start:]
            logprobs = policy_logprobs(self.model, batch.input_ids[rows], batch.attention_mask[rows], start)
            loss = grpo_loss(logprobs, sampled_with[rows], advantages[rows], mask)
            self.optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            if step == 0:
                gap = ((logprobs - sampled_with[rows]).abs() * mask).max().item()
        return gap

    def _split(self, advantages: torch.Tensor) -> list[torch.Tensor]:
        """Deal the rows out at random, without those that could not move the model: their advantage is zero."""
        useful = advantages.nonzero()[:, 0]
        order = torch.randperm(len(useful), generator=self.generator).to(useful.device)
        return [rows for rows in useful[order].chunk(self.mini_batches) if len(rows)]
