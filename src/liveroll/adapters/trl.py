"""Generation for the trainers of TRL, by the engine.

Two ways in: `rollout_func=RolloutFunction()` of TRL's own `GRPOTrainer`, through its public interface; or `GRPOTrainer`
and `RLOOTrainer` from here, which are TRL's with generation replaced, so that tools, environments and the
correction by importance sampling have it too. TRL 1.16 is imported when one of these two is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from liveroll.adapters.packages import load_package
from liveroll.adapters.trl_rollouts import TrainerRollouts, as_lists
from liveroll.adapters.trl_settings import check_arguments, read_settings, tokenize_prompts
from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError, PromptError
from liveroll.types import RolloutBatch

__all__ = ["GRPOTrainer", "RLOOTrainer", "RolloutFunction"]  # noqa: F822

Columns = Callable[[RolloutBatch], Mapping[str, list[Any]]]


class RolloutFunction(TrainerRollouts):
    """A `rollout_func` for TRL's `GRPOTrainer`.

    It returns one completion for each prompt that it is given, as TRL has repeated them already; the prompts of a
    group share their prefill. Beside what TRL needs, reward functions get a column `finish_reason`: `stop` or `length`.

    Args:
        config: how the engine runs.
        sleep: give the KV memory back to the trainer after each rollout.
        columns: more columns for the reward functions, made of a rollout: lists with an entry for each completion.

    Raises:
        ConfigError: `config` is something else.
    """

    def __init__(
        self, config: RolloutConfig | None = None, *, sleep: bool = False, columns: Columns | None = None
    ) -> None:
        super().__init__(config, sleep=sleep)
        self._columns = columns

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Roll out, for the trainer to call.

        Args:
            prompts: strings or conversations, as they stand in the data set.
            trainer: the `GRPOTrainer`.

        Returns:
            `prompt_ids` and `completion_ids`, lists of token ids; `logprobs`, of each token in the distribution that it
            was drawn from, after temperature and filters; and the columns.

        Raises:
            ConfigError: the trainer has settings that the engine does not do, or tools.
            PromptError: a prompt is in another form.
            LiverollError: whatever `RolloutEngine.generate` raises.
        """
        check_arguments(trainer.args)
        if getattr(trainer, "tools", None):
            raise ConfigError(
                "TRL generates the turns after tool calls without rollout_func; use liveroll.adapters.trl.GRPOTrainer"
            )
        prompt_ids = tokenize_prompts(prompts, trainer)
        batch = self.run(trainer, prompt_ids)
        completion_ids, logprobs = as_lists(batch)
        columns = dict(self._columns(batch)) if self._columns is not None else {}
        for name, values in columns.items():
            if name in ("prompt_ids", "completion_ids", "logprobs") or len(values) != len(prompts):
                raise ConfigError(f"columns makes {name} of {len(values)} entries for {len(prompts)} completions")
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            "finish_reason": [completion.finish_reason for completion in batch.completions],
            **columns,
        }


if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


class _GeneratingTrainer(_Trainer):  # type: ignore[misc]
    """A trainer of TRL whose generation is the engine's.

    Args:
        positional: as for TRL's.
        rollout_config: how the engine runs; by default as for `RolloutFunction`.
        sleep: give the KV memory back to the trainer after each rollout.
        named: as for TRL's.

    Raises:
        ConfigError: the trainer has settings that the engine does not do.
    """

    def __init__(
        self, *positional: Any, rollout_config: RolloutConfig | None = None, sleep: bool = False, **named: Any
    ) -> None:
        for given in (*positional, *named.values()):
            if hasattr(given, "use_vllm"):
                check_arguments(given)
        if named.get("rollout_func") is not None:
            raise ConfigError("this trainer generates by itself; give rollout_func to TRL's own")
        self.rollouts = TrainerRollouts(rollout_config, sleep=sleep)
        super().__init__(*positional, **named)
        read_settings(self)

    def _roll_out(self, prompt_ids: list[list[int]], images: Any) -> RolloutBatch:
        if images:
            raise PromptError("prompts or tool results hold images, and the engine takes text alone")
        return self.rollouts.run(self, prompt_ids)


class _GRPO(_GeneratingTrainer):
    """TRL's `GRPOTrainer` with the engine's generation, in the turns after tool calls too.

    Args:
        positional: as for TRL's.
        importance_sampling: correct for differences between the log-probabilities that tokens were drawn with and
            those of the training forward, with TRL's settings `vllm_importance_sampling_*`. It costs a forward.
        named: as for TRL's; and `rollout_config` and `sleep`, as for `RolloutFunction`.
    """

    use_vllm: bool

    def __init__(self, *positional: Any, importance_sampling: bool = False, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._corrects = importance_sampling
        if importance_sampling and not self.vllm_importance_sampling_correction:
            raise ConfigError("importance_sampling is asked for, and vllm_importance_sampling_correction forbids it")

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        return as_lists(self._roll_out(prompt_ids, images or multimodal_fields))

    # TRL corrects what vLLM has generated, and nothing else asks for it between generation and loss.
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._passing_for_vllm(self._corrects):
            return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts: list[Any]) -> Any:
        with self._passing_for_vllm(False):
            return super()._generate(prompts)

    @contextmanager
    def _passing_for_vllm(self, flag: bool) -> Iterator[None]:
        before, self.use_vllm = self.use_vllm, flag
        try:
            yield
        finally:
            self.use_vllm = before


class _RLOO(_GeneratingTrainer):
    """TRL's `RLOOTrainer` with the engine's generation."""

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *_: Any
    ) -> list[list[int]]:
        return as_lists(self._roll_out(prompt_ids, images or multimodal_fields))[0]


_TRAINERS = {"GRPOTrainer": _GRPO, "RLOOTrainer": _RLOO}


def __getattr__(name: str) -> Any:
    """A trainer of TRL with the engine's generation, made when it is first asked for."""
    if name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    trl = load_package("trl", f"{name} is TRL's with another generation")
    ours = _TRAINERS[name]
    trainer = type(name, (ours, getattr(trl, name)), {"__doc__": ours.__doc__, "__module__": __name__})
    globals()[name] = trainer
    return trainer
