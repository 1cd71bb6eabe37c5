"""The memory under the KV pages: on a GPU it can be given back while its addresses stay reserved."""

from __future__ import annotations

import logging
import sys
from typing import Any, Protocol

import torch
from torch import Tensor

from liveroll.errors import KVMemoryError

logger = logging.getLogger("liveroll")


class Arena(Protocol):
    """A flat piece of device memory.

    Attributes:
        memory: `[bytes]` uint8, zeros when mapped.
    """

    memory: Tensor

    @property
    def bytes(self) -> int:
        """Bytes of device memory held now."""
        ...

    def unmap(self) -> bool:
        """Give the memory back and keep the addresses; False, and nothing happens, where that is not possible."""
        ...

    def map(self) -> None:
        """Take memory for the addresses again; nothing where it was not given back."""
        ...


class PlainArena:
    """Memory of torch's allocator, held until the arena goes."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self.memory.nbytes

    def unmap(self) -> bool:
        """Not possible."""
        return False

    def map(self) -> None:
        """Nothing was given back."""


class VirtualArena:
    """Memory of CUDA's virtual memory management: an address range, and physical memory mapped to it.

    Args:
        size: bytes.
        device: the GPU.
        driver: the module `cuda.bindings.driver`.
    """

    def __init__(self, size: int, device: torch.device, driver: Any) -> None:
        self._range = _AddressRange(size, device, driver)
        self._range.map()
        # The tensor keeps the range, and every view of it does: addresses outlive the last tensor that uses them.
        self.memory = torch.as_tensor(self._range, device=device)
        self.memory.zero_()

    @property
    def bytes(self) -> int:
        """Bytes of physical memory mapped now."""
        return self._range.size if self._range.mapped else 0

    def unmap(self) -> bool:
        """Give the physical memory back."""
        self._range.unmap()
        return True

    def map(self) -> None:
        """Take physical memory again, zeroed.

        Raises:
            KVMemoryError: there is not enough.
        """
        if not self._range.mapped:
            self._range.map()
            self.memory.zero_()


class _AddressRange:
    """Reserved device addresses, with physical memory behind them or without (CUDA driver API, section 6.14)."""

    def __init__(self, size: int, device: torch.device, driver: Any) -> None:
        torch.cuda.synchronize(device)
        self._driver = driver
        self._device = device
        self._handle: Any = None
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = torch.cuda.current_device() if device.index is None else device.index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))
        self.size = -(-size // unit) * unit
        self._address = self._call("cuMemAddressReserve", self.size, 0, 0, 0)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (int(self._address), False),
            "strides": None,
            "version": 3,
        }

    @property
    def mapped(self) -> bool:
        """Whether there is memory behind the addresses."""
        return self._handle is not None

    def map(self) -> None:
        """Put memory behind the addresses."""
        try:
            handle = self._call("cuMemCreate", self.size, self._properties, 0)
        except KVMemoryError:
            # What torch's allocator holds unused is free memory to us, but not to the driver.
            torch.cuda.empty_cache()
            handle = self._call("cuMemCreate", self.size, self._properties, 0)
        self._call("cuMemMap", self._address, self.size, 0, handle, 0)
        self._call("cuMemSetAccess", self._address, self.size, [self._access], 1)
        self._handle = handle

    def unmap(self) -> None:
        """Give the memory back, if there is any."""
        if self._handle is not None:
            torch.cuda.synchronize(self._device)
            self._call("cuMemUnmap", self._address, self.size)
            self._call("cuMemRelease", self._handle)
            self._handle = None

    def __del__(self) -> None:
        if hasattr(self, "_address") and not sys.is_finalizing():
            self.unmap()
            self._call("cuMemAddressFree", self._address, self.size)

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *results = getattr(self._driver, name)(*arguments)
        if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise KVMemoryError(f"{self.size} bytes for the KV pages are not free on {self._device}")
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {code}")
        return results[0] if results else None


def make_arena(size: int, device: torch.device) -> Arena:
    """Memory for `size` bytes on a device: virtual where cuda-python is installed, plain elsewhere."""
    if device.type == "cuda":
        try:
            from cuda.bindings import driver
        except ImportError:
            logger.info("cuda-python is not installed: sleep() will release the captured steps too")
        else:
            return VirtualArena(size, device, driver)
    return PlainArena(size, device)
