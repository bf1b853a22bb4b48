"""`python -m tests.jax_pallas`: see suite.py."""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import pathlib
import sys
import time

from . import suite

PARTS = 16  # of a file, so that no process waits long for another one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.jax_pallas", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="of test ids, as in expected.toml")
    parser.add_argument("--list", action="store_true", help="print every outcome")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--files", nargs="*", default=suite.FILES)
    args = parser.parse_args()
    source = os.environ.get("JAX_SOURCE")
    if not source:
        print("JAX_SOURCE is not set: a checkout of JAX, of the version that is installed")
        return 2
    expected = suite.expectations(pathlib.Path(__file__).with_name("expected.toml"))
    root = pathlib.Path(source) / "tests" / "pallas"
    left_out = [e for e in expected if e.kind == "excluded"]
    jobs = [(str(root / f"{f}.py"), i, PARTS, args.patterns) for f in args.files for i in range(PARTS)]
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong, begin = 0, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for found in pool.imap_unordered(suite.part_of, jobs, chunksize=1):
            for outcome, seconds in found:
                kind = "excluded" if any(e.covers(outcome.test) for e in left_out) else outcome.kind
                table[outcome.test.split("::")[0]][kind] += 1
                problem = None if kind == "excluded" else suite.verdict(outcome, expected)
                wrong += problem is not None
                if problem or args.list:
                    print(f"{outcome.test} [{seconds:.1f} s] {kind}: {problem or outcome.why}", flush=True)
        pool.close()
        pool.join()
    columns = ("passed", "refused", "failed", "skipped", "excluded")
    print(f"| file | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for file, counts in sorted(table.items()):
        print(f"| {file} | {' | '.join(str(counts[c]) for c in columns)} |")
    print(f"{wrong} not as expected, {time.monotonic() - begin:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
