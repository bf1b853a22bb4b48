"""The cache file: its schema, what is refused and in which words, atomic and locked writes, what is shown as a diff."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import subprocess
import sys

import pytest

from mosaic_gpu.errors import CacheInvalid
from mosaic_gpu.tune import cache, schema
from mosaic_gpu.tune.tunable import find_tunable


@pytest.fixture
def path(store, fakes):
    """A good file with one entry of two trials, one of them the best."""
    s = store()
    good = {"status": "ok", "seconds": 1e-3, "spread": 0.01, "repeats": 3, "stage": 1, "registers": 168, "spills": 0}
    s.add(
        [
            {**good, "config": fakes.FakeConfig(a=8).to_json()},
            {"status": "spilled", "config": fakes.FakeConfig().to_json()},
        ]
    )
    return s.path


def changed(path, *place_and_value):
    """Put a value at a place of the file; None as the value takes the place away."""
    *place, last, value = place_and_value
    data = json.loads(path.read_text())
    inner = data
    for step in place:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(data))


def test_the_schema_is_a_schema_and_the_file_keeps_it(path):
    import jsonschema

    published = json.loads(schema.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    data = json.loads(path.read_text())
    assert schema.problems(data) == [] and data["schema"] == schema.SCHEMA == published["properties"]["schema"]["const"]
    assert data["entries"][0]["best"]["config"]["a"] == 8 and data["entries"][0]["best"]["tflops"] == 64.0
    assert data["entries"][0]["key"] == {"m": 64, "n": 64, "dtype": "bfloat16"}


def test_a_file_reads_as_a_diff_one_trial_a_line(path):
    lines = path.read_text().splitlines()
    assert sum('"status"' in line for line in lines) == 2 and all(len(line) < 400 for line in lines)
    data = json.loads(path.read_text())
    shuffled = copy.deepcopy(data)
    shuffled["entries"][0]["trials"].reverse()
    assert schema.dump(shuffled) == schema.dump(data) == path.read_text()
    shuffled["entries"][0]["trials"][0]["seconds"] = 2e-3
    new = schema.dump(shuffled).splitlines()
    assert len(new) == len(lines) and sum(a != b for a, b in zip(new, lines, strict=True)) == 1


WRONG = {
    "truncated": (lambda p: p.write_text(p.read_text()[: p.stat().st_size // 2]), "is no JSON, or only a part"),
    "empty": (lambda p: p.write_text(""), "is no JSON, or only a part"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "no object": (lambda p: p.write_text("[]"), "is no tuning cache"),
    "another JSON file": (lambda p: p.write_text("{}"), "is no tuning cache"),
    "old schema": (
        lambda p: changed(p, "schema", 1),
        r"has schema 1, this version has 2: `mosaic-gpu tune merge .* brings it",
    ),
    "newer schema": (lambda p: changed(p, "schema", 3), "has schema 3, .*a newer version of mosaic_gpu wrote it"),
    "wrong device": (
        lambda p: changed(p, "header", "device", "name", "nvidia_h100"),
        "measured on nvidia_h100, its folder is nvidia_h200's: timings of another GPU are not used",
    ),
    "renamed kernel": (
        lambda p: changed(p, "header", "kernel", "name", "flash"),
        "is of the kernel 'flash', its name says 'fake': if the kernel was renamed, tune it",
    ),
    "unknown field": (
        lambda p: changed(p, "header", "colour", "red"),
        "header: Additional properties.*'colour' was unexpected",
    ),
    "removed field": (
        lambda p: changed(p, "header", "provenances", None),
        "header: 'provenances' is a required property",
    ),
    "entries of another kind": (lambda p: changed(p, "entries", {}), "entries: {} is not of type 'array'"),
}


@pytest.mark.parametrize(("breaks", "words"), WRONG.values(), ids=WRONG)
def test_files_that_are_refused_whole(path, store, fakes, breaks, words):
    """Each in its words; a lookup goes on without, and a tuner does not overwrite what it cannot understand."""
    breaks(path)
    with pytest.raises(CacheInvalid, match=words):
        cache.load(path)
    before = path.read_bytes()
    with pytest.raises(CacheInvalid, match=words):
        store()
    assert path.read_bytes() == before


BROKEN = {
    "unknown field": (("entries", 0, "colour", "red"), "'colour' was unexpected"),
    "removed field": (("entries", 0, "workload", None), "'workload' is a required property"),
    "no number": (("entries", 0, "best", "seconds", "fast"), "best.seconds: 'fast' is not of type 'number'"),
    "no config": (("entries", 0, "best", "config", {}), "best.config: '"),
    "no object": (("entries", 0, 3), "3 is not of type 'object'"),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_entry_costs_that_entry(path, store, fakes, change, words):
    store("m128n64").add([{"status": "ok", "seconds": 1e-3, "config": fakes.FakeConfig(a=4).to_json()}])
    order = [e["workload"]["m"] for e in json.loads(path.read_text())["entries"]]
    changed(path, *change)
    loaded = cache.load(path)
    assert [e["workload"]["m"] for e in loaded.entries] == order[1:]
    (broken,) = loaded.broken
    assert words in broken and broken.startswith(f"entry 0 of {path} is left out")
    # Tuning another workload keeps what it does not understand, for `tune validate` to show.
    store("m256n64").add([{"status": "ok", "seconds": 1e-3, "config": fakes.FakeConfig(a=4).to_json()}])
    assert len(cache.load(path).entries) == 2 and len(cache.load(path).broken) == 1


def test_a_broken_trial_costs_a_lookup_nothing(path):
    changed(path, "entries", 0, "trials", 0, "status", "wonderful")
    assert len(cache.load(path).entries) == 1 and schema.problems(json.loads(path.read_text()))


def test_nothing_of_a_write_that_fails_stays(path, monkeypatch, store, fakes):
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(
        CacheInvalid, match="cannot be written: No space left on device; MOSAIC_GPU_TUNE_DIR names another"
    ):
        store().add([{"status": "ok", "seconds": 1e-3, "config": fakes.FakeConfig(a=4).to_json()}])
    assert path.read_bytes() == before and {p.name for p in path.parent.iterdir()} <= {"fake.json", "fake.lock"}


def test_a_folder_that_cannot_be_written(folder, store, fakes):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with pytest.raises(CacheInvalid, match="cannot be written: .*MOSAIC_GPU_TUNE_DIR names another folder"):
        store().add([{"status": "ok", "seconds": 1e-3, "config": fakes.FakeConfig().to_json()}])


def test_a_read_only_folder(tmp_path):
    """Its message, by a user who is not root: root may write anywhere."""
    script = (
        "import os, sys; uid = int(sys.argv[2])\n"
        "from mosaic_gpu.tune import cache\n"
        "from mosaic_gpu.errors import CacheInvalid\n"
        "import pathlib\n"
        "if os.geteuid() == 0: os.setgid(uid); os.setuid(uid)\n"
        "try: cache.update(pathlib.Path(sys.argv[1]) / 'd' / 'k.json', lambda data: {'entries': []})\n"
        "except CacheInvalid as error: print(error)\n"
    )
    place = tmp_path / "read_only"
    place.mkdir(mode=0o555)
    command = [sys.executable, "-c", script, str(place), "65534"]
    for parent in place.parents:  # the other user must get there
        if (
            parent.is_relative_to("/tmp")
            and parent != pathlib.Path("/tmp")
            and parent.owner() == pathlib.Path(tmp_path).owner()
        ):
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert "cannot be written: Permission denied; MOSAIC_GPU_TUNE_DIR names another folder" in done.stdout, done.stderr


def _add(where, number):
    tunable = find_tunable(f"{pathlib.Path(__file__).parent / 'fakes.py'}:Fake")
    fakes = sys.modules[type(tunable).__module__]
    from mosaic_gpu.tune.search import Store

    for a in (1, 2, 4, 8):
        s = Store(
            where,
            tunable,
            tunable.parse(f"m{64 * (number % 2 + 1)}n64"),
            fakes.DEVICE,
            fakes.TOOLCHAIN,
            {"who": number // 2},
        )
        s.add([{"status": "ok", "seconds": 1e-3, "config": fakes.FakeConfig(a=a).to_json()}])


def test_concurrent_tuners_lose_nothing(folder):
    """Four processes, two workloads, two provenances, into one file."""
    code = (
        "import importlib.util, pathlib, sys; "
        f"s = importlib.util.spec_from_file_location('t', {__file__!r}); m = importlib.util.module_from_spec(s); "
        "s.loader.exec_module(m); m._add(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(folder), str(i)]) for i in range(4)]
    assert [p.wait(60) for p in processes] == [0] * 4
    data = cache.read(folder / "nvidia_h200" / "fake.json")
    assert [len(e["trials"]) for e in data["entries"]] == [8, 8] and schema.problems(data) == []


def test_migration_keeps_measurements_and_invents_nothing():
    old = {
        "schema": 1,
        "device": "nvidia_h200",
        "kernel": "attention",
        "best": {},
        "trials": {
            "d128 bfloat16 full s4096 t4096": [
                {
                    "workload": find_tunable("attention").parse("b4s4096h16d128").to_json(),
                    "environment": {"driver": "CUDA 13.0", "package": "0.1.0", "toolchain": "NVRTC 13.0.88"},
                    "config": find_tunable("attention").config(block_kv=n).to_json(),
                    "date": "2026-11-29T22:02:42+00:00",
                    "status": status,
                    "seconds": seconds,
                    "error": 1e-3,
                    "allowed": 2e-3,
                    "message": "",
                    "tflops": 1.0,
                }
                for n, status, seconds in ((128, "ok", 8e-4), (144, "ok", 7.8e-4), (160, "refused", None))
            ]
        },
    }
    new = schema.migrate(old)
    assert schema.problems(new) == []
    (entry,) = new["entries"]
    assert entry["best"]["config"]["block_kv"] == 144 and entry["best"]["seconds"] == 7.8e-4
    assert [t["status"] for t in entry["trials"]].count("ok") == 2
    (provenance,) = new["header"]["provenances"].values()
    assert provenance["source"] is None and provenance["toolchain"]["jax"] is None
    assert new["header"]["device"]["power_limit_watts"] is None
    with pytest.raises(ValueError, match="no tuning cache of schema 1"):
        schema.migrate(new)
    with pytest.raises(ValueError, match="not known"):
        schema.migrate(old | {"device": "nvidia_rtx"})
