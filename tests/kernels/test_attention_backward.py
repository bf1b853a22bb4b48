"""Attention's gradients on Hopper: in the simulator against float64 by the accuracy rule, JAX's transformations, machine code.

The accuracy rule: the error is at most twice that of plain gradients in float32 from the same rounded inputs, with O, P and dS
rounded to the type, as any kernel on 16-bit tensor cores must; the floor is 1e-3 of the gradient's rms.
Element by element: `gradient_judge`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.test_util import check_grads

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.build import body_of, compile_plan, report
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90 import attention_backward as sm90
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig, default_config
from mosaic_gpu.kernels.sm90.attention_backward_work import Build
from mosaic_gpu.kernels.sm90.schedule import key_tile_table
from mosaic_gpu.kernels.tiles import HEAD_DIMS
from mosaic_gpu.plan.build import build_plan
from tests import support
from tests.kernels import gradient_judge

BF, F16 = ml_dtypes.bfloat16, np.float16
NAMES = ("dq", "dk", "dv")
randoms = functools.partial(support.randoms, dtype=BF)


def check(q, k, v, *, causal=False, scale=None, config=None, deterministic=False, lse_counts=True):
    """The gradients of a call that returns its LSE too, both with random cotangents."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    d_out = randoms(*q.shape[:3], v.shape[-1], dtype=q.dtype, seed=7)
    b, s, h, _ = q.shape
    d_lse = randoms(b, h, s, dtype=np.float32, seed=8) * np.float32(lse_counts)
    call = functools.partial(
        attention, causal=causal, scale=scale, return_lse=True, backward_config=config, deterministic=deterministic
    )
    (out, _), pull = jax.vjp(call, *map(jnp.asarray, (q, k, v)))
    found = pull((jnp.asarray(d_out), jnp.asarray(d_lse)))
    exact = reference.attention_gradients(q, k, v, d_out, d_lse, causal=causal, scale=scale)
    yardstick = reference.attention_gradients(q, k, v, d_out, d_lse, causal=causal, scale=scale, rounded=True)
    errors = reference.gradient_errors(found, exact, yardstick)
    for name, x, (error, allowed), like in zip(NAMES, found, errors, (q, k, v), strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype
        assert error <= allowed, f"{name}: rms error {error:.2e}, allowed {allowed:.2e}"
    gradient_judge.judge(found, (q, k, v, d_out, d_lse), out, causal, scale)
    return found


WIDE = AttentionBackwardConfig(block_q=128)
SPLIT = AttentionBackwardConfig(split=True)
ONE = AttentionBackwardConfig(num_stages=1, ds_stages=1, dq_stages=1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("b", "s", "t", "h", "h_kv", "d", "dv", "dtype", "causal", "config"),
    [
        (1, 128, 128, 1, 1, 64, 64, BF, False, None),
        (2, 200, 300, 2, 1, 64, 64, F16, True, None),
        (1, 300, 200, 4, 2, 128, 128, BF, True, None),
        (1, 65, 321, 3, 3, 64, 64, BF, True, AttentionBackwardConfig()),  # keys that no query sees
        (2, 130, 66, 6, 2, 64, 64, BF, False, ONE),
        (1, 1, 1, 1, 1, 64, 64, BF, False, None),
        (1, 1, 200, 2, 1, 128, 128, F16, False, None),
        (1, 200, 1, 1, 1, 64, 64, BF, True, None),
        (1, 130, 140, 2, 1, 256, 256, BF, True, None),
        (2, 70, 150, 1, 1, 256, 256, F16, False, None),
        (1, 150, 130, 2, 1, 192, 128, BF, True, None),
        (1, 70, 130, 1, 1, 80, 48, BF, True, None),
        (1, 100, 100, 1, 1, 16, 16, F16, False, None),
        (1, 100, 140, 2, 1, 8, 8, BF, True, None),
        (1, 130, 70, 1, 1, 72, 120, BF, True, None),
        (1, 70, 80, 1, 1, 248, 200, F16, False, None),
        (1, 130, 100, 1, 1, 96, 96, BF, True, AttentionBackwardConfig(dq_columns=32, dq_stages=3)),
        (1, 140, 140, 1, 1, 64, 64, BF, True, dataclasses.replace(SPLIT, block_q=128)),
        (2, 200, 321, 4, 2, 64, 64, F16, True, SPLIT),  # keys that no query sees
        (1, 330, 70, 1, 1, 32, 32, BF, False, dataclasses.replace(SPLIT, num_stages=3)),
    ],
)
def test_against_float64(b, s, t, h, h_kv, d, dv, dtype, causal, config, deterministic):
    """Tails of queries and keys, one block and many, grouped heads, both types, head dims, the diagonal, the LSE's cotangent."""
    q = randoms(b, s, h, d, dtype=dtype)
    k, v = randoms(b, t, h_kv, d, dtype=dtype, seed=1), randoms(b, t, h_kv, dv, dtype=dtype, seed=2)
    check(q, k, v, causal=causal, config=config, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_head_dim(d, deterministic):
    q, k, v = randoms(1, 130, 2, d), randoms(1, 150, 1, d, seed=1), randoms(1, 150, 1, d, seed=2)
    check(q, k, v, causal=True, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shift", [-120.0, 300.0])
def test_lse_far_from_zero(shift, deterministic):
    """exp(-LSE) alone would overflow: also at keys that do not exist, whose scores are zeros (t is no multiple of a tile)."""
    q, k, v = randoms(1, 130, 1, 64), randoms(1, 150, 1, 64, seed=1), randoms(1, 150, 1, 64, seed=2)
    q[..., 0], k[..., 0] = 16, shift / 2  # scores of 8 * shift / 8 each, and what the others add
    found = check(q, k, v, causal=False, deterministic=deterministic)
    assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_outliers_and_peaked_rows(deterministic):
    """A few huge entries, rows that see one key as good as alone, correlated keys."""
    q, k, v = randoms(1, 150, 2, 64), randoms(1, 140, 1, 64, seed=1), randoms(1, 140, 1, 64, seed=2)
    k = (k.astype(np.float32) + 2 * randoms(1, 1, 1, 64, dtype=np.float32, seed=3)).astype(BF)
    q[0, ::17] *= BF(12)
    v[0, ::13] *= BF(30)
    check(q, k, v, causal=True, deterministic=deterministic)


def test_rows_without_a_visible_key():
    """An LSE of -inf, as where every score is: zero gradients, no NaN, whatever the cotangents are."""
    q, k, v = randoms(1, 64, 1, 64), randoms(1, 64, 1, 64, seed=1), randoms(1, 64, 1, 64, seed=2)
    lse = np.zeros((1, 1, 64), np.float32)
    lse[:, :, 5:20] = -np.inf
    out = randoms(1, 64, 1, 64, seed=3)
    run = functools.partial(
        sm90.attention_backward,
        config=WIDE,
        causal=False,
        scale=0.125,
        d_lse=jnp.ones((1, 1, 64)),
        d_out=jnp.asarray(out),
    )
    for deterministic in (False, True):
        dq, dk, dv = run(*map(jnp.asarray, (q, k, v, out, lse)), deterministic=deterministic)
        assert not np.asarray(dq)[0, 5:20].any() and np.asarray(dq)[0, :5].any()
        assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 51))])
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_findings_in_any_order(seed, deterministic):
    """Copies, products and roles in drawn orders: no race, no leak, and the same bits (the simulated blocks add in one order)."""
    q, k, v = randoms(1, 200, 2, 64), randoms(1, 150, 1, 64, seed=1), randoms(1, 150, 1, 64, seed=2)

    def run():
        f = functools.partial(
            attention, causal=True, deterministic=deterministic, backward_config=AttentionBackwardConfig()
        )
        _, pull = jax.vjp(f, *map(jnp.asarray, (q, k, v)))
        return pull(jnp.asarray(q))

    expected = run()
    with plgpu.simulator_params(seed=seed, timing="early" if seed % 2 else "late"):
        for x, y in zip(run(), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# ---- JAX's transformations -----------------------------------------------------------------------------------------------
def inputs(*lead, s=70, t=90, h=2, h_kv=1, d=16):
    return tuple(
        jnp.asarray(randoms(*lead, n, heads, d, seed=i)) for i, (n, heads) in enumerate(((s, h), (t, h_kv), (t, h_kv)))
    )


def loss(q, k, v, **options):
    out, lse = attention(q, k, v, causal=True, return_lse=True, **options)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(lse**2)


def same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


grad = jax.grad(loss, (0, 1, 2))


def test_jit():
    same(jax.jit(grad)(*inputs(1)), grad(*inputs(1)))


def test_vmap_and_batch_dimensions():
    """Both ways round, several batch dimensions, and one that some arrays lack."""
    q, k, v = inputs(3)
    one_by_one = [grad(q[i], k[i], v[i]) for i in range(3)]
    expected = [np.stack([np.asarray(g[n]) for g in one_by_one]) for n in range(3)]
    same(jax.vmap(grad)(q, k, v), expected)
    same(grad(q, k, v), expected)
    same(jax.grad(lambda *a: jax.vmap(loss)(*a).sum(), (0, 1, 2))(q, k, v), expected)
    shared = jax.grad(lambda k: jax.vmap(loss, (0, None, None))(q, k, v[0]).sum())(k[0])
    apart = sum(np.asarray(grad(q[i], k[0], v[0])[1]).astype(np.float64) for i in range(3))
    assert reference.relative_error(shared, apart) < 1e-2


@pytest.mark.parametrize("policy", ["everything", "nothing", "names"])
def test_checkpoint(policy):
    """Recomputed or kept by name: the same gradients; kept, the forward kernel is not run again."""
    policies = {
        "everything": jax.checkpoint_policies.everything_saveable,
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "names": jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse"),
    }
    f = jax.checkpoint(loss, policy=policies[policy])
    same(jax.grad(f, (0, 1, 2))(*inputs(1)), grad(*inputs(1)))
    text = str(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(*inputs(1)))
    forwards = text.count("attention_sm90")
    assert forwards == {"everything": 1, "nothing": 2, "names": 1}[policy]


def test_scan():
    """Through a scan of layers: as unrolled."""
    q, k, v = inputs(1, t=70, h_kv=2)
    weights = jnp.asarray([0.5, 1.0, 1.5], jnp.bfloat16)

    def layer(x, w):
        return x + w * attention(x, k, v, causal=True), None

    def scanned(x, w):
        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).sum()

    def unrolled(x, w):
        for i in range(3):
            x, _ = layer(x, w[i])
        return x.astype(jnp.float32).sum()

    for x, y in zip(jax.grad(scanned, (0, 1))(q, weights), jax.grad(unrolled, (0, 1))(q, weights), strict=True):
        assert reference.relative_error(x, np.asarray(y).astype(np.float64)) < 1e-2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_check_grads(causal, deterministic):
    """Against differences, in float16 (whose rounding asks for a wide step), output and LSE."""
    q, k, v = (x.astype(jnp.float32) for x in inputs(1, s=20, t=24))

    def f(q, k, v):
        q, k, v = (x.astype(jnp.float16) for x in (q, k, v))
        out, lse = attention(q, k, v, causal=causal, return_lse=True, deterministic=deterministic)
        return out.astype(jnp.float32), lse

    check_grads(f, (q, k, v), order=1, modes=["rev"], eps=0.05, atol=0.3, rtol=0.02)


def test_no_lse_means_no_cotangent_of_it():
    q, k, v = inputs(1)
    out, pull = jax.vjp(functools.partial(attention, causal=True), q, k, v)
    both, pull_both = jax.vjp(functools.partial(attention, causal=True, return_lse=True), q, k, v)
    same((out, pull(out)), (both[0], pull_both((out, jnp.zeros_like(both[1])))))


def test_empty():
    """No queries or no keys: zeros."""
    q, k, v = inputs(1, s=0)
    assert [x.shape for x in grad(q, k, v)] == [q.shape, k.shape, v.shape]
    q, k, v = inputs(1, t=0)
    f = jax.grad(lambda q: attention(q, k, v).astype(jnp.float32).sum())
    assert not np.asarray(f(q)).any()


# ---- what it refuses -----------------------------------------------------------------------------------------------------
def test_forward_mode_and_second_order():
    q, k, v = inputs(1)
    for transform in (lambda: jax.jvp(loss, (q, k, v), (q, k, v)), lambda: jax.jacfwd(loss)(q, k, v)):
        with pytest.raises(UnsupportedCall, match="forward-mode"):
            transform()
    with pytest.raises(TypeError, match="forward-mode"):  # JAX's own: the call has been traced by then
        jax.jvp(jax.jit(loss), (q, k, v), (q, k, v))
    for first in (grad, jax.jit(grad)):
        with pytest.raises(UnsupportedCall, match="no second derivative"):
            jax.grad(lambda q, first=first: first(q, k, v)[0].astype(jnp.float32).sum())(q)


@pytest.mark.parametrize(
    "changes",
    [
        dict(block_q=96),
        dict(block_q=320),
        dict(num_stages=0),
        dict(split=True, compute_registers=240),
        dict(split=True, num_stages=1),
        dict(split=True, ds_stages=1),
        dict(split=True, dq_ahead=False),
        dict(dq_columns=24),
        dict(compute_registers=216),
        dict(dq_registers=70),
    ],
)
def test_bad_configs(changes):
    with pytest.raises(ValueError):
        AttentionBackwardConfig(**changes)


@pytest.mark.parametrize(("d", "words"), [(128, "shared memory"), (256, "registers")])
def test_configs_that_do_not_fit(d, words):
    config = WIDE if d == 128 else AttentionBackwardConfig(num_stages=1, ds_stages=1, dq_stages=1)
    with pytest.raises(ResourceExceeded, match=words):
        jax.grad(functools.partial(loss, backward_config=config))(*inputs(1, d=d))


# ---- the kernels as they are compiled --------------------------------------------------------------------------------------
def test_the_way_out_is_one():
    with pytest.raises(ResourceExceeded, match="fewer stages, or split=True"):
        AttentionBackwardConfig().check(256, 256)
    with pytest.raises(ResourceExceeded, match="smaller blocks, fewer stages$"):
        AttentionBackwardConfig(split=True, block_q=256).check(64, 64)


def plans(d, dv=None, *, causal=True, b=1, s=512, t=512, h=2, h_kv=1, dtype=jnp.bfloat16, config=None):
    """(name, plan) of every kernel of a backward pass, with and without determinism; "main" makes no dQ where it is split."""
    dv = dv or d
    c = config or default_config(d, dv)
    dtype = jnp.dtype(dtype)

    def of(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    q, k, v, d_out = of(b, s, h, d), of(b, t, h_kv, d), of(b, t, h_kv, dv), of(b, s, h, dv)
    lse = of(b, h, s, dtype=jnp.float32)
    preprocess, no_d_lse = (sm90._preprocess(b, s, h, d, dv, c, True, there) for there in (True, False))
    nlse, delta, sums = preprocess.options["out_type"]
    builds = [Build(d, dv, dtype, c, causal, 0.1, with_dq) for with_dq in (not c.split, False)]
    table = key_tile_table(b, h_kv, t, s, 1, builds[0].keys, 0 if causal else None, 132)
    main, no_dq = (functools.partial(sm90._main, b, h_kv, t, len(table), build) for build in builds)
    calls = [("preprocess", preprocess, (d_out, d_out, lse, lse)), ("no d_lse", no_d_lse, (d_out, d_out, lse))]
    rest, again = (table, q, k, v, d_out, nlse, delta), (table,) * c.split
    if c.split:
        calls.append(("main", main(), (*rest, *again)))
    else:
        calls += [
            ("main", main(sums.shape), (*rest, sums)),
            ("postprocess", sm90._postprocess(b, s, h, d, dtype, c, 0.1), (sums,)),
            ("no dq", no_dq(), rest),
        ]
    calls += [
        ("dq", sm90.query_gradients(b, s, h, d, dv, dtype, c, causal, 0.1), rest[1:]),
    ]
    return {name: build_plan(kernel.program(*arguments), "sm_90a") for name, kernel, arguments in calls}


SHAPES = [dict(), dict(s=1000, t=777), dict(b=7), dict(h=16, h_kv=4), dict(h=8, h_kv=1, s=1), dict(b=3, s=10000, t=5)]


@pytest.mark.parametrize("d", [64, 128, 256])
def test_one_source_for_all_shapes(d):
    """Lengths, batch, heads and groups are run-time values: one cubin for each kernel of a config."""
    texts = [{name: emit(plan) for name, plan in plans(d, **shape).items()} for shape in SHAPES]
    assert all(t == texts[0] for t in texts)


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (80, 80), (72, 120)])
def test_machine_code(d, dv, causal):
    """No spill, no message, the budgets kept; dQ leaves by additions, and nothing adds where determinism is asked for."""
    for name, plan in plans(d, dv, causal=causal).items():
        built = compile_plan(plan)
        r = report(plan, built.compiled)
        assert r.complaints() == [] and r.stack == 0 and r.local_accesses == 0, name
        assert ("tma_reduce_add" in body_of(built.source)) == (name == "main" and not default_config(d, dv).split)
        wanted = {role.registers for role in plan.roles if role.registers is not None}
        assert {b.requested for b in r.budgets} == wanted, name


def test_the_exponentials_begin_under_the_product():
    """In the steady loop the wait for dK comes after the first exponentials of the next block, as ptxas lays it out of itself.

    Tying all of them to the wait costs an instruction for each; the two warpgroups cover each other's rest.
    """
    for d, least in ((64, 16), (128, 8)):
        (function,) = sass.read_cubin(compile_plan(plans(d)["main"]).compiled.cubin)
        bodies = [[function.instructions[i] for i in sorted(loop.body)] for loop, _ in function.loops_with()]
        steady = min((b for b in bodies if any(i.opcode.startswith("MUFU.EX2") for i in b)), key=len)
        *_, scores, last = (n for n, i in enumerate(steady) if i.opcode.startswith("WARPGROUP.DEPBAR"))
        under = sum(scores < n < last for n, i in enumerate(steady) if i.opcode.startswith("MUFU.EX2"))
        assert under >= least, (d, under)
        assert len(steady) <= {64: 720, 128: 470}[d]


def test_the_config_knows_its_shared_memory():
    """What it says is at least what the plans take, and no more than 1 KiB beside it."""
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 80)):
        most = max(p.shared_bytes for name, p in plans(d, dv).items() if name != "dq")
        assert abs(most - default_config(d, dv).shared_bytes(d, dv)) < 1024
