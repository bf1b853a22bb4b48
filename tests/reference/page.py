"""docs/reference.md: every public name with its arguments and docstring, by the topics of the package's docstring.

python -m tests.reference.page      # writes the page
"""

import enum
import inspect
import pathlib
import re
import textwrap

import mosaic_gpu
from mosaic_gpu.frontend.memory import Accumulators, Space

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference.md"
HEAD = """# Reference

    import mosaic_gpu as plgpu

Every public function and type, with what it takes, does and refuses. Written by `python -m tests.reference.page` from the
docstrings, which `help(plgpu.wgmma)` shows as well. Errors are explained in [errors.md](errors.md), the rules of asynchronous
work in [memory_model.md](memory_model.md), what the operations of `jnp` and `lax` need in [ops.md](ops.md).
"""


def topics() -> dict[str, list[str]]:
    """Topic -> names, as the package's docstring lists them."""
    found = {}
    for topic, names in re.findall(r"^- ([\w ]+): (.*)$", mosaic_gpu.__doc__ or "", re.MULTILINE):
        public = [n for n in re.split(r"[ ,;()]+", names) if n in mosaic_gpu.__all__]
        if public:
            found[topic] = public
    return found


def default(value: object) -> str:
    if type(value) is object:
        return "..."  # given by another name, or not at all
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def signature(name: str, thing: object) -> str:
    """A call, without annotations: the text beside it says types, shapes and units."""
    if isinstance(thing, enum.EnumType):
        return f"{name}: {', '.join(thing.__members__)}"
    if not callable(thing):
        return name
    parts, star = [], False
    for p in inspect.signature(thing).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(prefix + p.name + ("" if p.default is p.empty else f"={default(p.default)}"))
    line = f"{name}({', '.join(parts)})"
    return "\n".join(textwrap.wrap(line, 120, subsequent_indent="    ", break_on_hyphens=False))


def text_of(thing: object) -> str:
    if isinstance(thing, (Accumulators, Space)):
        return inspect.getdoc(type(thing).__call__) or ""
    return inspect.getdoc(thing) or ""


def entry(name: str) -> str:
    thing = getattr(mosaic_gpu, name)
    return f"### {name}\n\n```\n{signature(name, thing)}\n\n{text_of(thing)}\n```\n"


def page() -> str:
    sections = [
        f"## {topic[0].upper()}{topic[1:]}\n\n" + "\n".join(map(entry, names)) for topic, names in topics().items()
    ]
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page())
