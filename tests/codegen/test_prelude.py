"""Every function of the prelude is compiled for the GPUs that have it."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import mosaic_gpu
from mosaic_gpu.codegen import prelude, sass
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.tcgen05_text import REGISTERS_PER_REPEAT, Shape, repeats, tcgen05_transfer_template
from mosaic_gpu.errors import IllegalInstruction

# One call of each function, in a kernel with: u32 u[8], float f[4], u16 h[2], int i[4], `map` and a pointer `out`.
CALLS: dict[str, list[str]] = {
    "common": [
        "u[0] = shared_address(memory)",
        "i[0] = uniform(i[0])",
        "i[0] = here(i[0])",
        "if (elect_one()) u[1] = 3",
    ],
    "numbers": [
        "f[0] = int_power<11>(f[1])",
        "f[0] = float_of_bits(as_bits(f[1]))",
        "f[0] = (float)float_of_bits(as_bits((double)f[1]))",
        "h[0] = next_bits(h[0], h[1], f[0], f[1])",
        "u[0] = count_from_end((int)u[1], 7)",
        "u[0] = order_keyf(f[0])",
        "u[0] = (u32)order_key((double)f[0])",
        "i[0] = wrap_s4(i[1]) + wrap_u4(i[2])",
        "f[0] = float_of_s4(i[0]) + float_of_u4(i[3] & 15)",
        "f[1] = from_e2m1(to_e2m1(f[2]))",
    ],
    "mbarrier": [
        "mbarrier_init(u[0], 1)",
        "fence_mbarrier_init()",
        "mbarrier_arrive(u[0])",
        "mbarrier_arrive_count(u[0], 3)",
        "mbarrier_expect_tx(u[0], 64)",
        "mbarrier_arrive_expect_tx(u[0], 64)",
        "mbarrier_arrive_cluster(u[0], 1, 4)",
        "mbarrier_arrive_cluster_release(u[0], 1, 4)",
        "mbarrier_expect_cluster(u[0], 64, 4)",
        "store_async_1(u[1], u[0], u[2])",
        "store_async_2(u[1], u[0], u[2], u[3])",
        "store_async_4(u[1], u[0], u[2], u[3], u[4], u[5])",
        "mbarrier_wait_cluster(u[0], 0)",
        "mbarrier_wait(u[0], 0)",
        "mbarrier_wait(u[0], 1)",
        "u[1] += mbarrier_test(u[0], 0)",
        "u[2] += mbarrier_test_cluster(u[0], 1)",
    ],
    "barriers": [
        "named_barrier_sync(3, 128)",
        "named_barrier_arrive(i[0], 128)",
        "u[3] += named_barrier_any(4, 128, i[0] > 3)",
        "cluster_arrive()",
        "cluster_wait()",
        "u[1] = cluster_address(u[0], 1)",
        "u[2] += *shared_of_block(memory, 1)",
    ],
    "fences": [
        "fence_proxy_async_shared()",
        "fence_proxy_async_cluster()",
    ],
    "delay": ["delay(i[0])", "wide += nanoseconds()"],
    "semaphores": [
        "semaphore_fence()",
        "semaphore_fence_sys()",
        "semaphore_add((int*)out, i[0])",
        "semaphore_add_sys((int*)out, i[1])",
        "i[0] = semaphore_read((int*)out)",
        "i[0] += semaphore_fetch_add((int*)out, 2)",
        "i[1] = semaphore_exchange((int*)out, i[0], 3)",
        "semaphore_wait((int*)out, i[2])",
        "semaphore_take((int*)out, 4)",
    ],
    "atomics": [
        f"red_{kind}_{dtype}(({c}*)out, ({c}){value})"
        for dtype, c, value, kinds in (
            ("int32", "int", "i[0]", ("add", "max", "min", "and", "or", "xor")),
            ("uint32", "u32", "u[0]", ("add", "max", "min", "and", "or", "xor")),
            ("int64", "long long", "i[1]", ("add", "max", "min", "and", "or", "xor")),
            ("uint64", "u64", "u[1]", ("add", "max", "min", "and", "or", "xor")),
            ("float32", "float", "f[0]", ("add",)),
            ("float64", "double", "f[1]", ("add",)),
            ("float16", "u16", "h[0]", ("add",)),
            ("bfloat16", "u16", "h[1]", ("add",)),
        )
        for kind in kinds
    ],
    "multimem": [
        "multimem_signal((int*)out, 3)",
        "multimem_store(out, u[0])",
        "multimem_store(out, u[0], u[1])",
        "multimem_store(out, u[0], u[1], u[2], u[3])",
        "multimem_store(out, (u64)u[2])",
        *(
            f"{{ {c} {', '.join(names)}; multimem_{kind}_{dtype}({', '.join(names)}, out); u[0] += (u32)({' + '.join(names)}); }}"
            for dtype, c, kinds in (
                ("int32", "int", ("add", "min", "max", "and", "or", "xor")),
                ("uint32", "u32", ("add", "min", "max", "and", "or", "xor")),
                ("int64", "long long", ("add", "min", "max", "and", "or", "xor")),
                ("uint64", "u64", ("add", "min", "max", "and", "or", "xor")),
                ("float32", "float", ("add",)),
                ("float64", "double", ("add",)),
                ("float16", "u32", ("add", "min", "max")),
                ("bfloat16", "u32", ("add", "min", "max")),
            )
            for kind in kinds
            for names in (("a", "ab", "abcd") if dtype in ("float32", "float16", "bfloat16") else ("a",))
        ),
    ],
    "griddep": ["griddepcontrol_wait()", "griddepcontrol_launch_dependents()"],
    "registers": ["set_max_registers_decrease<40>()", "set_max_registers_increase<160>()"],
    "math": [
        "u[0] = pack_bf16x2(f[0], f[1])",
        "u[1] = pack_f16x2(f[0], f[1])",
        "f[0] = unpack_bf16_low(u[0]) + unpack_bf16_high(u[0])",
        "f[1] = unpack_f16_low(u[1]) + unpack_f16_high(u[1])",
        "h[0] = to_bf16(f[0])",
        "f[2] = from_bf16(h[0])",
        "h[1] = to_f16(f[1])",
        "f[3] = from_f16(h[1])",
        "u[2] = to_tf32(f[0])",
        "h[0] = pack_e4m3x2(f[0], f[1])",
        "u[3] = unpack_e4m3x2(h[0])",
        "h[1] = pack_e5m2x2(f[0], f[1])",
        "u[4] = unpack_e5m2x2(h[1])",
        "f[0] = from_e4m3(to_e4m3(f[1])) + from_e5m2(to_e5m2(f[2]))",
        "f[0] = exp2_approx(f[0]) + exp2_fma(f[2])",
        "f[1] = log2_approx(f[0])",
        "f[2] = tanh_approx(f[3])",
        "f[3] = max_nan(f[0], f[2]) + min_nan(f[1], f[0])",
        "f[3] = (float)max_nan((double)f[0], min_nan((double)f[1], (double)f[0]))",
        "i[1] = max_int(i[0], i[1]) + min_int(i[2], i[3])",
        "u[5] = max_u32(u[0], u[1]) + min_u32(u[2], u[3])",
    ],
    "pairs": [
        "add_pair(f[0], f[1], f[2], f[3], f[1], f[0])",
        "sub_pair(f[1], f[2], f[3], f[0], f[1], f[2])",
        "mul_pair(f[2], f[3], f[0], f[1], f[2], f[3])",
        "fma_pair(f[3], f[0], f[1], f[2], f[3], f[0], f[1], f[2])",
        "exp2_fma_pair(f[0], f[1], f[2], f[3])",
    ],
    "matrix": [
        *(f"ldmatrix_x2{trans}(u[0], u[1], u[7])" for trans in ("", "_trans")),
        *(f"ldmatrix_x4{trans}(u[0], u[1], u[2], u[3], u[7])" for trans in ("", "_trans")),
        *(f"stmatrix_x4{trans}(u[7], u[0], u[1], u[2], u[3])" for trans in ("", "_trans")),
    ],
    "mma": [
        f"mma_{kinds}({', '.join(f'{d}[{j}]' for j in range(4))}, u[0], u[1], u[2], u[3], u[4], u[5])"
        for d, pairs in (
            ("f", ("f16_f16", "bf16_bf16", "tf32_tf32")),
            ("i", ("s8_s8", "s8_u8", "u8_s8", "u8_u8", "b1_and", "b1_xor")),
        )
        for kinds in pairs
    ],
    "debug": ['printf("%d %g", i[0], (double)f[0])', 'failed_check("message", "file", 3, "function")'],
    "wgmma": [
        "wgmma_fence()",
        "wgmma_commit()",
        "u[4] = bytes_of(u[0], u[1], u[2], u[3])",
        "wgmma_wait<1>()",
        "order_after(f[0], u[0])",
        "wgmma_wait<0>()",
    ],
    "tma": [
        *(f"bulk_reduce_add(({kind}*)out, u[0], 256)" for kind in ("float", "int", "u32")),
        *(
            call
            for rank in range(1, 6)
            for at in [", ".join(f"i[{j % 4}]" for j in range(rank))]
            for call in (
                f"tma_load_{rank}d(u[0], &map, u[1], {at})",
                f"tma_load_multicast_{rank}d(u[0], &map, u[1], {at}, h[0])",
                f"tma_store_{rank}d(&map, u[0], {at})",
                f"tma_reduce_add_{rank}d(&map, u[0], {at})",
                f"tma_prefetch_{rank}d(&map, {at})",
            )
        ),
        "tma_store_commit()",
        "tma_store_wait_read<1>()",
        "tma_store_wait<0>()",
    ],
    "tcgen05": [
        "tmem_alloc<64, GROUP>(u[0])",
        "tmem_relinquish<GROUP>()",
        *(
            f"tcgen05_mma_{kind}_{a}<GROUP>(u[0], {'wide' if a == 'ss' else 'u[1]'}, wide, u[2], u[3])"
            for kind in ("f16", "tf32", "f8", "i8")
            for a in ("ss", "ts")
        ),
        *(
            f"tcgen05_mma_{kind}_ss<GROUP>(u[0], wide, wide, u[2], u[3], u[5], u[6])"
            for kind in ("mxf8", "mxf4", "nvf4")
        ),
        *(
            f"tcgen05_mma_sparse_{kind}_ss<GROUP>(u[0], wide, wide, u[2], u[3], u[5])"
            for kind in ("f16", "tf32", "f8", "i8")
        ),
        *(f"tcgen05_copy_{form}<GROUP>(u[0], wide)" for form in ("32x128b_warpx4", "128x128b", "128x256b")),
        "tcgen05_commit<GROUP>(u[4])",
        "tcgen05_commit_multicast<GROUP>(u[4], h[0])",
        "tcgen05_fence_before()",
        "tcgen05_fence_after()",
        "tcgen05_wait_load()",
        "tcgen05_wait_store()",
        "tmem_dealloc<64, GROUP>(u[0])",
        *(f"tma_load_pair_{rank}d(u[0], &map, u[1], {', '.join('i[0]' for _ in range(rank))})" for rank in range(1, 6)),
    ],
}
CALLS["launch_control"] = ["try_cluster_cancel(u[0], u[1])", "try_cluster_cancel_all(u[0], u[1])"]
CALLS["launch_control"] += ["u[2] = query_cluster_cancel(u[3], i)"]
_FLOAT8 = [f"{a}_{b}" for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
CALLS["mma"] += [f"mma_{k}(f[0], f[1], f[2], f[3], u[0], u[1], u[2], u[3], u[4], u[5])" for k in _FLOAT8]
CALLS["mma"] += [f"mma_{k}_half(u[6], u[7], u[0], u[1], u[2], u[3], u[4], u[5])" for k in ("f16_f16", *_FLOAT8)]
CALLS["mma"].append(f"mma_f64_f64({', '.join(f'wide_float[{i}]' for i in range(16))})")
HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a")
ARCHES = {"wgmma": HOPPER, "tcgen05": BLACKWELL, "pairs": BLACKWELL, "launch_control": BLACKWELL}


def kernel(piece: str, calls: list[str], group: int = 1) -> str:
    # A branch on a value unknown at compile time around each: none may be dropped, order does not matter.
    body = "\n".join(f"  if (out[{number}]) {{ {call}; }}" for number, call in enumerate(calls))
    return f"""{prelude.prelude(piece)}
#line 1 "/test.cu"
constexpr int GROUP = {group};
extern "C" __global__ void __launch_bounds__(384, 1) k(const __grid_constant__ TensorMap map, u32* out, u64 wide) {{
  __shared__ __align__(128) unsigned char memory[256];
  u32 u[8]; double wide_float[16]; float f[4]; u16 h[2]; int i[4];
  for (int j = 0; j < 8; j++) u[j] = out[j];
  for (int j = 0; j < 16; j++) wide_float[j] = (double)out[j];
  for (int j = 0; j < 4; j++) {{ f[j] = __uint_as_float(out[j + 8]); i[j] = out[j + 12]; h[j / 2] = (u16)out[j + 16]; }}
{body}
  u32 sum = memory[0];
  for (int j = 0; j < 8; j++) sum += u[j];
  for (int j = 0; j < 16; j++) sum += (u32)wide_float[j];
  for (int j = 0; j < 4; j++) sum += __float_as_uint(f[j]) + i[j] + h[j / 2];
  out[threadIdx.x] = sum;
}}"""


PRELUDE = pathlib.Path(prelude.__file__).parent / "prelude"


@pytest.mark.parametrize("piece", CALLS)
def test_every_function_is_called_below(piece: str) -> None:
    called = set(re.findall(r"\b([a-z]\w+?)(?:<[\w, ]+>)?\(", " ".join(CALLS[piece])))
    assert prelude.functions(piece) <= called


# Written and compiled, for operations that are not there yet.
FOR_LATER = {f"{way}_{kind}x2" for way in ("pack", "unpack") for kind in ("e4m3", "e5m2")}


def emitted_names() -> list[re.Pattern[str]]:
    """The words in the strings of the emitters; what an f-string leaves open may be any letters."""
    package = pathlib.Path(mosaic_gpu.__file__).parent
    names = set()
    for path in (*(package / "codegen").glob("*.py"), *(package / "ops").glob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "\0" for part in parts
            )
            if id(node) not in docstrings:
                names |= {n for n in re.findall(r"[\w\0]+", text) if len(n.replace("\0", "")) > 2}
    return [re.compile(name.replace("\0", r"\w*")) for name in names]


def test_every_function_is_called_by_an_emitter() -> None:
    names = emitted_names()
    every = set().union(*(prelude.functions(piece) for piece in prelude.PIECES))
    found = {f for f in every if any(name.fullmatch(f) for name in names)}
    words = re.findall(r"\w+", "\n".join(path.read_text() for path in PRELUDE.glob("*.cuh")))
    found |= {f for f in every if words.count(f) > 1}  # another one calls it
    assert every - found <= FOR_LATER
    assert FOR_LATER <= every


def test_every_piece_is_tested() -> None:
    assert {name for name in prelude.PIECES if not re.match("tcgen05_(load|store)_", name)} == set(CALLS)


@pytest.mark.parametrize(
    ("piece", "arch"), [(piece, arch) for piece in CALLS for arch in ARCHES.get(piece, HOPPER + BLACKWELL)]
)
def test_compiles(piece: str, arch: str) -> None:
    # The GB300 dropped integer products.
    calls = [call for call in CALLS[piece] if not (arch == "sm_103a" and "_i8_" in call)]
    compile_cuda(kernel(piece, calls), arch=arch, name="/test.cu")


def test_compiles_for_pairs_of_blocks() -> None:
    compile_cuda(kernel("tcgen05", CALLS["tcgen05"], group=2), arch="sm_100a", name="/test.cu")


def test_instructions_reach_the_cubin() -> None:
    compiled = compile_cuda(kernel("tma", CALLS["tma"]), arch="sm_90a", name="/test.cu")
    counts = sass.read_cubin(compiled.cubin)[0].counts()
    assert (counts["UTMALDG"], counts["UTMASTG"], counts["UTMAREDG"]) == (10, 5, 5)
    assert counts["UTMACMDFLUSH"] == 1 and counts["UBLKRED"] == 3

    compiled = compile_cuda(kernel("tcgen05", CALLS["tcgen05"]), arch="sm_100a", name="/test.cu")
    counts = sass.read_cubin(compiled.cubin)[0].counts()
    assert (
        counts["UTCHMMA"] == 6
        and counts["UTCQMMA"] == 4
        and counts["UTCOMMA"] == 2
        and counts["UTCIMMA"] == 3
        and counts["UTCBAR"] == 2
        and counts["UTCCP"] == 3
    )


@pytest.mark.parametrize("shape", REGISTERS_PER_REPEAT)
@pytest.mark.parametrize("halves", ["", "halves_"])
def test_tensor_memory_transfers(shape: Shape, halves: str) -> None:
    counts = repeats(shape)
    body = ""
    for count in counts:
        registers = count * REGISTERS_PER_REPEAT[shape]
        body += f"""
  if (out[{count}]) {{
    u32 r[{registers}];
    tcgen05_load_{halves}{shape}<{count}>(r, out[0]);
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    tcgen05_store_{halves}{shape}<{count}>(out[1], r);
  }}"""
    text = prelude.prelude(f"tcgen05_load_{halves}{shape}", f"tcgen05_store_{halves}{shape}")
    source = f'{text}\nextern "C" __global__ void __launch_bounds__(128, 1) k(u32* out) {{{body}\n}}'
    found = sass.read_cubin(compile_cuda(source, arch="sm_100a", name="/test.cu").cubin)[0]
    assert found.counts()["LDTM"] == found.counts()["STTM"] == len(counts)
    assert found.spills == 0


def test_tensor_memory_transfer_that_does_not_exist() -> None:
    with pytest.raises(IllegalInstruction, match="16x256b has no x64"):
        tcgen05_transfer_template("load", "16x256b", (64,))


def test_wait_is_one_short_loop() -> None:
    source = prelude.prelude("mbarrier") + 'extern "C" __global__ void k(u32 bar) { mbarrier_wait(bar, 1); }'
    function = sass.read_cubin(compile_cuda(source, arch="sm_90a", name="/test.cu").cubin)[0]
    (loop,) = function.loops
    assert function.counts(loop.body)["SYNCS"] == 1 and len(loop.body) < 8


def test_prelude_for_takes_what_is_used() -> None:
    text = prelude.prelude_for("mbarrier_wait(bar, 0); tcgen05_load_32x32b<32>(r, t);")
    assert "mbarrier_wait" in text and "tcgen05_load_32x32b<32>" in text and "DI u32 shared_address" in text
    assert "tma_load" not in text and "tcgen05_store" not in text


def test_prelude_needs_nothing_else() -> None:
    text = prelude.prelude()
    assert "#include" not in text and "<cstdint>" not in text
    for name in prelude.PIECES:
        assert text.count(f'"{prelude.source_name(name)}"') == 1


def test_an_unknown_piece_is_named() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        prelude.prelude("nonsense")
