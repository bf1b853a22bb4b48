"""Arrays of registers, written out as one variable for each element.

The emitter writes a thread's part of an array value as a C array, indexed by constants.  NVVM takes such arrays apart
again, which is a quarter of its time; here it is done on the text, for every array that is used in no other way.
"""

from __future__ import annotations

import itertools
import re

# The text has some 150 kB and thousands of elements: it is taken apart and put together by `split` and `join`, which call
# nothing for each of them.  All arrays of registers have names of a letter and a number, which nothing else that is indexed has.
_TYPES = "float|double|int|u32|u64|long long|short|u16|signed char|u8|bool"
_DECLARATION = re.compile(rf"(^ *|; )((?:{_TYPES}) )([rv]\d\w*)\[(\d+)\](?=;)", re.MULTILINE)
_ELEMENT = re.compile(r"\b([rv]\d\w*)\[(\d+)\]")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"')
_NAME = re.compile(r"\b[rv]\d\w*")
_MARK = "\0"  # where a declaration has been taken out
_ENDINGS = [f"_{i}" for i in range(1024)]


def scalars(text: str) -> str:
    """The C++ `text` with `float v2[2]; v2[1] = ...;` as `float v2_0, v2_1; v2_1 = ...;`.

    An array that is passed on as a whole, indexed by anything but a number, or named in quotes, stays as it is.
    """
    around = _DECLARATION.split(text)  # text, then what stands before a declaration, type, name, count, and again text
    declared = around[3::5]
    parts = _ELEMENT.split(_MARK.join(around[0::5]))  # text, then name, number, and again text
    quoted = set(_NAME.findall(" ".join(set(_QUOTED.findall(text)))))
    stay = quoted.union(set(_NAME.findall(" ".join(parts[0::3]))).intersection(declared))
    count = len(parts) // 3
    out = [""] * (5 * count + 1)
    out[0::5], out[1::5], out[3::5] = parts[0::3], parts[1::3], parts[2::3]
    out[2::5] = ["_"] * count
    if stay:
        out[2::5] = ["[" if name in stay else "_" for name in parts[1::3]]
        out[4::5] = ["]" if name in stay else "" for name in parts[1::3]]
    between = "".join(out).split(_MARK)
    declarations = (
        # Of an array of no elements there is none: C++ has no such declaration, neither as an array nor of no names.
        f"{before}{kind}{f'{name}[{size}]' if name in stay else _variables(name, int(size))}" if int(size) else before
        for before, kind, name, size in zip(around[1::5], around[2::5], declared, around[4::5], strict=True)
    )
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(between, declarations, fillvalue="")))


def _variables(name: str, count: int) -> str:
    if count > len(_ENDINGS):
        return ", ".join([f"{name}_{i}" for i in range(count)])
    return name + f", {name}".join(_ENDINGS[:count])
