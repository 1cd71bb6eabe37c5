"""The coefficients that costs of routes are estimated with."""

from __future__ import annotations

from dataclasses import dataclass, fields

from liveroll.config_checks import check_number, check_whole, naming_unknown_options

_MOST_MS = 1e9
"""A week and a half: with more, the costs of large plans leave the range of a float."""


@naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What a device takes for each part of the work, in milliseconds.

    A left-padded forward over B rows of width L is estimated to take

    ```
    fixed_ms
    + token_ms · B·L
    + attention_ms_per_gflop · 4·B·L²·layers·query_heads·head_dim / 1e9
    + kv_ms_per_mib · 2·B·L·layers·kv_heads·head_dim·element_bytes / 2^20
    ```

    A packed forward has its own coefficients, B·L is the sum of its prompts' lengths and B·L² the sum of their
    squares. `model.generate` stores nothing in pages, so on the ordinary route the last term is left out.

    With the defaults a continuous decode step costs what it takes longer than one of `model.generate`. A calibrated
    model gives both in full, so that captured steps may be the cheaper ones. The defaults are a starting point, not
    constants of any device.

    Args:
        fixed_ms: of a padded forward, whatever it runs over, in ms.
        token_ms: of a token position, padding included, in ms: projections and MLPs.
        attention_ms_per_gflop: of 10^9 floating-point operations of padded attention, in ms.
        kv_ms_per_mib: of storing 2^20 bytes of keys and values in pages, in ms.
        packed_fixed_ms: of a packed forward, in ms; None as `fixed_ms`.
        packed_token_ms: of a token in a packed forward, in ms; None as `token_ms`.
        packed_attention_ms_per_gflop: of 10^9 floating-point operations of packed attention, in ms; None as
            `attention_ms_per_gflop`.
        ordinary_fixed_ms: of a call of `model.generate` up to its first token, in ms; None as `fixed_ms`.
        decode_step_ms: of a continuous decode step, in ms, whatever it runs over.
        decode_row_ms: of a running row in it, in ms.
        decode_kv_ms_per_mib: of attending to 2^20 bytes of keys and values in it, in ms.
        ordinary_step_ms: of a decode step of `model.generate`, in ms, whatever it runs over.
        ordinary_row_ms: of a row in it, ended or not, in ms.
        ordinary_kv_ms_per_mib: of attending to 2^20 bytes of keys and values in it, padding included, in ms.
        max_tokens: token positions, padding included, in one prefill forward; None removes the limit.

    Raises:
        ConfigError: a coefficient is negative, over 10^9 or not a number.
    """

    fixed_ms: float = 25.0
    token_ms: float = 0.1
    attention_ms_per_gflop: float = 0.01
    kv_ms_per_mib: float = 0.04
    packed_fixed_ms: float | None = None
    packed_token_ms: float | None = None
    packed_attention_ms_per_gflop: float | None = None
    ordinary_fixed_ms: float | None = None
    decode_step_ms: float = 10.0
    decode_row_ms: float = 0.0
    decode_kv_ms_per_mib: float = 0.0
    ordinary_step_ms: float = 0.0
    ordinary_row_ms: float = 0.0
    ordinary_kv_ms_per_mib: float = 0.0
    max_tokens: int | None = 65536

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "max_tokens":
                check_number(self, field.name, low=0.0, high=_MOST_MS, optional=field.default is None)
        check_whole(self, "max_tokens", low=1, optional=True)
