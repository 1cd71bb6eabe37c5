"""What to generate for a prompt: frozen, and validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from liveroll.config_checks import check_flag, check_number, check_tuple, check_whole, naming_unknown_options
from liveroll.errors import ConfigError

# Logits divided by less leave the range of fp32.
_LEAST_TEMPERATURE = 1e-6


@naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What to generate for a prompt.

    A field left at None takes the value that `model.generate` would take from the model's generation
    configuration, so a checkpoint that ships `repetition_penalty=1.05` gets it; a given value wins.

    Args:
        max_new_tokens: tokens to generate, at most.
        min_new_tokens: tokens before which no stop token may be chosen.
        n: samples of each prompt, which is prefilled once for all of them.
        temperature: divides the logits; 0 is greedy, any other value samples and is at least 1e-6.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens whose probability is at least this share of the most likely one's; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the history.
        stop_token_ids: tokens that end a response, as `eos_token_id` does; () never stops early.
        stop: strings that end a response; needs a tokenizer. The text keeps the string found.
        seed: seed of the samples. The same seed and prompt give the same samples, whatever shares the batch.
        logprobs: return the log-probability of each sampled token.

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
    stop_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] | str = ()
    seed: int | None = None
    logprobs: bool = True

    def __post_init__(self) -> None:
        check_whole(self, "max_new_tokens", low=1, optional=True)
        check_whole(self, "min_new_tokens", low=0, optional=True)
        check_whole(self, "n", low=1)
        check_number(self, "temperature", low=0.0, optional=True)
        if self.temperature and self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"SamplingConfig.temperature must be 0, for greedy, or at least {_LEAST_TEMPERATURE:g}, "
                f"not {self.temperature:g}"
            )
        check_whole(self, "top_k", low=0, optional=True)
        check_number(self, "top_p", low=0.0, high=1.0, low_open=True, optional=True)
        check_number(self, "min_p", low=0.0, high=1.0, optional=True)
        check_number(self, "repetition_penalty", low=0.0, low_open=True, optional=True)
        check_whole(self, "seed", low=0, optional=True)
        check_flag(self, "logprobs")
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", check_tuple(self, "stop_token_ids", int))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", check_tuple(self, "stop", str))
        if "" in self.stop:
            raise ConfigError("stop holds an empty string, which every response contains")
        low, high = self.min_new_tokens, self.max_new_tokens
        if low is not None and high is not None and low > high:
            raise ConfigError(f"min_new_tokens={low} is more than max_new_tokens={high}")
