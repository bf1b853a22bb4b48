"""`python -m tests.gpu.replay FILE --out REPORT`: what the tests simulated, run on a Hopper GPU and compared.

FILE is what `recording.py` made: nothing is compiled here but the calls of kernels, by XLA, several of them as one function.
Records run in processes beside this one, first in groups.  A group that fails, hangs or takes its process with it costs that
process; its records are run again one by one, so that the one to blame is found.  Each result is at once a line of a file
beside REPORT: after a time limit the same command goes on with the rest.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mosaic_gpu.bundle import files, verify
from mosaic_gpu.bundle.files import Bundle, Entry
from mosaic_gpu.bundle.verify import Result
from mosaic_gpu.errors import MosaicGpuError

from .comparison import compare

GROUP = 16  # records whose calls XLA compiles as one function
LIMIT = 20.0  # seconds for a group
WORKERS = 4  # processes that share the GPU; one where something went wrong
Launch = Callable[[Sequence[Entry]], list[list[np.ndarray]]]
Groups = Sequence[Sequence[int]]


# ---- in the processes that use the GPU -----------------------------------------------------------------------------------
def launch_group(entries: Sequence[Entry]) -> list[list[np.ndarray]]:
    """The outputs of each entry, written over NaNs (integers: bytes 0xAB)."""
    import jax

    jax.config.update("jax_enable_x64", True)  # else JAX would make 32 bits of 64
    program, arrays, poison = program_of(entries)
    return jax.tree.map(np.asarray, program(arrays, jax.device_put(poison)))


def program_of(entries: Sequence[Entry]) -> tuple[Any, list[tuple[Any, ...]], list[np.ndarray]]:
    """The jitted function of a group and what to call it on; what comes last is donated, and its memory becomes outputs."""
    import jax

    arrays = [e.operands for e in entries]

    def call(arrays: Sequence[Sequence[Any]], poison: Sequence[Any]) -> list[list[Any]]:
        numbered = (dataclasses.replace(e, operands=tuple(range(len(e.operands)))) for e in entries)
        return [verify.launch_entry(e, xs) for e, xs in zip(numbered, arrays, strict=True)]

    aliased = [{o for _, o in e.aliases} for e in entries]
    poison = [_poison(x) for e, a in zip(entries, aliased, strict=True) for i, x in enumerate(e.expected) if i not in a]
    return jax.jit(call, donate_argnums=1, keep_unused=True), arrays, poison


def _poison(like: np.ndarray) -> np.ndarray:
    if like.dtype == bool:
        return np.ones_like(like)
    byte = 0xAB if like.dtype.kind in "iu" else 0xFF
    return np.full(like.nbytes, byte, np.uint8).view(like.dtype).reshape(like.shape)


def check(entry: Entry, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """A line of the report: the worst output of a record, and whether all are the same to the bit."""
    found = [compare(a, b, bool(entry.case.get("float8"))) for a, b in zip(outputs, entry.expected, strict=False)]
    worst = max(found, key=lambda d: (d.wrong, d.norm))
    status = "wrong" if worst.wrong else "ok"
    return _line(entry, status, worst.message) | {
        "same": all(d.same for d in found),
        "outputs": [{"dtype": d.dtype, "norm": d.norm, "most": d.most} for d in found],
    }


def _line(entry: Entry, status: str, message: str) -> dict[str, Any]:
    return {"kernel": entry.name, **entry.case, "status": status, "message": message}


def run_group(entries: Sequence[Entry], launch: Launch) -> list[dict[str, Any]]:
    """A line of the report for each record.  What the launcher refuses becomes one where it is alone; all else is raised."""
    from mosaic_gpu.runtime.jax_ffi import translate_error

    try:
        outputs = launch(entries)
    except Exception as error:
        ours = error if isinstance(error, MosaicGpuError) else translate_error(error)
        if ours is None or len(entries) > 1:
            raise
        return [_line(entries[0], "refused", str(ours).splitlines()[0])]
    return [check(e, xs) for e, xs in zip(entries, outputs, strict=True)]


def work(
    path: str,
    indices: Sequence[int],
    benchmark: bool,
    pipe: Connection,
    *,
    groups: Groups,
    lines: str,
    launch: Launch = launch_group,
    arch: str | None = None,
) -> None:
    """`verify.run`'s process, whose entries are our groups.  arch: the GPU's; None: what JAX finds."""
    from mosaic_gpu.runtime.device import default_arch

    bundle = files.load(pathlib.Path(path))
    arch = arch or default_arch()
    pipe.send(("device", arch, {}, {}))
    if arch != bundle.arch:
        return
    for n in indices:
        pipe.send(("start", n))
        try:
            found = run_group([bundle.entries[i] for i in groups[n]], launch)
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            pipe.send(("done", n, Result("", "failed", message=f"{type(error).__name__}: {text}")))
            traceback.print_exc()
            return  # the GPU's state is unknown: another process goes on
        _append(lines, [{"record": i, **line} for i, line in zip(groups[n], found, strict=True)])
        pipe.send(("done", n, Result("", "ok")))
    pipe.send(("end",))


# ---- in the process that waits for them ----------------------------------------------------------------------------------
def _append(path: str, lines: Sequence[dict[str, Any]]) -> None:
    with open(path, "a") as f:
        f.write("".join(json.dumps(line) + "\n" for line in lines))


def replay(
    path: pathlib.Path,
    lines: pathlib.Path,
    *,
    limit: float = LIMIT,
    workers: int = WORKERS,
    size: int = GROUP,
    **fake: Any,
) -> dict[int, dict[str, Any]]:
    """Run the records that have no line yet; all lines, by record.  fake: for `work`, in tests."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    bundle = files.load(path)

    def run(groups: Groups) -> verify.Outcome:
        """A line also for the record that alone made a group fail."""
        if not groups:
            return verify.Outcome(bundle.arch)
        first = dataclasses.replace(bundle, entries=tuple(bundle.entries[g[0]] for g in groups))
        child = functools.partial(work, groups=groups, lines=str(lines), **fake)
        outcome = verify.run(path, first, timeout=limit, work=child)
        for n, r in outcome.results.items():
            if r.status != "ok" and len(groups[n]) == 1:
                (i,) = groups[n]
                _append(str(lines), [{"record": i, **_line(bundle.entries[i], r.status, r.message)}])
        return outcome

    left = [i for i in range(len(bundle.entries)) if i not in read(lines)]
    groups = [left[i : i + size] for i in range(0, len(left), size)]
    shares = [groups[i::workers] for i in range(workers)]
    threads = [threading.Thread(target=run, args=(share,)) for share in shares]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    known = read(lines)
    suspects = [[i] for i in left if i not in known]
    outcome = run(suspects)  # none: as if the GPU were right
    if outcome.arch != bundle.arch:
        raise SystemExit(f"{path} is for {bundle.arch}; here is {outcome.arch or 'no GPU'}")
    return read(lines)


def read(lines: pathlib.Path) -> dict[int, dict[str, Any]]:
    """The lines written so far, by record; one that a time limit has cut off does not count."""
    found = {}
    for text in lines.read_text().splitlines() if lines.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["record"]] = line
    return found


def report(bundle: Bundle, found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Counts by status and by folder of tests, what is not right, and the worst of what is allowed."""
    missing = {
        i: _line(e, "not run", "processes ended before it") for i, e in enumerate(bundle.entries) if i not in found
    }
    lines = [*found.values(), *missing.values()]
    folders: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    worst: dict[str, dict[str, Any]] = {}
    for line in lines:
        folders["/".join(line["test"].split("/")[:2])][line["status"]] += 1
        for x in line.get("outputs", ()) if line["status"] == "ok" else ():
            if x["norm"] >= worst.get(x["dtype"], {"norm": 0.0})["norm"]:
                worst[x["dtype"]] = {**x, "test": line["test"], "kernel": line["kernel"]}
    return {
        "bundle": bundle.identity,
        "summary": dict(collections.Counter(x["status"] for x in lines)),
        "same to the bit": sum(x.get("same", False) for x in lines),
        "folders": {k: dict(v) for k, v in sorted(folders.items())},
        "worst": worst,
        "not right": [x for x in lines if x["status"] != "ok"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Run on a GPU what tests have simulated, and compare.")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("replay.json"), help="the report")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a group of records")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that share the GPU")
    parser.add_argument("--group", type=int, default=GROUP, help="records in one jitted function")
    options = parser.parse_args()
    bundle = files.load(options.file)
    lines = options.out.with_suffix(f".{bundle.identity[:8]}.jsonl")
    found = replay(options.file, lines, limit=options.limit, workers=options.workers, size=options.group)
    data = report(bundle, found)
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    for line in data["not right"][:100]:
        print(f"{line['status']}: {line['test']} ({line['kernel']}): {line['message']}")
    for dtype, x in sorted(data["worst"].items()):
        print(f"worst {dtype}: relative norm {x['norm']:.2e}, {x['most']:.2f} eps of the largest ({x['test']})")
    for folder, counts in data["folders"].items():
        print(f"{folder}: {counts}")
    print(f"{data['summary']}, {data['same to the bit']} the same to the bit")
    raise SystemExit(set(data["summary"]) - {"ok"} != set())


if __name__ == "__main__":
    main()
