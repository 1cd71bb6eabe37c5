"""User-facing configuration: frozen, and validated when it is made."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, TypeVar, get_args

from liveroll.errors import ConfigError

PrefillRoute = Literal["packed", "equal_width", "per_prompt", "ordinary"]
Fallback = Literal["error", "generate"]

Config = TypeVar("Config")

# Logits divided by less leave the range of fp32.
_LEAST_TEMPERATURE = 1e-6


def _naming_unknown_options(cls: type[Config]) -> type[Config]:
    """Let a dataclass answer an option that it does not have with the ones that it has."""
    create: Callable[..., None] = cls.__init__

    @functools.wraps(create)
    def init(self: Config, *args: Any, **options: Any) -> None:
        known = [field.name for field in fields(self)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                meant = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {meant[0]}?" if meant else f"its options are {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no option {name}; {hint}")
        create(self, *args, **options)

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls


@_naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a `RolloutEngine` runs.

    Args:
        max_slots: rows that decode side by side, at most.
        max_length: tokens (prompt and response) a row may hold. None sizes the KV storage for each call's
            longest row; a number fixes it, so that calls of any shape share one storage.
        kv_tokens: KV memory in tokens over all rows. At most one of the three `kv_*` may be given.
        kv_bytes: KV memory in bytes.
        kv_fraction: KV memory as a share of the memory free on the device when it is allocated; 0.5 when none
            of the three is given. Never more is taken than `max_slots` rows of full length need.
        page_size: tokens in one page of KV cache.
        prefill_route: how admitted prompts are prefilled. `packed`: one forward without padding. `equal_width`:
            one left-padded forward with the model's own attention and mask. `per_prompt`: one forward each.
            `ordinary`: the padded batch goes to `model.generate`.
        prefill_max_tokens: token positions, padding included, in one prefill forward; None removes the limit.
        fallback: what happens to a model or setting that the engine cannot run exactly. `error` refuses it;
            `generate` hands the call to `model.generate` and says why in the stats.
        training_mode: the mode the model generates in; False is `model.eval()`, True `model.train()`, and None
            leaves every module in the mode it is in.
        capture: whether decode steps are captured, as CUDA graphs on a GPU. `auto` runs them eagerly where they
            cannot be, and says why in the stats; True makes that an error; False never captures.
        max_captures: captured steps kept, the one unused for longest leaves; None keeps all.
        run_ahead: decode steps that may be launched before the result of an earlier one is read, so that the
            device never waits for the host. None is 2 on a GPU and 0 elsewhere.
        seed: the engine's seed, used by calls whose `SamplingConfig.seed` is None. Such calls differ from one
            another, and the sequence of calls repeats with the engine's seed.
        progress: show a progress bar of finished completions.

    Raises:
        ConfigError: a value is out of range or two settings exclude each other.
    """

    max_slots: int = 32
    max_length: int | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    kv_fraction: float | None = None
    page_size: int = 16
    prefill_route: PrefillRoute = "packed"
    prefill_max_tokens: int | None = 65536
    fallback: Fallback = "error"
    training_mode: bool | None = False
    capture: bool | Literal["auto"] = "auto"
    max_captures: int | None = None
    run_ahead: int | None = None
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        _whole(self, "max_slots", low=1)
        _whole(self, "max_length", low=2, optional=True)
        _whole(self, "kv_tokens", low=1, optional=True)
        _whole(self, "kv_bytes", low=1, optional=True)
        _number(self, "kv_fraction", low=0.0, high=1.0, low_open=True, optional=True)
        _whole(self, "page_size", low=1)
        _choice(self, "prefill_route", get_args(PrefillRoute))
        _whole(self, "prefill_max_tokens", low=1, optional=True)
        _choice(self, "fallback", get_args(Fallback))
        _flag(self, "training_mode", optional=True, besides="None")
        if self.capture != "auto":
            _flag(self, "capture", besides='"auto"')
        _whole(self, "max_captures", low=1, optional=True)
        _whole(self, "run_ahead", low=0, optional=True)
        _whole(self, "seed", low=0)
        _flag(self, "progress")
        given = [name for name in ("kv_tokens", "kv_bytes", "kv_fraction") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} all set the KV memory; give one of them")


@_naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What to generate for a prompt.

    A field left at None takes the value that `model.generate` would take from the model's generation
    configuration, so a checkpoint that ships `repetition_penalty=1.05` gets it; a given value wins.

    Args:
        max_new_tokens: tokens to generate, at most.
        min_new_tokens: tokens before which no stop token may be chosen.
        n: samples of each prompt.
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
        _whole(self, "max_new_tokens", low=1, optional=True)
        _whole(self, "min_new_tokens", low=0, optional=True)
        _whole(self, "n", low=1)
        _number(self, "temperature", low=0.0, optional=True)
        if self.temperature and self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"SamplingConfig.temperature must be 0, for greedy, or at least {_LEAST_TEMPERATURE:g}, "
                f"not {self.temperature:g}"
            )
        _whole(self, "top_k", low=0, optional=True)
        _number(self, "top_p", low=0.0, high=1.0, low_open=True, optional=True)
        _number(self, "min_p", low=0.0, high=1.0, optional=True)
        _number(self, "repetition_penalty", low=0.0, low_open=True, optional=True)
        _whole(self, "seed", low=0, optional=True)
        _flag(self, "logprobs")
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", _tuple_of(self, "stop_token_ids", int))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _tuple_of(self, "stop", str))
        if "" in self.stop:
            raise ConfigError("stop holds an empty string, which every response contains")
        low, high = self.min_new_tokens, self.max_new_tokens
        if low is not None and high is not None and low > high:
            raise ConfigError(f"min_new_tokens={low} is more than max_new_tokens={high}")


def check_config(config: Any) -> RolloutConfig:
    """The configuration given to an engine, or the default where it is None.

    Raises:
        ConfigError: it is something else.
    """
    if config is not None and not isinstance(config, RolloutConfig):
        raise ConfigError(f"config must be a RolloutConfig, not a {type(config).__name__}")
    return config or RolloutConfig()


def _owner(config: Any, name: str) -> str:
    return f"{type(config).__name__}.{name}"


def _plain(value: Any) -> Any:
    """The Python number in a NumPy scalar; anything else as it is."""
    return value.item() if isinstance(value, Real) and hasattr(value, "item") else value


def _settle(config: Any, name: str) -> Any:
    """Keep a field as a plain Python number, and return it."""
    value = _plain(getattr(config, name))
    object.__setattr__(config, name, value)
    return value


def _whole(config: Any, name: str, *, low: int, optional: bool = False) -> None:
    value = _settle(config, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{_owner(config, name)} must be a whole number, not {value!r}")
    if value < low:
        raise ConfigError(f"{_owner(config, name)} must be at least {low}, not {value}")


def _number(
    config: Any,
    name: str,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    optional: bool = False,
) -> None:
    value = _settle(config, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{_owner(config, name)} must be a number, not {value!r}")
    inside = math.isfinite(value) and (value > low if low_open else value >= low) and value <= high
    if not inside:
        bounds = f"{'above' if low_open else 'at least'} {low:g}"
        bounds += f" and at most {high:g}" if math.isfinite(high) else " and finite"
        raise ConfigError(f"{_owner(config, name)} must be {bounds}, not {value}")


def _flag(config: Any, name: str, *, optional: bool = False, besides: str = "") -> None:
    value = getattr(config, name)
    if value is None and optional:
        return
    if not isinstance(value, bool):
        allowed = f"True, False or {besides}" if besides else "True or False"
        raise ConfigError(f"{_owner(config, name)} must be {allowed}, not {value!r}")


def _choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{_owner(config, name)} must be one of {', '.join(allowed)}, not {value!r}")


def _tuple_of(config: Any, name: str, kind: type) -> tuple[Any, ...]:
    value = getattr(config, name)
    if isinstance(value, kind) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{_owner(config, name)} must be a sequence of {kind.__name__}, not {value!r}")
    items = tuple(_plain(item) for item in value)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, kind):
            raise ConfigError(f"{_owner(config, name)} holds {item!r}; every entry must be of type {kind.__name__}")
        if isinstance(item, int) and item < 0:
            raise ConfigError(f"{_owner(config, name)} holds {item}; token ids begin at 0")
    return items
