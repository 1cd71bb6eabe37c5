"""What to generate for a prompt: frozen, and validated when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from liveroll.config_checks import (
    MOST_ROWS,
    check_biases,
    check_flag,
    check_number,
    check_tuple,
    check_whole,
    naming_unknown_options,
)
from liveroll.errors import ConfigError

# Logits divided by less, or multiplied by more, leave the range of fp32.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
LEAST_PENALTY, MOST_PENALTY = 1e-6, 1e6
# Far more than any logit, and far from the range of fp32.
_MOST_ADDED = 1e6
# The alternatives of a token are found one by one, and its kept ids are copied to the host in every step.
_MOST_ALTERNATIVES = 32
_MOST_KEPT = 4096


@naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What to generate for a prompt.

    A field left at None takes the value that `model.generate` would take from the model's generation
    configuration, so a checkpoint that ships `repetition_penalty=1.05` gets it; a given value wins.

    Args:
        max_new_tokens: tokens to sample, at most. In a response that an earlier call began it counts those of before
            too; forced tokens do not count.
        min_new_tokens: tokens before which no stop token may be chosen, counted in the same way.
        n: samples of each prompt, which is prefilled once for all of them; up to 2^20. Of no effect on completions
            that are continued.
        temperature: divides the logits; 0 is greedy, any other value samples and is between 1e-6 and
            1e6.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens whose probability is at least this share of the most likely one's; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in prompt or response;
            between 1e-6 and 1e6.
        presence_penalty: subtracted from the logits of tokens already in the response. Not inherited.
        frequency_penalty: subtracted from the logit of a token once for each time that it stands in the response. Not
            inherited.
        logit_bias: added to the logits of these token ids, before anything else; `sequence_bias` of the generation
            configuration is inherited.
        forbidden_tokens: ids that are never sampled; `suppress_tokens` and `bad_words_ids` of the generation
            configuration are inherited.
        stop_token_ids: tokens that end a response, as `eos_token_id` does; () never stops early.
        stop: strings that end a response at the sampled token that completes one; needs a tokenizer. Special
            tokens count with their text.
        include_stop: whether the text of a completion keeps the stop string that ended it. The tokens always do.
        seed: seed of the samples. The same seed and prompt give the same samples, whatever shares the batch.
            Completions that are continued keep the random streams they have.
        logprobs: return the log-probability of each sampled token.
        raw_logprobs: return each sampled token's log-probability in the softmax of the model's own logits too.
        top_logprobs: return this many of the most likely alternatives of each token, at most 32.
        kept_tokens: return the ids that top-k, top-p and min-p kept for each token, where they are at most this many;
            at most 4096.

    Raises:
        ConfigError: a value is not finite, negative or otherwise out of range.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    forbidden_tokens: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] | str = ()
    include_stop: bool = True
    seed: int | None = None
    logprobs: bool = True
    raw_logprobs: bool = False
    top_logprobs: int = 0
    kept_tokens: int = 0

    def __post_init__(self) -> None:
        check_whole(self, "max_new_tokens", low=1, optional=True)
        check_whole(self, "min_new_tokens", low=0, optional=True)
        check_whole(self, "n", low=1, high=MOST_ROWS)
        check_number(self, "temperature", low=0.0, high=MOST_TEMPERATURE, optional=True)
        if self.temperature and self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"SamplingConfig.temperature must be 0, for greedy, or at least {LEAST_TEMPERATURE:g}, "
                f"not {self.temperature:g}"
            )
        check_whole(self, "top_k", low=0, optional=True)
        check_number(self, "top_p", low=0.0, high=1.0, low_open=True, optional=True)
        check_number(self, "min_p", low=0.0, high=1.0, optional=True)
        check_number(self, "repetition_penalty", low=LEAST_PENALTY, high=MOST_PENALTY, optional=True)
        check_number(self, "presence_penalty", low=-_MOST_ADDED, high=_MOST_ADDED)
        check_number(self, "frequency_penalty", low=-_MOST_ADDED, high=_MOST_ADDED)
        check_whole(self, "seed", low=0, optional=True)
        check_flag(self, "include_stop")
        check_flag(self, "logprobs")
        check_flag(self, "raw_logprobs")
        check_whole(self, "top_logprobs", low=0, high=_MOST_ALTERNATIVES)
        check_whole(self, "kept_tokens", low=0, high=_MOST_KEPT)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", check_biases(self, "logit_bias", high=_MOST_ADDED))
        for name in ("forbidden_tokens", "stop_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_tuple(self, name, int))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", check_tuple(self, "stop", str))
        if "" in self.stop:
            raise ConfigError("stop holds an empty string, which every response contains")
        low, high = self.min_new_tokens, self.max_new_tokens
        if low is not None and high is not None and low > high:
            raise ConfigError(f"min_new_tokens={low} is more than max_new_tokens={high}")
