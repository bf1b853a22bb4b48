"""Attention's gradients on a Hopper GPU against float64, by the accuracy rule of tests/kernels/test_attention_backward.py,
and element by element by that of tests/kernels/gradient_judge.py.

The first tests are the simplest; what hangs, hangs early: run the file under `timeout`.  `-k sampled` is the wide sweep.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.cubin_cache import compile_count
from mosaic_gpu.kernels import attention_gradient, reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig, default_config
from mosaic_gpu.runtime.device import default_arch
from tests.gpu.inputs import KINDS, inputs_of, sampled
from tests.kernels import gradient_judge

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

BF, F16 = jnp.bfloat16, jnp.float16
Arrays = tuple[jax.Array, ...]


def gradients_and_out(q: Any, k: Any, v: Any, d_out: Any, d_lse: Any, **options: Any) -> Arrays:
    """dQ, dK, dV as users get them, of an attention that returns its LSE too, and the O that they start from."""
    (out, _), pull = jax.vjp(functools.partial(attention, return_lse=True, **options), q, k, v)
    return (*pull((d_out, d_lse)), out)


def gradients(*arrays: Any, **options: Any) -> Arrays:
    """dQ, dK, dV."""
    return gradients_and_out(*arrays, **options)[:3]


def poison_free_memory() -> None:
    """What XLA takes for its temporaries next (the sums of dQ, -LSE, delta) was full of NaN."""
    jax.block_until_ready([jnp.full((1 << 24,), jnp.nan, jnp.float32) for _ in range(4)])


def judge(found: Arrays, arrays: Arrays, causal: Causal, scale: float, what: str = "") -> None:
    """found: dQ, dK, dV and the O they start from.  Fails with all three errors beside what is allowed: twice plain's, from that
    O; where terms cancel, what float32 loses of them.  Then element by element."""
    options: dict[str, Any] = {"causal": causal, "scale": scale}
    *found_gradients, out = found
    exact = reference.attention_gradients(*arrays, **options)
    plain = reference.attention_gradients(*arrays, **options, rounded=True, out=out)
    terms = reference.attention_gradients(*arrays, **options, absolute=True)
    errors = [
        (e, max(a, 2.0**-24 * float(np.sqrt(np.mean(np.square(t))))))
        for (e, a), t in zip(reference.gradient_errors(found_gradients, exact, plain), terms, strict=True)
    ]
    report = ", ".join(f"{n} {e:.2e} of {a:.2e}" for n, (e, a) in zip(("dq", "dk", "dv"), errors, strict=True))
    assert all(e <= a for e, a in errors), f"{what} {report}"
    gradient_judge.judge(found_gradients, arrays, out, causal, scale, what)


@pytest.fixture
def check(random: Callable[..., jax.Array], poisoned: Callable[..., Any]) -> Callable[..., Arrays]:
    """check(q, k, v, causal=, scale=, **options): random cotangents, poisoned buffers, the accuracy rule."""

    def run(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, **options: Any) -> Arrays:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        b, s, h, _ = q.shape
        cotangents = random(b, s, h, v.shape[-1], dtype=q.dtype), random(b, h, s, dtype=jnp.float32)
        poison_free_memory()
        f = functools.partial(gradients_and_out, causal=causal, scale=scale, **options)
        found: Arrays = poisoned(f, q, k, v, *cotangents)
        judge(found, (q, k, v, *cotangents), causal, scale)
        return found[:3]

    return run


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_one_block(check: Any, random: Any, d: int, deterministic: bool) -> None:
    """128 queries, 128 keys, one head: every role runs once."""
    check(*(random(1, 128, 1, d, dtype=BF) for _ in range(3)), deterministic=deterministic)


LENGTHS = ((256, 256), (1, 1), (300, 411), (129, 64), (64, 1000), (192, 320), (1, 200), (777, 1))


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize(
    "dtype,d,causal,heads", list(itertools.product((BF, F16), (64, 128, 256), (False, True), ((2, 2), (4, 1), (6, 3))))
)
def test_against_float64(
    check: Any, random: Any, dtype: Any, d: int, causal: bool, heads: tuple[int, int], deterministic: bool
) -> None:
    """Odd lengths, lengths of 64 modulo 128, one query row, one key; batch 2; grouped heads; the LSE's cotangent."""
    h, h_kv = heads
    for s, t in LENGTHS:
        q, k, v = (
            random(2, s, h, d, dtype=dtype),
            random(2, t, h_kv, d, dtype=dtype),
            random(2, t, h_kv, d, dtype=dtype),
        )
        check(q, k, v, causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "d,dv", ((16, 16), (32, 32), (72, 72), (40, 120), (80, 80), (96, 96), (192, 128), (64, 128), (160, 160), (240, 240))
)
def test_head_dims(check: Any, random: Any, d: int, dv: int, causal: bool, deterministic: bool) -> None:
    q, k, v = (random(2, n, h, m, dtype=BF) for n, h, m in ((333, 4, d), (401, 2, d), (401, 2, dv)))
    check(q, k, v, causal=causal, deterministic=deterministic)


OPTIONS = [
    (64, {"block_q": 64}),
    (64, {"block_q": 128, "ds_stages": 1, "dq_stages": 1}),
    (64, {"block_q": 128, "split": True}),
    (64, {"num_stages": 3}),
    (96, {"dq_columns": 32, "dq_stages": 3}),
    (128, {"num_stages": 1}),
    (128, {"dq_columns": 32}),
    (128, {"split": True}),
]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d,fields", OPTIONS)
def test_every_option(check: Any, random: Any, d: int, fields: dict[str, Any], causal: bool) -> None:
    """Several blocks for a multiprocessor, tails in both lengths."""
    q, k, v = random(2, 1333, 4, d, dtype=BF), *(random(2, 1501, 2, d, dtype=BF) for _ in range(2))
    check(q, k, v, causal=causal, backward_config=AttentionBackwardConfig(**fields))


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("kind", KINDS[1:])
def test_adversarial(check: Any, kind: str, d: int, deterministic: bool) -> None:
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    for causal in (False, True):
        found = check(*inputs_of(kind, d, BF, 333, 290, 4, 2, 3, rng), causal=causal, deterministic=deterministic)
        assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in found)


@pytest.mark.parametrize("seed", range(25))
def test_sampled(poisoned: Any, seed: int) -> None:
    """24 cases each, drawn from everything above; the same for the same seed.  The message says which failed."""
    failures = []
    for what, arrays, options in sampled(seed):
        poison_free_memory()
        found = poisoned(functools.partial(gradients_and_out, **options), *arrays)
        try:
            judge(found, arrays, options["causal"], options["scale"], what)
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("d,h,h_kv", ((64, 8, 2), (128, 4, 4), (128, 8, 2), (256, 4, 2)))
def test_deterministic_means_the_same_bits(random: Any, d: int, h: int, h_kv: int) -> None:
    """200 runs under load, another kernel's work between some of them."""
    q, d_out = random(2, 1111, h, d, dtype=BF), random(2, 1111, h, d, dtype=BF)
    k, v = random(2, 1300, h_kv, d, dtype=BF), random(2, 1300, h_kv, d, dtype=BF)
    d_lse = random(2, h, 1111, dtype=jnp.float32)
    f = jax.jit(functools.partial(gradients, causal=True, deterministic=True))
    disturb = jax.jit(lambda x: x @ x)
    noise = random(4096, 4096, dtype=BF)
    first = [np.asarray(x).view(np.uint16) for x in f(q, k, v, d_out, d_lse)]
    for i in range(200):
        if i % 3 == 0:
            noise = disturb(noise * 1e-2)
        for x, y in zip(f(q, k, v, d_out, d_lse), first, strict=True):
            assert (np.asarray(x).view(np.uint16) == y).all(), f"run {i} differs"


def test_only_dq_depends_on_the_order(random: Any) -> None:
    """Without determinism, dK and dV are still the same bits; dQ differs by float32 rounding at most."""
    q, k, v, d_out = (random(2, 1024, 4, 128, dtype=BF) for _ in range(4))
    d_lse = random(2, 4, 1024, dtype=jnp.float32)
    f = jax.jit(functools.partial(gradients, causal=True))
    first = [np.asarray(x) for x in f(q, k, v, d_out, d_lse)]
    for _ in range(50):
        dq, dk, dv = (np.asarray(x) for x in f(q, k, v, d_out, d_lse))
        assert (dk.view(np.uint16) == first[1].view(np.uint16)).all() and (
            dv.view(np.uint16) == first[2].view(np.uint16)
        ).all()
        assert reference.relative_error(dq, first[0].astype(np.float64)) < 1e-3


def test_keys_that_no_query_sees_get_zeros(random: Any, poisoned: Any) -> None:
    q, d_out = random(1, 65, 2, 128, dtype=BF), random(1, 65, 2, 128, dtype=BF)
    k, v, d_lse = (
        random(1, 500, 1, 128, dtype=BF),
        random(1, 500, 1, 128, dtype=BF),
        random(1, 2, 65, dtype=jnp.float32),
    )
    _, dk, dv = poisoned(functools.partial(gradients, causal=True), q, k, v, d_out, d_lse)
    assert not np.asarray(dk, np.float32)[:, 65:].any() and not np.asarray(dv, np.float32)[:, 65:].any()


def test_one_set_of_cubins_serves_every_length_batch_and_head_count(check: Any, random: Any) -> None:
    config = default_config(128, 128)  # tuned ones differ with the length

    def run(b: int, s: int, t: int, h: int, h_kv: int) -> None:
        q, k, v = (random(b, n, m, 128, dtype=BF) for n, m in ((s, h), (t, h_kv), (t, h_kv)))
        check(q, k, v, backward_config=config)

    run(1, 128, 128, 1, 1)
    before = compile_count()
    for shape in ((2, 300, 77, 4, 2), (1, 1000, 1024, 3, 3), (3, 5, 513, 8, 1)):
        run(*shape)
    assert compile_count() == before


@pytest.mark.parametrize("transform", ("jit", "scan", "checkpoint", "vmap"))
def test_transformations(random: Any, transform: str) -> None:
    """Beside XLA's attention in float32, from the same rounded numbers."""
    q, k, v = (random(2, 200, 2, 64, dtype=BF) for _ in range(3))

    def loss(attend: Any, q: Any, k: Any, v: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            if transform == "checkpoint":
                return x + jax.checkpoint(attend)(x, k, v), None
            if transform == "vmap":
                return x + jax.vmap(lambda *one: attend(*(y[None] for y in one))[0])(x, k, v), None
            return x + attend(x, k, v), None

        out = jax.lax.scan(layer, q, None, length=3)[0] if transform == "scan" else layer(q, None)[0]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    ours = jax.jit(jax.grad(functools.partial(loss, attention), (0, 1, 2)))(q, k, v)
    plain = jax.nn.dot_product_attention
    exact = jax.grad(functools.partial(loss, plain), (0, 1, 2))(*(x.astype(jnp.float32) for x in (q, k, v)))
    for x, y in zip(ours, exact, strict=True):
        assert reference.relative_error(x, np.asarray(y, np.float64)) < 2e-2


def test_large(random: Any) -> None:
    """Many blocks for every multiprocessor, long loops: against attention of XLA in float32, one head at a time."""
    b, s, h, d = 1, 4096, 8, 128
    q, k, v, d_out = (random(b, s, h, d, dtype=BF) for _ in range(4))
    for causal in (False, True):
        _, pull = jax.vjp(jax.jit(functools.partial(attention, causal=causal)), q, k, v)
        found = pull(d_out)

        @jax.jit
        def exact(q: Any, k: Any, v: Any, d_out: Any, causal: bool = causal) -> Any:
            with jax.default_matmul_precision("highest"):
                f = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")
                return jax.vjp(f, q, k, v)[1](d_out)

        for head in (0, 3, 7):
            one = [x[:, :, head : head + 1].astype(jnp.float32) for x in (q, k, v, d_out)]
            for name, x, y in zip(("dq", "dk", "dv"), found, exact(*one), strict=True):
                error = reference.relative_error(x[:, :, head : head + 1], np.asarray(y, np.float64))
                assert error < 6e-3, f"{name} head {head}: {error:.2e}"  # bf16 P and dS: 2.3e-3 to 3.1e-3


def slow_writer(shape: tuple[int, ...]) -> Any:
    """A kernel that lets the next one begin at once, computes for a while, and only then writes x + 1."""
    rows = shape[0] // 64

    def body(x: Any, out: Any) -> None:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        block = plgpu.ds(lax.axis_index("block") * 64, 64)
        value = x[block].astype(jnp.float32)

        def slower(_: Any, y: Any) -> Any:
            return y * 1.0000001 - y * 0.0000001

        out[block] = (lax.fori_loop(0, 200, slower, value) * 0 + value + 1).astype(out.dtype)

    out = jax.ShapeDtypeStruct(shape, BF)
    return plgpu.kernel(body, out, grid=(rows,), grid_names=("block",), name="slow_writer")


@pytest.mark.parametrize("deterministic", (False, True))
def test_d_out_of_a_kernel_launched_immediately_before(random: Any, deterministic: bool) -> None:
    """1,000 times: the backward kernels, which may begin early, see what the kernel before them writes, and are not
    overtaken by the next round's writer.  dK, dV (and dQ, deterministic) are bitwise those of a program that waits in between."""
    b, s, h, d = 1, 512, 4, 128
    q, k, v = (random(b, s, h, d, dtype=BF) for _ in range(3))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    write = slow_writer((b * s * h, d))
    options: dict[str, Any] = {"causal": True, "scale": d**-0.5, "deterministic": deterministic}

    @jax.jit
    def chained(q: Any, k: Any, v: Any, out: Any, lse: Any, x: Any) -> Any:
        d_out = write(x.reshape(-1, d)).reshape(x.shape)
        return attention_gradient.gradients(q, k, v, out, lse, d_out, **options)

    apart = jax.jit(functools.partial(attention_gradient.gradients, **options))
    for i in range(1000):
        x = jnp.roll(q, i, 1) * (1 + i % 7)
        d_out = jax.block_until_ready((x.astype(jnp.float32) + 1).astype(BF))
        found = chained(q, k, v, out, lse, x)
        expected = jax.block_until_ready(apart(q, k, v, out, lse, d_out))
        for name, one, other in list(zip(("dq", "dk", "dv"), found, expected, strict=True))[
            0 if deterministic else 1 :
        ]:
            same = np.asarray(one).view(np.uint16) == np.asarray(other).view(np.uint16)
            assert same.all(), f"round {i}: {name} differs in {int((~same).sum())} elements"
