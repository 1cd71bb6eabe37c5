"""Which token ids may be sampled: those that the tokenizer knows, where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from liveroll.errors import ConfigError
from liveroll.model.inherited import read_ids
from liveroll.types import ResolvedSampling


class Vocabulary:
    """The token ids of an engine.

    A model's embedding often has more rows than its tokenizer has tokens, to make its size a round number. Nothing
    decodes those ids, so they are not sampled unless the configuration says so.

    Args:
        model: the model.
        tokenizer: its tokenizer, or None.
        padded: whether ids that the tokenizer does not know may be sampled.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, padded: bool) -> None:
        self._model = model
        self._tokenizer: Any = None if padded else tokenizer
        self._known = (0, 0)

    @property
    def size(self) -> int:
        """Token ids of the model."""
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def sampled_size(self) -> int:
        """Ids below this may be sampled: up to the last that the tokenizer knows or that ends a response."""
        tokenizer = self._tokenizer
        if tokenizer is None or not (hasattr(tokenizer, "__len__") and hasattr(tokenizer, "get_vocab")):
            return self.size
        count = len(tokenizer)
        if self._known[0] != count:  # the whole vocabulary is looked at once, and again when tokens were added
            self._known = (count, 1 + max(tokenizer.get_vocab().values(), default=-1))
        ends = read_ids(self._model.generation_config.eos_token_id)
        return min(max(self._known[1], 1 + max(ends, default=-1)), self.size)

    def check(self, samplings: Sequence[ResolvedSampling]) -> None:
        """Refuse settings under which a response cannot begin, or cannot end as it is told to.

        Raises:
            ConfigError: naming the tokens.
        """
        size = self.sampled_size
        for sampling in samplings:
            unknown = [token for token in sampling.stop_token_ids if token >= size]
            if unknown:
                raise ConfigError(
                    f"stop_token_ids holds {unknown}, which the tokenizer does not know and which are therefore never "
                    "sampled; take them out, or set RolloutConfig.sample_padded_vocabulary"
                )
            barred = {*sampling.forbidden_tokens, *sampling.first_forbidden_tokens}
            if sampling.min_new_tokens:
                barred |= {*sampling.stop_token_ids}
            if sum(token < size for token in barred) == size:
                raise ConfigError(
                    f"all {size} tokens are forbidden or stop tokens before min_new_tokens, so none can be sampled"
                )
