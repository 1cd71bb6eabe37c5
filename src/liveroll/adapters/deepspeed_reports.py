"""What a call did, in the dictionaries that DeepSpeed's rollouts report."""

from __future__ import annotations

from typing import Any

from liveroll.types import RolloutBatch

_STRATEGIES = {"ordinary": "batched", "generate": "batched"}


def describe_profile(batch: RolloutBatch, slots: int) -> dict[str, Any] | None:
    """Where the time of a call went; None where it was not profiled.

    `generation_ms` is all but post-processing, and `generation_overhead_ms` what of it no forward took. Tokens are
    those sampled: no padding, the one that ended a response included.

    Args:
        batch: what the call returned.
        slots: rows that could decode side by side.
    """
    profile = batch.stats.profile
    if profile is None:
        return None
    total = profile.wall_ms
    generation = total - profile.postprocessing_ms
    return {
        "prompt_expansion_ms": 0.0,
        "generation_ms": generation,
        "prefill_forward_ms": profile.prefill_ms,
        "decode_forward_ms": profile.decode_ms,
        "generation_overhead_ms": max(0.0, generation - profile.prefill_ms - profile.decode_ms),
        "num_prefill_forwards": profile.prefill_forwards,
        "num_decode_forwards": profile.decode_forwards,
        "scheduler_overhead_ms": profile.planning_ms + profile.scheduling_ms,
        "cache_management_overhead_ms": profile.cache_ms,
        "graph_capture_ms": profile.capture_ms,
        "post_processing_ms": profile.postprocessing_ms,
        "total_ms": total,
        "num_generated_tokens": profile.productive_tokens,
        "tokens_per_second": profile.productive_tokens / (total / 1e3) if total > 0 else 0.0,
        "batch_size": batch.stats.prompts,
        "num_samples_per_prompt": len(batch) // batch.stats.prompts,
        "prompt_length": batch.response_start_idx,
        "response_length": batch.input_ids.shape[1] - batch.response_start_idx,
        "active_batch_size": min(slots, len(batch)),
        "continuous_batch_size": slots,
        "generation_strategy": _STRATEGIES.get(batch.stats.route, batch.stats.route),
    }


def describe_continuous(batch: RolloutBatch, capacity: int | None) -> dict[str, Any] | None:
    """Cache and speed of a continuous call; None where `model.generate` did it.

    There is nothing to trim, so all that counts trims is 0. Speeds are None unless the call was profiled.

    Args:
        batch: what the call returned.
        capacity: tokens that a row may hold, where they are fixed.
    """
    stats = batch.stats
    if stats.route in _STRATEGIES:
        return None
    lengths = batch.attention_mask.sum(dim=1)
    seconds = stats.seconds if stats.profile is not None else None
    return {
        "cache_capacity": capacity or batch.input_ids.shape[1],
        "peak_cache_length": int(lengths.max()),
        "cache_memory_bytes": stats.kv_bytes,
        "trim_count": 0,
        "trimmed_columns": 0,
        "trim_latency_ms": 0.0,
        "trim_bytes_moved": 0,
        "trim_frequency": 0.0,
        "decode_steps": stats.decode_steps,
        "end_to_end_ms": seconds and seconds * 1e3,
        "tokens_per_second": seconds and stats.new_tokens / seconds,
    }
