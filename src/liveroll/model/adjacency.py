"""Parameters laid side by side in memory, so that one matrix spans them, while each stays a tensor of its own.

Every parameter keeps a storage of its own size. That is what saving, copying and sharing weights go by: accelerate,
for one, saves a single tensor of those that are views of one storage, and drops the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

_laid: dict[StorageWeakRef, int] = {}
"""Where the storages lie that were laid together, for as long as there is one."""


def lie_together(parameters: Sequence[Tensor]) -> bool:
    """Whether each of the contiguous tensors begins where the one before ends."""
    end = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end:
            return False
        end += parameter.nbytes
    return True


@torch.no_grad()
def lay_together(parameters: Sequence[Tensor]) -> None:
    """Move parameters into one buffer, the rows of one behind those of the other.

    The parameters stay the same objects and keep their values, also where this is interrupted. The buffer lives until
    the last of them has moved elsewhere.

    Args:
        parameters: `[rows, ...]` each, alike but for the number of rows.
    """
    for gone in [storage for storage in list(_laid) if storage.expired()]:
        _laid.pop(gone, None)
    rows = [len(parameter) for parameter in parameters]
    buffer = parameters[0].detach().new_empty(sum(rows), *parameters[0].shape[1:])
    for parameter, place in zip(parameters, buffer.split(rows), strict=True):
        place.copy_(parameter)
        # The import makes a storage that begins and ends with the rows, and keeps the buffer.
        parameter.data = from_dlpack(place)
        _laid[StorageWeakRef(parameter.untyped_storage())] = parameter.data_ptr()


def was_laid(parameter: Tensor) -> bool:
    """Whether a parameter is where `lay_together` put it, and nobody has laid it elsewhere since."""
    if type(parameter) is not nn.Parameter:  # others may have no storage to ask for
        return False
    return _laid.get(StorageWeakRef(parameter.untyped_storage())) == parameter.data_ptr()


# Parameters made in inference mode could not be trained any more.
@torch.inference_mode(False)
@torch.no_grad()
def lay_apart(parameters: Sequence[Tensor]) -> None:
    """Give each parameter memory of its own."""
    for parameter in parameters:
        parameter.data = parameter.detach().clone()


def span(parameters: Sequence[Tensor]) -> Tensor:
    """The tensor over the memory of parameters that lie together on the CPU or a GPU.

    It does not keep that memory: it may be read only while the parameters have not moved.
    """
    first, size = parameters[0], sum(parameter.nbytes for parameter in parameters)
    if first.is_cuda:
        memory = torch.as_tensor(_DeviceMemory(first.data_ptr(), size), device=first.device)
    else:
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(first.data_ptr()), dtype=torch.uint8)
    return memory.view(first.dtype).view(-1, *first.shape[1:])


class _DeviceMemory:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
