"""What goes in and comes out of a rollout: requests, settings, the batch of completions and its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from liveroll.completion import Completion
    from liveroll.profile import RolloutProfile


@dataclass(frozen=True)
class RolloutRequest:
    """A left-padded batch of prompts.

    Args:
        prompt_ids: `[B, T]` int64 token ids.
        prompt_attention_mask: `[B, T]`, nonzero where `prompt_ids` is a prompt token; zeros only on the left.
    """

    prompt_ids: torch.Tensor
    prompt_attention_mask: torch.Tensor


@dataclass(frozen=True)
class ResolvedSampling:
    """The settings a prompt really ran with: every field of `SamplingConfig` with nothing left to inherit.

    `do_sample` is False where the most likely token is taken; `temperature`, `top_k`, `top_p` and `min_p` are
    then without effect, as in `model.generate`. `first_forbidden_tokens` may not be the first sampled token;
    they come from `begin_suppress_tokens` of the model's generation configuration alone.
    """

    max_new_tokens: int
    min_new_tokens: int
    n: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool
    pad_token_id: int
    include_stop: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    forbidden_tokens: tuple[int, ...] = ()
    first_forbidden_tokens: tuple[int, ...] = ()
    raw_logprobs: bool = False
    top_logprobs: int = 0
    kept_tokens: int = 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may leave tokens out."""
        return self.do_sample and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def told(self) -> tuple[str, ...]:
        """The fields of a completion that tell of each of its tokens."""
        asked = {
            "logprobs": self.logprobs,
            "raw_logprobs": self.raw_logprobs,
            "top_logprobs": self.top_logprobs,
            "kept_tokens": self.kept_tokens and self.truncates,
        }
        return tuple(name for name, wanted in asked.items() if wanted)


@dataclass(frozen=True)
class RolloutStats:
    """What a call did; of a call over a group, what this rank did.

    Attributes:
        route: the prefill route taken, with `auto` by the first admission; `generate` where the call was handed to
            `model.generate` as a fallback; `none` where there was nothing to run.
        fallback_reason: why it was handed over, or None.
        prompts: prompts given.
        new_tokens: tokens that the call sampled.
        prefill_forwards: forwards over prompts.
        prefill_routes: how many of them each route planned; with `auto`, refills may take another one than the
            first admission.
        prefill_tokens: token positions in them, padding included.
        padded_tokens: how many of those were padding, or filled up a captured prefill.
        shared_tokens: prompt tokens that were not run because another sample of the prompt had run them.
        decode_steps: forwards for one new token of every running row.
        preemptions: rows put back in the queue because the pages ran out.
        peak_pages: most KV pages in use at once.
        kv_bytes: bytes of KV storage held.
        captures: decode steps captured during the call.
        replays: captured steps run.
        cascade_steps: decode steps in which attention read keys of a prompt once for several of its samples.
        prefill_captures: packed prefills captured during the call.
        prefill_replays: captured prefills run.
        eager_reason: why decode steps were not captured, or None.
        prefill_eager_reason: why packed prefills were not captured, whatever their length, or None.
        uncompiled_reason: why steps or captured prefills were not compiled although they should be, or None.
        seconds: wall time of the call.
        waited_seconds: those of them in which this rank had nothing left to run and others of its group had.
        profile: where the time went; None unless `RolloutConfig.profile` is set.
    """

    route: str
    prompts: int
    new_tokens: int
    prefill_forwards: int
    prefill_tokens: int
    padded_tokens: int
    shared_tokens: int
    decode_steps: int
    preemptions: int
    peak_pages: int
    kv_bytes: int
    captures: int
    replays: int
    seconds: float
    cascade_steps: int = 0
    prefill_captures: int = 0
    prefill_replays: int = 0
    eager_reason: str | None = None
    prefill_eager_reason: str | None = None
    uncompiled_reason: str | None = None
    fallback_reason: str | None = None
    prefill_routes: dict[str, int] = field(default_factory=dict, hash=False)
    profile: RolloutProfile | None = None
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class RolloutFusion:
    """Projections that decode steps compute as one product, and those that they do not.

    Each is given by the path of the module and the names of its layers, as in
    `model.layers.0.self_attn: q_proj, k_proj, v_proj`.

    Attributes:
        fused: those whose parameters lie together.
        refused: why others do not, in words.
    """

    fused: tuple[str, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes that an engine keeps between calls.

    Attributes:
        kv: the KV pages.
        graphs: the memory pool of the captured steps and prefills.
        static: the running batch, and inputs and outputs of the captured steps and prefills.
    """

    kv: int
    graphs: int
    static: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kv + self.graphs + self.static


@dataclass(frozen=True)
class RolloutBatch:
    """The result of `RolloutEngine.generate`: completions, and the same as tensors.

    Rows are in the order of the prompts, the `n` samples of a prompt beside each other. Completions that the call
    went on with come first.

    Attributes:
        completions: one for each row.
        input_ids: `[N, P + R]` int64: the prompts left-padded to P, then the responses right-padded to R.
        attention_mask: `[N, P + R]` int64, 1 where `input_ids` is a prompt or response token.
        response_start_idx: P, the column where every response begins.
        loss_mask: `[N, R]` int64, 1 where a response token was sampled: 0 at forced tokens and at padding.
        sampling: the resolved settings, one for each prompt; empty where the call was handed to `model.generate`,
            which resolved them by itself.
        stats: what the call did.
        response_logprobs: `[N, R]` float32, `logprobs` of the completions, 0 behind each response; None unless every
            completion has them.
        response_raw_logprobs: the same of `raw_logprobs`.
    """

    completions: tuple[Completion, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_start_idx: int
    loss_mask: torch.Tensor
    sampling: tuple[ResolvedSampling, ...]
    stats: RolloutStats = field(repr=False)
    response_logprobs: torch.Tensor | None = None
    response_raw_logprobs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.completions)
