"""The pytest plugin: kernels under many schedules of the simulator.

    def test_scale(simulate_schedules):
        y = simulate_schedules(scale, x, schedules=20)

pytest loads this in every run, with our kernels or without: JAX is imported when the fixture is used, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OPTION = "--mosaic-gpu-schedules"


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError(text)
    return count


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that overrides what tests ask for."""
    parser.getgroup("mosaic_gpu").addoption(
        OPTION,
        type=_count,
        default=None,
        metavar="N",
        help="random schedules of each simulate_schedules, besides late and early, whatever the test says",
    )


@pytest.fixture
def simulate_schedules(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """simulate_schedules(kernel, *arrays, schedules=20): what the kernel returns, as NumPy arrays.

    It runs in the simulator in the late and the early order and in `schedules` random ones (seeds 1, 2, ...).  Raises the
    first finding, and `Race` (kind 'timing') if the bits are not the same every time; a note on the
    error names the schedule.  The kernel: an object of `plgpu.kernel`, or a function that calls some.
    """
    override: int | None = request.config.getoption(OPTION)

    def run(kernel: Callable[..., Any], *arrays: Any, schedules: int = 20, arch: str | None = None) -> Any:
        return simulate_all(kernel, arrays, schedules if override is None else override, arch)

    return run


def simulate_all(kernel: Callable[..., Any], arrays: Any, random: int, arch: str | None = None) -> Any:
    """What the fixture does; for scripts without pytest, too."""
    from .errors import MosaicGpuError
    from .runtime.schedules import Rehearsal, name_of, schedules

    rehearsal = Rehearsal(kernel, arrays, arch)
    first: tuple[list[Any], str] | None = None
    for schedule in schedules(random):
        name = name_of(schedule)
        try:
            outputs = rehearsal.outputs(schedule)
        except MosaicGpuError as error:
            error.add_note(f"under the schedule '{name}'")
            raise error.with_traceback(
                None
            ) from None  # the report has the kernel's lines; those of the simulator hide it
        first = first or (outputs, name)
        difference = rehearsal.compare(*first, outputs, name)
        if difference is not None:
            raise difference
    assert first is not None
    return rehearsal.unflatten(first[0])
