"""`mma.sync` for which a GPU has no instruction: ptxas builds it from others, and says nothing.

Seen in the disassembly of each (NVRTC 13).  Neither wgmma nor tcgen05 has such forms: what they lack, ptxas refuses.
"""

from __future__ import annotations

import re

# What is in the name of an instruction, on which architectures ("": all), and what is made of it
_EMULATED = (
    (
        r"\.(e4m3|e5m2)\.",
        "",
        "conversions of both operands to float16 and two HMMA; with wgmma or tcgen05 it is native",
    ),
    (r"\.(s4|u4)\.", "", "a call that unpacks both operands, and two IMMA of 8 bits"),
    (r"\.m8n8k4\..*\.f16\.f16\.", "", "a call without any tensor core instruction"),
    (r"\.b1\..*\.xor\.", "", "calls and several instructions"),
    (r"\.b1\..*\.and\.", "sm_10", "a call and eight IMMA of 8 bits"),
)


def emulated_products(ptx: str | None, arch: str) -> tuple[str, ...]:
    """A sentence for each kind of product in a kernel's PTX that is emulated on `arch`; without PTX none is known."""
    found = []
    for name in dict.fromkeys(re.findall(r"mma\.sync\.aligned[\w.:]*", ptx or "")):
        for pattern, on, made_of in _EMULATED:
            if arch.startswith(on) and re.search(pattern, name):
                found.append(f"{name} is emulated on {arch}: ptxas makes of it {made_of}.")
                break
    return tuple(found)
