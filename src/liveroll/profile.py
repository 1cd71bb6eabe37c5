"""Where the time of a call went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutProfile:
    """Where the time of a call went.

    The first eight are milliseconds of the host's time. Each moment of the call is in exactly one of them, so they
    sum to its wall time. Waiting for a step's result counts to the kind of step waited for.

    On the ordinary route `model.generate` is prefill until the first token and decode from then on. A call handed to
    `model.generate` as a fallback is decode as a whole, its forwards not counted.

    Attributes:
        intake_ms: weights that ranks hold in parts brought to hand, prompts and settings read and checked, the model
            put into rollout mode.
        planning_ms: how prompts are executed decided, and their admissions split into forwards.
        scheduling_ms: rows and pages given and taken, results taken in.
        cache_ms: KV pages and running batch provided, what captured steps depend on compared, block tables loaded.
        capture_ms: decode steps captured.
        prefill_ms: forwards over prompts, and their first tokens.
        decode_ms: decode steps.
        postprocessing_ms: the model put back, completions, text and tensors made.
        prefill_device_ms: what the prefill forwards took on the device, by its own clock, waits for their launches
            included; None on a CPU.
        decode_device_ms: the same of the decode steps.
        prefill_forwards: forwards over prompts.
        decode_forwards: decode steps.
        productive_tokens: tokens sampled for the completions, without those that they began with.
        active_capacity: decode steps' rows that gave a token.
        configured_capacity: rows they could have had: `max_slots` times the decode steps.
    """

    intake_ms: float
    planning_ms: float
    scheduling_ms: float
    cache_ms: float
    capture_ms: float
    prefill_ms: float
    decode_ms: float
    postprocessing_ms: float
    prefill_device_ms: float | None
    decode_device_ms: float | None
    prefill_forwards: int
    decode_forwards: int
    productive_tokens: int
    active_capacity: int
    configured_capacity: int

    @property
    def wall_ms(self) -> float:
        """Milliseconds of the call: the sum of its parts."""
        return (
            self.intake_ms
            + self.planning_ms
            + self.scheduling_ms
            + self.cache_ms
            + self.capture_ms
            + self.prefill_ms
            + self.decode_ms
            + self.postprocessing_ms
        )
