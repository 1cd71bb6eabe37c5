"""Where the time of a call goes: its wall time cut into parts, each moment in exactly one of them."""

from __future__ import annotations

import time
from typing import Literal, get_args

import torch

Part = Literal["intake", "planning", "scheduling", "cache", "capture", "prefill", "decode", "postprocessing"]
DevicePart = Literal["prefill", "decode"]


class Timeline:
    """The timeline of a call whose profile was not asked for: when it began, and nothing else."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def enter(self, part: Part) -> None:
        """Count the time from now on to a part."""

    def launch(self, part: DevicePart) -> None:
        """Enter a part whose work goes to the device."""

    def launched(self) -> None:
        """All of the work of the last `launch` has been given to the device."""

    def wait(self) -> None:
        """Let the device finish, so that the part entered next does not wait for the work of this one."""

    def finish(self) -> float:
        """Seconds of the call, which ends now."""
        return time.perf_counter() - self._started


class RecordedTimeline(Timeline):
    """The timeline of a call that is profiled.

    The parts cover the call without gap or overlap, so that they sum to its wall time. On a GPU they say what the
    host did; events around the launches say besides how long the device took, and are read when the call has ended,
    so that nothing waits for them.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._part: Part = "intake"
        self._since = self._started
        self._spans: list[tuple[DevicePart, torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)

    def enter(self, part: Part) -> None:
        """Count the time from now on to a part."""
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def launch(self, part: DevicePart) -> None:
        """Enter a part whose work goes to the device."""
        self.enter(part)
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._spans.append((part, begin, end))

    def launched(self) -> None:
        """All of the work of the last `launch` has been given to the device."""
        if self._device.type == "cuda":
            self._spans[-1][2].record()

    def wait(self) -> None:
        """Let the device finish, so that the part entered next does not wait for the work of this one."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def finish(self) -> float:
        """Seconds of the call, which ends now."""
        self.enter(self._part)
        return self._since - self._started

    def device_ms(self, part: DevicePart) -> float | None:
        """Milliseconds that the device took over a part, waits for its launches included; None on a CPU.

        The device must have finished.
        """
        if self._device.type != "cuda":
            return None
        return float(sum(begin.elapsed_time(end) for name, begin, end in self._spans if name == part))
