"""The rollout engine: the façade, and the loop `plan → run → commit` that every rollout is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.completion import Completion
from liveroll.config import RolloutConfig, check_config
from liveroll.decode.decoder import Decoder
from liveroll.decode.sampler import Variant
from liveroll.errors import ConfigError, EngineStateError, UnsupportedGenerationError, UnsupportedModelError
from liveroll.fallback import run_fallback
from liveroll.intake import Intake, Sampling
from liveroll.model.capability import check_model
from liveroll.model.guard import ModelGuard
from liveroll.model.unwrap import unwrap
from liveroll.ordinary import run_ordinary
from liveroll.planning.costs import CostModel
from liveroll.planning.routes import RoutePlan
from liveroll.progress import completion_progress
from liveroll.prompts import Prompts, check_tokenizer
from liveroll.results import make_batch, make_completion
from liveroll.routing import Router
from liveroll.scheduling.details import Wanted
from liveroll.scheduling.plan import Wait
from liveroll.scheduling.request import Request
from liveroll.stage import Stage
from liveroll.stats import StatsRecorder
from liveroll.timeline import RecordedTimeline, Timeline
from liveroll.types import RolloutBatch, RolloutFusion, RolloutMemory


class RolloutEngine:
    """Generates with a model that is being trained: its own modules and weights, in this process.

    Between calls the model is exactly as the trainer left it. Weights may change at any time between calls; no
    key or value outlives the call that computed it.

    Args:
        model: a transformers causal language model, or a DDP, DeepSpeed, PEFT or `torch.compile` wrapper of one.
        tokenizer: needed for prompts given as text, stop strings, and text in completions.
        config: how to run.
        tp_group: the ranks that hold shards of this model, if it is tensor-parallel: they capture together.

    Raises:
        ConfigError: `config` or `tokenizer` is something else, or the file of costs was not measured for this model.
        UnsupportedModelError: the model cannot be rolled out, and the configuration allows no fallback for it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: RolloutConfig | None = None,
        *,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        self.config = check_config(config)
        self.tokenizer = check_tokenizer(tokenizer)
        if tp_group is not None and not isinstance(tp_group, ProcessGroup):
            raise ConfigError(f"tp_group must be a process group of torch.distributed, not a {type(tp_group).__name__}")
        self._model: PreTrainedModel = unwrap(model)
        self._refusal: UnsupportedModelError | None = None
        try:
            check_model(self._model)
        except UnsupportedModelError as refusal:
            self._allow_fallback(refusal)
            self._refusal = refusal
        self._guard = ModelGuard(self._model, training=self.config.training_mode)
        self._router = Router(self._model, self.config, 1 if tp_group is None else tp_group.size())
        self._intake = Intake(self._model, self.tokenizer, self.config, self._router.costs.max_tokens)
        self._decoder = Decoder(self._model, self.config, tp_group)
        self._stage = Stage(self._model, self.config, self._guard, self._decoder, self._router)
        self._claim: object = None

    def generate(self, prompts: Prompts, sampling: Sampling | None = None) -> RolloutBatch:
        """Generate for prompts and return all completions.

        Args:
            prompts: token-id lists, strings, chat message lists, or a left-padded `RolloutRequest`.
            sampling: settings for all prompts, or a list with one for each; None inherits everything.

        Raises:
            ConfigError: settings that exclude one another, or that transformers refuses.
            PromptError: a prompt that cannot be generated from.
            UnsupportedGenerationError: settings that the engine does not do exactly.
            UnsupportedModelError: a model that it does not run exactly.
            KVMemoryError: one row needs more KV memory than allowed.
            CompileError: the decode step must be compiled, and cannot be.
            FusionError: projections must be fused, and cannot be.
            LogitsError: the model's logits are not numbers.
            EngineStateError: a stream of this engine is still open.
        """
        with self._exclusive():
            self._settle_costs()
            timeline = RecordedTimeline(self._model.device) if self.config.profile else Timeline()
            stats = StatsRecorder(timeline, self.config.max_slots)
            batch, settings = self._intake.read(prompts, sampling)
            try:
                if self._refusal is not None:
                    raise self._refusal
                call = self._intake.open(batch, settings)
                timeline.enter("planning")
                ordinary = self._stage.takes_ordinary(call)
                timeline.enter("intake")
                with (
                    self._rollout_mode(ordinary),
                    completion_progress(len(call.requests), self.config.progress) as tick,
                ):
                    for finished in self._steps(call, ordinary, stats):
                        tick(finished)
                    timeline.enter("postprocessing")
            except (UnsupportedModelError, UnsupportedGenerationError) as refusal:
                self._allow_fallback(refusal)
                timeline.enter("decode")
                with self._guard.rollout():
                    call = run_fallback(
                        self._model,
                        batch,
                        settings,
                        self._intake.next_seed(),
                        self.tokenizer,
                        self._intake.vocabulary.sampled_size,
                    )
                timeline.enter("postprocessing")
                stats.record_fallback(str(refusal))
            finish = partial(stats.finish, len(batch.prompts), call.requests, self._decoder.kv_bytes)
            return make_batch(call.requests, batch, call.sampling, finish, self.tokenizer, self._model.device)

    def stream(self, prompts: Prompts, sampling: Sampling | None = None) -> Iterator[Completion]:
        """Generate for prompts and yield each completion as it finishes.

        While the caller holds a completion the model is as the trainer left it. The weights must not change
        before the stream ends, since the keys and values of running rows were computed with them. Until then
        the engine takes no other call; closing the stream drops the rows that are still running.

        Args:
            prompts: as for `generate`.
            sampling: as for `generate`.

        Raises:
            UnsupportedModelError: also where the configuration allows the fallback, which cannot stream.
            LiverollError: whatever `generate` raises.
        """
        with self._exclusive() as claim:
            if self._refusal is not None:
                raise self._refusal
            self._settle_costs()
            call = self._intake.open(*self._intake.read(prompts, sampling))
            ordinary = self._stage.takes_ordinary(call)
            steps = self._steps(call, ordinary, StatsRecorder(Timeline(), self.config.max_slots))
            while True:
                with self._rollout_mode(ordinary):
                    finished = next(steps, None)
                if finished is None:
                    return
                for request in finished:
                    yield make_completion(request, self.tokenizer)
                    if self._claim is not claim:
                        raise EngineStateError("the engine was left while this stream was open, and its rows are gone")

    def plan(self, prompts: Prompts, sampling: Sampling | None = None) -> RoutePlan:
        """Explain by which route `generate` would take a call, and what each route is estimated to cost.

        Nothing runs and nothing changes: no forward, no seed. Until the first call has looked at the model's layers,
        their shape is taken from the model's configuration.

        Args:
            prompts: as for `generate`.
            sampling: as for `generate`.

        Raises:
            ConfigError: also where the model's configuration does not give the shape of its layers.
            LiverollError: whatever `generate` raises before it runs anything.
        """
        with self._exclusive():
            if self._refusal is not None:
                raise self._refusal
            return self._stage.plan(self._intake.draft(*self._intake.read(prompts, sampling)))

    @property
    def costs(self) -> CostModel:
        """The costs that routes are compared with, and the limit on a prefill forward's token positions that holds."""
        return self._router.costs

    @property
    def captures(self) -> int:
        """Decode steps captured in the engine's life."""
        return self._decoder.graphs.captures

    @property
    def replays(self) -> int:
        """Captured decode steps run in the engine's life."""
        return self._decoder.graphs.replays

    @property
    def recapture_reasons(self) -> list[str]:
        """Why captured steps were dropped, each time they were: the tensor or setting, and what changed."""
        return list(self._decoder.graphs.recapture_reasons)

    @property
    def compilations(self) -> list[str]:
        """Why decode steps were compiled, each time they were."""
        return list(self._decoder.forward.compilations)

    @property
    def fusion(self) -> RolloutFusion:
        """Which projections are one product in decode steps, as the last call found them."""
        return self._decoder.fusion.report

    def unfuse(self) -> None:
        """Give the parameters of fused projections memory of their own again. The next call fuses them anew."""
        with self._exclusive():
            self._decoder.fusion.separate()

    def memory(self) -> RolloutMemory:
        """Bytes kept between calls."""
        return RolloutMemory(
            kv=self._decoder.kv_bytes,
            graphs=self._decoder.graphs.bytes,
            static=self._decoder.static_bytes,
        )

    def release(self) -> None:
        """Free the KV pages and the captured steps. The next call makes them again."""
        with self._exclusive():
            self._decoder.release()

    def sleep(self) -> bool:
        """Give the KV memory back to the trainer, and keep the captured steps for after `wake`.

        On a GPU with cuda-python installed, the pages lose their memory and keep their addresses. Elsewhere this is
        `release`, and the next call captures again.

        Returns:
            Whether the captured steps were kept.
        """
        with self._exclusive():
            return self._decoder.sleep()

    def wake(self) -> None:
        """Take the KV memory again after `sleep`. A call of the engine does so by itself.

        Raises:
            KVMemoryError: the memory is not free any more.
        """
        with self._exclusive():
            self._decoder.wake()

    def shutdown(self) -> None:
        """Free all that the engine holds. It stays usable, and captures again at the next call."""
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._claim = None
        self.shutdown()

    def _steps(self, call: Call, ordinary: bool, stats: StatsRecorder) -> Iterator[list[Request]]:
        """Run a call; after each step, the requests that it finished."""
        if ordinary:
            yield from self._ordinary_chunks(call, stats)
            return
        scheduler, runner = self._stage.set_up(call, stats)
        stats.timeline.enter("scheduling")
        while (plan := scheduler.plan()) is not None:
            waiting = isinstance(plan, Wait)
            if not isinstance(plan, Wait):
                runner.launch(plan)
            for done, result in runner.collect(everything=waiting):
                stats.timeline.enter("scheduling")
                yield scheduler.commit(done, result)
            stats.timeline.enter("scheduling")

    def _ordinary_chunks(self, call: Call, stats: StatsRecorder) -> Iterator[list[Request]]:
        variant, wanted = Variant.of(call.sampling), Wanted.of(call.sampling)
        search = None if call.stop_strings is None else call.stop_strings.search
        for start in range(0, len(call.requests), self.config.max_slots):
            chunk = list(call.requests[start : start + self.config.max_slots])
            counts = run_ordinary(
                self._model, chunk, variant, search, stats.timeline, wanted=wanted, sampled_size=call.sampled_size
            )
            stats.record_chunk(counts)
            yield chunk

    def _settle_costs(self) -> None:
        if self._refusal is None:
            self._router.settle()

    @contextmanager
    def _rollout_mode(self, ordinary: bool) -> Iterator[None]:
        with self._guard.rollout():
            if ordinary:
                yield
            else:
                with self._guard.our_attention():
                    yield

    @contextmanager
    def _exclusive(self) -> Iterator[object]:
        if self._claim is not None:
            raise EngineStateError("this engine is running, or a stream of it is still open; exhaust or close it first")
        claim = self._claim = object()
        try:
            yield claim
        finally:
            if self._claim is claim:
                self._claim = None

    def _allow_fallback(self, refusal: UnsupportedModelError | UnsupportedGenerationError) -> None:
        """Raise a refusal again unless the call may go to `model.generate` instead."""
        if self.config.fallback == "error" or not refusal.generates:
            raise refusal
