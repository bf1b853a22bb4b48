"""Arrays of registers, written out as one variable for each element.

The emitter writes a thread's part of an array value as a C array, indexed by constants.  NVVM takes such arrays apart
again, which is a quarter of its time; here it is done on the text, for every array that is used in no other way.
"""

from __future__ import annotations

import re

_TYPES = "float|double|int|u32|u64|long long|short|u16|signed char|u8|bool"
_DECLARATION = re.compile(rf"\b({_TYPES}) (\w+)\[(\d+)\];")
_ELEMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\b(\w+)\[(\d+)\]')  # text in quotes is left alone


def scalars(text: str) -> str:
    """The C++ `text` with `float v[2]; v[1] = ...;` as `float v_0, v_1; v_1 = ...;`.

    An array that is passed on as a whole, or indexed by anything but a number, stays as it is.
    """
    declared = {name for _, name, _ in _DECLARATION.findall(text)}
    apart = declared - set(re.findall(r"\w+", _ELEMENT.sub("", text)))

    def declaration(m: re.Match[str]) -> str:
        kind, name, count = m.groups()
        return f"{kind} {', '.join(f'{name}_{i}' for i in range(int(count)))};" if name in apart else m[0]

    def element(m: re.Match[str]) -> str:
        return f"{m[1]}_{m[2]}" if m[1] in apart else m[0]

    return _ELEMENT.sub(element, _DECLARATION.sub(declaration, text))
