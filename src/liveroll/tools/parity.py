"""How near the engine's log-probabilities are to the trainer's: sampled tokens against forwards over what came out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from liveroll.engine import RolloutEngine
from liveroll.model.versions import keeps_chosen_logits
from liveroll.prompts import Prompts
from liveroll.sampling_config import SamplingConfig
from liveroll.types import RolloutBatch

RATIO = 0.1
"""A token's ratio of probabilities is far from 1 when it is off by more than this."""

ROUNDING = 2e-5
"""A mean difference of log-probabilities that rounding in float32 explains in any model."""

_MOST = {torch.float32: 0.01, torch.float64: 0.01}
_MOST_IN_HALF = 0.1


def plain_sampling(max_new_tokens: int, n: int, seed: int) -> SamplingConfig:
    """Settings that draw from the model's own distribution: temperature 1, and nothing penalised or left out."""
    return SamplingConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        n=n,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        logit_bias=(),
        forbidden_tokens=(),
        seed=seed,
    )


@dataclass(frozen=True)
class LogprobGap:
    """How far the log-probabilities of some sampled tokens are from others of the same tokens.

    Attributes:
        tokens: how many were compared.
        mean: mean of the absolute differences.
        p99: 99 in 100 are at most this.
        max: the largest.
        kl: mean of `exp(d) - 1 - d` for differences d, the k3 estimate of the divergence of the second distribution
            from the first, which the tokens were drawn from (Schulman 2020, joschu.net/blog/kl-approx.html).
        outside: share of tokens whose ratio of probabilities is outside of [0.9, 1.1].
    """

    tokens: int
    mean: float
    p99: float
    max: float
    kl: float
    outside: float

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> LogprobGap:
        """The gap between log-probabilities `[T]` in the distribution drawn from, and `[T]` in another."""
        difference = theirs.double() - ours.double()
        apart = difference.abs()
        return cls(
            tokens=len(apart),
            mean=apart.mean().item(),
            # Of a finite sample, and without interpolation, so that a value that was seen stands there.
            p99=apart.sort().values[math.ceil(0.99 * len(apart)) - 1].item(),
            max=apart.max().item(),
            kl=(difference.expm1() - difference).mean().item(),
            outside=(difference.expm1().abs() > RATIO).double().mean().item(),
        )


@dataclass(frozen=True)
class Parity:
    """What `measure_parity` found.

    Attributes:
        dtype: of the model.
        sequences: how many were compared.
        alone: the engine against the trainer's forward over one sequence at a time.
        together: the engine against the trainer's forward over all of them in one padded batch.
        trainer: these two forwards against one another, which is how far the trainer is from itself.
        engine_exact: the engine against the same weights in float32; None where the model is in float32.
        trainer_exact: the trainer's forward over one sequence at a time against the same.
        batch: what was generated.
    """

    dtype: torch.dtype
    sequences: int
    alone: LogprobGap
    together: LogprobGap
    trainer: LogprobGap
    engine_exact: LogprobGap | None
    trainer_exact: LogprobGap | None
    batch: RolloutBatch

    @property
    def gaps(self) -> dict[str, LogprobGap]:
        """All that was measured, by name."""
        named = {
            "engine, trainer row by row": self.alone,
            "engine, trainer in one batch": self.together,
            "trainer, both ways": self.trainer,
            "engine, float32": self.engine_exact,
            "trainer, float32": self.trainer_exact,
        }
        return {name: gap for name, gap in named.items() if gap is not None}

    @property
    def enough(self) -> float:
        """A mean difference that rounding explains: twice what the trainer's own forwards have, in whatever way.

        But no more than 0.01, in half precision 0.1: a trainer that is so far from itself has something random in it.
        """
        own = [gap.mean for gap in (self.trainer, self.trainer_exact) if gap is not None]
        return min(max(ROUNDING, *(2 * mean for mean in own)), _MOST.get(self.dtype, _MOST_IN_HALF))

    @property
    def near(self) -> bool:
        """Whether the engine is as near to the trainer as rounding lets it be."""
        return self.alone.mean <= self.enough and self.together.mean <= self.enough

    @property
    def verdict(self) -> str:
        """One sentence."""
        mean = max(self.alone.mean, self.together.mean)
        dtype = str(self.dtype).removeprefix("torch.")
        differ = (
            f"log-probabilities of sampled tokens differ by {mean:.2g} on average, and rounding in {dtype} explains"
        )
        if self.near:
            return f"The engine is as near to the trainer as rounding lets it be: {differ} up to {self.enough:.2g}."
        return f"The engine is far from the trainer: {differ} {self.enough:.2g} at most; something else is at work."


@torch.no_grad()
def forced_logprobs(model: PreTrainedModel, batch: RolloutBatch, rows: int) -> Tensor:
    """Log-probabilities of the response tokens of a batch, by the model's own forward in the mode it is in.

    Args:
        model: the model that is trained.
        batch: its rows are the sequences, prompts left-padded and responses right-padded.
        rows: sequences in one forward; columns that are padding in all of them are left out.

    Returns:
        `[N, R]` float32 on the CPU, 0 behind each response. The softmax is taken in float64.
    """
    found = torch.zeros(batch.loss_mask.shape)
    for first in range(0, len(batch), rows):
        chosen = slice(first, first + rows)
        used = batch.attention_mask[chosen].any(0).nonzero()[:, 0]
        columns = slice(int(used[0]), int(used[-1]) + 1)
        ids, mask = batch.input_ids[chosen, columns], batch.attention_mask[chosen, columns]
        length = columns.stop - batch.response_start_idx
        arguments: dict[str, Any] = {"logits_to_keep": length + 1} if keeps_chosen_logits(model) else {}
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **arguments).logits[
            :, -length - 1 : -1
        ]
        for row, (own, tokens) in enumerate(zip(logits, ids[:, ids.shape[1] - length :], strict=True)):
            # In float32 torch's log_softmax on a CPU is off by 3e-5 over a vocabulary of 262144.
            chosen_logprobs = own.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            found[first + row, :length] = chosen_logprobs.cpu()
    return found * batch.attention_mask[:, batch.response_start_idx :].cpu()


def measure_parity(engine: RolloutEngine, model: PreTrainedModel, prompts: Prompts, sampling: SamplingConfig) -> Parity:
    """Sample with the engine, and run the model over what came out.

    Args:
        engine: of the model.
        model: in the mode that the trainer's forward is to have. It is left in float32.
        prompts: as for `RolloutEngine.generate`.
        sampling: `plain_sampling`.

    Raises:
        LiverollError: as `RolloutEngine.generate` raises.
    """
    dtype = model.dtype
    batch = engine.generate(prompts, sampling)
    assert batch.response_logprobs is not None
    sampled = batch.loss_mask.bool().cpu()
    ours = batch.response_logprobs.cpu()[sampled]
    alone, together = (forced_logprobs(model, batch, rows)[sampled] for rows in (1, len(batch)))
    exact = None
    if dtype.itemsize < torch.float32.itemsize:
        engine.release()
        exact = forced_logprobs(model.float(), batch, 1)[sampled]
    return Parity(
        dtype=dtype,
        sequences=len(batch),
        alone=LogprobGap.of(ours, alone),
        together=LogprobGap.of(ours, together),
        trainer=LogprobGap.of(alone, together),
        engine_exact=None if exact is None else LogprobGap.of(ours, exact),
        trainer_exact=None if exact is None else LogprobGap.of(alone, exact),
        batch=batch,
    )
