"""Every wgmma that our table allows, on a Hopper GPU: the kernels that the simulator has tried, against exact sums."""

from __future__ import annotations

import pytest

from mosaic_gpu.runtime.device import default_arch
from tests.kernels import test_wgmma_matrix as wgmma

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize("case", wgmma.CASES, ids=str)
def test_wgmma(case):
    wgmma.check(case)
