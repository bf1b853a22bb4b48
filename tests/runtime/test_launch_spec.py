"""What a launch specification refuses, and its bytes."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from cuda.bindings import driver as cuda

from mosaic_gpu import errors
from mosaic_gpu.runtime import launch_spec, native
from mosaic_gpu.runtime.launch_spec import (
    BufferPointer,
    Extent,
    LaunchSpec,
    Scalar,
    ShapedMap,
    TensorMap,
    deserialize,
    serialize,
)

GOOD_MAP = {"buffer": 0, "dtype": "bfloat16", "dims": (128, 64), "strides": (256,), "box": (64, 64), "swizzle": 128}
GOOD_SPEC = {
    "cubin": b"\x7fELF",
    "entry": "k",
    "grid": (4, 1, 1),
    "threads": 128,
    "cluster": (1, 1, 1),
    "shared_bytes": 1024,
    "parameters": (TensorMap(**GOOD_MAP), BufferPointer(1, 4), Scalar(2, "int32")),
    "toolchain": "NVRTC 13.0 sm_90a",
}


def test_illegal_maps_of_unknown_arrays():
    with pytest.raises(errors.IllegalInstruction, match="swizzle of 128 bytes"):
        ShapedMap(0, "bfloat16", ((1, 1, None), (0, 1, None)), (128, 64), 128)
    with pytest.raises(errors.UnsupportedCall, match="complex64"):
        ShapedMap(0, "complex64", ((0, 1, None),), (64,))
    with pytest.raises(errors.UnsupportedCall, match="count from 0"):
        Extent(0, -1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dims": (64,) * 6, "strides": (128,) * 5, "box": (64,) * 6}, errors.IllegalInstruction, "has 6"),
        ({"dims": (), "strides": (), "box": ()}, errors.IllegalInstruction, "has 0"),
        ({"strides": ()}, errors.IllegalInstruction, "1 strides"),
        ({"box": (64,)}, errors.IllegalInstruction, "2 box extents"),
        ({"box": (64, 257)}, errors.IllegalInstruction, "dimension 1 of .* has 257"),
        ({"box": (64, 0)}, errors.IllegalInstruction, "has 0"),
        ({"box": (4, 64)}, errors.IllegalInstruction, "8 bytes"),
        ({"box": (128, 64)}, errors.IllegalInstruction, "swizzle of 128 bytes.*are 256 bytes"),
        ({"box": (64, 64), "swizzle": 64}, errors.IllegalInstruction, "swizzle of 64 bytes.*are 128 bytes"),
        ({"swizzle": 96}, errors.IllegalInstruction, "got 96"),
        ({"strides": (24,)}, errors.UnsupportedCall, "stride of 24 bytes.*multiple of 8 elements"),
        ({"strides": (1 << 40,)}, errors.UnsupportedCall, "1099511627776"),
        ({"strides": (-16,)}, errors.UnsupportedCall, "-16"),
        ({"dims": (128, 0)}, errors.UnsupportedCall, "dimension 1 has 0"),
        ({"dims": (128, (1 << 32) + 1)}, errors.UnsupportedCall, "4294967297"),
        ({"dtype": "complex64"}, errors.UnsupportedCall, "complex64"),
        ({"buffer": -1}, errors.UnsupportedCall, "-1"),
    ],
)
def test_illegal_tensor_maps(changes, error, message):
    TensorMap(**GOOD_MAP)
    with pytest.raises(error, match=message):
        TensorMap(**(GOOD_MAP | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": (128, 1 << 32), "strides": (256,)},
        {"box": (256, 256), "swizzle": 0},
        {"dims": (8,), "strides": (), "box": (8,), "swizzle": 32},
        {"dtype": "float8_e4m3fn", "box": (128, 64)},
    ],
)
def test_tensor_maps_at_the_limit(changes):
    TensorMap(**(GOOD_MAP | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"grid": (1 << 31, 1, 1)}, errors.UnsupportedCall, "2147483648"),
        ({"grid": (1, 65536, 1)}, errors.UnsupportedCall, "65536"),
        ({"grid": (-1, 1, 1)}, errors.UnsupportedCall, "-1"),
        ({"cluster": (4, 5, 1), "grid": (4, 5, 1)}, errors.UnsupportedCall, "20 blocks"),
        ({"cluster": (0, 1, 1)}, errors.UnsupportedCall, "0 blocks"),
        ({"cluster": (3, 1, 1)}, errors.UnsupportedCall, "no multiple"),
        ({"threads": 1025}, errors.ResourceExceeded, "1025"),
        ({"shared_bytes": 232449}, errors.ResourceExceeded, "232448.*232449"),
        ({"toolchain": "NVRTC 13.0"}, errors.UnsupportedCall, "names no target"),
    ],
)
def test_illegal_launches(changes, error, message):
    LaunchSpec(**GOOD_SPEC)
    with pytest.raises(error, match=message):
        LaunchSpec(**(GOOD_SPEC | changes))


@pytest.mark.parametrize(("value", "dtype"), [(1 << 31, "int32"), (1 << 63, "int64"), (0.5, "int32"), (1, "uint8")])
def test_scalars_that_do_not_fit(value, dtype):
    with pytest.raises(errors.UnsupportedCall, match=re.escape(str(value)) if dtype != "uint8" else "uint8"):
        Scalar(value, dtype)


def test_arch_and_extent():
    assert LaunchSpec(**GOOD_SPEC).arch == (90, "a")
    assert LaunchSpec(**(GOOD_SPEC | {"toolchain": "NVRTC 13.0 sm_100f"})).arch == (100, "f")
    assert TensorMap(**GOOD_MAP).extent == 63 * 256 + 128 * 2


def test_bytes_tell_every_field_apart():
    changes = {
        "cubin": b"\x7fELG",
        "entry": "l",
        "grid": (5, 1, 1),
        "threads": 256,
        "cluster": (2, 1, 1),
        "shared_bytes": 1025,
        "parameters": (),
        "toolchain": "NVRTC 13.0 sm_90",
    }
    assert changes.keys() == GOOD_SPEC.keys()
    blobs = [serialize(LaunchSpec(**(GOOD_SPEC | {name: value}))) for name, value in changes.items()]
    maps = [{}, {"buffer": 1}, {"dtype": "float16"}, {"dims": (128, 65)}, {"strides": (512,)}, {"box": (32, 64)}]
    for changed in [*maps, {"swizzle": 0}]:
        blobs.append(serialize(LaunchSpec(**(GOOD_SPEC | {"parameters": (TensorMap(**(GOOD_MAP | changed)),)}))))
    steps = ((1, 1, 64), (0, 1, None))
    shaped = {"buffer": 0, "dtype": "bfloat16", "dims": steps, "box": (64, 64), "swizzle": 128}
    changes = [{"dims": ((1, 1, 64), (0, 2, None))}, {"dims": ((1, 1, None), (0, 1, None))}, {"dims": steps[::-1]}]
    parameters = [ShapedMap(**(shaped | c)) for c in [*maps[:3], *changes, {"box": (32, 64)}, {"swizzle": 0}]]
    for parameter in [*parameters, Extent(0, 0), Extent(1, 0), Extent(0, 1)]:
        spec = LaunchSpec(**(GOOD_SPEC | {"parameters": (parameter,)}))
        blobs.append(serialize(spec))
        assert deserialize(blobs[-1]) == spec
    blobs.append(serialize(LaunchSpec(**GOOD_SPEC)))
    assert len(set(blobs)) == len(blobs)
    assert blobs[-1] == serialize(LaunchSpec(**GOOD_SPEC))


def test_numbers_are_the_drivers():
    """The codes in the specification and in the hand-written header, against cuda-bindings."""
    types = cuda.CUtensorMapDataType
    for name, (code, size) in launch_spec.TENSOR_MAP_TYPES.items():
        kind, bits = re.fullmatch(r"(bool|bfloat|float|u?int)(\d*)(?:_\w+)?", name).groups()
        assert size == int(bits or 8) // 8
        wanted = "UINT8" if size == 1 else "UINT16" if name == "int16" else f"{kind.upper()}{bits}"
        assert types(code).name == f"CU_TENSOR_MAP_DATA_TYPE_{wanted}"
    for size, code in launch_spec.SWIZZLES.items():
        name = f"CU_TENSOR_MAP_SWIZZLE_{f'{size}B' if size else 'NONE'}"
        assert cuda.CUtensorMapSwizzle(code).name == name

    known = {
        member.name: int(member)
        for enum in vars(cuda).values()
        if isinstance(enum, type) and enum.__name__.startswith("CU") and hasattr(enum, "__members__")
        for member in enum
    }
    header = next(p for folder in native.__path__ if (p := pathlib.Path(folder, "driver.h")).exists()).read_text()
    constants = re.findall(r"inline constexpr \w+ k\w+ = (\d+); +// (CU\w+)", header)
    assert len(constants) == header.count("inline constexpr") > 15
    for number, name in constants:
        assert known[name] == int(number), name


def test_imports_no_jax():
    script = "import sys; sys.modules['jax'] = None; import mosaic_gpu.runtime.launch_spec, mosaic_gpu.runtime.native"
    subprocess.run([sys.executable, "-c", script], check=True)
