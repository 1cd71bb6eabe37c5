"""How often things were drawn, against how often they should be."""

from __future__ import annotations

import numpy as np
from scipy import stats


def assert_drawn_from(probs: np.ndarray, counts: np.ndarray) -> None:
    """Pearson's chi-square test at 0.001; outcomes expected less than five times count as one.

    Raises:
        AssertionError: the counts differ from the probabilities, or something impossible was drawn.
    """
    expected = probs.astype(np.float64) / probs.sum(dtype=np.float64) * counts.sum()
    assert not counts[expected == 0].any(), "something impossible was drawn"
    often = expected >= 5
    rare = ~often & (expected > 0)
    if rare.any():
        counts = np.append(counts[often], counts[rare].sum())
        expected = np.append(expected[often], expected[rare].sum())
    else:
        counts, expected = counts[often], expected[often]
    assert len(counts) > 1, "nothing was left to chance"
    assert stats.chisquare(counts, expected).pvalue > 1e-3
