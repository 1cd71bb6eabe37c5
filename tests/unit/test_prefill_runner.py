"""What a prefill writes and keeps: its own pages, and logits that are needed again."""

from __future__ import annotations

import pytest
import torch
from fake_device import make_request
from zoo import shared

from liveroll.attention.reference import ReferenceAttention
from liveroll.kv.storage import PagedStorage
from liveroll.model.forward import ModelForward
from liveroll.model.guard import ModelGuard
from liveroll.model.probe import probe
from liveroll.planning.prefill import Forward, PrefillPlan
from liveroll.prefill.logits import PromptLogits
from liveroll.prefill.runner import PrefillRunner


@pytest.mark.parametrize("width", [None, 10])
def test_pages_that_others_have_written_are_left_alone(width):
    """Guards against a row that comes back and writes over keys, equal but for rounding, which running rows read."""
    model = shared("llama")
    guard = ModelGuard(model, training=False)
    with guard.rollout(), guard.our_attention():
        shape, dtype = probe(model)
        storage = PagedStorage(shape.layers, 7, 4, dtype, torch.device("cpu"))
        back, new = make_request(0, 10, 9), make_request(1, 3, 9)
        back.prompt, new.prompt = back.prompt % 97, new.prompt % 97
        back.pages, back.borrowed, new.pages = [3, 5, 1], 2, [6]
        runner = PrefillRunner(ModelForward(model), guard, storage, ReferenceAttention())
        plan = PrefillPlan("packed" if width is None else "equal_width", (Forward((0, 1), width),))
        list(runner.run([back, new], plan))
    for tensor in (*storage.keys, *storage.values):
        written = tensor.flatten(2).ne(0).any(dim=2)
        assert written[1:].nonzero().tolist() == [[0, 0], [0, 1], [5, 0], [5, 1], [5, 2]]


def test_kept_logits_do_not_hold_those_beside_them():
    """Guards against the logits of a whole forward held for the sake of one prompt's."""
    logits = torch.randn(8, 97)
    kept = PromptLogits()
    for group in (3, 5, 6):
        kept.keep(group, logits[group])
    assert kept.of([5, 3]).equal(logits[[5, 3]])
    assert kept._rows[3].untyped_storage().nbytes() == 97 * 4
    kept.drop_others({5})
    assert list(kept._rows) == [5]
