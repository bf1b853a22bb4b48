"""Killing a search at any point loses no finished trial, leaves a readable file, and the next one goes on from there."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys

import pytest

from mosaic_gpu.tune import cache, schema
from mosaic_gpu.tune.schema import canonical

VICTIM = pathlib.Path(__file__).parent / "victim.py"
KILLS = 50


@pytest.fixture
def victim(folder, tmp_path):
    """victim("SIGKILL", 0.01): how the child ended; reads the log and the file."""
    process = subprocess.Popen(
        [sys.executable, VICTIM, folder, tmp_path / "log"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    class Victim:
        def __call__(self, signal, delay):
            process.stdin.write(f"{signal} {delay}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        def log(self):
            if not (tmp_path / "log").exists():
                return []
            return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

        def trials(self):
            path = folder / "nvidia_h200" / "fake.json"
            if not path.exists():
                return {}
            data = cache.read(path)
            assert schema.problems(data) == []
            return {canonical(t["config"]): t for e in data["entries"] for t in e["trials"]}

    yield Victim()
    process.stdin.close()
    process.wait(30)


def test_killed_at_50_random_points(victim, folder):
    chance = random.Random(5)
    ends = set()
    killed = 0
    for _ in range(3 * KILLS):
        if killed == KILLS:
            break
        ended = victim(chance.choice(["SIGINT", "SIGKILL"]), chance.uniform(0.0, 0.06))
        assert ended in (0, 130, -9, -2), ended  # -2: before the child had its handler
        ends.add(ended)
        killed += ended != 0
        on_disk = victim.trials()
        for what, config, stage in victim.log():
            if what == "done":
                assert config in on_disk and on_disk[config]["stage"] >= stage
        begun = [config for what, config, _ in victim.log() if what == "begun"]
        # What was measured and written is never measured again: only the one that each kill caught may be.
        assert len(begun) - len(set(begun)) <= killed + 5  # 5: the later stages
        if ended == 0 or len(on_disk) == 17:  # through: begin another one
            (folder / "nvidia_h200" / "fake.json").unlink(missing_ok=True)
            (folder.parent / "log").unlink(missing_ok=True)
    assert killed == KILLS and {130, -9} <= ends
    assert victim("SIGINT", 2.0) == 0
    assert len(victim.trials()) == 17
    left = {p.name for p in (folder / "nvidia_h200").iterdir()}
    assert left == {"fake.json", "fake.lock"}
