"""What liveroll runs on: versions and devices."""

from __future__ import annotations

import importlib
import platform


def describe_environment() -> dict[str, str]:
    """Versions, and the devices that torch sees."""
    import torch

    import liveroll

    cuda = torch.version.cuda
    found = {
        "liveroll": liveroll.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}",
        "transformers": _version_of("transformers", "needed"),
        "triton": _version_of("triton", "decode attention and sampling need it on a GPU"),
        "cuda-python": _version_of("cuda.bindings", "sleep() cannot keep captured steps without it"),
        "TF32 products": "yes" if torch.backends.cuda.matmul.allow_tf32 else "no",
    }
    if not torch.cuda.is_available():
        return found | {"device": f"CPU, {torch.get_num_threads()} threads; torch sees no GPU"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found[f"device cuda:{index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
    return found


def _version_of(module: str, missing: str) -> str:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return f"not installed: {missing}"
    return str(getattr(found, "__version__", "installed"))
