"""Files of costs are read in full or refused by name, and hold only for what they were measured with."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import zoo

from liveroll import ConfigError, CostModel, ModelGeometry, RolloutConfig, RolloutEngine
from liveroll.model.identity import describe_origin
from liveroll.planning import costs_file
from liveroll.planning.costs_file import (
    CostsFile,
    CostsOrigin,
    check_origin,
    fingerprint_sources,
    read_costs,
    write_costs,
)

COSTS = CostModel(fixed_ms=1.5, packed_token_ms=0.25, decode_step_ms=2.0, ordinary_step_ms=9.0, max_tokens=None)
POINTS = ({"route": "packed", "lengths": [16, 16], "ms": 3.5},)
ORIGINS = [field.name for field in dataclasses.fields(CostsOrigin)]


def origin_of(model, ranks=1, **settings):
    return describe_origin(model, RolloutConfig(**settings), ranks)


def save(path, origin=None, costs=COSTS):
    write_costs(path, CostsFile(costs, origin or origin_of(zoo.shared("llama")), POINTS))
    return path


def change(path, edit):
    """Edit the content of a file of costs in place."""
    content = json.loads(path.read_text("utf-8"))
    edit(content)
    path.write_text(json.dumps(content), "utf-8")
    return path


def test_what_is_written_is_read(tmp_path):
    """Guards against a coefficient, None, or a shape that differs by layer, lost on the way."""
    uneven = ModelGeometry(layers=2, query_heads=(4, 2), kv_heads=2, head_dim=8, element_bytes=2)
    for geometry in (origin_of(zoo.shared("llama")).geometry, uneven):
        origin = dataclasses.replace(origin_of(zoo.shared("llama")), geometry=geometry)
        path = tmp_path / "deep" / "costs.json"
        write_costs(path, CostsFile(COSTS, origin, POINTS))
        assert read_costs(path) == CostsFile(COSTS, origin, POINTS)
    assert json.loads(path.read_text("utf-8")).keys() == {"coefficients", "metadata", "points"}


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    """Guards against a file that another process reads half written, and against what a failed write leaves behind."""
    path = tmp_path / "costs.json"
    path.mkdir()
    with pytest.raises(OSError, match=re.escape("costs.json")):
        save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    """Guards against costs written beside those that a link names, which others go on reading."""
    kept, link = tmp_path / "kept.json", tmp_path / "costs.json"
    link.symlink_to(kept)
    save(link)
    assert link.is_symlink()
    assert read_costs(kept).coefficients == COSTS


def test_a_measurement_that_is_no_number_is_not_written(tmp_path):
    """Guards against a file that no other JSON reader takes."""
    with pytest.raises(ValueError, match="JSON"):
        write_costs(tmp_path / "costs.json", CostsFile(COSTS, origin_of(zoo.shared("llama")), ({"ms": float("nan")},)))
    assert not (tmp_path / "costs.json").exists()


BAD_FILES = {
    "no coefficients": (lambda c: c.pop("coefficients"), "the file lacks coefficients"),
    "no points": (lambda c: c.pop("points"), "the file lacks points"),
    "something else": (lambda c: c.update(extra=1), "the file has unknown extra"),
    "a missing coefficient": (lambda c: c["coefficients"].pop("kv_ms_per_mib"), "coefficients lacks kv_ms_per_mib"),
    "a missing optional one": (lambda c: c["coefficients"].pop("packed_fixed_ms"), "lacks packed_fixed_ms"),
    "an unknown coefficient": (lambda c: c["coefficients"].update(gpu=1), "coefficients has unknown gpu"),
    "a negative one": (lambda c: c["coefficients"].update(token_ms=-0.1), r"CostModel\.token_ms must be at least 0"),
    "NaN": (
        lambda c: c["coefficients"].update(token_ms=float("nan")),
        r"CostModel\.token_ms must be .*at most 1e\+09, not nan",
    ),
    "infinity": (
        lambda c: c["coefficients"].update(fixed_ms=float("inf")),
        r"CostModel\.fixed_ms must be .*at most 1e\+09, not inf",
    ),
    "None": (lambda c: c["coefficients"].update(fixed_ms=None), r"CostModel\.fixed_ms must be a number, not None"),
    "a string": (lambda c: c["coefficients"].update(fixed_ms="1"), r"CostModel\.fixed_ms must be a number"),
    "a list of coefficients": (lambda c: c.update(coefficients=[1]), "coefficients must be an object"),
    "missing metadata": (lambda c: c["metadata"].pop("device"), "metadata lacks device"),
    "two at once": (
        lambda c: (c["metadata"].pop("dtype"), c["metadata"].update(gpu=1)),
        "metadata lacks dtype and has unknown gpu",
    ),
    "no geometry": (lambda c: c["metadata"].update(geometry=None), "metadata.geometry must be an object"),
    "half a geometry": (lambda c: c["metadata"]["geometry"].pop("layers"), "metadata.geometry lacks layers"),
    "an odd geometry": (
        lambda c: c["metadata"]["geometry"].update(layers=0),
        r"ModelGeometry\.layers must be at least",
    ),
    "points that are none": (lambda c: c.update(points=[1]), "points must be a list of objects"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path, case):
    """Guards against a default in the place of a cost that was not measured."""
    edit, message = BAD_FILES[case]
    path = change(save(tmp_path / "costs.json"), edit)
    with pytest.raises(ConfigError, match=message) as error:
        read_costs(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"costs"', "\x00", "[" * 100_000], ids=len)
def test_a_file_of_something_else(tmp_path, text):
    """Guards against an error of the JSON module, or of a type, where a message is due."""
    path = tmp_path / "costs.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"costs file .*costs\.json"):
        read_costs(path)


def test_no_file(tmp_path):
    """Guards against an OSError, and against an engine that begins without the costs it was given."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the costs file"):
            RolloutEngine(zoo.shared("llama"), config=RolloutConfig(costs=path))


@pytest.mark.parametrize("name", ORIGINS)
def test_every_field_of_the_metadata_counts(name):
    """Guards against costs of another model, device or version that are taken for this one's."""
    here = origin_of(zoo.shared("llama"))
    other = ModelGeometry(layers=9, query_heads=4, kv_heads=2, head_dim=8, element_bytes=4)
    value = getattr(here, name)
    strange = other if name == "geometry" else not value if isinstance(value, bool) else f"not {value}"
    with pytest.raises(ConfigError, match=f"measured with something else: {name} is ") as error:
        check_origin(Path("costs.json"), dataclasses.replace(here, **{name: strange}), here)
    assert ";" not in str(error.value)
    check_origin(Path("costs.json"), here, here)


def test_an_engine_takes_its_own_costs_and_no_other(tmp_path):
    """Guards against a file that is not looked at, and a refusal that names one difference of several."""
    llama = zoo.shared("llama")
    path = save(tmp_path / "costs.json")
    engine = RolloutEngine(llama, config=RolloutConfig(costs=path, prefill_max_tokens=50))
    assert engine.costs == dataclasses.replace(COSTS, max_tokens=50)
    with pytest.raises(ConfigError, match="model_type is 'llama' there and 'qwen3' here; parameters is"):
        RolloutEngine(zoo.shared("qwen3"), config=RolloutConfig(costs=str(path)))
    with pytest.raises(ConfigError, match=r"else: capture is True there and False here$"):
        RolloutEngine(llama, config=RolloutConfig(costs=path, capture=False))
    with pytest.raises(ConfigError, match=r"else: compile is False there and True here$"):
        RolloutEngine(llama, config=RolloutConfig(costs=path, compile=True))
    with pytest.raises(ConfigError, match=r"else: fuse is False there and True here$"):
        RolloutEngine(llama, config=RolloutConfig(costs=path, fuse="auto"))
    half = zoo.build("llama").bfloat16()
    with pytest.raises(ConfigError, match="dtype is 'float32' there and 'bfloat16' here"):
        RolloutEngine(half, config=RolloutConfig(costs=path))
    wider = zoo.build("llama", intermediate_size=96)
    with pytest.raises(ConfigError, match="else: parameters is"):
        RolloutEngine(wider, config=RolloutConfig(costs=path))
    eager = zoo.build("llama")
    eager.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=r"else: padded_attention is 'sdpa' there and 'eager' here$"):
        RolloutEngine(eager, config=RolloutConfig(costs=path))


def test_the_limit_is_the_smaller_one():
    """Guards against a limit of the costs, or of the configuration, that is dropped."""
    model = zoo.shared("llama")

    def limit(**settings):
        return RolloutEngine(model, config=RolloutConfig(**settings)).costs.max_tokens

    assert limit() == 65536
    assert limit(prefill_max_tokens=None) is None
    assert limit(costs=CostModel(max_tokens=70)) == 70
    assert limit(costs=CostModel(max_tokens=70), prefill_max_tokens=60) == 60
    assert limit(costs=CostModel(max_tokens=None), prefill_max_tokens=60) == 60
    assert limit(costs=CostModel(max_tokens=None), prefill_max_tokens=None) is None
    assert limit(costs=CostModel(), prefill_max_tokens=None) == 65536


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package, in whose place it is fingerprinted."""
    copy, before = tmp_path / "liveroll", fingerprint_sources()
    shutil.copytree(costs_file._PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    monkeypatch.setattr(costs_file, "_PACKAGE", copy)
    assert fingerprint_sources() == before
    return copy


@pytest.mark.parametrize("room", ["planning", "kv", "prefill"])
def test_changed_sources_have_another_fingerprint(package, room):
    """Guards against costs of an older prefill, planner or KV storage."""
    before = fingerprint_sources()
    file = sorted((package / room).glob("*.py"))[-1]
    file.write_text(file.read_text("utf-8") + "\n# changed\n", "utf-8")
    changed = fingerprint_sources()
    assert changed != before
    file.rename(file.with_name("renamed.py"))
    assert fingerprint_sources() not in (before, changed)


@pytest.mark.parametrize("name", ["calibrate", "grid", "measure", "readings", "workloads"])
def test_costs_measured_in_another_way_have_another_fingerprint(package, name):
    """Guards against costs, or samples of an interrupted run, of calls that were of other lengths under one name."""
    before = fingerprint_sources()
    file = package / "tools" / f"{name}.py"
    file.write_text(file.read_text("utf-8") + "\n# changed\n", "utf-8")
    assert fingerprint_sources() != before
