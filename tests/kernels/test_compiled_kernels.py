"""What the interpreter does not see: whether kernels compile for a GPU, which needs none, and fit onto one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import liveroll.kernels

LAUNCH = re.compile(r"^ +(\w+)\[.*\]\(", re.MULTILINE)
LEAST = 99 * 1024
"""Bytes of shared memory that a program may take on every GPU since Ampere."""


def test_kernels_compile_and_fit(tmp_path):
    """Guards against code that the interpreter alone takes, defaults that Triton warns of, and tiles for H200s."""
    script = Path(__file__).parents[1] / "compiled_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = [sys.executable, "-W", "error::UserWarning", str(script)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert max(int(shared) for _, shared in compiled) <= LEAST
    sources = Path(liveroll.kernels.__file__).parent.glob("*.py")
    assert {name for name, _ in compiled} == {name for source in sources for name in LAUNCH.findall(source.read_text())}
