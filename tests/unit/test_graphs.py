"""The store of captured steps."""

from __future__ import annotations

from liveroll.decode.capture import RecordedSteps
from liveroll.decode.graphs import GraphStore


def test_dropped_steps_leave_their_pool():
    """Guards against a pool of device memory that stays with the store when its steps are gone."""
    pools = []

    class Pool(RecordedSteps):
        def bytes(self):
            return 7

    def make_pool():
        pools.append(Pool())
        return pools[-1]

    store = GraphStore(make_pool, None)
    assert store.bytes == 0
    for rows in (1, 2):
        store.record(("decode", rows), lambda: None)
    assert (store.bytes, len(pools)) == (7, 1)
    store.drop(None)
    assert store.bytes == 0
    store.record(("decode", 1), lambda: None)
    assert (store.bytes, len(pools)) == (7, 2)
