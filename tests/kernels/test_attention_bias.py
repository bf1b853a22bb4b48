"""Attention with a bias and a mask: both generations' kernels in the simulator and compiled, XLA's, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90 import attention as sm90
from mosaic_gpu.kernels.sm90.attention import AttentionConfig as HopperConfig
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig
from mosaic_gpu.kernels.sm100.attention import AttentionConfig, default_config
from mosaic_gpu.kernels.tiles import HEAD_DIMS
from mosaic_gpu.runtime.device import planning_for
from tests.kernels import closed_forms
from tests.support import randoms

BF, F16 = ml_dtypes.bfloat16, np.float16
SCHEDULES = (dict(timing="early"), dict(shadow="bytes"), dict(seed=1), dict(seed=2), dict(timing="early", seed=3))


def small(**options):
    return AttentionConfig(**{"tile_k": 64, "kv_slots": 2, **options})


def hopper(**options):
    return HopperConfig(**{"block_kv": 64, **options})


BOTH = pytest.mark.parametrize("config", [small(), hopper()], ids=["sm100", "sm90"])


def given(b, s, t, h, h_kv, d, dv, bias, mask, dtype=BF, seed=0):
    """Arrays; bias, mask: shapes, or None.  Some queries see no key at all."""
    sizes = ((s, h, d), (t, h_kv, d), (t, h_kv, dv))
    arrays = [randoms(b, *x, dtype=dtype, seed=seed + i) for i, x in enumerate(sizes)]
    bias = None if bias is None else 2 * randoms(*bias, seed=seed + 3).astype(np.float32)
    mask = None if mask is None else np.random.default_rng(seed + 4).random(mask) < 0.7
    if mask is not None and mask.shape[2] > 3:
        mask[:, :, 3] = False
    return arrays, bias, mask


def check(arrays, bias, mask, *, causal, config=None, implementation=None, **options):
    options |= dict(causal=causal, config=config, implementation=implementation, return_lse=True)
    call = functools.partial(attention, **options)
    more = {name: jnp.asarray(x) for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    out, lse = map(np.asarray, call(*map(jnp.asarray, arrays), **more))
    rounded = None if bias is None else bias.astype(arrays[0].dtype)  # as the kernel has it
    exact, exact_lse = reference.attention(
        *arrays, causal=causal, bias=rounded if implementation is None else bias, mask=mask
    )
    assert out.dtype == arrays[0].dtype and out.shape == exact.shape
    assert reference.relative_error(out, exact) < (4e-3 if out.dtype == BF else 6e-4)
    hidden = ~np.isfinite(exact_lse)
    np.testing.assert_array_equal(lse[hidden], exact_lse[hidden])
    rtol, atol = (1e-3, 2e-3) if getattr(config, "sum_by_product", False) else (1e-5, 1e-4)  # sums of rounded P
    np.testing.assert_allclose(lse[~hidden], exact_lse[~hidden], rtol=rtol, atol=atol)
    assert not out.transpose(0, 2, 1, 3)[hidden].any(), "a query that sees no key gives zeros"
    return out


CASES = [
    (1, 300, 400, 2, 1, 64, 64, (1, 2, 300, 400), None, BF, False, small()),
    (2, 200, 303, 2, 1, 64, 64, (1, 1, 200, 303), (2, 1, 1, 303), BF, True, small(kv_slots=3)),
    (2, 260, 300, 2, 2, 128, 64, None, (2, 2, 260, 300), F16, False, default_config(128, 64, bias=True)),
    (1, 130, 500, 3, 1, 64, 128, (1, 3, 1, 500), (1, 1, 130, 500), BF, False, small(tile_k=96, rescale_threshold=0.0)),
    (1, 700, 333, 1, 1, 128, 128, (1, 1, 700, 333), None, BF, True, AttentionConfig(pair=True, p_parts=2)),
    (1, 600, 200, 2, 1, 64, 64, (1, 2, 600, 200), None, F16, True, small(pair=True, query_tiles=1)),
    (1, 200, 300, 1, 1, 256, 256, (1, 1, 200, 300), None, BF, True, default_config(256, bias=True)),
    (1, 100, 40, 1, 1, 80, 48, (1, 1, 100, 40), None, BF, "bottom_right", small(emulated_columns=32)),
    (1, 1, 1, 1, 1, 64, 64, (1, 1, 1, 1), (1, 1, 1, 1), BF, False, small(persistent=False)),
]
REGISTERS = dict(compute_registers=160, memory_registers=32)
CASES90 = [
    (1, 300, 400, 2, 1, 64, 64, (1, 2, 300, 400), None, BF, False, hopper()),
    (2, 200, 303, 2, 1, 64, 64, (1, 1, 200, 303), (2, 1, 1, 303), BF, True, hopper(num_stages=3)),
    (2, 260, 300, 2, 2, 128, 64, None, (2, 2, 260, 300), F16, False, sm90.default_config(128, 64, bias=True)),
    (
        1,
        130,
        500,
        3,
        1,
        64,
        128,
        (1, 3, 1, 500),
        (1, 1, 130, 500),
        BF,
        False,
        hopper(block_kv=96, rescale_threshold=0.0),
    ),
    (1, 700, 333, 1, 1, 128, 128, (1, 1, 700, 333), None, BF, True, HopperConfig()),  # one block of the bias in flight
    (1, 400, 200, 2, 1, 64, 64, (1, 2, 400, 200), None, F16, True, hopper(compute_warpgroups=3, **REGISTERS)),
    (1, 200, 300, 1, 1, 256, 256, (1, 1, 200, 300), None, BF, True, sm90.default_config(256, bias=True)),
    (1, 100, 40, 1, 1, 80, 48, (1, 1, 100, 40), None, BF, "bottom_right", hopper(q_in_registers=True)),
    (1, 200, 130, 2, 2, 64, 64, (1, 2, 200, 130), None, BF, "bottom_right", hopper(block_kv=48, take_turns=False)),
    (
        1,
        130,
        128,
        1,
        1,
        64,
        64,
        (1, 1, 130, 128),
        (1, 1, 1, 128),
        F16,
        False,
        hopper(num_stages=1, sum_by_product=True),
    ),
    (1, 1, 1, 1, 1, 64, 64, (1, 1, 1, 1), (1, 1, 1, 1), BF, False, hopper(persistent=False)),
]


@pytest.mark.parametrize(
    ("b", "s", "t", "h", "h_kv", "d", "dv", "bias", "mask", "dtype", "causal", "config"), CASES + CASES90
)
def test_against_the_reference(b, s, t, h, h_kv, d, dv, bias, mask, dtype, causal, config):
    """Of each head or of all, of each query or of all; masks that hide all keys of a query; with the diagonal, tails, grouped
    heads, pairs, one query tile and two; and XLA's of the same arrays."""
    arrays = given(b, s, t, h, h_kv, d, dv, bias, mask, dtype)
    check(*arrays, causal=causal, config=config)
    if config.generation == "sm100":  # the same arrays
        check(*arrays, causal=causal, implementation="xla")


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed):
    """Hopper's and Blackwell's kernels of the same random arrays, in every form that a bias and a mask may have."""
    rng = np.random.default_rng(seed)
    (b, h_kv, group), (s, t) = rng.integers(1, 3, 3), rng.integers(1, 300, 2)
    h, d, dv = h_kv * group, *(int(n) for n in rng.choice((16, 64, 72, 128), 2))
    bias, mask = ([int(n) if rng.integers(2) else 1 for n in (b, h, s)] + [t] for _ in range(2))
    which, dtype = rng.integers(3), (BF, F16)[rng.integers(2)]
    arrays = given(b, s, t, h, h_kv, d, dv, bias if which != 1 else None, mask if which else None, dtype, seed)
    causal, keys = (False, True, "bottom_right")[rng.integers(3)], int(rng.choice((32, 64, 96)))
    options = dict(num_stages=int(rng.integers(1, 4)), persistent=bool(rng.integers(2)))
    found = check(*arrays, causal=causal, config=hopper(block_kv=keys, **options, q_in_registers=bool(rng.integers(2))))
    other = check(*arrays, causal=causal, config=small(tile_k=keys, kv_slots=1))
    assert reference.relative_error(found, other.astype(np.float64)) < (8e-3 if dtype == BF else 1.2e-3)


def test_without_a_maximum():
    """On Hopper, of scores that are small; hidden keys stay hidden."""
    arrays = given(1, 200, 150, 2, 1, 64, 64, (1, 2, 200, 150), (1, 1, 200, 150))
    check(*arrays, causal=True, config=hopper(), use_stable_softmax=False)


def test_the_default_sums_rounded_probabilities_only_without_the_log_sum_exp():
    arrays = given(1, 100, 130, 1, 1, 64, 64, (1, 1, 100, 130), None)
    assert sm90.default_config(64, bias=True).sum_by_product
    check(*arrays, causal=False)  # to 1e-5


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "config",
    [small(), small(pair=True, p_parts=2), small(query_tiles=1), hopper(), hopper(block_kv=48, num_stages=1)],
    ids=["two tiles", "pair", "one tile", "hopper", "hopper, one stage"],
)
def test_every_schedule_gives_the_same(schedule, config):
    arrays = given(1, 520, 400, 2, 1, 64, 64, (1, 2, 520, 400), None)
    first = check(*arrays, causal=True, config=config)
    with plgpu.simulator_params(plgpu.SimulatorParams(**schedule)):
        np.testing.assert_array_equal(check(*arrays, causal=True, config=config), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_a_hundred_schedules(seed):
    options = dict(
        kv_slots=1 + seed % 3, query_tiles=1 + seed // 2 % 2, pair=bool(seed // 4 % 2), p_parts=1 + seed // 8 % 2
    )
    arrays = given(1, 300, 260, 2, 1, 64, 64, (1, 1, 300, 260), (1, 2, 1, 260), seed=seed)
    with plgpu.simulator_params(plgpu.SimulatorParams(seed=seed)):
        check(*arrays, causal=bool(seed % 2), config=small(**options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_a_hundred_schedules_on_hopper(seed):
    options = dict(num_stages=1 + seed % 3, q_in_registers=bool(seed // 4 % 2), take_turns=bool(seed // 8 % 2))
    # Of a wide one there is one block of the bias in flight.
    d, config = (128, HopperConfig(take_turns=options["take_turns"])) if seed // 2 % 4 == 3 else (64, hopper(**options))
    assert config.bias_slots(d) == (1 if d == 128 else 2)
    arrays = given(1, 300, 260, 2, 1, d, d, (1, 1, 300, 260), (1, 2, 1, 260), seed=seed)
    with plgpu.simulator_params(plgpu.SimulatorParams(seed=seed)):
        check(*arrays, causal=bool(seed % 2), config=config)


@BOTH
def test_batches_jit_and_vmap(config):
    """Batch dimensions are those of q, one of extent 1 stands for all; the same bits each way."""
    arrays, bias, _ = given(2, 200, 300, 2, 1, 64, 64, (1, 2, 200, 300), None)
    q, k, v = map(jnp.asarray, arrays)
    call, bias = functools.partial(attention, config=config), jnp.asarray(bias, BF)
    plain, every = np.asarray(call(q, k, v, bias=bias)), jnp.broadcast_to(bias, (2, 2, 200, 300))
    more = [x[None] for x in (q, k, v)]
    each = jax.vmap(lambda q, k, v, bias: call(q, k, v, bias=bias))(*(x[:, None] for x in (q, k, v, every)))
    for found in (
        jax.jit(call)(q, k, v, bias=bias),
        call(q, k, v, bias=every),
        call(*more, bias=bias[None])[0],
        call(*more, bias=every[None])[0],
        each[:, 0],
    ):
        np.testing.assert_array_equal(np.asarray(found), plain)


@BOTH
@pytest.mark.parametrize("low", [-1e4, -1e9, -3e38, -np.inf])
def test_large_negative_values_hide_keys(low, config):
    """What is written for a mask: a block of keys behind the end, the first that is visited, and single ones; and rows of nothing
    but such values are no NaN."""
    arrays, _, _ = given(1, 200, 300, 1, 1, 64, 64, None, None)
    hidden = np.zeros((1, 1, 200, 300), bool)
    hidden[..., 180:] = True
    hidden[:, :, ::3, 7:90] = True
    hidden[:, :, 5] = True
    more = dict(bias=jnp.asarray(np.where(hidden, np.float32(low), 0)), config=config)
    out = np.asarray(attention(*map(jnp.asarray, arrays), **more)).astype(np.float32)
    exact, _ = reference.attention(*arrays, mask=~hidden)
    seen = ~hidden[0, 0].all(1)
    assert reference.relative_error(out[:, seen], exact[:, seen]) < 4e-3 and np.isfinite(out).all()


@BOTH
@pytest.mark.parametrize("low", [-1e9, -1e30])
def test_a_row_of_nothing_but_large_negative_values(low, config):
    """Is the mean of V, however the values round."""
    arrays, _, _ = given(1, 130, 200, 1, 1, 64, 64, None, None)
    bias = jnp.full((1, 1, 130, 200), low, jnp.float32)
    out = np.asarray(attention(*map(jnp.asarray, arrays), bias=bias, config=config)).astype(np.float32)
    mean = arrays[2].astype(np.float64).mean(1, keepdims=True)
    if low > -1e29:
        assert reference.relative_error(out, np.broadcast_to(mean, out.shape)) < 8e-3
    else:  # below where the running maximum starts
        assert not out.any()


@pytest.mark.parametrize(("arch", "keys"), [("sm_100a", 4096), ("sm_103a", 4088)])
@pytest.mark.parametrize(
    ("d", "causal", "options"),
    [
        (64, False, {}),
        (64, True, {}),
        (128, False, {}),
        (256, True, {}),
        (128, True, dict(pair=True, p_parts=2)),
        (128, False, dict(query_tiles=1, tile_k=96)),
    ],
)
def test_machine_code(kernel_plan, arch, keys, d, causal, options):
    """No spill, budgets kept, loads in their loop, one fma more for each score; and the memory that the config says."""
    c = AttentionConfig(**options) if options else default_config(d, arch=arch, bias=True)
    x, y = (jax.ShapeDtypeStruct((2, n, 8, d), BF) for n in (4096, keys))
    bias = jax.ShapeDtypeStruct((1, 8, 4096, keys), BF)
    call = functools.partial(attention, causal=causal, config=c, return_lse=True)
    with planning_for(132, arch):
        plan = kernel_plan(lambda q, k, v, bias: call(q, k, v, bias=bias), x, y, y, bias, arch=arch)
    forms = closed_forms.Attention(c, d, d, causal, keys)
    closed_forms.check_code(plan, forms.whole(), forms.loops())
    assert plan.shared_bytes == c.shared_bytes(d, d, bias=True)


def plan_of_hopper(kernel_plan, d, causal, dtype, config, keys=4096):
    x, y = (jax.ShapeDtypeStruct((2, n, 8, d), dtype) for n in (4096, keys))
    bias = jax.ShapeDtypeStruct((1, 8, 4096, keys), dtype)
    call = functools.partial(attention, causal=causal, config=config)
    plan = kernel_plan(lambda q, k, v, bias: call(q, k, v, bias=bias), x, y, y, bias)
    assert plan.shared_bytes == config.shared_bytes(d, d, bias=True)
    return plan


@pytest.mark.parametrize("dtype", [BF, F16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_machine_code_of_hopper(kernel_plan, compiled, d, causal, dtype):
    """No spill and no word from ptxas, budgets kept; each product once a loop, and of the bias one `ldmatrix` for 16 x 16 values
    of a warp beside it; the memory warpgroup loads Q, K, V and, for each compute warpgroup, the bias."""
    c = sm90.default_config(d, bias=True)
    report = compiled(plan_of_hopper(kernel_plan, d, causal, dtype, c))
    assert report.complaints() == [] and report.stack == 0 and report.local_accesses == 0
    loops = 1 + (causal and c.block_kv % c.rows != 0)
    assert [loop.products for loop in report.loops] == [d // 16 + c.block_kv // 16] * loops
    assert all(b.needed <= b.requested for b in report.budgets)
    bias = c.block_kv // 16 * (loops + 2)  # a tile's first scores are in two places
    assert report.mnemonics["LDSM"] == bias + c.q_in_registers * 2 * d // 16
    assert (
        report.mnemonics["UTMALDG"] == 3 * c.compute_warpgroups + 4
    )  # a tile's first bias and its other ones, as of K and V


@pytest.mark.parametrize(
    ("d", "options"),
    [
        (64, dict(block_kv=112, compute_warpgroups=3, **REGISTERS)),
        (64, dict(block_kv=96, compute_warpgroups=3, sum_by_product=True, **REGISTERS)),
        (128, dict(q_in_registers=True)),  # one block of the bias in flight
        (128, dict(block_kv=160, num_stages=1)),
        (256, dict(block_kv=48, persistent=False)),
    ],
)
def test_machine_code_of_other_configs(kernel_plan, compiled, d, options):
    report = compiled(plan_of_hopper(kernel_plan, d, True, BF, HopperConfig(**options), keys=4088))
    assert report.complaints() == [] and report.stack == 0 and all(b.needed <= b.requested for b in report.budgets)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_bias_is_added_under_the_product(kernel_plan, d):
    """In the steady loop it is loaded, and the maximum known, between the wait for the scores and that for P V."""
    plan = plan_of_hopper(kernel_plan, d, False, BF, sm90.default_config(d, bias=True))
    (function,) = sass.read_cubin(compile_plan(plan).compiled.cubin)
    ((loop, _),) = function.loops_with()
    code = [function.instructions[i] for i in sorted(loop.body)]
    scores, values = (k for k, i in enumerate(code) if i.opcode.startswith("WARPGROUP.DEPBAR"))
    for name in ("LDSM", "FMNMX"):
        at = [k for k, i in enumerate(code) if i.mnemonic == name]
        assert at and all(scores < k < values for k in at), name


def test_one_source_for_all_shapes(kernel_plan):
    """Lengths, batch, heads, and which of them a bias has."""
    shapes = [(1, 256, 256, 2, (1, 2)), (3, 1000, 512, 4, (1, 1)), (2, 5, 128, 2, (2, 1)), (2, 70, 640, 2, (2, 2))]
    found = set()
    for b, s, t, h, lead in shapes:
        x, y = (jax.ShapeDtypeStruct((b, n, h, 64), BF) for n in (s, t))
        call = functools.partial(sm90.attention, config=hopper(), causal=False, scale=0.125, return_lse=False)
        found.add(emit(kernel_plan(call, x, y, y, jax.ShapeDtypeStruct((*lead, s, t), BF))))
    assert len(found) == 1


def test_every_head_dim_has_a_default():
    for default in (default_config, sm90.default_config):
        for d in HEAD_DIMS:
            for dv in HEAD_DIMS:
                default(d, dv, bias=True).check(d, dv, bias=True)


def test_xla_has_gradients_of_a_bias():
    arrays, bias, mask = given(1, 12, 16, 2, 1, 8, 8, (1, 2, 1, 16), (1, 1, 12, 16))
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays)

    def total(bias):
        return attention(q, k, v, bias=bias, mask=jnp.asarray(mask), implementation="xla").sum()

    slope = jax.grad(total)(jnp.asarray(bias))
    step = 1e-2 * randoms(*bias.shape, seed=7)
    difference = total(jnp.asarray(bias + step)) - total(jnp.asarray(bias - step))
    np.testing.assert_allclose(float((slope * step).sum() * 2), float(difference), rtol=2e-2)


Q = jnp.zeros((2, 8, 4, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(bias=jnp.zeros((4, 8, 8))), UnsupportedCall, r"bias has shape \(4, 8, 8\); it takes \(2, 4, 8, 8\)"),
        (dict(bias=jnp.zeros((2, 4, 8, 1))), UnsupportedCall, "any extent but the last may be 1"),
        (dict(bias=jnp.zeros((2, 2, 8, 8))), UnsupportedCall, r"bias has shape \(2, 2, 8, 8\)"),
        (dict(bias=jnp.zeros((2, 4, 8, 8), jnp.int32)), UnsupportedCall, "bias is int32; it takes a floating array"),
        (dict(mask=jnp.zeros((2, 4, 8, 8))), UnsupportedCall, "mask is float32; it takes a bool array"),
        (dict(mask=3), TypeError, "mask is an array, not 3"),
        (
            dict(mask=jnp.ones((1, 1, 8, 8), bool), config=hopper(), backward_config=AttentionBackwardConfig()),
            UnsupportedCall,
            "backward_config with a bias or a mask: there are no gradients",
        ),
        (
            dict(bias=jnp.zeros((1, 1, 8, 8)), config=HopperConfig(num_stages=3, output_tile=False)),
            ResourceExceeded,
            "128 x 3 stages at head dim 128 and a bias take 262304 bytes .* bias 32768",
        ),
        (
            dict(bias=jnp.zeros((1, 1, 8, 8)), config=HopperConfig(block_kv=128, compute_registers=192)),
            ResourceExceeded,
            "block_kv=128 at head dim 128 and a bias needs about 200 registers, compute_registers is 192",
        ),
        (dict(mask=jnp.ones((1, 1, 8, 8), bool), config=small(dynamic=True)), UnsupportedCall, "take dynamic=False"),
        (
            dict(bias=jnp.zeros((1, 1, 8, 8)), config=AttentionConfig(kv_slots=4)),
            ResourceExceeded,
            "bias 0|bias 65536",
        ),
    ],
)
def test_what_is_refused(arguments, error, words):
    wide = jnp.zeros((2, 8, 4, 128), jnp.bfloat16) if error is ResourceExceeded else Q
    with pytest.raises(error, match=words):
        attention(wide, wide, wide, **arguments)


@pytest.mark.parametrize(("config", "why"), [(small(), "on Blackwell"), (hopper(), "with a bias or a mask on Hopper")])
@pytest.mark.parametrize("place", ["bias", "mask"])
def test_no_gradients(config, why, place):
    """With a bias or a mask of none of the arrays, in either mode; nor of q, k and v alone."""
    more = {place: jnp.ones((1, 1, 8, 8), bool if place == "mask" else jnp.bfloat16)}
    total = functools.partial(lambda q, **more: attention(q, Q, Q, config=config, **more).astype(jnp.float32).sum())
    words = f"there are no gradients {why} yet; implementation='xla' has them"
    with pytest.raises(UnsupportedCall, match=words):
        jax.grad(lambda q: total(q, **more))(Q)
    with pytest.raises(UnsupportedCall, match=words):
        jax.jvp(lambda q: total(q, **more), (Q,), (Q,))
    if place == "bias":
        with pytest.raises(UnsupportedCall, match=words):
            jax.grad(lambda x: total(Q, bias=x))(more["bias"])


@pytest.mark.parametrize(
    ("arch", "options"), [("sm_100a", dict(query_tiles=2, tile_k=64)), ("sm_90a", dict(block_kv=96, num_stages=2))]
)
def test_which_config(arch, options, monkeypatch):
    """One that has room, whatever was tuned; also where the first implementation that takes the call may run."""
    from mosaic_gpu.kernels import attention as module
    from mosaic_gpu.kernels.sm100 import attention as sm100

    taken = []

    def record(q, k, v, bias, *, config, **_):
        taken.append((config, bias.shape))
        return (jnp.zeros_like(q),)

    monkeypatch.setattr(module, "default_arch", lambda: arch)
    for generation in (sm90, sm100):
        monkeypatch.setattr(generation, "attention", record)
    x, bias = jnp.zeros((1, 8, 2, 128), jnp.bfloat16), jnp.zeros((1, 1, 1, 8))
    attention(x, x, x, bias=bias)
    attention(x, x, x, mask=bias > 0, implementation=("mosaic_gpu", "xla"))
    for config, shape in taken:
        assert {n: getattr(config, n) for n in options} == options and shape == (1, 1, 8, 8)
    assert len(taken) == 2


@pytest.mark.parametrize("level", [-1e4, -1e7, -1e9])
def test_xla_divides_by_the_sum(level):
    """A row whose keys all have one large bias is that row without it, up to what the bias's size leaves of the scores."""
    q, k, v = (randoms(1, 1, 93, 1, 32, dtype=np.float32, seed=i)[0] for i in range(3))
    bias = jnp.full((1, 1, 93, 93), level, jnp.float32)
    out = attention(q, k, v, bias=bias, implementation="xla")
    scores = np.float32(np.einsum("bsnd,btnd->bnst", q, k, dtype=np.float64) * 32**-0.5) + np.float32(level)
    p = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    right = np.einsum("bnst,btnd->bsnd", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out, right, atol=2e-2 if level == -1e7 else 2e-3)


def test_xla_gradients_of_a_query_without_keys():
    """By a bias of -inf as by a mask: zeros, and no NaN for anybody."""
    q, k, v = (randoms(1, 1, 9, 1, 16, dtype=np.float32, seed=i)[0] for i in range(3))
    hidden = np.zeros((1, 1, 9, 9), bool)
    hidden[..., 4, :] = hidden[..., 7] = True

    def loss(q, k, v, bias, mask):
        out, lse = attention(q, k, v, bias=bias, mask=mask, return_lse=True, implementation="xla")
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    bias = jnp.where(hidden, -jnp.inf, 0.0)
    found = jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias, None)
    wanted = jax.grad(loss, (0, 1, 2))(q, k, v, None, ~hidden)
    assert (
        all(bool(jnp.isfinite(x).all()) for x in found) and not found[0][0, 4].any() and not found[3][..., 4, :].any()
    )
    for x, y in zip(found, wanted, strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
