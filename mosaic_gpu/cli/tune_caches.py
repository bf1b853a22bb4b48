"""`mosaic-gpu tune show | diff | merge | prune | validate | export`: work with tuning caches; none needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CacheInvalid
from .common import FAILED, AsJson, Refusal, output, print_json, table
from .tune import name_of, short

Cache = Annotated[str, typer.Argument(help="A cache file, or DEVICE/KERNEL such as nvidia_h200/attention.")]


def find(text: str) -> Path:
    """A file by its path, or by DEVICE/KERNEL in the user's folder, then the repository's."""
    from ..tune import cache

    if Path(text).is_file():
        return Path(text)
    folders = (cache.user_folder(), cache.repository_folder())
    parts = text.removesuffix(".json").split("/")
    if len(parts) == 2:
        for folder in folders:
            if (path := cache.cache_file(folder, *parts)).is_file():
                return path
    raise Refusal(f"there is no tuning cache {text}: give a file, or DEVICE/KERNEL in {' or '.join(map(str, folders))}")


def all_files() -> Iterator[tuple[str, Path]]:
    """(user or repository, file) of every cache there is."""
    from ..tune import cache

    for place, folder in (("user", cache.user_folder()), ("repository", cache.repository_folder())):
        for path in sorted(folder.glob("*/*.json")):
            yield place, path


def loaded(text: str) -> tuple[Path, dict[str, Any]]:
    """A file and its content; a refusal for what is no cache."""
    from ..tune.manage import read_any

    path = find(text)
    try:
        return path, read_any(path)
    except CacheInvalid as error:
        raise Refusal(error.message) from error


def written(data: dict[str, Any], out: Path) -> None:
    """Write a file, through the same door as the tuner; a refusal where something else is in its place."""
    from ..tune import cache
    from ..tune.manage import read_any

    if not out.parent.is_dir():
        raise Refusal(f"--out {out}: there is no folder {out.parent}")
    if out.exists():
        try:
            read_any(out)
        except CacheInvalid as error:
            raise Refusal(
                f"--out {out} is there and no tuning cache that is understood, so it stays: {error.message}"
            ) from error
    cache.write(out, data)


def key_text(entry: dict[str, Any], tunable: Any = None) -> str:
    """The workload of an entry in a line: as the kernel writes its shapes, where that is known."""
    if tunable is not None:
        try:
            return name_of(tunable.workload(entry["workload"]))
        except (KeyError, TypeError, ValueError):
            pass  # a workload of another kernel: `validate` says so
    return " ".join(f"{k}={v}" for k, v in entry["workload"].items())


def show(
    files: Annotated[list[str] | None, typer.Argument(help="Files, or DEVICE/KERNEL; default: all there are.")] = None,
    trials: Annotated[bool, typer.Option("--trials", help="Every trial of every entry, the fastest first.")] = False,
    ranking: Annotated[
        bool, typer.Option("--ranking", help="How well the cost estimate ordered what was timed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What the caches hold: the best config of each workload, and how it was found."""
    from ..tune import manage

    wanted = [(place, str(path)) for place, path in all_files()] if not files else [("", f) for f in files]
    found: list[Any] = []
    console = output()
    for place, text in wanted:
        path, data = loaded(text)
        if ranking:
            found.append({"file": str(path), "header": data["header"], **manage.ranking(data)})
        else:
            found.append(
                {"file": str(path), "place": place, "header": data["header"], "entries": manage.good_entries(data)}
            )
        if not as_json:
            _show_ranking(console, found[-1]) if ranking else _show(console, found[-1], trials)
    if as_json:
        print_json(found)
    elif not found:
        console.print("there are no tuning caches; `mosaic-gpu tune run attention` makes one", highlight=False)


def _show(console: Any, shown: dict[str, Any], trials: bool) -> None:
    from ..tune.manage import tunable_of

    header = shown["header"]
    tunable = tunable_of(shown)
    console.print(f"{shown['file']}: {header['device']['name']}, {header['date']}", highlight=False, soft_wrap=True)
    rows = []
    for e in shown["entries"]:
        best = e["best"]
        count: dict[str, int] = {}
        for t in e["trials"]:
            count[t["status"]] = count.get(t["status"], 0) + 1
        source = header["provenances"].get((best or {}).get("provenance"), {}).get("source")
        stale = "" if tunable is None or best is None or source == tunable.source_hash else "stale"
        numbers = [f"{best['seconds'] * 1e6:.1f}", best["tflops"], _percent(best["spread"])] if best else [None] * 3
        tried = ", ".join(f"{n} {s}" for s, n in sorted(count.items())) or None
        rows.append([key_text(e, tunable), *numbers, tried, stale, best and short(best["config"])])
    console.print(table("", ["workload", "us", "TFLOP/s", "spread", "trials", "", "config"], rows))
    for e in shown["entries"] if trials else []:
        ordered = sorted(e["trials"], key=lambda t: (t.get("seconds") is None, t.get("seconds")))
        lines = [
            [
                short(t["config"]),
                t["status"],
                t.get("seconds") and f"{t['seconds'] * 1e6:.1f}",
                _percent(t.get("spread")),
            ]
            + [t.get(k) for k in ("stage", "rank", "registers", "spills", "shared_bytes")]
            + [t.get("message")]
            for t in ordered
        ]
        heads = ["config", "status", "us", "spread", "stage", "rank", "registers", "spills", "shared", "message"]
        console.print(table(key_text(e, tunable), heads, lines, left=2))


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _show_ranking(console: Any, shown: dict[str, Any]) -> None:
    from ..tune.manage import tunable_of

    tunable = tunable_of(shown)
    rows = [
        [
            key_text(r, tunable),
            r["timed"],
            r["place"] + 1,
            "yes" if r["in_top_quarter"] else "no",
            f"{r['lost_by_first']:.1%}",
            r["seconds"],
        ]
        for r in shown["entries"]
    ]
    console.print(shown["file"], highlight=False, soft_wrap=True)
    console.print(table("", ["workload", "timed", "place of best", "top quarter", "first is slower by", "s"], rows))
    console.print(
        f"the best was in the ranking's top quarter in {shown['in_top_quarter']} of {shown['of']}", highlight=False
    )


def savings(
    short: Annotated[str, typer.Argument(help="The cache of a usual search.")],
    exhaustive: Annotated[str, typer.Argument(help="That of a search with --exhaustive, from another folder.")],
    as_json: AsJson = False,
) -> None:
    """What ranking and halving saved against trying everything, and what they missed."""
    from ..tune import manage

    (_, data), (_, whole) = loaded(short), loaded(exhaustive)
    try:
        found = manage.savings(data, whole)
    except CacheInvalid as error:
        raise Refusal(error.message) from error
    if as_json:
        print_json(found)
        return
    if not found["of"]:
        raise Refusal("the two have no workload in common")
    tunable = manage.tunable_of(data)
    rows = [
        [key_text(r, tunable), *map(str, r["trials"]), *map(str, r["seconds"]), _percent(r["saved"])]
        + ["yes" if r["found"] else "no", _percent(r["lost"])]
        for r in found["entries"]
    ]
    heads = ["workload", "trials", "of all", "s", "of all", "saved", "best found", "lost"]
    console = output()
    console.print(table(f"{short} against {exhaustive}", heads, rows))
    console.print(
        f"saved {_percent(found['saved'])} of the time; the best of all was found in {found['found']} of {found['of']}, the "
        f"largest loss is {_percent(found['lost']) or 'not known'}",
        highlight=False,
    )


def diff(a: Cache, b: Cache, as_json: AsJson = False) -> None:
    """What differs between the best configs of two files, perhaps of two devices.  Exit code 1 if anything does."""
    from ..tune.manage import differences

    (path_a, data_a), (path_b, data_b) = loaded(a), loaded(b)
    rows = differences(data_a, data_b)
    if as_json:
        print_json({"a": str(path_a), "b": str(path_b), "rows": rows})
    else:
        cells = []
        for r in rows:
            changed = ", ".join(f"{k}: {x} -> {y}" for k, (x, y) in r["changed"].items()) or (
                r["only"] and f"only in {r['only']}"
            )
            times = [r[s] and f"{r[s] * 1e6:.1f}" for s in ("a", "b")]
            cells.append([key_text(r), *times, r["ratio"] and f"{r['ratio']:.3f}", changed or "same config"])
        console = output()
        console.print(table(f"a: {path_a}\nb: {path_b}", ["workload", "a us", "b us", "a / b", "config"], cells))
    if any(r["only"] or r["changed"] for r in rows):
        raise typer.Exit(FAILED)


def merge(
    files: Annotated[list[str], typer.Argument(help="Files of one device and kernel; of schema 1, too.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: the user's cache, added to.")] = None,
    repo: Annotated[bool, typer.Option("--repo", help="Add to the autotune_cache/ of this checkout.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put files together: all their trials; where several have the same, the newest."""
    from ..tune import cache, manage
    from .tune import folder_for

    found = [(str(p), d) for p, d in map(loaded, files)]
    header = found[0][1]["header"]
    target = out or cache.cache_file(folder_for(repo), header["device"]["name"], header["kernel"]["name"])
    if out is not None:
        try:
            written(manage.merge(found), out)
        except CacheInvalid as error:
            raise Refusal(error.message) from error
    else:

        def change(old: Any) -> Any:
            return manage.merge(([(str(target), old)] if old else []) + found)

        try:
            cache.update(target, change)
        except CacheInvalid as error:
            raise Refusal(error.message) from error
    data = manage.read_any(target)
    result = {
        "file": str(target),
        "entries": len(data["entries"]),
        "trials": sum(len(e["trials"]) for e in data["entries"]),
    }
    if as_json:
        print_json(result)
    else:
        output().print(
            f"{target}: {result['entries']} entries, {result['trials']} trials", highlight=False, soft_wrap=True
        )


def prune(
    file: Cache,
    stale: Annotated[
        bool, typer.Option("--stale", help="Drop what was timed with another revision of the kernel.")
    ] = False,
    fastest: Annotated[int | None, typer.Option(min=0, help="Keep so many right trials of each entry.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a file smaller, in place: broken entries and unused provenances go, and what the options say."""
    from ..tune import cache, manage

    path, data = loaded(file)
    tunable = manage.tunable_of(data)
    if stale and tunable is None:
        raise Refusal(f"--stale: {path} is of {data['header']['kernel']['name']}, whose source is not known here")
    dropped: dict[str, int] = {}

    def change(old: Any) -> Any:
        made, counts = manage.prune(old, stale=tunable.source_hash if stale and tunable else None, fastest=fastest)
        dropped.update(counts)
        return made

    cache.update(path, change)
    if as_json:
        print_json({"file": str(path), "dropped": dropped})
    else:
        what = ", ".join(f"{n} {k}" for k, n in dropped.items()) or "nothing"
        output().print(f"{path}: dropped {what}", highlight=False, soft_wrap=True)


def validate(
    files: Annotated[list[str] | None, typer.Argument(help="Files, or DEVICE/KERNEL; default: all there are.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check files against the schema, their place and today's kernels.  Exit code 1 if something is wrong."""
    found = {}
    paths = [path for _, path in all_files()] if not files else [find(f) for f in files]
    for path in paths:
        found[str(path)] = problems_of(path)
    if as_json:
        print_json(found)
    else:
        console = output()
        for name, lines in found.items():
            console.print(f"{name}: {'; '.join(lines) or 'valid'}", highlight=False, markup=False, soft_wrap=True)
        if not found:
            console.print("there are no tuning caches", highlight=False)
    if any(found.values()):
        raise typer.Exit(FAILED)


def problems_of(path: Path) -> list[str]:
    """What is wrong with a file."""
    from ..tune import cache, manage, schema

    try:
        data = cache.read(path)
    except CacheInvalid as error:
        return [error.message]
    found = [line for line in schema.problems(data)]
    tunable = manage.tunable_of(data)
    seen = []
    for entry in manage.good_entries(data):
        if wrong := manage.what_is_wrong(data, entry, tunable):
            found.append(f"{key_text(entry)}: {wrong}")
        if entry["workload"] in seen:
            found.append(f"{key_text(entry)}: there twice, and which counts is chance")
        seen.append(entry["workload"])
    return found


def export(
    file: Cache,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    as_json: AsJson = False,
) -> None:
    """The best configs alone, without trials: a small file of the same schema, to ship."""
    from ..tune import manage

    path, data = loaded(file)
    small = manage.export(data)
    written(small, out)
    if as_json:
        print_json({"from": str(path), "file": str(out), "entries": len(small["entries"])})
    else:
        output().print(f"{out}: {len(small['entries'])} entries", highlight=False, soft_wrap=True)
