"""Every wgmma and mma.sync that our tables allow, on a Hopper GPU: kernels that the simulator has tried, against exact sums."""

from __future__ import annotations

import pytest

from mosaic_gpu.runtime.device import default_arch
from tests.kernels import test_bits as bits
from tests.kernels import test_mma_matrix as mma
from tests.kernels import test_wgmma_matrix as wgmma

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize("case", wgmma.CASES, ids=str)
def test_wgmma(case):
    wgmma.check(case)


@pytest.mark.parametrize("case", bits.CASES, ids=str)
def test_bits(case):
    bits.check(case)


@pytest.mark.parametrize("case", mma.CASES, ids=str)
def test_mma(case):
    mma.check(case)
