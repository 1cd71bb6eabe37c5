"""Every exception liveroll raises on purpose, each saying what was wrong and what to do."""

from __future__ import annotations


class LiverollError(Exception):
    """Base of all errors raised by liveroll."""


class ConfigError(LiverollError, ValueError):
    """A setting is out of range, or settings that cannot be combined were combined."""


class PromptError(LiverollError, ValueError):
    """A prompt, token id, mask or shape cannot be generated from."""


class PrefillLimitError(PromptError):
    """A single prompt is longer than `RolloutConfig.prefill_max_tokens`."""


class UnsupportedModelError(LiverollError):
    """The engine cannot run this model exactly; the message says which part of it.

    Attributes:
        generates: whether `model.generate` could run it instead.
    """

    def __init__(self, message: str, *, generates: bool = True) -> None:
        super().__init__(message)
        self.generates = generates


class UnsupportedGenerationError(LiverollError):
    """The effective generation configuration asks for something the engine does not do exactly.

    Attributes:
        generates: `model.generate` could do it instead.
    """

    generates = True


class CaptureError(LiverollError):
    """The decode step cannot be captured; the message names the module that prevents it."""


class CompileError(LiverollError):
    """The decode step cannot be compiled; the message says why."""


class FusionError(LiverollError):
    """Projections cannot be fused; the message says which, and why."""


class GatherError(LiverollError):
    """Weights that ranks hold in parts cannot be gathered for a call, and must be; the message says why."""


class LogitsError(LiverollError):
    """The model's logits are not numbers, so that nothing can be sampled from them."""


class KVMemoryError(LiverollError):
    """The KV memory allowed cannot hold even one prompt; the message says how much is needed."""


class EngineStateError(LiverollError, RuntimeError):
    """The engine was used while a stream was open, was re-entered, or outlived a process group that it needs."""


class RankError(LiverollError, RuntimeError):
    """A call that several ranks make together cannot go on: they disagree, or one of them failed or did not come.

    Attributes:
        ranks: the ranks of the group that failed, are missing, or have something else than the first one.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[RankError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)
