"""Arrays of registers, written out as one variable for each element.

The emitter writes a thread's part of an array value as a C array, indexed by constants.  NVVM takes such arrays apart
again, which is a quarter of its time; here it is done on the text, for every array that is used in no other way.
"""

from __future__ import annotations

import re

# Each is one pass over some 150 kB, and none calls a function for each of the thousands of elements.  All arrays of registers
# have names of a letter and a number, which nothing else that is indexed has.
_TYPES = "float|double|int|u32|u64|long long|short|u16|signed char|u8|bool"
_DECLARATION = re.compile(rf"(^ *|; )((?:{_TYPES}) )([rv]\d\w*)\[(\d+)\](?=;)", re.MULTILINE)
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"')
_WHOLE = re.compile(r"\b([rv]\d\w*)\b(?!\[\d)")


def scalars(text: str) -> str:
    """The C++ `text` with `float v2[2]; v2[1] = ...;` as `float v2_0, v2_1; v2_1 = ...;`.

    An array that is passed on as a whole, indexed by anything but a number, or named in quotes, stays as it is.
    """
    quoted = re.findall(r"\w+", " ".join(_QUOTED.findall(text)))
    stay = {*_WHOLE.findall(text), *quoted}

    def declaration(m: re.Match[str]) -> str:
        before, kind, name, count = m.groups()
        if int(count) == 0:  # of an array of no elements: C++ has no such declaration, neither as an array nor of no names
            return before
        names = [f"{name}[{count}]"] if name in stay else [f"{name}_{i}" for i in range(int(count))]
        return f"{before}{kind}{', '.join(names)}"

    arrays = (
        "|".join(sorted(stay.intersection(name for _, _, name, _ in _DECLARATION.findall(text)).union(quoted))) or "-"
    )
    element = re.compile(rf"\b(?!(?:{arrays})\[)([rv]\d\w*)\[(\d+)\]")
    return element.sub(r"\1_\2", _DECLARATION.sub(declaration, text))
