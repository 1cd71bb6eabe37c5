"""Whole rollouts by the engine and by what else generates in the trainer's process, against the memory floor.

    python benchmarks/decode.py [--model 3B|8B|32B|MoE] [--cases A,B,...] [--contenders fused,...] [--repeats N]
                                [--deepspeed FOLDER] [--curve] [--out FOLDER]

Cases of 32 prompts: A 16 tokens each, B one of 512 and 31 of 16, both with 128 new tokens; C and D the same with 16; E
16, 32, ..., 512 with 16. F: 64 prompts of 256 tokens with 8 samples of 256 tokens at temperature 1. G: 256 prompts of
64 to 512 tokens with long-tail answers (lognormal, median 128, 8 to 512) on 64 slots. `long` and `longer`: 64 rows at
4,096 and 8 at 32,768 tokens.

Contenders take turns, case by case. A peer whose first call of a case takes over --patience seconds is called once more
there; not at all where it takes over ten times that and sets nothing up, so that the next would be like the first, nor
where it takes over fifty times that. What there is is kept after each call.
The floor reads every weight once a step and the keys and values of the running rows, those of a prompt once for all of
its samples, at the card's copy rate.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from common import COPY_BYTES_PER_SECOND, GEOMETRIES, build, keep, median, need_gpu, prompts_of, report
from contenders import PEERS, SETTING_UP, VARIANTS, Case, Ours, Run, clear, find_deepspeed
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")
from matplotlib import pyplot

HOST_PARTS = ("intake", "planning", "scheduling", "cache", "capture", "postprocessing")
"""Of a call's profile; what of them falls between decode steps, the device does not wait for."""


def make_cases(vocab: int) -> dict[str, Case]:
    mixed, ladder = [512] + [16] * 31, list(range(16, 513, 16))
    draw = random.Random(0)
    lengths = [draw.randint(64, 512) for _ in range(256)]
    answers = [min(512, max(8, round(draw.lognormvariate(4.852, 1.0)))) for _ in range(256)]
    cases = [
        Case("A", prompts_of([16] * 32, vocab), [128] * 32),
        Case("B", prompts_of(mixed, vocab), [128] * 32),
        Case("C", prompts_of([16] * 32, vocab), [16] * 32),
        Case("D", prompts_of(mixed, vocab), [16] * 32),
        Case("E", prompts_of(ladder, vocab), [16] * 32),
        Case("F", prompts_of([256] * 64, vocab), [256] * 64, samples=8, slots=512, sampled=True),
        Case("G", prompts_of(lengths, vocab), answers, slots=64, sampled=True),
        Case("long", prompts_of([4096] * 64, vocab), [34] * 64, slots=64),
        Case("longer", prompts_of([32_000] * 8, vocab), [34] * 8, slots=8),
    ]
    return {case.name: case for case in cases}


def floor_ms(model: Any, case: Case) -> float:
    """Milliseconds that the decode steps of a case take at least."""
    config = model.config.get_text_config()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * model.dtype.itemsize
    return (case.steps * weights + case.keys_read * token) / COPY_BYTES_PER_SECOND * 1e3


def time_once(run: Run, case: Case) -> tuple[float, Any]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    batch = run(case)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3, batch


def failed(case: Case, name: str, error: Exception) -> dict[str, str]:
    """What a contender has for a result that raised."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    print(f"{case.name}: {name}: {text}", flush=True)
    return {"failed": text}


def is_called_again(name: str, first_ms: float, repeats: int, patience: float) -> bool:
    """Whether a contender has another call of a case, after its first and some repeats."""
    if name not in PEERS or first_ms <= patience * 1e3:
        return True
    return not repeats and first_ms <= (50 if name in SETTING_UP else 10) * patience * 1e3


def measure(
    model: Any, case: Case, runs: dict[str, Run], repeats: int, patience: float, found: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Times of a case by every contender, in turns; `found` is told after each call what there is."""
    rows: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    floor = floor_ms(model, case)
    result = {"floor ms": round(floor, 2), "least steps": case.steps, "contenders": rows}
    for name, run in runs.items():
        torch.cuda.reset_peak_memory_stats()
        try:
            first, _ = time_once(run, case)
        except Exception as error:  # a contender that cannot do a case is a result too
            rows[name] = failed(case, name, error)
            continue
        rows[name] = {"first ms": round(first, 1), "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
        rows[name] |= summary(case, [first], floor)
        times[name] = []
        print(f"{case.name}: {name}: first {first:.1f} ms", flush=True)
        found(result)
    for _ in range(repeats):
        for name in list(times):
            if not is_called_again(name, rows[name]["first ms"], len(times[name]), patience):
                continue
            try:
                spent, batch = time_once(runs[name], case)
            except Exception as error:
                rows[name] = failed(case, name, error)
                del times[name]
                continue
            times[name].append(spent)
            print(f"{case.name}: {name}: {spent:.1f} ms", flush=True)
            profile = getattr(getattr(batch, "stats", None), "profile", None)
            if profile is not None and profile.decode_forwards:
                step = profile.decode_device_ms / profile.decode_forwards
                rows[name]["ms a step"] = round(step, 3)
                rows[name]["prefill ms"] = round(profile.prefill_device_ms, 2)
                rows[name]["decode steps"] = profile.decode_forwards
                rows[name]["step, share of the floor"] = round(floor / (step * profile.decode_forwards), 3)
                on_device = profile.prefill_device_ms + profile.decode_device_ms
                rows[name]["outside prefill and steps, ms"] = round(profile.wall_ms - on_device, 2)
                rows[name]["of the host, ms"] = {part: round(getattr(profile, f"{part}_ms"), 2) for part in HOST_PARTS}
            rows[name] |= summary(case, times[name], floor) | {"all ms": [round(spent, 1) for spent in times[name]]}
            found(result)
    return result


def summary(case: Case, times: Sequence[float], floor: float) -> dict[str, float]:
    """What calls that took so many milliseconds come to."""
    ms = median(list(times))
    return {"ms": ms, "tokens/s": round(case.new_tokens / ms * 1e3), "share of the floor": round(floor / ms, 3)}


def curve(model: Any, run: Run, vocab: int, out: Path) -> list[dict[str, float]]:
    """Milliseconds a step over rows and context, against the floor; also as a plot."""
    points = []
    # The longest rows come first: they say how long those of the one engine may be.
    for context, counts in ((4096, (1, 8, 32, 64)), (1024, (1, 8, 32, 128)), (128, (1, 8, 32, 128, 512))):
        for rows in counts:
            case = Case("", prompts_of([context] * rows, vocab), [18] * rows, slots=512)
            run(case)
            profile = run(case).stats.profile
            step = profile.decode_device_ms / profile.decode_forwards
            least = floor_ms(model, case) / case.steps
            points.append({"context": context, "rows": rows, "ms": round(step, 3), "floor ms": round(least, 3)})
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for index, context in enumerate(dict.fromkeys(point["context"] for point in points)):
        mine = [point for point in points if point["context"] == context]
        rows = [point["rows"] for point in mine]
        axes.plot(rows, [point["ms"] for point in mine], f"C{index}o-", label=f"{context} tokens of context")
        axes.plot(rows, [point["floor ms"] for point in mine], f"C{index}:", label=f"{context}, memory floor")
    axes.set(xscale="log", xlabel="rows", ylabel="ms a decode step", ylim=(0, None))
    axes.legend()
    figure.savefig(out, dpi=150)
    return points


def show(results: dict[str, Any]) -> None:
    table = Table("case", "contender", "ms", "tokens/s", "ms a step", "prefill ms", "of the floor", "peak GiB", "first")
    for name, result in results.items():
        for contender, row in result["contenders"].items():
            if "failed" in row:
                table.add_row(name, contender, row["failed"][:60])
                continue
            columns = ("ms", "tokens/s", "ms a step", "prefill ms", "share of the floor", "peak GiB", "first ms")
            table.add_row(name, contender, *(str(row.get(column, "")) for column in columns))
    Console(width=150).print(table)


def names_in(text: str, known: Collection[str]) -> list[str]:
    """The names in a list that is separated by semicolons, or by commas where names have none."""
    separator = ";" if ";" in text or text.strip() in known else ","
    return [name.strip() for name in text.split(separator) if name.strip()]


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; `cases` and `contenders` as lists of names. Exits where one of them is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GEOMETRIES, default="3B")
    parser.add_argument("--cases", default="A,B,C,D,E,F,G")
    parser.add_argument("--contenders", default=";".join((*VARIANTS, *PEERS)), help="separated by commas, or by ;")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=2.0, help="seconds after which a peer is called once more")
    parser.add_argument("--deepspeed", type=Path, default=None, help="folder of DeepSpeed's Python files")
    parser.add_argument("--curve", action="store_true", help="ms a step over rows and context, by the last variant")
    parser.add_argument("--name", default=None, help="of the result")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args(given)
    cases = make_cases(GEOMETRIES[arguments.model]["vocab_size"])
    for what, known in (("cases", cases), ("contenders", (*VARIANTS, *PEERS))):
        names = names_in(getattr(arguments, what), known)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no {what} of these names: {'; '.join(unknown)}; there are {'; '.join(known)}")
        setattr(arguments, what, names)
    if arguments.curve and not set(arguments.contenders) & set(VARIANTS):
        parser.error(f"--curve needs one of the contenders {'; '.join(VARIANTS)}")
    need_gpu(parser)
    return arguments


def main() -> None:
    arguments = read_arguments()
    find_deepspeed(arguments.deepspeed)
    wanted = arguments.contenders
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(arguments.model, torch.bfloat16, "cuda")
    cases = make_cases(model.config.get_text_config().vocab_size)
    chosen = [cases[name] for name in arguments.cases]
    ours = {name: Ours(model, name) for name in wanted if name in VARIANTS}
    runs: dict[str, Run] = {**ours, **{name: PEERS[name](model) for name in wanted if name in PEERS}}
    name = arguments.name or f"decode-{arguments.model}"
    results: dict[str, Any] = {}
    found: dict[str, Any] = {"model": arguments.model, "cases": results}
    for case in chosen:

        def keep_case(result: dict[str, Any], case: Case = case) -> None:
            results[case.name] = result
            keep(name, found, arguments.out)

        show({case.name: measure(model, case, runs, arguments.repeats, arguments.patience, keep_case)})
        clear()
    if arguments.curve:
        picture = (arguments.out or Path(__file__).parent / "results") / f"{name}.png"
        last = next(reversed(ours.values()))
        found["curve"] = curve(model, last, model.config.get_text_config().vocab_size, picture)
    report(name, found, arguments.out)


if __name__ == "__main__":
    main()
