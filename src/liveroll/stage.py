"""What a call runs on: the model's shape, a scheduler for its requests, and a runner for its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.config import RolloutConfig
from liveroll.decode.adjustments import most_adjusted
from liveroll.decode.decoder import Decoder
from liveroll.decode.runner import StepRunner
from liveroll.decode.sampler import Variant
from liveroll.distributed.agreement import any_rank
from liveroll.model.capability import check_shape
from liveroll.model.forward import ModelForward, autocast_dtype
from liveroll.model.geometry import ModelShape
from liveroll.model.guard import ModelGuard
from liveroll.model.identity import counted_geometry, declared_geometry
from liveroll.model.probe import probe
from liveroll.planning.cascade import least_spared
from liveroll.planning.geometry import ModelGeometry
from liveroll.planning.routes import RoutePlan
from liveroll.prefill.runner import PrefillRunner
from liveroll.routing import Router
from liveroll.scheduling.clusters import ClusterFinder
from liveroll.scheduling.details import Wanted
from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.request import Request
from liveroll.scheduling.scheduler import Scheduler
from liveroll.scheduling.shares import Source
from liveroll.stats import StatsRecorder


class Stage:
    """Sets up each call over what the decoder keeps; nothing else passes from call to call.

    Args:
        model: the model.
        config: the engine's.
        guard: has the model in rollout mode while a call is set up and run.
        decoder: KV pages, running batch and captured steps.
        router: plans prefills.
    """

    def __init__(
        self, model: PreTrainedModel, config: RolloutConfig, guard: ModelGuard, decoder: Decoder, router: Router
    ) -> None:
        self._model = model
        self._config = config
        self._guard = guard
        self._decoder = decoder
        self._router = router
        self._forward = ModelForward(model)
        self._probed: tuple[tuple[object, ...], ModelShape, torch.dtype] | None = None
        self._geometry: ModelGeometry | None = None

    def set_up(self, call: Call, source: Source | None, stats: StatsRecorder) -> tuple[Scheduler, StepRunner]:
        """A scheduler and a runner for the unfinished requests of a call, of which there are some.

        They come from `source`, where there is one.

        Raises:
            UnsupportedModelError: the model's layers do not work the way the engine needs.
            KVMemoryError: the memory allowed cannot hold the longest row.
            CaptureError: the step must be captured, and cannot be.
            CompileError: the model must be compiled, and cannot be.
            FusionError: projections must be fused, and cannot be.
        """
        stats.timeline.enter("cache")
        requests = call.unfinished
        shape, dtype = self._probe()
        variant, wanted = Variant.of(call.settings), Wanted.of(call.settings)
        self._decoder.prepare(
            shape,
            dtype,
            self._guard.modules,
            longest=max(request.longest for request in requests),
            stops=max(len(settings.stop_token_ids) for settings in call.settings),
            variant=variant,
            adjusted=most_adjusted(call.settings),
            sampled_size=call.sampled_size,
        )
        storage = self._decoder.storage
        allocator = PageAllocator(storage.pages)
        scheduler = Scheduler(
            requests,
            slots=min(self._config.max_slots, len(requests)),
            allocator=allocator,
            page_size=storage.page_size,
            search_stop=call.search_stop,
            wanted=wanted,
            source=source,
            clusters=self._cluster_finder(requests, shape, dtype),
        )
        ahead = self._config.run_ahead
        if ahead is None:
            ahead = 2 if self._model.device.type == "cuda" else 0
        runner = StepRunner(
            decoder=self._decoder,
            prefill=PrefillRunner(
                self._forward,
                self._guard,
                storage,
                self._decoder.backend,
                captured=self._decoder.prefill,
                max_tokens=self._router.costs.max_tokens,
            ),
            scheduler=scheduler,
            variant=variant,
            planner=self._router.planner(self._counted_geometry()),
            run_ahead=ahead,
            wanted=wanted,
            timeline=stats.timeline,
        )
        stats.watch(scheduler, allocator, runner, self._decoder)
        return scheduler, runner

    def takes_ordinary(self, call: Call) -> bool:
        """Whether a call goes to `model.generate` on the ordinary route; finds out the model's shape if it must."""
        if self._config.prefill_route != "auto":
            return self._config.prefill_route == "ordinary"
        if "ordinary" not in self._config.auto_routes:
            return False
        if self._geometry is None:
            with self._guard.rollout(), self._guard.our_attention():
                self._probe()
        return self._router.takes_ordinary(call, self._counted_geometry())

    def plan(self, call: Call) -> RoutePlan:
        """The routes that a call could take, by what is known of the model's shape without a forward."""
        return self._router.plan(call, self._geometry or declared_geometry(self._model))

    def _cluster_finder(
        self, requests: Sequence[Request], shape: ModelShape, dtype: torch.dtype
    ) -> ClusterFinder | None:
        unbounded = [layer for layer in shape.layers if layer.traits.window is None]
        numbers = max((layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in unbounded), default=0)
        least = least_spared(self._config.cascade, numbers * dtype.itemsize)
        together = self._decoder.steps.rows_together
        if least is None or together == 1 or len({request.group for request in requests}) == len(requests):
            return None
        return ClusterFinder(self._config.page_size, together, least)

    def _counted_geometry(self) -> ModelGeometry:
        """As the layers were seen to attend by the probe that has run."""
        assert self._geometry is not None
        return self._geometry

    def _probe(self) -> tuple[ModelShape, torch.dtype]:
        """The model's shape, read again when its modules, device, dtype, vocabulary, attention or autocast change."""
        first = next(self._model.parameters())
        device, vocabulary = first.device, self._model.config.get_text_config().vocab_size
        modules = tuple(map(id, self._guard.modules))
        key = (device, first.dtype, vocabulary, self._guard.own, autocast_dtype(device), modules)
        group = self._decoder.tp_group
        if any_rank(self._probed is None or self._probed[0] != key, group, device):
            with self._decoder.fusion.observe():
                shape, dtype = probe(self._model, group)
            check_shape(shape, self._guard.own)
            # Last of all, so that a probe that is interrupted is made again.
            self._geometry = counted_geometry(shape, dtype)
            self._probed = (key, shape, dtype)
        assert self._probed is not None
        return self._probed[1:]
