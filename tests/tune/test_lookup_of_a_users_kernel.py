"""`explain_config` of a user's own Tunable: it says what that kernel would take, and takes nothing of another kernel's."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.config import Config
from mosaic_gpu.kernels.sm90.attention import AttentionConfig
from mosaic_gpu.kernels.sm90.matmul import MatmulConfig
from mosaic_gpu.runtime import device
from mosaic_gpu.tune import Tunable, config_for
from mosaic_gpu.tune.search import Store
from mosaic_gpu.tune.tunable import find_tunable

H200 = "nvidia_h200"
X = jax.ShapeDtypeStruct((64, 512), jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleConfig(Config):
    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "scale"
    rows: int = 8


class Scale(Tunable):
    name, config, letters = "scale", ScaleConfig, {"m": "rows", "n": "columns"}
    space = {"rows": (4, 8, 16)}

    def workload_of(self, x: Any) -> Any:
        return self.workload({"m": x.shape[0], "n": x.shape[1], "dtype": str(x.dtype)})


SCALE = Scale()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamesakeConfig(Config):
    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "scale"
    rows: int = 1


@pytest.fixture
def tuned(folder: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_key", lambda: H200)
    s = Store(folder, SCALE, SCALE.parse("m64n512", dtype="float32"), fakes.DEVICE, fakes.TOOLCHAIN, fakes.PROTOCOL)
    s.add([{"status": "ok", "seconds": 1e-3, "config": ScaleConfig(rows=16).to_json()}])


def test_what_it_would_take(tuned: None) -> None:
    exact = plgpu.explain_config(SCALE, X)
    assert (exact.config, exact.source, exact.match) == (ScaleConfig(rows=16), "user", "exact")
    near = plgpu.explain_config(SCALE, jax.ShapeDtypeStruct((128, 512), jnp.float32))
    assert (near.config, near.match, near.distance) == (ScaleConfig(rows=16), "nearest", 1.0)
    far = plgpu.explain_config(SCALE, jax.ShapeDtypeStruct((64, 512), jnp.bfloat16))
    assert (far.config, far.source) == (ScaleConfig(), "heuristic") and "nothing tuned is near" in str(far)
    assert plgpu.explain_config(Scale, X).config == exact.config  # the class, too
    assert plgpu.explain_config(f"{__file__}:SCALE", X).config.to_json() == exact.config.to_json()


def test_without_a_gpu_it_says_so() -> None:
    assert "on no GPU: the kernel's heuristic: caches are of GPUs, and there is none" in str(
        plgpu.explain_config(SCALE, X)
    )


@pytest.mark.parametrize("other", [AttentionConfig(), MatmulConfig(), NamesakeConfig()])
def test_another_kernels_config_is_none_of_its_own(other: Any) -> None:
    with pytest.raises(TypeError, match=rf"config={type(other).__name__}\(.*another kernel: scale takes ScaleConfig"):
        plgpu.explain_config(SCALE, X, config=other)
    with plgpu.override_config(other):
        assert plgpu.explain_config(SCALE, X).source == "heuristic"
        assert config_for(SCALE, X) == ScaleConfig()
    with plgpu.override_config(ScaleConfig(rows=4), other):
        assert config_for(SCALE, X) == ScaleConfig(rows=4)
    assert plgpu.explain_config(SCALE, X, config=ScaleConfig(rows=2)).source == "explicit"


def test_the_name_of_a_kernel_of_ours() -> None:
    """It would read our caches, and write into them."""

    class Mine(Scale):
        name = "matmul"

    with pytest.raises(ValueError, match="Mine.name = 'matmul' is the name of a kernel that comes with mosaic_gpu"):
        plgpu.explain_config(Mine(), X)
    assert find_tunable("matmul").name == "matmul"


def test_what_is_no_tunable() -> None:
    with pytest.raises(ValueError, match=r"explain_config\('scale'\): a kernel of yours is named by its Tunable"):
        plgpu.explain_config("scale", X)
    wrong: Any = len
    with pytest.raises(TypeError, match="'attention', 'attention_backward', 'matmul' or a Tunable, not <built-in"):
        plgpu.explain_config(wrong, X)

    class Empty(Tunable):
        name = "empty"

    with pytest.raises(ValueError, match="Empty lacks `config`"):
        plgpu.explain_config(Empty(), X)


def test_how_it_is_tuned_again_is_a_command_that_works(tuned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCALE.__dict__, "source_hash", "another")
    said = str(plgpu.explain_config(SCALE, X))
    assert f"`mosaic-gpu tune run {__file__}:Scale` times this one" in said
    assert find_tunable(f"{__file__}:Scale").name == "scale"
