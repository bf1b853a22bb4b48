"""`tune` without a GPU: with a machine and a timer that are made up, on real cache files."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from mosaic_gpu.cli import tune as tune_module
from mosaic_gpu.cli.tune import seconds_of
from mosaic_gpu.runtime.device import planning_for
from mosaic_gpu.tune import cache, lookup, schema
from mosaic_gpu.tune.chip import chip_of
from mosaic_gpu.tune.tunable import find_tunable
from mosaic_gpu.tune.workers import Machine

FAKES = pathlib.Path(__file__).parents[1] / "tune" / "fakes.py"
FAKE = f"{FAKES}:Fake"


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """(the user's, the repository's) caches."""
    user, repository = tmp_path / "user", tmp_path / "checkout" / "autotune_cache"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(user))
    monkeypatch.setattr(cache, "repository_folder", lambda: repository)
    repository.mkdir(parents=True)
    (repository.parent / "pyproject.toml").touch()
    for remembered in (cache._load, lookup._warn, lookup._tell):
        remembered.cache_clear()
    return user, repository


@pytest.fixture
def host(monkeypatch, folders):
    """A machine with a GPU that nobody has; tests of `tune run` use its fake timer."""
    find_tunable(FAKE)
    fakes = next(m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(FAKES))
    made = Machine("sm_90a", fakes.DEVICE, fakes.TOOLCHAIN, ("0",), f"{FAKES}:make_timer")
    monkeypatch.setattr(tune_module, "machine", lambda: made)
    return made


def data_of(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def run(verb, *more):
    return data_of(verb("tune", "run", FAKE, "--shape", "m64n64", "--json", *more))


def test_run(verb, host, folders):
    data = run(verb)
    (row,) = data["results"]
    assert row["config"]["a"] == 8 and row["measured"] > 0 and row["left"] == 0 and row["gain"] > 0.5
    path = folders[0] / "nvidia_h200" / "fake.json"
    assert data["file"] == str(path) and schema.problems(cache.read(path)) == []
    again = run(verb)["results"][0]
    assert (again["measured"], again["known"]) == (0, row["measured"]) and again["config"] == row["config"]
    assert run(verb, "--again")["results"][0]["known"] == 0


def test_run_prints_its_progress_and_a_table(verb, host):
    result = verb("tune", "run", FAKE, "--shape", "m64n64", "--budget", "5m")
    assert result.exit_code == 0, result.output
    assert "a=8" in result.stdout and "TFLOP/s" in result.stdout and "fake.json" in result.stdout
    assert "m64 n64 (1 of 1): timing" in result.stderr and "best" in result.stderr and "s left" in result.stderr


def test_run_into_the_checkout(verb, host, folders):
    assert run(verb, "--repo")["file"] == str(folders[1] / "nvidia_h200" / "fake.json") and not folders[0].exists()
    (folders[1].parent / "pyproject.toml").unlink()
    result = verb("tune", "run", FAKE, "--shape", "m64n64", "--repo")
    assert result.exit_code == 2 and "is not in a checkout" in result.stderr


def test_exhaustive_and_guided(verb, host):
    assert run(verb, "--exhaustive")["results"][0]["measured"] == 17
    assert run(verb, "--guided", "5", "--again")["results"][0]["measured"] == 5


def test_resume_goes_on_with_what_the_cache_has(verb, host, tmp_path):
    nothing = verb("tune", "resume", FAKE)
    assert nothing.exit_code == 2 and "nothing to go on with" in nothing.stderr
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("m64n64  # one\n\nm128n64\n")
    first = data_of(verb("tune", "run", FAKE, "--from-file", shapes, "--json"))
    assert [r["shape"] for r in first["results"]] == ["m64 n64", "m128 n64"]
    # What a search that was stopped leaves behind.
    path = pathlib.Path(first["file"])
    data = cache.read(path)
    data["entries"][0]["trials"] = data["entries"][0]["trials"][:3]
    cache.write(path, data)
    rows = data_of(verb("tune", "resume", FAKE, "--json"))["results"]
    assert sorted(r["measured"] > 0 for r in rows) == [False, True] and all(r["left"] == 0 for r in rows)


def test_show_and_its_trials_and_ranking(verb, host, folders):
    assert "there are no tuning caches" in verb("tune", "show").stdout
    run(verb, "--exhaustive")
    result = verb("tune", "show")
    assert (
        result.exit_code == 0 and "nvidia_h200" in result.stdout and "17 ok" in result.stdout and "a=8" in result.stdout
    )
    assert "16" in verb("tune", "show", "nvidia_h200/fake", "--trials").stdout
    (shown,) = data_of(verb("tune", "show", "--json"))
    assert shown["place"] == "user" and len(shown["entries"]) == 1
    (ranked,) = data_of(verb("tune", "show", "--ranking", "--json"))
    assert ranked["of"] == 1 and ranked["entries"][0]["timed"] == 17 and 0 <= ranked["entries"][0]["place"] < 17
    assert ranked["lost_by_first"] > 0
    assert "top quarter in" in verb("tune", "show", "--ranking").stdout
    missing = verb("tune", "show", "nvidia_b200/fake")
    assert missing.exit_code == 2 and "there is no tuning cache nvidia_b200/fake" in missing.stderr


def test_savings(verb, host, tmp_path, monkeypatch):
    """A usual search beside an exhaustive one, in folders of their own: what it saved, what it missed."""
    short = pathlib.Path(run(verb)["file"])
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "other"))
    whole = run(verb, "--exhaustive")["file"]
    found = data_of(verb("tune", "savings", short, whole, "--json"))
    (row,) = found["entries"]
    assert (
        found["of"] == 1
        and row["trials"][0] < row["trials"][1]
        and 0 <= row["lost"]
        and row["found"] == (row["lost"] == 0)
    )
    ours, theirs = (
        sum(t.get("took", 0) for t in cache.read(pathlib.Path(f))["entries"][0]["trials"]) for f in (short, whole)
    )
    assert row["seconds"] == [round(ours, 2), round(theirs, 2)]
    assert found["saved"] is None or found["saved"] == pytest.approx(1 - row["seconds"][0] / row["seconds"][1])
    # An exhaustive search that says another config is faster: not found, and by how much.
    data = cache.read(pathlib.Path(whole))
    (e,) = data["entries"]
    other = next(t for t in e["trials"] if t["status"] == "ok" and t["config"] != e["best"]["config"])
    for t in e["trials"]:
        if t["status"] == "ok":
            t["seconds"] = 2e-3 if t["config"] == cache.read(short)["entries"][0]["best"]["config"] else 3e-3
    other["seconds"] = 1e-3
    e["best"] = {**e["best"], "config": other["config"], "seconds": 1e-3}
    changed, b200 = (tmp_path / "changed" / name / "fake.json" for name in ("nvidia_h200", "nvidia_b200"))
    cache.write(changed, data)
    missed = data_of(verb("tune", "savings", short, changed, "--json"))
    assert missed["found"] == 0 and missed["lost"] == pytest.approx(1.0)
    shown = verb("tune", "savings", short, changed)
    assert shown.exit_code == 0 and "found in 0 of 1, the largest loss is 100.0%" in shown.stdout
    data["header"]["device"]["name"] = "nvidia_b200"
    cache.write(b200, data)
    refused = verb("tune", "savings", short, b200)
    assert refused.exit_code == 2 and "device nvidia_h200, the other of nvidia_b200" in refused.stderr


@pytest.fixture
def two(verb, host, tmp_path, folders):
    """Two files of one kernel and device whose best configs differ in one workload; one has another workload, too."""
    path = pathlib.Path(run(verb)["file"])
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(path.read_text())
    data_of(verb("tune", "run", FAKE, "--shape", "m128n64", "--json"))
    data = cache.read(path)
    for e in data["entries"]:
        if e["workload"]["m"] == 64:
            e["best"] = {**e["best"], "seconds": e["best"]["seconds"] / 2, "config": {**e["best"]["config"], "b": 2}}
    cache.write(b, data)
    return a, b


def test_diff(verb, two):
    a, b = two
    result = verb("tune", "diff", a, b, "--json")
    rows = {r["workload"]["m"]: r for r in json.loads(result.stdout)["rows"]}
    assert result.exit_code == 1 and rows[128]["only"] == "b" and rows[64]["ratio"] == pytest.approx(2.0)
    assert list(rows[64]["changed"]) == ["b"]
    text = verb("tune", "diff", a, b).stdout
    assert "only in b" in text and "2.000" in text
    same = verb("tune", "diff", a, a)
    assert same.exit_code == 0 and "same config" in same.stdout


def test_merge(verb, two, tmp_path, folders):
    a, b = two
    out = tmp_path / "merged.json"
    merged = data_of(verb("tune", "merge", a, b, "--out", out, "--json"))
    assert merged["entries"] == 2 and merged["file"] == str(out)
    # Found again out of the trials, whatever the files said was the best.
    assert {e["workload"]["m"]: e["best"]["config"]["b"] for e in json.loads(out.read_text())["entries"]}[64] == 4
    other = tmp_path / "other.json"
    data = json.loads(a.read_text())
    data["header"]["device"]["name"] = "nvidia_h100"
    other.write_text(json.dumps(data))
    refused = verb("tune", "merge", a, other, "--out", out)
    assert refused.exit_code == 2 and "of device nvidia_h100" in refused.stderr
    into = data_of(verb("tune", "merge", b, "--json"))
    assert into["file"] == str(folders[0] / "nvidia_h200" / "fake.json") and into["entries"] == 2


def test_merge_brings_schema_1_to_today(verb, folders, tmp_path):
    old = tmp_path / "old.json"
    attention = find_tunable("attention")
    trial = {
        "workload": attention.parse("b4s4096h16d128").to_json(),
        "environment": {"driver": "CUDA 13.0", "package": "0.1.0", "toolchain": "NVRTC 13.0.88"},
        "config": attention.config(block_kv=96).to_json(),
        "date": "2026-11-29T22:02:42+00:00",
        "status": "ok",
        "seconds": 8e-4,
        "error": 1e-3,
        "allowed": 2e-3,
        "message": "",
    }
    old.write_text(json.dumps({"schema": 1, "device": "nvidia_h200", "kernel": "attention", "trials": {"k": [trial]}}))
    made = data_of(verb("tune", "merge", old, "--json"))
    found = lookup.explain(attention, attention.parse("b4s4096h16d128"), device="nvidia_h200")
    assert found.config.block_kv == 96 and found.stale and str(found.path) == made["file"]
    old.write_text(json.dumps({"schema": 1, "device": "nvidia_h200", "kernel": "attention", "trials": {"k": [{}]}}))
    refused = verb("tune", "merge", old)
    assert refused.exit_code == 2 and "cannot be brought to 2" in refused.stderr


def test_prune_and_export(verb, two, tmp_path):
    _, b = two
    before = len(json.loads(b.read_text())["entries"][0]["trials"])
    assert before > 2
    # In place a file must lie where it belongs.
    place = tmp_path / "nvidia_h200" / "fake.json"
    place.parent.mkdir()
    data = json.loads(b.read_text())
    data["entries"].append({"key": 3})
    place.write_text(json.dumps(data))
    dropped = data_of(verb("tune", "prune", place, "--fastest", "2", "--json"))["dropped"]
    assert dropped["broken entries"] == 1 and dropped["slower trials"] > 0
    kept = json.loads(place.read_text())["entries"]
    assert [len(e["trials"]) for e in kept] == [2, 2]
    refused = verb("tune", "prune", place, "--stale")
    assert refused.exit_code == 2 and "whose source is not known here" in refused.stderr
    out = tmp_path / "small.json"
    assert data_of(verb("tune", "export", place, "--out", out, "--json"))["entries"] == 2
    small = json.loads(out.read_text())
    assert schema.problems(small) == [] and all(e["trials"] == [] and e["best"] for e in small["entries"])


def test_validate(verb, two, folders, tmp_path):
    assert verb("tune", "validate").exit_code == 0
    path = folders[0] / "nvidia_h200" / "fake.json"
    data = json.loads(path.read_text())
    data["entries"][0]["trials"][0]["status"] = "wonderful"
    path.write_text(json.dumps(data))
    result = verb("tune", "validate")
    assert result.exit_code == 1 and "'wonderful' is not one of" in result.stdout
    attention = folders[0] / "nvidia_h200" / "attention.json"
    tunable = find_tunable("attention")
    w = tunable.parse("b1s64h1d256")
    data["header"]["kernel"] = {"name": "attention", "generation": "sm90", "space": None}
    best = {**data["entries"][1]["best"], "config": tunable.config(block_kv=176).to_json()}
    data["entries"] = [{"key": tunable.key(w), "workload": w.to_json(), "best": best, "trials": []}]
    attention.write_text(json.dumps(data))
    found = json.loads(verb("tune", "validate", "nvidia_h200/attention", "--json").stdout)
    assert "bytes of shared memory" in found[str(attention)][0]
    attention.write_text(attention.read_text()[:50])
    assert "only a part" in verb("tune", "validate", attention).stdout


def test_compile_without_a_gpu_and_time_it_elsewhere(verb, host, folders, tmp_path, monkeypatch):
    out = tmp_path / "carried"
    monkeypatch.setenv("MOSAIC_GPU_CACHE_DIR", str(tmp_path / "none"))  # put back what the verbs set
    arguments = ["tune", "compile", "attention", "--shape", "b1s256h1d64", "--causal", "--top", "3", "--out", out]
    plan = data_of(verb(*arguments, "--json"))
    (entry,) = plan["workloads"]
    assert [c["status"] for c in entry["configs"]] == ["ok"] * 3 and all(
        c["registers"] in (128, 168) for c in entry["configs"]
    )
    assert [c["estimate_seconds"] for c in entry["configs"]] == sorted(c["estimate_seconds"] for c in entry["configs"])
    assert len([p for p in (out / "cubins").iterdir() if len(p.name) == 64]) in (
        2,
        3,
    )  # whether it is persistent is the launch's
    timers = tmp_path / "timers.py"
    timers.write_text(
        f"from mosaic_gpu.tune.tunable import _module_of\nfakes = _module_of({str(FAKES)!r})\n"
        "class T(fakes.Timer):\n"
        "    def samples(self, config, repeats, stop_above): return [1e-3 / config.block_kv] * repeats\n"
        "    def interleaved(self, configs, rounds): return [[1e-3 / c.block_kv] * rounds for c in configs]\n"
        "def make_timer(*arguments): return T()\n"
    )
    import dataclasses

    monkeypatch.setattr(tune_module, "machine", lambda: dataclasses.replace(host, timer=f"{timers}:make_timer"))
    timed = data_of(verb("tune", "time", out, "--json"))
    (row,) = timed["results"]
    sizes = [c["config"]["block_kv"] for c in entry["configs"]]
    assert row["measured"] == 3 and row["config"]["block_kv"] == max(sizes)
    monkeypatch.setattr(tune_module, "machine", lambda: dataclasses.replace(host, arch="sm_100a"))
    refused = verb("tune", "time", out)
    assert refused.exit_code == 2 and "compiled for sm_90a, this GPU is sm_100a" in refused.stderr
    (out / "plan.json").write_text("{}")
    assert "has no plan of `tune compile`" in verb("tune", "time", out).stderr


def test_compile_for_both_kinds_of_blackwell(verb, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_CACHE_DIR", str(tmp_path / "none"))  # put back what the verb sets
    shape = ["--shape", "b1s256h1d64", "--full", "--top", "1"]
    attention = find_tunable("attention", "sm100")
    for arch, reduces in (("sm_100a", {False}), ("sm_103a", {False, True})):
        plan = data_of(verb("tune", "compile", "attention", "--arch", arch, *shape, "--out", tmp_path / arch, "--json"))
        ((first,),) = (e["configs"] for e in plan["workloads"])
        assert first["status"] == "ok" and plan["arch"] == arch, first
        with planning_for(148, arch):
            found = attention.candidates(attention.parse("b1s256h1d64"), chip_of(None, arch))
        assert {c.load_reduces for c in found} == reduces


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "conv"], "a kernel to tune is attention, attention_backward, matmul or FILE.py:NAME, not 'conv'"),
        (["run", "nowhere.py:K"], "there is no file"),
        (["run", FAKE], "has no usual shapes: give --shape, such as m128n128"),
        (["run", f"{FAKES}:Nothing", "--shape", "m1n1"], "has no Tunable 'Nothing'; it has Fake"),
        (
            ["run", "attention", "--shapes", "llama-9"],
            "there is no set of shapes 'llama-9' for attention; there are benchmark",
        ),
        (
            ["run", "attention", "--shape", "b1s8 maybe causal"],
            "come causal or full, bf16 or f16, and bias, not 'maybe'",
        ),
        (["run", "attention", "--from-file", "/nonexistent"], "--from-file: /nonexistent cannot be read"),
        (["run", FAKE, "--shape", "m64"], "lacks n (columns)"),
        (["compile", "attention", "--out", "x", "--arch", "sm_80"], "--arch sm_80: one of"),
        (["compile", "matmul", "--out", "x", "--causal"], "--causal or --full: matmul has no mask"),
        (["compile", "matmul", "--out", "x", "--shape", "m1n8k8 full"], "--shape: matmul has no mask"),
        (["show", "nothing"], "there is no tuning cache nothing"),
        (["run", "attention", "--budget", "0"], "write 120s"),
    ],
)
def test_refusals(verb, folders, arguments, words):
    result = verb("tune", *arguments)
    text = " ".join(result.stderr.split())
    assert result.exit_code == 2 and words in text and "Traceback" not in text, result.output


def test_sets_of_shapes_are_shapes():
    from mosaic_gpu.tune.shapes import SETS, named_shapes, workloads

    for kernel, sets in SETS.items():
        for name in sets:
            found = workloads(find_tunable(kernel), named_shapes(kernel, name), dtype="bf16", causal=None)
            assert found and len(set(found)) == len(found)
    found = workloads(
        find_tunable("attention"), named_shapes("attention", "llama3-8b,b1s128d64"), dtype="bf16", causal=None
    )
    assert [w.causal for w in found] == [True] * 3 + [False, True]
    assert {(w.heads, w.kv_heads, w.head_dim) for w in found[:3]} == {(32, 8, 128)}


@pytest.mark.parametrize(("text", "seconds"), [("120s", 120), ("2m", 120), ("1.5h", 5400), ("7", 7)])
def test_budgets(text, seconds):
    assert seconds_of(text) == seconds


def test_another_file_in_the_place_of_an_output_stays(verb, two, tmp_path):
    """Also one of a newer version, or only a part of one; and no folder is made."""
    a, _ = two
    for text in ("my notes", "", "[]", '{"schema": 9, "newer": 1}', a.read_text()[:200]):
        out = tmp_path / "there.json"
        out.write_text(text)
        for arguments in (["merge", a, "--out", out], ["export", a, "--out", out]):
            refused = verb("tune", *arguments)
            assert refused.exit_code == 2 and "so it stays" in refused.stderr and out.read_text() == text
    nowhere = tmp_path / "none" / "out.json"
    refused = verb("tune", "export", a, "--out", nowhere)
    assert refused.exit_code == 2 and "there is no folder" in refused.stderr and not nowhere.parent.exists()


def test_what_validate_refuses_prune_drops_and_show_survives(verb, two, tmp_path):
    """A config that is none today, a key of something else, a provenance that is not there, no time, an entry twice."""
    a, _ = two
    tunable = find_tunable("attention")
    w = tunable.parse("b1s64h1d64")
    data = json.loads(a.read_text())
    data["header"]["kernel"] = {"name": "attention", "generation": "sm90", "space": None}
    best = {**data["entries"][0]["best"], "config": tunable.config().to_json()}
    good = {"key": tunable.key(w), "workload": w.to_json(), "best": best, "trials": []}
    broken = {
        "a multiple of 16": {**good, "best": {**best, "config": {**best["config"], "block_kv": 100}}},
        "its key is not that of its workload": {**good, "key": {**good["key"], "head_dim": 128}},
        "the header has no provenance": {**good, "best": {**best, "provenance": "0123456789"}},
    }
    place = tmp_path / "nvidia_h200" / "attention.json"
    place.parent.mkdir()
    for words, entry in broken.items():
        data["entries"] = [entry]
        place.write_text(json.dumps(data))
        found = verb("tune", "validate", place)
        assert found.exit_code == 1 and words in found.stdout
        assert data_of(verb("tune", "prune", place, "--json"))["dropped"]["broken entries"] == 1
    data["entries"] = [good, good]
    place.write_text(json.dumps(data))
    assert "there twice" in verb("tune", "validate", place).stdout
    data["entries"] = [{**good, "best": {**best, "seconds": float("nan")}}]
    place.write_text(json.dumps(data))
    assert "NaN is no number of JSON" in verb("tune", "validate", place).stdout
    data["entries"] = [{**good, "workload": {"m": 64}}]
    place.write_text(json.dumps(data))
    shown = verb("tune", "show", place)
    assert shown.exit_code == 0 and "m=64" in shown.stdout


MISTAKES = {
    'space = {"nope": (1,)}': "FakeConfig has no field 'nope'; it has a, b",
    'space = {"a": 4}': "space['a'] is 4: a sequence of values",
    'space = {"a": lambda c: (c["b"],), "b": (1,)}': "the values of 'a' depend on 'b', which is no field before it",
    "letters = {}": "lacks `letters`",
    "config = 3": "config=3 is no dataclass",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_in_ones_own_tunable_are_said_to_be_ones_own(verb, tmp_path, line):
    path = tmp_path / "mine.py"
    fakes = FAKE.rpartition(":")[0]
    path.write_text(
        "from mosaic_gpu.tune.tunable import _module_of\n"
        f"Fake = _module_of({fakes!r}).Fake\n\n\nclass Mine(Fake):\n    {line}\n"
    )
    found = verb("tune", "compile", f"{path}:Mine", "--shape", "m64n64", "--out", tmp_path / "out")
    assert found.exit_code == 2 and MISTAKES[line] in " ".join(found.stderr.split())
