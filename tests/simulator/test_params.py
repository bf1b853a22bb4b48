"""SimulatorParams refuses what it does not know, with the field and the value."""

import pytest

from mosaic_gpu import SimulatorParams


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("timing", "soon", "one of late, early"),
        ("shadow", "words", "one of regions, bytes"),
        ("uninitialized", 0, "one of nan, zero"),
        ("checks", "off", "True or False"),
        ("checks", 1, "True or False"),
        ("seed", -1, "a number from 0 on"),
        ("seed", True, "a number from 0 on"),
        ("max_steps", 0, "a number from 1 on"),
        ("max_steps", None, "a number from 1 on"),
        ("processes", 1.5, "a number from 1 on, or None"),
        ("report", "yes", "a Report, or None"),
    ],
)
def test_refused(field, value, says):
    with pytest.raises((TypeError, ValueError), match=rf"SimulatorParams\({field}=.*{says}"):
        SimulatorParams(**{field: value})
