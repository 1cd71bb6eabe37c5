"""Where versions of transformers and torch differ: every probe of one, and every call that depends on it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import get_compilation_metrics
from torch._inductor.exc import InductorError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.fx import GraphModule
from torch.nn.attention.varlen import varlen_attn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])


class PreparedGeneration(NamedTuple):
    """What the model's generation preparer made of a request.

    Attributes:
        config: the effective generation configuration.
        model_kwargs: what was given and is not a field of it; `generate` hands these to `forward`.
        max_length_is_default: nobody set `max_length`, so that `generate` counts it from the end of the prompt.
    """

    config: GenerationConfig
    model_kwargs: dict[str, Any]
    max_length_is_default: bool


PENALTY_COUNTS_PADDING = _RELEASE < (5, 23)
"""Whether `generate` counts the tokens at masked positions of a padded batch as history to penalise."""


def prepare_generation_config(model: PreTrainedModel, request: dict[str, Any]) -> PreparedGeneration:
    """Run the model's generation preparer once, the way `model.generate(**request)` runs it.

    The preparer is `_prepare_generation_config`, a private method, but the one that custom models override.

    `model.generation_config` is left as it was found, whatever the preparer writes into it. In 4.57 the
    preparer may put a new object in its place when `model.config` was modified to control generation; that
    object stays, as it does after `generate`.

    Args:
        model: a Hugging Face causal LM.
        request: generation fields and model inputs, as one would give them to `generate`.

    Raises:
        ValueError: transformers, or a custom preparer, refuses the request.
    """
    own = model.generation_config
    before = copy.deepcopy(vars(own))
    # 4.57 passes `use_model_defaults` as a second positional argument; 5.x has none.
    positional = (None, None) if _RELEASE < (5, 0) else (None,)
    try:
        config, model_kwargs = model._prepare_generation_config(*positional, **request)
    finally:
        vars(own).clear()
        vars(own).update(before)
    return PreparedGeneration(config, model_kwargs, _max_length_is_default(before["max_length"], config))


def has_own_preparer(model: PreTrainedModel) -> bool:
    """Whether a model prepares its generation configuration otherwise than transformers does."""
    name = "_prepare_generation_config"
    return name in vars(model) or getattr(type(model), name) is not getattr(GenerationMixin, name)


def _max_length_is_default(own: int | None, config: GenerationConfig) -> bool:
    if _RELEASE < (5, 0):  # an unset `max_length` reads 20, and so cannot be told from a given 20
        return bool(config.max_length == GenerationConfig().max_length)
    if _RELEASE < (5, 3):  # only arguments of the call count as given, not the model's generation config
        return True
    return own is None


def default_generation_fields() -> dict[str, Any]:
    """Every public generation field of the installed version, with the value it has when nobody sets it.

    In 5.x a plain `GenerationConfig` holds None for all of them; the preparer fills in the defaults later.
    """
    filled_in: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    fields = {**vars(GenerationConfig()), **filled_in}
    return {name: value for name, value in fields.items() if not name.startswith("_")}


@contextmanager
def prepared_for_generate(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Make `model.generate` use `config` as it is, without running the model's preparer again.

    A preparer may multiply a setting, and would do so twice. Generation fields among the arguments of
    `generate` are dropped in favour of `config`, which stays unchanged; model inputs pass through.

    Args:
        model: a Hugging Face causal LM.
        config: a complete configuration, such as a preparer returns.
    """
    name = "_prepare_generation_config"
    own = vars(model)
    shadowed = {name: own[name]} if name in own else {}

    def prepare(*_: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        fresh = copy.deepcopy(config)
        return fresh, {key: value for key, value in kwargs.items() if not hasattr(fresh, key)}

    own[name] = prepare
    try:
        yield
    finally:
        del own[name]
        own.update(shadowed)


def cache_argument(model: nn.Module) -> str:
    """Name of the forward argument that takes the cache: `cache` since 5.2x, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def keeps_chosen_logits(model: nn.Module) -> bool:
    """Whether forward can compute the logits of chosen positions only; a few models before 5.0 cannot."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def model_mesh(model: nn.Module) -> DeviceMesh | None:
    """The devices that transformers divided a model over.

    There is no public way to it, and early versions of 5 leave parameters that are plain tensors.
    """
    mesh = getattr(model, "_device_mesh", None)
    return mesh if isinstance(mesh, DeviceMesh) else None


def abandon_forwards(units: Iterable[FSDPModule]) -> None:
    """Let units of `fully_shard` forget forwards that an exception ended, which still count as running.

    Units that stay unsharded after a forward are not resharded while one runs, and the next one would go on with what
    they gathered then. Nothing public tells that. `reset_iter_state`, which torch has since 2.13, also drops gradients
    that are still to be added up.
    """
    states: list[Any] = [unit._get_fsdp_state() for unit in units]
    if not any(state._training_state.name == "FORWARD" for state in states):
        return
    idle = type(states[0]._training_state).IDLE
    for state in states:
        state._training_state = idle
        state._state_ctx.iter_forward_root = None
        state._modules_to_run_forward.clear()  # before 2.13 a unit of several modules would not gather otherwise
        several = getattr(state, "_fsdp_param_groups", None)  # since 2.13
        for group in [state._fsdp_param_group] if several is None else several:
            if group is not None:
                group.wait_for_unshard()  # of one that was gathered ahead
                group._training_state = idle


class AttentionSwitch:
    """Switches a model's attention implementation, and knows the one in force.

    transformers has no public getter, and its public setter looks through all modules twice: too slow for twice a
    call. Both work on this attribute of the configurations that modules read it from. Most share the model's own; a
    layer that was copied has one of its own.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def name(self) -> str:
        """The model's implementation in force."""
        return str(self._model.config._attn_implementation)

    def find(self, modules: Iterable[nn.Module]) -> list[tuple[PretrainedConfig, str]]:
        """Every configuration that the modules hold, and the implementation in force by it."""
        held = [config for module in modules if (config := module.__dict__.get("config")) is not None]
        configs = {id(config): config for config in held if isinstance(config, PretrainedConfig)}
        return [(config, str(config._attn_implementation)) for config in configs.values()]

    def set(self, names: Iterable[tuple[PretrainedConfig, str]]) -> None:
        """Put implementations in force, as `find` gives them."""
        for config, name in names:
            config._attn_implementation = name


def varlen_attention(*, grouped: bool) -> Callable[..., Any]:
    """Torch's `varlen_attn`, told by keyword of fewer KV heads than query heads since 2.12; 2.11 need not be told."""
    known = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=grouped) if known else varlen_attn


COMPILE_FAILURES = (TorchDynamoException, InductorError)
"""What `torch.compile` raises where it cannot compile; errors of the compiled program itself are none of these."""


def end_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell torch that a capture that broke has ended; before 2.13 it takes it to go on.

    Until then it would give back no memory that it caches, even where there is none left, nor ever use again what
    other streams have used.

    Args:
        device: the GPU.
        pool: that the capture took memory from.
    """
    with suppress(RuntimeError):  # torch knows
        torch._C._cuda_endAllocateToPool(device.index, pool)


def inductor(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a traced graph as `torch.compile` does by default, small kernels beside one another merged."""
    compile_graph: Callable[..., Any] = lookup_backend("inductor")
    compiled: Callable[..., Any] = compile_graph(graph, inputs, config_patches={"combo_kernels": True})
    return compiled


def last_recompile_reason() -> str | None:
    """Why what was compiled last had been compiled before and did not fit any more; None if it had not."""
    records = get_compilation_metrics()
    reason = records[-1].recompile_reason if records else None
    return reason and reason.splitlines()[0]  # the rest is the stack that it was found in
