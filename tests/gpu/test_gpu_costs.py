"""Costs measured and routes compared on a GPU."""

import gc

import pytest
import torch
from zoo import build

from liveroll import ConfigError, RolloutConfig
from liveroll.planning.costs_file import write_costs
from liveroll.tools.calibrate import calibrate
from liveroll.tools.grid import WorkloadRange
from liveroll.tools.reference import Reference
from liveroll.tools.sweep import sweep
from liveroll.tools.sweep_result import CONTENDERS
from liveroll.tools.workloads import Workload

WORK = WorkloadRange(min_length=2, max_length=32, max_batch=4)


@pytest.mark.parametrize("capture", [True, False])
def test_calibration_and_sweep(capture, tmp_path):
    """Guards against captured steps timed as eager ones, memory that is not given back, and unlike tokens."""
    model = build("qwen3").cuda()
    config = RolloutConfig(capture=capture)
    # The first one leaves the workspaces of cuBLAS behind, which torch keeps for each stream.
    calibrate(model, WorkloadRange(min_length=2, max_length=4, max_batch=1), config, repeats=1)
    gc.collect()
    before = torch.cuda.memory_allocated()
    calibration = calibrate(model, WORK, config, repeats=2)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert calibration.file.origin.capture == capture
    assert calibration.file.origin.device == torch.cuda.get_device_name()
    if capture:
        assert calibration.costs.decode_step_ms < calibration.costs.ordinary_step_ms

    path = tmp_path / "costs.json"
    write_costs(path, calibration.file)
    workload = Workload("w", (20, 3, 3, 3))
    (case,) = sweep(
        model,
        [workload],
        [4],
        path,
        config=RolloutConfig(max_slots=4, capture=capture),
        repeats=1,
        reference=Reference(),
    )
    assert tuple(case.results) == CONTENDERS
    for result in case.results.values():
        assert result.peak_bytes > 0
        assert result.agreement == 1.0
    with pytest.raises(ConfigError, match="capture"):
        sweep(model, [workload], [4], path, config=RolloutConfig(max_slots=4, capture=not capture))


def test_a_range_that_the_memory_does_not_hold():
    """Guards against running out of memory in mid-calibration."""
    with pytest.raises(ConfigError, match="lower max_batch or max_length"):
        calibrate(build("qwen3").cuda(), WorkloadRange(min_length=2, max_length=400, max_batch=10**7))
