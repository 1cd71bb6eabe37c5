"""How an engine runs: frozen, and validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from liveroll.config_checks import (
    MOST_ROWS,
    MOST_TOKENS,
    check_choice,
    check_flag,
    check_number,
    check_tuple,
    check_whole,
    naming_unknown_options,
)
from liveroll.errors import ConfigError
from liveroll.planning.costs import CostModel

Route = Literal["packed", "bucketed", "equal_width", "per_prompt", "ordinary"]
PrefillRoute = Literal[Route, "auto"]
Fallback = Literal["error", "generate"]
Balance = Literal["queue", "static"]


@naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a `RolloutEngine` runs.

    Args:
        max_slots: rows that decode side by side, at most; up to 2^20.
        max_length: tokens (prompt and response) a row may hold. None sizes the KV storage for each call's
            longest row; a number, up to 2^24, fixes it, so that calls of any shape share one storage.
        kv_tokens: KV memory in tokens over all rows. At most one of the three `kv_*` may be given.
        kv_bytes: KV memory in bytes.
        kv_fraction: KV memory as a share of the memory free on the device when it is allocated; 0.5 when none
            of the three is given. Never more is taken than `max_slots` rows of full length need.
        page_size: tokens in one page of KV cache.
        prefill_route: how admitted prompts are prefilled. `packed`: one forward without padding. `equal_width`:
            one left-padded forward with the model's own attention and mask. `bucketed`: the left-padded forwards
            that `plan_buckets` finds. `per_prompt`: one forward each. `ordinary`: the padded batch goes to
            `model.generate`. `auto`: the cheapest of `auto_routes` by `costs`, for the call and for every refill.
        auto_routes: the routes that `auto` may take. `ordinary` is taken only by calls that fit it whole, so there
            must be another.
        costs: what forwards and decode steps take: a `CostModel`, a file of costs measured with this model and
            device, or None for the defaults of `CostModel`. `auto` measures them before the first call that goes by
            them, which takes about 12 seconds, and keeps them in the user's cache folder for later engines.
        prefill_capture: whether packed prefills are captured as decode steps are, filled up to one of a few sizes.
            `auto` does so on a GPU wherever `capture` allows it, and runs them eagerly where they cannot be, and says
            why in the stats; True does so on a CPU too, and makes that an error; False never captures them.
        prefill_capture_tokens: tokens up to which a packed prefill is captured; up to 2^24. Launching kernels takes
            longer than running them up to about the default; beyond, a prefill runs eagerly.
        prefill_max_tokens: token positions, padding included, in one prefill forward; None removes the limit. Where
            `costs` are given, the smaller of this and their `max_tokens` holds.
        fallback: what happens to a model or setting that the engine cannot run exactly. `error` refuses it;
            `generate` hands the call to `model.generate` and says why in the stats.
        training_mode: the mode the model generates in; False is `model.eval()`, True `model.train()`, and None
            leaves every module in the mode it is in.
        capture: whether decode steps are captured, as CUDA graphs on a GPU. `auto` runs them eagerly where they
            cannot be, and says why in the stats; True makes that an error; False never captures.
        compile: whether decode steps, and packed prefills where prefills are captured, go through `torch.compile`,
            which takes up to a minute once for each of the two and makes them faster; their numbers then differ from
            eager ones by rounding. `auto` compiles on a GPU, and where it fails goes on without and says why in the
            stats; True makes that an error.
        fuse: whether the projections of one input (`q_proj`, `k_proj` and `v_proj`; `gate_proj` and `up_proj`) are one
            product in decode steps and captured prefills. Their parameters are moved side by side at the first call,
            without a copy; their numbers then differ from those of separate products by rounding. `auto` leaves what
            cannot be fused, and `engine.fusion` says why; True makes that an error.
        cascade: whether attention in decode steps reads the keys of a prompt once for several of its samples, on a GPU.
            `auto` does in steps in which that spares enough; True does in all in which samples share pages, and needs a
            GPU. Neither does in float64, with more than 32 query heads to a KV head (8 in float32), or where all layers
            have windows. Numbers differ by rounding from those of rows that read all keys for themselves.
        gather_weights: whether weights that ranks hold in parts (ZeRO-3, `fully_shard`) are gathered once for a whole
            call, which is then captured like any other. False gathers them layer by layer in every forward, all ranks
            in step. `auto` gathers them whole where memory allows on every rank; True makes that an error.
        max_captures: captured steps and prefills kept, the one unused for longest leaves; None keeps all.
        run_ahead: decode steps that may be launched before the result of an earlier one is read, so that the
            device never waits for the host. None is 2 on a GPU and 0 elsewhere.
        seed: the engine's seed, used by calls whose `SamplingConfig.seed` is None. Such calls differ from one
            another, and the sequence of calls repeats with the engine's seed.
        balance: how the ranks of a group divide a call's work. `queue`: each takes more when it has slots free, so that
            none waits for another's long responses; `static`: each runs its own prompts.
        rank_timeout: seconds without a sign of life after which a rank that others of its group wait for counts as
            lost. It must be longer than what ranks come to a call apart from each other, and than the capture or
            compilation of a step.
        sample_padded_vocabulary: whether ids that the engine's tokenizer does not know may be sampled. Models often
            have more rows in their embedding than their tokenizer has tokens, and `model.generate` may choose one.
        progress: show a progress bar of finished completions.
        profile: say in the stats where the time of a call went.

    Raises:
        ConfigError: a value is out of range or two settings exclude each other.
    """

    max_slots: int = 32
    max_length: int | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    kv_fraction: float | None = None
    page_size: int = 16
    prefill_route: PrefillRoute = "packed"
    auto_routes: tuple[Route, ...] = get_args(Route)
    costs: CostModel | Path | str | None = None
    prefill_capture: bool | Literal["auto"] = "auto"
    prefill_capture_tokens: int = 2048
    prefill_max_tokens: int | None = 65536
    fallback: Fallback = "error"
    training_mode: bool | None = False
    capture: bool | Literal["auto"] = "auto"
    compile: bool | Literal["auto"] = False
    fuse: bool | Literal["auto"] = False
    cascade: bool | Literal["auto"] = "auto"
    gather_weights: bool | Literal["auto"] = "auto"
    max_captures: int | None = None
    run_ahead: int | None = None
    seed: int = 0
    balance: Balance = "queue"
    rank_timeout: float = 600.0
    sample_padded_vocabulary: bool = False
    progress: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        check_whole(self, "max_slots", low=1, high=MOST_ROWS)
        check_whole(self, "max_length", low=2, high=MOST_TOKENS, optional=True)
        check_whole(self, "kv_tokens", low=1, optional=True)
        check_whole(self, "kv_bytes", low=1, optional=True)
        check_number(self, "kv_fraction", low=0.0, high=1.0, low_open=True, optional=True)
        check_whole(self, "page_size", low=1)
        check_choice(self, "prefill_route", get_args(PrefillRoute))
        _check_auto_routes(self)
        if isinstance(self.costs, str) and self.costs not in ("", "auto"):
            object.__setattr__(self, "costs", Path(self.costs))
        if self.costs not in (None, "auto") and not isinstance(self.costs, CostModel | Path):
            raise ConfigError(f'RolloutConfig.costs must be a CostModel, a path, "auto" or None, not {self.costs!r}')
        check_whole(self, "prefill_max_tokens", low=1, optional=True)
        check_choice(self, "fallback", get_args(Fallback))
        check_flag(self, "training_mode", optional=True, besides="None")
        for name in ("capture", "prefill_capture", "compile", "fuse", "cascade", "gather_weights"):
            if getattr(self, name) != "auto":
                check_flag(self, name, besides='"auto"')
        check_whole(self, "prefill_capture_tokens", low=1, high=MOST_TOKENS)
        if self.prefill_capture is True and self.capture is False:
            raise ConfigError("RolloutConfig.prefill_capture is True and capture False, which captures nothing")
        check_whole(self, "max_captures", low=1, optional=True)
        check_whole(self, "run_ahead", low=0, optional=True)
        check_whole(self, "seed", low=0)
        check_choice(self, "balance", get_args(Balance))
        check_number(self, "rank_timeout", low=0.0, low_open=True)
        check_flag(self, "sample_padded_vocabulary")
        check_flag(self, "progress")
        check_flag(self, "profile")
        given = [name for name in ("kv_tokens", "kv_bytes", "kv_fraction") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} all set the KV memory; give one of them")


def check_config(config: Any) -> RolloutConfig:
    """The configuration given to an engine, or the default where it is None.

    Raises:
        ConfigError: it is something else.
    """
    if config is not None and not isinstance(config, RolloutConfig):
        raise ConfigError(f"config must be a RolloutConfig, not a {type(config).__name__}")
    return config or RolloutConfig()


def no_prefill_capture(config: RolloutConfig, device_type: str) -> str | None:
    """Why a configuration wants no captured prefills on a kind of device; None where it wants them."""
    if config.capture is False:
        return "RolloutConfig.capture is False"
    if config.prefill_capture is False:
        return "RolloutConfig.prefill_capture is False"
    if config.prefill_capture == "auto" and device_type != "cuda":
        return "prefill_capture='auto' captures prefills on a GPU only"
    return None


def check_device(config: RolloutConfig, device_type: str) -> None:
    """Refuse settings that a kind of device does not have.

    Raises:
        ConfigError: there are such.
    """
    if config.cascade is True and device_type != "cuda":
        raise ConfigError(
            f"RolloutConfig.cascade is True and the model is on a device of type {device_type}, where attention reads "
            "keys for each row; set cascade='auto'"
        )


def _check_auto_routes(config: RolloutConfig) -> None:
    known = get_args(Route)
    given = check_tuple(config, "auto_routes", str)
    object.__setattr__(config, "auto_routes", given)
    if not given or len(set(given)) < len(given) or not set(given) <= set(known):
        raise ConfigError(f"RolloutConfig.auto_routes must be different ones of {', '.join(known)}, not {given!r}")
    if given == ("ordinary",):
        raise ConfigError(
            "RolloutConfig.auto_routes holds ordinary alone, which not every call fits; add another route"
        )
    if set(given) < set(known) and config.prefill_route != "auto":
        raise ConfigError(
            "RolloutConfig.auto_routes is what prefill_route='auto' may take, and prefill_route is "
            f"{config.prefill_route!r}; give one of the two"
        )
