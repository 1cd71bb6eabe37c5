"""When the keys of a prompt are read once for several samples, and what a step is told of its rows."""

import numpy as np
import pytest
import torch
from fake_device import make_request
from zoo import VOCAB_SIZE, build, ragged_prompts

from liveroll import ConfigError, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.decode import prefixes
from liveroll.decode.prefixes import PrefixTable
from liveroll.decode.upload import upload_into
from liveroll.planning import cascade
from liveroll.planning.cascade import WORTHWHILE_BYTES, least_spared
from liveroll.scheduling.clusters import NO_CLUSTERS, ClusterFinder, Clusters, find_clusters

PROMPTS = ragged_prompts(VOCAB_SIZE, seed=31, lengths=(3, 20, 33))


def rows_of(samples, tokens=9):
    rows = [make_request(row, tokens, 5, kind=0) for row in range(samples)]
    for row in rows:
        row.pages = [4, 7, 9 + row.row]
    return rows


def test_what_a_step_is_spared_decides():
    """Guards against a kernel more in every layer of steps that it spares nothing."""
    assert least_spared("auto", 1024) == WORTHWHILE_BYTES // 1024
    assert least_spared(True, 1024) == 1
    for setting, token_bytes in ((False, 1024), ("auto", 0), (True, 0)):
        assert least_spared(setting, token_bytes) is None
    # Of nine samples in clusters of up to eight, seven do not read the eight tokens in full pages.
    rows = rows_of(9)
    assert find_clusters(rows, 4, 8).spared == 7 * 8
    slots, tenancies = np.arange(9), np.zeros(9, np.int64)
    for least, found in ((56, True), (57, False)):
        finder = ClusterFinder(4, 8, least)
        assert (finder.find(slots, tenancies, dict(enumerate(rows))) is not None) == found
        assert finder.find(slots[:3], tenancies[:3], dict(enumerate(rows))) is None
    assert NO_CLUSTERS.spared == find_clusters(rows_of(1), 4, 8).spared == find_clusters(rows_of(5), 16, 8).spared == 0


def test_clusters_are_of_about_one_size():
    """Guards against one row left over that reads all of its keys alone."""
    clusters = find_clusters(rows_of(9), 4, 8)
    assert [(members >= 0).sum() for members in clusters.members] == [4, 5]
    assert clusters.tokens.tolist() == [8, 8]


def test_the_same_clusters_for_the_same_rows():
    """Guards against what is found, and put on the device, again in every step, and against a slot's last tenant."""
    finder = ClusterFinder(4, 8, 1)
    running = {slot: make_request(slot, 4, 5, kind=0) for slot in range(3)}
    for request in running.values():
        request.pages = [3]
    slots, tenancies = np.arange(3), np.zeros(3, np.int64)
    first = finder.find(slots, tenancies, running)
    assert finder.find(slots.copy(), tenancies.copy(), running) is first
    running[1] = make_request(1, 4, 5, kind=7)
    running[1].pages = [5]
    assert finder.find(slots, np.array([0, 1, 0]), running).members[0].tolist()[:3] == [0, 2, -1]


def test_what_a_step_is_told():
    """Guards against clusters of an earlier step, in which other rows stood or more rows were shared."""
    table = PrefixTable(9, 3, torch.device("cpu"))

    def told(rows):
        shown = table.view(rows)
        return [tensor.tolist() for tensor in (shown.count, shown.shared, shown.tokens, shown.members)]

    first = Clusters(np.array([[0, 3, 4], [6, 1, -1]], np.int32), np.array([8, 4], np.int32))
    table.load(first, 7)
    assert told(7) == [[2], [8, 4, 0, 8, 8, 0, 4], [8, 4, 0], [[0, 3, 4], [6, 1, -1], [-1] * 3]]
    table.load(Clusters(np.array([[1, 0, -1]], np.int32), np.array([12], np.int32)), 2)
    assert told(2) == [[1], [12, 12], [12], [[1, 0, -1]]]
    table.load(first, 7)
    assert told(7)[1] == [8, 4, 0, 8, 8, 0, 4]
    table.load(first, 9)
    assert told(9) == [[2], [8, 4, 0, 8, 8, 0, 4, 0, 0], [8, 4, 0, 0], [[0, 3, 4], [6, 1, -1], [-1] * 3, [-1] * 3]]


def test_an_interrupt_while_clusters_are_uploaded(monkeypatch):
    """Guards against clusters that count as uploaded, where others were half written over them."""
    table = PrefixTable(4, 2, torch.device("cpu"))
    first, other = (Clusters(np.array([rows], np.int32), np.array([8], np.int32)) for rows in ([0, 1], [2, 3]))
    table.load(first, 4)

    def upload_and_stop(array, target):
        upload_into(array, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prefixes, "upload_into", upload_and_stop)
        with pytest.raises(KeyboardInterrupt):
            table.load(other, 4)
    table.load(first, 4)
    assert table.view(4).members.tolist() == [[0, 1], [-1, -1]]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("name", "least", "settings"),
    [
        # Its one layer without a window keeps 256 bytes of a token; 124 tokens are spared until the first rows end.
        ("gemma2", 256 * 100, {"max_slots": 12}),
        ("llama", 1, {"max_slots": 5, "run_ahead": 3}),
        ("llama", 1, {"max_slots": 12, "kv_tokens": 100, "capture": False}),
    ],
    ids=["at once", "refilled", "preempted and eager"],
)
def test_samples_equal_those_that_read_all_keys(monkeypatch, name, least, settings):
    """Guards against rows that read a prompt of others, after rows have ended, come back or taken a slot."""
    pytest.importorskip("triton")
    from liveroll.attention.fast import GpuAttention
    from liveroll.attention.reference import ReferenceAttention

    class Interpreted(GpuAttention):
        packed = ReferenceAttention.packed

    model, sampling = build(name), SamplingConfig(n=3, temperature=1.0, top_k=0, seed=3, max_new_tokens=6)
    varied = [sampling, SamplingConfig(n=4, temperature=1.0, top_k=0, seed=3, max_new_tokens=3), sampling]
    settings = {"page_size": 4, "max_length": 48} | settings
    expected = RolloutEngine(model, config=RolloutConfig(**settings)).generate(PROMPTS, varied)
    assert not expected.stats.cascade_steps
    monkeypatch.setattr(cascade, "WORTHWHILE_BYTES", least)
    monkeypatch.setattr("liveroll.decode.decoder.choose_backend", Interpreted)
    engine = RolloutEngine(model, config=RolloutConfig(**settings))
    batch = engine.generate(PROMPTS, varied)
    assert [c.token_ids for c in batch.completions] == [c.token_ids for c in expected.completions]
    assert batch.stats.cascade_steps == 2 if least > 1 else batch.stats.cascade_steps > 2
    assert (batch.stats.preemptions > 0) == ("kv_tokens" in settings)
    # Prompts alone are other steps than those of samples that share, and both stay captured.
    captured = engine.captures
    alone = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=3))
    again = engine.generate(PROMPTS, varied)
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in expected.completions]
    assert (alone.stats.cascade_steps, again.stats.cascade_steps) == (0, batch.stats.cascade_steps)
    assert engine.captures == captured + alone.stats.captures


def test_layers_that_all_have_windows(monkeypatch):
    """Guards against steps captured apart, and counted, in which no layer reads keys once."""
    pytest.importorskip("triton")
    from liveroll.attention.fast import GpuAttention
    from liveroll.attention.reference import ReferenceAttention

    class Interpreted(GpuAttention):
        packed, paged = ReferenceAttention.packed, ReferenceAttention.paged

    monkeypatch.setattr(cascade, "WORTHWHILE_BYTES", 1)
    monkeypatch.setattr("liveroll.decode.decoder.choose_backend", Interpreted)
    for name, shares in (("mistral", False), ("llama", True)):
        engine = RolloutEngine(build(name), config=RolloutConfig(page_size=4, max_length=48))
        stats = engine.generate(PROMPTS, SamplingConfig(n=3, max_new_tokens=3, temperature=1.0)).stats
        assert (stats.cascade_steps > 0) == shares


def test_it_needs_a_gpu():
    """Guards against a setting that is taken and does nothing."""
    with pytest.raises(ConfigError, match=r"cascade is True and the model is on a device of type cpu.*cascade='auto'"):
        RolloutEngine(build("llama"), config=RolloutConfig(cascade=True))
    with pytest.raises(ConfigError, match='cascade must be True, False or "auto"'):
        RolloutConfig(cascade="always")
