"""What is known about mutants and sabotages: which change nothing, which only a wrong value can show, which are missed.

A mutant that is in none of these tables must be found as an error.  KNOWN_MISSES shrinks: what is found must leave it.
Keys are `str(mutant)` and `str(sabotage)`.
"""

from __future__ import annotations

# Mutants that break nothing, with the ordering rule that still holds.
EQUIVALENT: dict[str, str] = {}

# Mutants that take other data or leave some out, with every access in order: only the result is wrong.
VALUE: dict[str, str] = {}

# Defects that the simulator does not report as it should, with the rule that should catch them.
KNOWN_MISSES: dict[str, str] = {}
