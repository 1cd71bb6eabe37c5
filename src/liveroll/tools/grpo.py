"""Group relative policy optimisation (GRPO): from rollouts and rewards to a loss.

The method is that of "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (Shao et
al., 2024, arXiv:2402.03300), without its KL term. Every prompt is answered several times; an answer is good or bad
compared with the other answers to the same prompt, so no value model is needed.
"""

from __future__ import annotations

from typing import Any

import torch

from liveroll.types import RolloutBatch


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Compare each reward with its group: `(reward - mean) / standard deviation` (section 4.1.2 of the paper).

    A group whose answers all earned the same teaches nothing: its advantages are zero.

    Args:
        rewards: `[N]` float, the answers to one prompt beside each other.
        group_size: answers to a prompt; N is a multiple of it.

    Returns:
        `[N]` advantages, of the dtype of `rewards`.
    """
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    # Compared, not computed: rounding leaves equal rewards such as 0.1 a spread of almost, not exactly, nothing.
    agrees = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    spread = groups.std(dim=1, keepdim=True, correction=0)
    return (centred / spread).masked_fill(agrees, 0.0).reshape(-1)


def rollout_logprobs(batch: RolloutBatch) -> torch.Tensor:
    """Give the log-probabilities the engine sampled with, `[N, R]` float32, zero after each response."""
    if batch.response_logprobs is None:
        raise ValueError("the rollout holds no logprobs; generate it with SamplingConfig(logprobs=True)")
    return batch.response_logprobs


def policy_logprobs(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_start_idx: int, temperature: float = 1.0
) -> torch.Tensor:
    """Compute the log-probability of every response token under the model being trained, with gradient.

    Args:
        model: a causal language model.
        input_ids: `[N, P + R]` int64, prompts left-padded, responses right-padded.
        attention_mask: `[N, P + R]`, 1 where `input_ids` is a prompt or response token.
        response_start_idx: P.
        temperature: the one the responses were sampled with.

    Returns:
        `[N, R]` float32; meaningless where the mask is zero.
    """
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
    # The logits at one token predict the next, hence one column to the left.
    logits = output.logits[:, response_start_idx - 1 : -1].float() / temperature
    tokens = input_ids[:, response_start_idx:, None]
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens)[..., 0]


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float = 0.2,
) -> torch.Tensor:
    """Compute the clipped surrogate loss, averaged over the response tokens of all answers.

    With `ratio = exp(logprobs - old_logprobs)` a token costs `-min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)`
    (equation 3 of the paper; the clipping is that of PPO, Schulman et al., 2017, arXiv:1707.06347, equation 7). On
    policy the ratio is one and the gradient is that of the plain policy gradient, `-A * d logprobs`. Each token
    weighs the same, as in DAPO (Yu et al., 2025, arXiv:2503.14476), so a long answer is not favoured when wrong.

    Args:
        logprobs: `[N, R]` under the model being trained, with gradient.
        old_logprobs: `[N, R]` under the model that wrote the answers.
        advantages: `[N]`.
        mask: `[N, R]`, nonzero at response tokens; other positions contribute neither value nor gradient.
        clip: how far the ratio may move from one before a token stops pushing.

    Returns:
        A scalar to minimise.
    """
    inside = mask != 0
    ratio = (logprobs - old_logprobs).masked_fill(~inside, 0.0).exp()
    gain = advantages[:, None]
    tokens = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return tokens.masked_fill(~inside, 0.0).sum() / inside.sum().clamp(min=1)
