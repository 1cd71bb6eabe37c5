"""What a call runs on: the model's shape, a scheduler for its requests, and a runner for its steps."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.config import RolloutConfig
from liveroll.decode.adjustments import most_adjusted
from liveroll.decode.decoder import Decoder
from liveroll.decode.runner import StepRunner
from liveroll.decode.sampler import Variant
from liveroll.model.capability import check_shape
from liveroll.model.forward import ModelForward, autocast_dtype
from liveroll.model.geometry import ModelShape
from liveroll.model.guard import ModelGuard
from liveroll.model.probe import probe
from liveroll.prefill.runner import PrefillRunner
from liveroll.scheduling.details import Wanted
from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.scheduler import Scheduler
from liveroll.stats import StatsRecorder


class Stage:
    """Sets up each call over what the decoder keeps; nothing else passes from call to call.

    Args:
        model: the model.
        config: the engine's.
        guard: has the model in rollout mode while a call is set up and run.
        decoder: KV pages, running batch and captured steps.
    """

    def __init__(self, model: PreTrainedModel, config: RolloutConfig, guard: ModelGuard, decoder: Decoder) -> None:
        self._model = model
        self._config = config
        self._guard = guard
        self._decoder = decoder
        self._forward = ModelForward(model)
        self._probed: tuple[tuple[object, ...], ModelShape, torch.dtype] | None = None

    def set_up(self, call: Call, stats: StatsRecorder) -> tuple[Scheduler, StepRunner]:
        """A scheduler and a runner for one call.

        Raises:
            UnsupportedModelError: the model's layers do not work the way the engine needs.
            KVMemoryError: the memory allowed cannot hold the longest row.
            CaptureError: the step must be captured, and cannot be.
            CompileError: the model must be compiled, and cannot be.
        """
        shape, dtype = self._probe()
        variant, wanted = Variant.of(call.sampling), Wanted.of(call.sampling)
        self._decoder.prepare(
            shape,
            dtype,
            self._guard.modules,
            longest=max(request.longest for request in call.requests),
            stops=max(len(settings.stop_token_ids) for settings in call.sampling),
            variant=variant,
            adjusted=most_adjusted(call.sampling),
            sampled_size=call.sampled_size,
        )
        storage = self._decoder.storage
        allocator = PageAllocator(storage.pages)
        scheduler = Scheduler(
            call.requests,
            slots=min(self._config.max_slots, len(call.requests)),
            allocator=allocator,
            page_size=storage.page_size,
            search_stop=None if call.stop_strings is None else call.stop_strings.search,
            wanted=wanted,
        )
        ahead = self._config.run_ahead
        if ahead is None:
            ahead = 2 if self._model.device.type == "cuda" else 0
        runner = StepRunner(
            decoder=self._decoder,
            prefill=PrefillRunner(self._forward, self._guard, storage, self._decoder.backend),
            scheduler=scheduler,
            variant=variant,
            route=self._config.prefill_route,
            max_tokens=self._config.prefill_max_tokens,
            run_ahead=ahead,
            wanted=wanted,
        )
        stats.watch(self._config.prefill_route, scheduler, allocator, runner, self._decoder)
        return scheduler, runner

    def _probe(self) -> tuple[ModelShape, torch.dtype]:
        """The model's shape, read again when its modules, device, dtype, vocabulary, attention or autocast change."""
        first = next(self._model.parameters())
        device, vocabulary = first.device, self._model.config.get_text_config().vocab_size
        modules = tuple(map(id, self._guard.modules))
        key = (device, first.dtype, vocabulary, self._guard.own, autocast_dtype(device), modules)
        if self._probed is None or self._probed[0] != key:
            shape, dtype = probe(self._model)
            check_shape(shape, self._guard.own)
            self._probed = (key, shape, dtype)
        return self._probed[1:]
