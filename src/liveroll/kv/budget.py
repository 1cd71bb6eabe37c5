"""How many pages the KV storage gets."""

from __future__ import annotations

import os

import torch

from liveroll.config import RolloutConfig
from liveroll.errors import KVMemoryError

DEFAULT_FRACTION = 0.5


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on a device now, those that the caching allocator holds unused included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allowed_pages(config: RolloutConfig, token_bytes: int, free: int) -> int:
    """Pages that the configuration allows, the scratch page not counted.

    Args:
        config: gives tokens, bytes or a fraction of the free memory.
        token_bytes: KV bytes of one token over all layers.
        free: bytes free on the device.
    """
    if config.kv_tokens is not None:
        return config.kv_tokens // config.page_size
    if config.kv_bytes is not None:
        return config.kv_bytes // (token_bytes * config.page_size)
    fraction = DEFAULT_FRACTION if config.kv_fraction is None else config.kv_fraction
    return int(free * fraction) // (token_bytes * config.page_size)


def check_fits(page_size: int, longest: int, allowed: int, token_bytes: int) -> None:
    """Refuse a call whose longest row would not fit alone.

    Args:
        page_size: tokens in a page.
        longest: tokens of keys and values that the longest row comes to hold.
        allowed: pages allowed.
        token_bytes: KV bytes of one token.

    Raises:
        KVMemoryError: saying how much is needed.
    """
    needed = -(-longest // page_size)
    if needed > allowed:
        tokens = needed * page_size
        raise KVMemoryError(
            f"the KV memory allowed holds {allowed * page_size} tokens and one row of this call needs {tokens} "
            f"({tokens * token_bytes} bytes); raise kv_tokens, kv_bytes or kv_fraction, or shorten the prompt or "
            f"max_new_tokens. Memory is taken in whole pages of {page_size} tokens"
        )
