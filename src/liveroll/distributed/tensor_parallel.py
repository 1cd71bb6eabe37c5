"""The ranks that compute a model's layers together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from liveroll.distributed.agreement import any_rank, least_of, name_ranks
from liveroll.errors import ConfigError, EngineStateError, UnsupportedModelError
from liveroll.model.signature import walk
from liveroll.model.versions import model_mesh


def choose_group(model: nn.Module, given: Any) -> ProcessGroup | None:
    """The tensor-parallel group of a model: the one that was given, or the one that the model tells.

    Returns:
        None where there is none, or it is this rank alone.

    Raises:
        ConfigError: what was given is no process group, or not this rank's, or has other ranks than the model tells.
    """
    found = find_group(model)
    if given is None:
        return found
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("this rank is not in tp_group; give each rank the group that it computes layers with")
    if not isinstance(given, ProcessGroup):
        raise ConfigError(f"tp_group must be a process group of torch.distributed, not a {type(given).__name__}")
    if found is not None:
        told, wanted = dist.get_process_group_ranks(found), dist.get_process_group_ranks(given)
        if set(told) != set(wanted):
            raise ConfigError(
                f"tp_group has {name_ranks(wanted)}, and the model's layers are divided among {name_ranks(told)}; "
                "leave tp_group out, or give the group of the mesh that divides them"
            )
    return given if given.size() > 1 else None


def find_group(model: nn.Module) -> ProcessGroup | None:
    """The tensor-parallel group of a model: of transformers' or torch's device mesh, or of DeepSpeed's layers.

    Returns:
        None where no layer is divided, or only one rank has all of it.

    Raises:
        EngineStateError: the group has been destroyed.
    """
    modules = walk(model)
    gathered = any(isinstance(module, FSDPModule) for module in modules)
    for module in modules:
        group = getattr(module, "mp_group", None)  # of DeepSpeed's AutoTP layers
        if isinstance(group, ProcessGroup) and group.size() > 1:
            return group
    tensors: Iterator[Any] = (tensor for module in modules for tensor in module._parameters.values())
    # Tensors that only `fully_shard` divides lie on a mesh without the ranks of the others.
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    groups = (_group_of(mesh, named=gathered) for mesh in (*meshes, model_mesh(model)) if mesh is not None)
    return next((group for group in groups if group is not None), None)


def _group_of(mesh: DeviceMesh, *, named: bool) -> ProcessGroup | None:
    """The group of a mesh's dimension `tp`, or of its only one where that need not have the name."""
    names = mesh.mesh_dim_names or ()
    alone = mesh.ndim == 1 and not named and not {"fsdp", "dp", "pp"} & set(names)
    if "tp" not in names and not alone:
        return None
    try:
        group = mesh.get_group("tp" if "tp" in names else None)
    except RuntimeError as error:
        raise EngineStateError(
            "the process group that computes the model's layers does not exist or has been destroyed; make the engine "
            "between init_process_group and destroy_process_group, of a model divided since then"
        ) from error
    return group if group.size() > 1 else None


def check_logits(logits: Tensor, vocab_size: int, group: ProcessGroup | None) -> None:
    """Refuse a model whose ranks would not sample the same tokens.

    Args:
        logits: `[..., V]` of one forward of the same tokens on every rank.
        vocab_size: ids that the model is configured for.
        group: the ranks that hold the model together, or None.

    Raises:
        UnsupportedModelError: the logits are divided among the ranks, or differ.
    """
    if group is None:
        return
    divided = isinstance(logits, DTensor) or logits.shape[-1] < vocab_size
    if any_rank(divided, group, logits.device):
        raise UnsupportedModelError(
            "each rank computes the logits of a part of the vocabulary only, and none could sample from them; let the "
            "plan of lm_head gather its output ('colwise_gather_output', or 'colwise_rep' before transformers 5)"
        )
    # The bits, so that numbers which are not numbers compare too.
    bits = logits.detach().float().contiguous().view(torch.int32).long()
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    total = int((bits.flatten() * place).sum().item() % (1 << 62))
    if least_of(total, group, logits.device) != -least_of(-total, group, logits.device):
        raise UnsupportedModelError(
            "the ranks of tp_group compute different logits for one prompt, so they do not hold shards of one model; "
            "ranks that hold whole models each need no tp_group"
        )
