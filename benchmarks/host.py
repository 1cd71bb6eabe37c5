"""Whether the host is quiet enough to time what it launches: eager steps, and what Python does around captured ones.

    python benchmarks/host.py [--seconds S] [--slow SHARE] [--out FOLDER]

Runs a fixed piece of Python over and over. Where others work on the same cores it takes about twice as long, for
seconds on end. Ends with 1 if it was slow for more than a share of the time, so that it can stand before a benchmark.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from common import report

from liveroll.tools.quiet import SLOW, time_python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--slow", type=float, default=0.25, help="share of the time that it may be slow")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    times = []
    ends = time.perf_counter() + arguments.seconds
    while time.perf_counter() < ends:
        times.append(time_python())
        time.sleep(0.002)  # so that it is not the host's only work, and may be moved to another core
    least, times = min(times), sorted(times)
    slow = sum(taken > SLOW * least for taken in times) / len(times)
    result = {
        "least ms": round(least, 4),
        "median ms": round(times[len(times) // 2], 4),
        "most ms": round(times[-1], 4),
        "slow": round(slow, 3),
    }
    report("host", result, arguments.out)
    return int(slow > arguments.slow)


if __name__ == "__main__":
    sys.exit(main())
