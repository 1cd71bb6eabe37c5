"""What `liveroll doctor` looks at: what is installed, what a model allows, how near the engine is to its trainer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from liveroll.config import PrefillRoute, RolloutConfig
from liveroll.errors import ConfigError, LiverollError, PromptError
from liveroll.tools.checkpoint import Checkpoint, load_checkpoint
from liveroll.tools.environment import describe_environment
from liveroll.tools.jobs import Prompt, read_jobs, refuse_bad_lines

TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969, the first",
    "Dear Sir or Madam,",
    "The meaning of life is",
    "The history of the village begins with a river. " * 8,
)
"""Prompts that parity is measured on where none are given."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What `liveroll doctor` was asked to do.

    Args:
        model: a checkpoint folder, the id of a model on the Hub, or `tiny`; None to look at the environment alone.
        parity: compare log-probabilities with the trainer's.
        prompts: file of prompts for it, as `liveroll generate` reads it; None for `TEXTS`.
        max_new_tokens: tokens of each response, at most; None is 64.
        n: samples of each prompt; None is 4.
        seed: of the samples; None is 0.
        slots: rows that decode side by side, at most.
        route: how prompts are prefilled.
        capture: as in `RolloutConfig`.
        compile: as there.
        fuse: as there.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one) or a torch device.

    Raises:
        ConfigError: options that exclude one another.
    """

    model: str | None = None
    parity: bool = False
    prompts: Path | None = None
    max_new_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    slots: int = 32
    route: str = "packed"
    capture: bool | Literal["auto"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    fuse: bool | Literal["auto"] = "auto"
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.parity and self.model is None:
            raise ConfigError("--parity compares with a model; give --model")
        given = [name for name in ("prompts", "max_new_tokens", "n", "seed") if getattr(self, name) is not None]
        if given and not self.parity:
            raise ConfigError(f"--{given[0].replace('_', '-')} is of --parity; give that too")
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if changed and self.model is None:
            raise ConfigError(f"--{changed[0]} is of a model; give --model")


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        environment: versions and devices, by name.
        model: what the model allows, by name; empty where none was given.
        parity: a `liveroll.tools.parity.Parity`, or None.
        healthy: the model can be rolled out, and is near to its trainer where that was measured.
    """

    environment: dict[str, str]
    model: dict[str, str]
    parity: Any
    healthy: bool


def run_doctor(options: DoctorOptions) -> Diagnosis:
    """Look at what there is.

    Raises:
        ConfigError: the model or device cannot be used, or the engine's options are none.
        PromptError: the prompts file has bad lines, or settings of its own, or a prompt that is too long.
    """
    config = RolloutConfig(
        max_slots=options.slots,
        prefill_route=cast(PrefillRoute, options.route),
        capture=options.capture,
        compile=options.compile,
        fuse=options.fuse,
        sample_padded_vocabulary=True,
    )
    prompts = None if options.prompts is None else _read_prompts(options.prompts)
    environment = describe_environment()
    if options.model is None:
        return Diagnosis(environment, {}, None, True)
    checkpoint = load_checkpoint(options.model, options.dtype, options.device)
    described = _describe_model(checkpoint.model)
    try:
        if options.parity:
            return _measure(options, checkpoint, config, prompts, environment, described)
        described |= _try_out(checkpoint, config)
    except LiverollError as error:
        if options.parity and isinstance(error, ConfigError | PromptError):
            raise
        return Diagnosis(environment, described | {"rollout": f"no: {error}"}, None, False)
    return Diagnosis(environment, described, None, True)


def _measure(
    options: DoctorOptions,
    checkpoint: Checkpoint,
    config: RolloutConfig,
    prompts: Any,
    environment: dict[str, str],
    described: dict[str, str],
) -> Diagnosis:
    from liveroll.engine import RolloutEngine
    from liveroll.tools.parity import measure_parity, plain_sampling

    sampling = plain_sampling(
        64 if options.max_new_tokens is None else options.max_new_tokens,
        4 if options.n is None else options.n,
        options.seed or 0,
    )
    engine = RolloutEngine(checkpoint.model, checkpoint.tokenizer, config)
    parity = measure_parity(engine, checkpoint.model, prompts or default_prompts(checkpoint), sampling)
    described |= {"rollout": "yes"} | _describe_steps(engine, parity.batch.stats)
    return Diagnosis(environment, described, parity, parity.near)


def default_prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """`TEXTS` as tokens; where there is no tokenizer, or it does not know all characters, random tokens."""
    tokenizer, size = checkpoint.tokenizer, checkpoint.model.config.get_text_config().vocab_size
    prompts = [] if tokenizer is None else [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    unknown = None if tokenizer is None else tokenizer.unk_token_id
    if not prompts or any(not prompt or unknown in prompt for prompt in prompts):
        from liveroll.tools.workloads import draw_prompts

        return draw_prompts([4, 5, 6, 7, 8, 12, 16, 48], size, seed=0)
    return prompts


def _try_out(checkpoint: Checkpoint, config: RolloutConfig) -> dict[str, str]:
    """What a short call did."""
    from liveroll.engine import RolloutEngine
    from liveroll.tools.parity import plain_sampling

    with RolloutEngine(checkpoint.model, checkpoint.tokenizer, config) as engine:
        # A model that ends at once would run no decode step.
        sampling = replace(plain_sampling(4, 1, 0), stop_token_ids=())
        batch = engine.generate(default_prompts(checkpoint)[:2], sampling)
        return {"rollout": "yes"} | _describe_steps(engine, batch.stats)


def _describe_model(model: Any) -> dict[str, str]:
    from liveroll.attention.backend import name_backend
    from liveroll.model.versions import AttentionSwitch

    size = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "model": f"{type(model).__name__}, {size / 1e6:,.0f} M parameters, {dtype} on {model.device}",
        "attention": f"{name_backend(model.device)} in rollouts, {AttentionSwitch(model).name} in training",
    }


def _describe_steps(engine: Any, stats: Any) -> dict[str, str]:
    """How the decode steps of a call were run, and why not otherwise."""
    on_gpu = engine._model.device.type == "cuda"
    tried = bool(stats.captures or stats.replays)
    untried = "not tried: the engine itself ran no decode step"
    captured = "yes" if on_gpu else "yes, as steps run again: CUDA graphs need a GPU"
    fused = "no: RolloutConfig.fuse is False"
    if engine.config.fuse:
        fusion = engine.fusion
        refused = "; ".join(f"not {name}: {reason}" for name, reason in list(fusion.refused.items())[:3])
        fused = f"{len(fusion.fused)} groups of projections" + (f"; {refused}" if refused else "")
    return {
        "captured": f"no: {stats.eager_reason}" if stats.eager_reason else captured if tried else untried,
        "compiled": _describe_compilation(engine.config.compile, on_gpu, stats, untried),
        "fused": fused,
    }


def _describe_compilation(asked: bool | str, on_gpu: bool, stats: Any, untried: str) -> str:
    if not asked:
        return "no: RolloutConfig.compile is False"
    if asked == "auto" and not on_gpu:
        return "no: auto compiles on a GPU only"
    if stats.uncompiled_reason:
        return f"no: {stats.uncompiled_reason}"
    return "yes" if stats.captures or stats.replays or stats.eager_reason else untried


def _read_prompts(path: Path) -> list[Prompt]:
    from liveroll.sampling_config import SamplingConfig

    plain = SamplingConfig(seed=0)
    file = read_jobs(path, plain)
    refuse_bad_lines(path, file.bad)
    for job in file.jobs:
        if job.sampling != SamplingConfig(seed=job.index):
            raise PromptError(f"line {job.index + 1} of {path} has settings; parity is measured without any")
    if not file.jobs:
        raise PromptError(f"{path} has no prompts")
    return [job.prompt for job in file.jobs]
