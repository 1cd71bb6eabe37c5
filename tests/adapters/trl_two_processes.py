"""Three steps of GRPO on one of several processes, half of every group on each: what it has drawn goes to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import trl
import trl_training as work

from liveroll.adapters.trl import RolloutFunction

folder = Path(sys.argv[1])
torch.set_num_threads(1)
steps = []


def rewards(prompts, completions, **_):
    gap = work.gap(trainer.model, rollouts.last, args.temperature)
    steps.append({"prompts": prompts, "completions": completions, "gap": gap})
    return work.mark(prompts, completions)


def weights():
    return [float(parameter.detach().double().sum()) for parameter in trainer.model.parameters()]


args = work.settings(
    trl.GRPOConfig, folder, per_device_train_batch_size=4, num_generations=8, temperature=1.5, save_strategy="no"
)
rollouts = RolloutFunction()
trainer = work.make(trl.GRPOTrainer, args, rewards, rollout_func=rollouts)
before = weights()
trainer.train()
report = {
    "steps": steps,
    "weights_before": before,
    "weights": weights(),
    "recaptures": rollouts.engine.recapture_reasons,
}
(folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(report), "utf-8")
torch.distributed.destroy_process_group()
# DistributedDataParallel holds the group it was made with, and a gloo thread of a held group that lets go of a tensor
# while the interpreter ends aborts the process: one in ten programs of torch alone that end so.
sys.stderr.flush()
os._exit(0)
