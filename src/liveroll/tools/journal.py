"""The output file of a batch run: what an earlier run left in it, and rows added one whole line at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from liveroll.errors import ConfigError
from liveroll.planning.json_file import write_json
from liveroll.tools.outputs import check_output, writing

Fingerprint = dict[str, Any]


@dataclass(frozen=True)
class Resumption:
    """Where an output file can be gone on with.

    Attributes:
        done: indexes of the jobs whose rows are whole.
        keep: bytes of the file that hold them; what follows is a torn row.
        size: bytes in the file when it was looked at.
    """

    done: frozenset[int]
    keep: int
    size: int


def meta_path(out: Path) -> Path:
    """Name the file beside `out` that says which run made it: `out.jsonl` has `out.jsonl.meta.json`."""
    return out.with_name(out.name + ".meta.json")


def find_resumption(
    out: Path, fingerprint: Fingerprint, ids: Mapping[int, str | int], *, overwrite: bool = False
) -> Resumption:
    """Look at an output file without changing anything.

    Args:
        out: the file; it need not exist.
        fingerprint: what the run asks for, as nested dicts of JSON values.
        ids: the id of every job, by its index.
        overwrite: start again whatever the file holds.

    Raises:
        ConfigError: the file was made by a run that asked for something else, or is not such a file at all. The
            message names every field that differs.
    """
    size = _size(out)
    if overwrite or size == 0:
        return Resumption(frozenset(), 0, size)
    _refuse_other_run(out, fingerprint)
    done: set[int] = set()
    keep = 0
    with out.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            done.add(_index_of(line, f"line {number} of {out}", ids))
            keep += len(line)
    return Resumption(frozenset(done), keep, size)


class Journal:
    """An output file open for adding rows. Nobody else can add to it meanwhile.

    Args:
        out: the file, made if it is missing.
        fingerprint: what the run asks for; kept in the file beside it.
        resumption: what `find_resumption` said; the file is cut to its whole rows.

    Raises:
        ConfigError: another run is writing to the file, or has since it was looked at, or it cannot be opened.
    """

    def __init__(self, out: Path, fingerprint: Fingerprint, resumption: Resumption) -> None:
        self._out = out
        with writing(out):
            self._file = out.open("ab")
        try:
            _lock(self._file)
            if os.fstat(self._file.fileno()).st_size != resumption.size:
                raise BlockingIOError
            self._file.truncate(resumption.keep)
            write_json(meta_path(out), fingerprint)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(f"another run is writing to {out}; wait for it, or give another --out") from error
        except OSError as error:
            self._file.close()
            raise ConfigError(f"cannot write beside {out}: {error.strerror}") from error
        except BaseException:
            self._file.close()
            raise

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row, whole: a kill after this call loses nothing, one during it leaves a torn last line.

        Raises:
            ConfigError: the file cannot be written to any more.
        """
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        with writing(self._out):
            self._file.write(line.encode("utf-8") + b"\n")
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        # What could not be written is tried once more.
        with writing(self._out):
            self._file.close()


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        # Some cluster file systems are mounted without locks: there, only a second run is not noticed.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def _size(out: Path) -> int:
    check_output(out)
    return out.stat().st_size if out.exists() else 0


def _refuse_other_run(out: Path, fingerprint: Fingerprint) -> None:
    meta = meta_path(out)
    way_out = "give --overwrite to start again, or another --out"
    try:
        made_with = json.loads(meta.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{out} is not empty and {meta.name} is missing; {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{meta} is damaged; {way_out}") from error
    was, now = _flat(made_with), _flat(json.loads(json.dumps(fingerprint)))
    differing = [
        f"  {name}: {_shown(was, name)} then, {_shown(now, name)} now"
        for name in [*now, *(name for name in was if name not in now)]
        if name not in was or name not in now or was[name] != now[name]
    ]
    if differing:
        listed = "\n".join(differing)
        raise ConfigError(f"{out} was made with other settings; give those to go on, or {way_out}:\n{listed}")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Turn `{"a": {"b": 1}}` into `{"a.b": 1}`."""
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, child in value.items():
        flat.update(_flat(child, f"{name}.{key}" if name else key))
    return flat


def _shown(flat: dict[str, Any], name: str) -> str:
    return json.dumps(flat[name]) if name in flat else "not given"


def _index_of(line: bytes, place: str, ids: Mapping[int, str | int]) -> int:
    try:
        row = json.loads(line)
        index = row["index"]
        known = ids[index] == row["id"]
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ConfigError(f"{place} is no row of this run; give --overwrite to start again, or another --out")
    return int(index)
