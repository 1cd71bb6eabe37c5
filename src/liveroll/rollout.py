"""An engine's calls, carried through one at a time: read, run by the loop or left to the fallback, made a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from copy import copy
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.completion import Completion
from liveroll.config import RolloutConfig
from liveroll.cutoff import Cutoff, Limits
from liveroll.decode.decoder import Decoder
from liveroll.distributed.control import Control
from liveroll.distributed.rollout import Gather, GroupRollout, check_gather
from liveroll.distributed.same_call import read_together
from liveroll.distributed.subjects import call_subjects
from liveroll.distributed.weights import ShardedWeights
from liveroll.errors import ConfigError, EngineStateError, UnsupportedGenerationError, UnsupportedModelError
from liveroll.fallback import check_fallback, run_fallback
from liveroll.intake import Given, Inputs, Intake
from liveroll.loop import RolloutLoop
from liveroll.model.guard import ModelGuard
from liveroll.occupancy import Claim, Occupancy
from liveroll.planning.costs import CostModel
from liveroll.planning.routes import RoutePlan
from liveroll.progress import completion_progress
from liveroll.results import make_batch, make_completion
from liveroll.routing import Router
from liveroll.stats import StatsRecorder
from liveroll.timeline import RecordedTimeline, Timeline
from liveroll.types import RolloutBatch


class Rollout:
    """Carries the calls of an engine through, one after the other.

    Args:
        given: the model, or the wrapper of it that the trainer runs.
        model: the model.
        tokenizer: the engine's, or None.
        config: the engine's.
        refusal: why the model cannot be rolled out; None where it can.
        occupancy: gives the engine to one call at a time.
        decoder: what decoding keeps from call to call.

    Raises:
        ConfigError: the file of costs was not measured for this model.
    """

    def __init__(
        self,
        given: Any,
        model: PreTrainedModel,
        tokenizer: Any,
        config: RolloutConfig,
        refusal: UnsupportedModelError | None,
        occupancy: Occupancy,
        decoder: Decoder,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._refusal = refusal
        self._occupancy = occupancy
        self._guard = ModelGuard(model, training=config.training_mode)
        self._weights = ShardedWeights(given, model, config.gather_weights, self._guard.rollout)
        ranks = max(self._weights.ranks, 1 if decoder.tp_group is None else decoder.tp_group.size())
        self._router = Router(model, config, ranks)
        self._intake = Intake(model, tokenizer, config, self._router.costs.max_tokens)
        self.run_over(decoder)

    def run_over(self, decoder: Decoder) -> None:
        """Run the next calls over what this decoder keeps."""
        self._decoder = decoder
        self._loop = RolloutLoop(self._model, self._config, self._guard, decoder, self._router)
        self._group_rollout = GroupRollout(
            self._model, self._config, self._tokenizer, self._intake, self._loop, decoder
        )

    @property
    def costs(self) -> CostModel:
        """The costs that hold."""
        return self._router.costs

    def run(self, inputs: Inputs) -> RolloutBatch:
        """Carry a call through that this rank makes by itself.

        Raises:
            LiverollError: whatever `generate` raises.
        """
        stats = self._record()
        with self._occupancy.claim() as claim, self._weights.at_hand() as shared:
            if self._refusal is None and self._router.settle():
                stats = self._record()  # finding costs is no part of the call
            given, limits = self._read(inputs, may_be_empty=shared)
            prompts = given.prompts
            call = self._complete(given, limits, claim, stats) if prompts.prompts else Call(prompts, (), (), None)
            finish = partial(stats.finish, len(prompts.prompts), call.requests, self._decoder.kv_bytes)
            return make_batch(call.requests, prompts, call.sampling, finish, self._tokenizer, self._model.device)

    def run_together(self, group: ProcessGroup, gather: Gather, inputs: Inputs) -> RolloutBatch:
        """Carry a call through that all ranks of a group make together.

        Raises:
            LiverollError: whatever `generate` raises.
        """
        with (
            Control(group, self._config.rank_timeout) as control,
            self._weights.at_hand(partial(control.meet, "weights")),
            self._occupancy.claim(),
        ):
            check_gather(gather)
            if self._decoder.tp_group is not None:
                raise ConfigError("an engine with a tp_group cannot generate with a group")
            if (inputs.max_seconds, inputs.max_total_tokens) != (None, None):
                raise ConfigError(
                    "max_seconds and max_total_tokens limit what one rank runs; leave them out with a group"
                )
            try:
                self._refuse_model()
                self._router.settle()
                stats = self._record()
                given = self._intake.read(inputs, may_be_empty=True)
                return self._group_rollout.run(group, control, given, inputs.sampling, gather, stats)
            except (UnsupportedModelError, UnsupportedGenerationError) as refusal:
                check_fallback(refusal, self._config, plain=False)
                raise

    def stream(self, inputs: Inputs) -> Iterator[Completion]:
        """Check a call at once, and carry it through while its completions are read.

        Raises:
            LiverollError: whatever `RolloutEngine.stream` raises.
        """
        with self._occupancy.claim():
            self._refuse_model()
            self._weights.refuse_stream()
            self._router.settle()
            given, limits = self._read(inputs)
            call = self._intake.open(given)
        return self._completions(call, limits)

    def plan(self, inputs: Inputs) -> RoutePlan:
        """The routes that a call could take, of which nothing runs.

        Raises:
            LiverollError: whatever `RolloutEngine.plan` raises.
        """
        with self._occupancy.claim():
            self._refuse_model()
            return self._loop.plan(self._intake.draft(self._intake.read(inputs)))

    def _read(self, inputs: Inputs, *, may_be_empty: bool = False) -> tuple[Given, Limits]:
        """What a call is given, the same on all ranks that compute layers together."""
        group = self._decoder.tp_group

        def read() -> tuple[Given, Limits]:
            if inputs.max_seconds is not None and group is not None:
                raise ConfigError("max_seconds would end the call at another step on each rank; give max_total_tokens")
            limits = Limits(inputs.max_seconds, inputs.max_total_tokens)
            return self._intake.read(inputs, may_be_empty=may_be_empty), limits

        def subjects(asked: tuple[Given, Limits]) -> dict[str, str]:
            given, limits = asked
            common = call_subjects(self._model, self._config, self._router.costs, given)
            return common | {
                "max_total_tokens": repr(limits.max_total_tokens),
                "the calls that their engines made before": str(self._intake.calls),
            }

        return read_together(read, subjects, group, self._model.device)

    def _complete(self, given: Given, limits: Limits, claim: Claim, stats: StatsRecorder) -> Call:
        """The call of what was given, all its requests finished: by the loop, or where it is refused, elsewhere."""
        timeline = stats.timeline
        try:
            self._refuse_model()
            call = self._intake.open(given)
            claim.cutoff = Cutoff(call.requests, limits)
            timeline.enter("planning")
            ordinary = self._loop.takes_ordinary(call)
            timeline.enter("intake")
            with self._loop.mode(ordinary), completion_progress(len(call.requests), self._config.progress) as tick:
                for finished in self._loop.run(call, ordinary, claim.cutoff, stats):
                    tick(finished)
                timeline.enter("postprocessing")
        except (UnsupportedModelError, UnsupportedGenerationError) as refusal:
            claim.cutoff = None
            check_fallback(refusal, self._config, plain=given.all_new and limits == Limits())
            timeline.enter("decode")
            call = self._fall_back(given)
            timeline.enter("postprocessing")
            stats.record_fallback(str(refusal))
        return call

    def _fall_back(self, given: Given) -> Call:
        with self._guard.rollout():
            return run_fallback(
                self._model,
                given.prompts,
                given.sampling,
                self._intake.next_seed(),
                self._tokenizer,
                self._intake.vocabulary.sampled_size,
            )

    def _completions(self, call: Call, limits: Limits) -> Iterator[Completion]:
        with self._occupancy.claim() as claim:
            claim.cutoff = Cutoff(call.requests, limits)
            ordinary = self._loop.takes_ordinary(call)
            stats = StatsRecorder(Timeline(), self._config.max_slots)
            # Whoever keeps an error of the stream would keep its steps open.
            with closing(self._loop.run(call, ordinary, claim.cutoff, stats)) as steps:
                while True:
                    with self._loop.mode(ordinary):
                        finished = next(steps, None)
                    if finished is None:
                        return
                    for request in finished:
                        yield make_completion(request, call.prompts, self._tokenizer)
                        if not self._occupancy.holds(claim):
                            raise EngineStateError(
                                "the engine was left while this stream was open, and its rows are gone"
                            )

    def _refuse_model(self) -> None:
        if self._refusal is not None:
            # An error that is raised again and again would keep what each of its calls had.
            raise copy(self._refusal)

    def _record(self) -> StatsRecorder:
        timeline = RecordedTimeline(self._model.device) if self._config.profile else Timeline()
        return StatsRecorder(timeline, self._config.max_slots)
