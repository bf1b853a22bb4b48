"""Bundles: what is written is what is loaded, and whatever was changed on the way is refused."""

from __future__ import annotations

import dataclasses
import json
import struct
import zipfile

import numpy as np
import pytest

from mosaic_gpu.bundle import files, make
from mosaic_gpu.bundle.cases import Case, sweep
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.runtime.device import multiprocessors
from mosaic_gpu.runtime.launch_spec import BufferPointer, LaunchSpec, Scalar, TensorMap, deserialize, serialize


def test_there_and_back(made, bundle_file):
    held = files.load(bundle_file)
    assert held.identity and held.arch == "sm_90a" and held.multiprocessors == 3 and held.versions == made.versions
    for old, new in zip(made.entries, held.entries, strict=True):
        assert serialize(old.spec) == serialize(new.spec) and new.spec.cubin[:4] == b"\x7fELF"
        assert Case(**new.case) == Case(**old.case) and (new.name, new.outputs, new.aliases) == (
            old.name,
            old.outputs,
            old.aliases,
        )
        for a, b in zip(old.operands, new.operands, strict=True):
            np.testing.assert_array_equal(a, b)
    assert files.describe(held.entries) == {"entries": 3, "cubins": 2}, (
        "lengths are run-time values: matmuls share a cubin"
    )


def test_planned_for_another_gpu(made):
    """Persistent kernels spread over the multiprocessors that were asked for, not over those that are here."""
    assert made.entries[1].spec.grid[0] == 3 < multiprocessors()
    table = made.entries[2].operands[0]
    assert isinstance(table, np.ndarray) and table.shape[1] == made.entries[2].spec.grid[0]
    assert made.entries[2].operands[1:] == (0, 1, 2)


def test_the_same_content_gives_the_same_bytes(made, tmp_path):
    names = [files.write(made, tmp_path / n) for n in ("a", "b")]
    assert names[0] == names[1] and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def rewritten(path, change):
    with zipfile.ZipFile(path) as old:
        held = {name: old.read(name) for name in old.namelist()}
    change(held)
    with zipfile.ZipFile(path, "w") as new:
        for name, data in held.items():
            new.writestr(name, data)


def flip(held, prefix):
    name = next(n for n in held if n.startswith(prefix))
    data = bytearray(held[name])
    data[len(data) // 2] ^= 1
    held[name] = bytes(data)


def other_version(held):
    manifest = json.loads(held["manifest.json"]) | {"version": 99}
    _with_sums(held, "manifest.json", json.dumps(manifest).encode())


def without_entries(held):
    manifest = json.loads(held["manifest.json"])
    del manifest["entries"][0]["spec"]
    _with_sums(held, "manifest.json", json.dumps(manifest).encode())


def _with_sums(held, name, data):
    held[name] = data
    sums = [f"{files._hash(d)}  {n}" for n, d in sorted(held.items()) if n != files.SUMS]
    held[files.SUMS] = ("\n".join(sums) + "\n").encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: flip(h, "cubins/"), "is damaged: cubins/.*does not have the hash"),
        (lambda h: flip(h, "specs/"), "is damaged: specs/"),
        (lambda h: flip(h, "constants/"), "is damaged: constants/"),
        (lambda h: flip(h, "manifest"), "is damaged: manifest.json"),
        (lambda h: h.pop("specs/1.bin"), "no whole bundle: specs/1.bin is missing"),
        (lambda h: h.update(more=b"x"), "no whole bundle: more is missing or is not in SHA256SUMS"),
        (lambda h: h.pop(files.SUMS), "no whole bundle"),
        (other_version, "of version 99; this mosaic_gpu reads mosaic-gpu bundle of version 1"),
        (without_entries, "manifest.json lacks something"),
    ],
)
def test_damage_is_refused(bundle_file, change, words):
    rewritten(bundle_file, change)
    with pytest.raises(UnsupportedCall, match=words):
        files.load(bundle_file)


def test_other_files_are_refused(tmp_path, bundle_file):
    (tmp_path / "x").write_bytes(b"no zip")
    for path in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(UnsupportedCall, match="is no bundle"):
            files.load(path)
    bundle_file.write_bytes(bundle_file.read_bytes()[:5000])
    with pytest.raises(UnsupportedCall, match="is no bundle"):
        files.load(bundle_file)


SPEC = LaunchSpec(
    b"\x7fELF",
    "kernel",
    (4, 2, 1),
    384,
    (2, 1, 1),
    1000,
    (
        TensorMap(0, "bfloat16", (64, 8, 3), (128, 1024), (64, 8, 1), 128),
        TensorMap(1, "uint8", (64,), (), (32,)),
        BufferPointer(2, 16),
        Scalar(-5, "int32"),
        Scalar(1 << 40, "int64"),
    ),
    "NVRTC 13.0 sm_90a",
    early=True,
)


def test_launch_specifications_there_and_back():
    found = deserialize(serialize(SPEC))
    assert serialize(found) == serialize(SPEC)
    assert dataclasses.replace(found, parameters=()) == dataclasses.replace(SPEC, parameters=())
    assert found.parameters[0] == SPEC.parameters[0] and found.parameters[2:] == SPEC.parameters[2:]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"abc", "ends after 3 bytes"),
        (b"abcdefgh", "no launch specification"),
        (b"MGLS" + struct.pack("<III", 7, 90, 97), "of version 7"),
        (serialize(SPEC)[:-2], "ends after"),
        (serialize(SPEC) + b"x", "with 1 more behind it"),
    ],
)
def test_what_is_no_launch_specification(data, words):
    with pytest.raises(UnsupportedCall, match=words):
        deserialize(data)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_sweeps_can_be_called(arch):
    """Every case traces to one kernel; names differ; what is for Blackwell has all kinds."""
    cases = sweep(arch)
    assert len({str(c) for c in cases}) == len(cases) >= 30
    kernels = {c.kernel for c in cases}
    assert kernels == {"attention", "biased_attention", "matmul"} | ({"scaled_matmul"} if arch != "sm_90a" else set())
    assert {c.kernel for c in cases if c.benchmark} == kernels
    for c in cases:
        traced, operands = make.kernel_call(*make.call_of(c, arch))
        assert [o for o in operands if isinstance(o, int)] == list(range(sum(isinstance(o, int) for o in operands)))
        assert traced.program.params.arch in (None, "sm_90a" if arch == "sm_90a" else "sm_100a", arch)
