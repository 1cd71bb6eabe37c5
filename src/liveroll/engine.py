"""The rollout engine: the façade over one model."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.completion import Completion
from liveroll.config import RolloutConfig, check_config, check_device
from liveroll.decode.decoder import Decoder
from liveroll.distributed.control import check_group
from liveroll.distributed.rollout import Gather, check_gather
from liveroll.distributed.tensor_parallel import choose_group
from liveroll.errors import EngineStateError, UnsupportedModelError
from liveroll.fallback import check_fallback
from liveroll.intake import Inputs, Sampling
from liveroll.model.capability import check_model
from liveroll.model.unwrap import unwrap
from liveroll.occupancy import Occupancy
from liveroll.planning.costs import CostModel
from liveroll.planning.routes import RoutePlan
from liveroll.prompts import Prompts, check_tokenizer
from liveroll.rollout import Rollout
from liveroll.starts import ContinueFrom, ResponsePrefix
from liveroll.types import RolloutBatch, RolloutFusion, RolloutMemory


class RolloutEngine:
    """Generates with a model that is being trained: its own modules and weights, in this process.

    Between calls the model is exactly as the trainer left it. Weights may change at any time between calls; no
    key or value outlives the call that computed it.

    Args:
        model: a transformers causal language model, or a DDP, DeepSpeed, PEFT or `torch.compile` wrapper of one. Where
            ranks hold its weights in parts (ZeRO-3, `fully_shard`), all of them call `generate` together, with prompts
            of their own; a rank that has none gives an empty list.
        tokenizer: needed for prompts given as text, stop strings, and text in completions.
        config: how to run.
        tp_group: the ranks that compute each layer together, if the model is tensor-parallel: they capture together.
            None finds them where the model tells (device meshes of torch and transformers, DeepSpeed's AutoTP).
            All of them make the same calls.

    Raises:
        ConfigError: `config`, `tokenizer` or `tp_group` is something else, the file of costs was not measured for this
            model, its layers are divided among other ranks than those of `tp_group`, or the configuration asks for what
            its device does not have.
        UnsupportedModelError: the model cannot be rolled out, and the configuration allows no fallback for it.
        EngineStateError: the process group that holds parts of the model has been destroyed.
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
        self._model: PreTrainedModel = unwrap(model)
        check_device(self.config, self._model.device.type)
        ranks = choose_group(self._model, tp_group)
        refusal: UnsupportedModelError | None = None
        try:
            check_model(self._model)
        except UnsupportedModelError as error:
            check_fallback(error, self.config)
            refusal = error.with_traceback(None)
        self._occupancy = Occupancy()
        self._decoder = Decoder(self._model, self.config, ranks)
        self._rollout = Rollout(
            model, self._model, self.tokenizer, self.config, refusal, self._occupancy, self._decoder
        )

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling: Sampling | None = None,
        *,
        continue_from: ContinueFrom | None = None,
        response_prefix: ResponsePrefix | None = None,
        max_seconds: float | None = None,
        max_total_tokens: int | None = None,
        group: ProcessGroup | None = None,
        gather: Gather = "own",
    ) -> RolloutBatch:
        """Generate for prompts and return all completions.

        With a group, every rank of it calls this with prompts of its own, and gets the completions of these. They are
        those that one rank would return, given the prompts of all ranks in the order of the ranks.

        Args:
            prompts: token-id lists, strings, chat message lists, or a left-padded `RolloutRequest`; may be left out
                where there are completions to continue.
            sampling: settings for all prompts, or a list with one for each, those of `continue_from` first; None
                inherits everything.
            continue_from: completions of earlier calls to go on with, as a batch or a list. Those that ended by a stop,
                or have spent `max_new_tokens`, are passed through. In a list, completions beside each other with one
                prompt, one prompt index and ascending sample indices are samples of one prompt.
            response_prefix: text or token ids that the responses to `prompts` are forced to begin with: one for all,
                or a list with one (or None) for each.
            max_seconds: wall time of the call. After the step in which it is over, completions that have not
                ended are returned as they are, those never begun empty, with finish reason `aborted`.
            max_total_tokens: tokens sampled in the call, over all rows; likewise. The last step is taken in whole.
            group: ranks that hold the same model and share the work, as `RolloutConfig.balance` says. Some of them may
                have no prompts. A call over more than one rank takes no limits, and cannot be aborted.
            gather: `own` returns the completions of this rank's prompts; `all` those of all ranks, to each.

        Raises:
            RankError: ranks of the group disagree about the model or the settings, or another one failed; or those of
                a `tp_group` disagree about the call, or another one's is refused; or those that hold the weights in
                parts disagree about `gather_weights`.
            ConfigError: settings that exclude one another, or that transformers refuses.
            PromptError: a prompt that cannot be generated from, or a completion that cannot be continued.
            UnsupportedGenerationError: settings that the engine does not do exactly.
            UnsupportedModelError: a model that it does not run exactly.
            KVMemoryError: one row needs more KV memory than allowed.
            CompileError: the decode step must be compiled, and cannot be.
            FusionError: projections must be fused, and cannot be.
            GatherError: the weights must be gathered, and cannot be.
            LogitsError: the model's logits are not numbers.
            EngineStateError: a stream of this engine is still open, or the process group that holds parts of the model
                has been destroyed.
        """
        inputs = Inputs(prompts, sampling, continue_from, response_prefix, max_seconds, max_total_tokens)
        if (ranks := check_group(group)) is not None:
            return self._rollout.run_together(ranks, gather, inputs)
        check_gather(gather)
        return self._rollout.run(inputs)

    def stream(
        self,
        prompts: Prompts | None = None,
        sampling: Sampling | None = None,
        *,
        continue_from: ContinueFrom | None = None,
        response_prefix: ResponsePrefix | None = None,
        max_seconds: float | None = None,
        max_total_tokens: int | None = None,
    ) -> Iterator[Completion]:
        """Generate for prompts and yield each completion as it finishes.

        Everything is checked at once, and runs while the stream is read. While the caller holds a completion the
        model is as the trainer left it. The weights must not change before the stream ends, since the keys and
        values of running rows were computed with them. Until then the engine takes no other call; closing the
        stream drops the rows that are still running.

        Args:
            prompts: this and all else as for `generate`.
            sampling: as there.
            continue_from: as there.
            response_prefix: as there.
            max_seconds: as there, from the first completion asked for; the caller's own time counts too.
            max_total_tokens: as there.

        Raises:
            UnsupportedModelError: also where the configuration allows the fallback, which cannot stream, and where
                ranks hold the weights in parts, which would wait for the reader of each other's stream.
            LiverollError: whatever `generate` raises.
        """
        inputs = Inputs(prompts, sampling, continue_from, response_prefix, max_seconds, max_total_tokens)
        return self._rollout.stream(inputs)

    def abort(self, prompt_index: int, sample_index: int | None = None) -> int:
        """End samples of the call that is running; each comes back with the tokens it has, its reason `aborted`.

        It is for whoever reads a stream, for a hook or callback inside a call, and for other threads. The samples end
        before the next step, and their slots and pages are free for others. Steps that were launched by then are
        dropped. Ranks of a `tp_group` must all abort the same samples at the same point of a stream.

        Args:
            prompt_index: the prompt.
            sample_index: one of its samples; None for all of them.

        Returns:
            How many of them had not ended.

        Raises:
            EngineStateError: no call is running, or one over a group, or one that `model.generate` does as the
                fallback.
            PromptError: the call has no such prompt or sample.
        """
        cutoff = self._occupancy.cutoff
        if cutoff is None:
            raise EngineStateError("there is nothing to abort: no call is running, or one over a group")
        return cutoff.abort(prompt_index, sample_index)

    def plan(self, prompts: Prompts, sampling: Sampling | None = None) -> RoutePlan:
        """Explain by which route `generate` would take a call, and what each route is estimated to cost.

        Nothing runs and nothing changes: no forward, no seed. Until the first call has looked at the model's layers,
        their shape is taken from the model's configuration, and costs that it is to measure (`costs="auto"`) are the
        defaults of `CostModel`, by which another route may be taken than after it.

        Args:
            prompts: as for `generate`.
            sampling: as for `generate`.

        Raises:
            ConfigError: also where the model's configuration does not give the shape of its layers.
            LiverollError: whatever `generate` raises before it runs anything.
        """
        return self._rollout.plan(Inputs(prompts, sampling))

    @property
    def costs(self) -> CostModel:
        """The costs that routes are compared with, and the limit on a prefill forward's token positions that holds."""
        return self._rollout.costs

    @property
    def captures(self) -> int:
        """Decode steps captured in the engine's life."""
        return self._decoder.graphs.captures["decode"]

    @property
    def replays(self) -> int:
        """Captured decode steps run in the engine's life."""
        return self._decoder.graphs.replays["decode"]

    @property
    def prefill_captures(self) -> int:
        """Packed prefills captured in the engine's life."""
        return self._decoder.graphs.captures["prefill"]

    @property
    def prefill_replays(self) -> int:
        """Captured prefills run in the engine's life."""
        return self._decoder.graphs.replays["prefill"]

    @property
    def recapture_reasons(self) -> list[str]:
        """Why steps had to be captured again, each time that was so: the tensor or setting, and what changed.

        What `release`, `shutdown`, a `sleep` that returns False or `max_captures` drops adds nothing.
        """
        return list(self._decoder.graphs.recapture_reasons)

    @property
    def compilations(self) -> list[str]:
        """Why decode steps and captured prefills were compiled, each time they were."""
        return [*self._decoder.steps.forward.compilations, *self._decoder.prefill.forward.compilations]

    @property
    def fusion(self) -> RolloutFusion:
        """Which projections are one product in decode steps, as the last call found them."""
        return self._decoder.fusion.report

    def unfuse(self) -> None:
        """Give the parameters of fused projections memory of their own again. The next call fuses them anew.

        That is also for those that another engine fused, which may be gone. Parameters that somebody has laid elsewhere
        or tied since stay where they are.

        Raises:
            EngineStateError: a stream of this engine, or of another one of the model, is open, or a call is running.
        """
        with self._occupancy.claim():
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
        with self._occupancy.claim():
            self._decoder.release()

    def sleep(self) -> bool:
        """Give the KV memory back to the trainer, and keep the captured steps for after `wake`.

        On a GPU with cuda-python installed, the pages lose their memory and keep their addresses. Elsewhere this is
        `release`, and the next call captures again.

        Returns:
            Whether the captured steps were kept.
        """
        with self._occupancy.claim():
            return self._decoder.sleep()

    def wake(self) -> None:
        """Take the KV memory again after `sleep`. A call of the engine does so by itself.

        Raises:
            KVMemoryError: the memory is not free any more.
        """
        with self._occupancy.claim():
            self._decoder.wake()

    def shutdown(self) -> None:
        """Free all that the engine holds. It stays usable, and captures again at the next call."""
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._occupancy.end()
        self._decoder.fusion.leave()
        self.shutdown()
