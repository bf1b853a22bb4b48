"""Which config a call gets: the order of sources, nearest keys, what is said, and what is never used silently."""

from __future__ import annotations

import json
import logging

import jax
import jax.numpy as jnp
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import MosaicGpuError, UnsupportedCall
from mosaic_gpu.kernels.sm90.attention import AttentionConfig, default_config
from mosaic_gpu.runtime import device
from mosaic_gpu.tune import lookup
from mosaic_gpu.tune.search import Store
from mosaic_gpu.tune.tunable import find_tunable

H200 = "nvidia_h200"


@pytest.fixture
def tuned(store, fakes):
    """tuned("m64n64", a=8): that config is the best of the workload in the user's cache; where=folder: elsewhere."""

    def put(shape, where=None, **fields):
        s = store(shape, **({"where": where} if where else {}))
        s.add([{"status": "ok", "seconds": 1e-3, "config": fakes.FakeConfig(**fields).to_json()}])
        return s.path

    return put


@pytest.fixture
def ask(fake):
    return lambda shape, device=H200, **options: lookup.explain(fake, fake.parse(shape), device=device, **options)


def test_the_order_of_sources(ask, tuned, fakes, repository):
    c = fakes.FakeConfig
    assert (ask("m64n64").source, ask("m64n64").config) == ("heuristic", c())
    tuned("m64n64", where=repository, a=2)
    assert (ask("m64n64").source, ask("m64n64").match, ask("m64n64").config.a) == ("repository", "exact", 2)
    tuned("m64n64", a=4)
    assert (ask("m64n64").source, ask("m64n64").config.a) == ("user", 4)
    with plgpu.override_config(c(a=8)):
        assert (ask("m64n64").source, ask("m64n64").config.a) == ("override", 8)
        with plgpu.override_config(AttentionConfig()):  # another kernel's
            assert ask("m64n64").config.a == 8
        assert (ask("m64n64", config=c(a=16)).source, ask("m64n64", config=c(a=16)).config.a) == ("explicit", 16)
    assert ask("m64n64").source == "user"
    with pytest.raises(TypeError, match="takes configs"), plgpu.override_config({"a": 1}):
        pass


def test_nearest_keys(ask, tuned, repository):
    tuned("m64n64", a=2)
    tuned("m1024n64", where=repository, a=4)
    near = ask("m128n64")
    assert (near.match, near.distance, near.config.a, near.source) == ("nearest", 1.0, 2, "user")
    assert "nearest key (m=64 n=64 dtype=bfloat16, distance 1, 64 TFLOP/s there)" in str(near)
    assert (ask("m512n64").config.a, ask("m512n64").source) == (4, "repository")
    assert ask("m256n64").config.a == 2  # two doublings from both: the user's
    assert ask("m64n4096").source == "heuristic"  # six doublings are too far
    tuned("m512n64", where=repository, a=8)
    assert ask("m512n64").match == "exact"


def test_the_stamp_of_caches_changes_with_them(tuned, repository):
    """By which benchmarks know that the tuned configs are others."""
    seen = [lookup.stamp("fake", H200)]
    for options in ({"a": 8}, {"a": 4, "where": repository}):
        tuned("m64n64", **options)
        seen.append(lookup.stamp("fake", H200))
    assert seen[0] == lookup.stamp("fake", None) == "" and len(set(seen)) == 3


def test_without_a_gpu_no_cache_is_used(ask, tuned):
    tuned("m64n64", a=8)
    assert ask("m64n64", device=None).source == "heuristic" and "no GPU" in str(ask("m64n64", device=None))


def test_another_devices_cache_is_not_used(ask, tuned, folder, caplog):
    path = tuned("m64n64", a=8)
    other = folder / "nvidia_b200" / path.name
    other.parent.mkdir()
    other.write_text(path.read_text())
    found = ask("m64n64", device="nvidia_b200")
    assert found.source == "heuristic" and "was measured on nvidia_h200" in found.notes[0]
    assert "was measured on nvidia_h200" in caplog.text


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, indent=3))


def test_a_config_that_is_none_of_todays_kernel(ask, tuned, repository, caplog):
    """An unknown field, as one that was removed is, or a value that is refused now: the next source is taken."""
    path = tuned("m64n64", a=8)
    tuned("m64n64", where=repository, a=2)
    edit(path, lambda d: d["entries"][0]["best"]["config"].update(colour=1))
    found = ask("m64n64")
    assert (found.source, found.config.a) == ("repository", 2) and "has no field colour" in found.notes[0]
    edit(
        path,
        lambda d: d["entries"][0]["best"]["config"].update(a=999) or d["entries"][0]["best"]["config"].pop("colour"),
    )
    assert "none of today's kernel: a=999" in ask("m64n64").notes[0]
    edit(path, lambda d: d["header"]["kernel"].update(generation="sm100"))
    assert "has configs for sm100, this device takes sm90" in ask("m64n64").notes[0]
    assert caplog.text.count("has no field colour") == 1


def test_a_truncated_file_does_not_stop_a_call(ask, tuned, repository):
    path = tuned("m64n64", a=8)
    tuned("m64n64", where=repository, a=2)
    path.write_text(path.read_text()[:100])
    assert ask("m64n64").config.a == 2 and "only a part" in ask("m64n64").notes[0]


def test_a_changed_kernel_is_said(ask, tuned, fake, caplog, monkeypatch):
    tuned("m64n64", a=8)
    assert not ask("m64n64").stale
    monkeypatch.setitem(fake.__dict__, "source_hash", "another")
    found = ask("m64n64")
    assert (
        found.stale and found.config.a == 8 and "another revision" in str(found) and "another revision" in caplog.text
    )


def test_one_log_line_the_first_time(ask, tuned, caplog):
    caplog.set_level(logging.INFO, "mosaic_gpu")
    tuned("m64n64", a=8)
    for _ in range(3):
        ask("m64n64")
    (record,) = caplog.records
    assert "exact key, 64 TFLOP/s there, user cache" in record.getMessage()


def test_the_source_hash_forgets_comments_only(fake, tmp_path, monkeypatch):
    made = []
    for text in ("x = 1\n", "# why\nx = 1\n\n", "x = 2\n"):
        (tmp_path / "k.py").write_text(text)
        t = type(fake)()
        monkeypatch.setattr(t, "sources", lambda: [tmp_path / "k.py"], raising=False)
        made.append(t.source_hash)
    assert made[0] == made[1] != made[2]


# ---- attention --------------------------------------------------------------------------------------------------------


def arrays(b=1, s=4000, t=4000, h=8, h_kv=8, d=128, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((b, s, h, d), dtype), *[jax.ShapeDtypeStruct((b, t, h_kv, d), dtype)] * 2


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(device, "device_key", lambda: H200)


def test_explain_config_of_attention(folder, fakes, h200):
    attention = find_tunable("attention")
    wanted = AttentionConfig(block_kv=96, num_stages=3)
    assert plgpu.explain_config("attention", *arrays()).config == default_config(128)
    s = Store(folder, attention, attention.parse("b4s4096h16d128"), fakes.DEVICE, fakes.TOOLCHAIN, fakes.PROTOCOL)
    s.add([{"status": "ok", "seconds": 1e-3, "config": wanted.to_json()}])
    exact = plgpu.explain_config("attention", *arrays())
    assert (exact.config, exact.match, exact.stale) == (wanted, "exact", False)
    assert plgpu.explain_config("attention", *arrays(s=1000)).match == "nearest"
    assert plgpu.explain_config("attention", *arrays(), causal=True).distance == 2.0
    assert plgpu.explain_config("attention", *arrays(d=64)).source == "heuristic"  # another head dim is of no use
    assert "heuristic" in str(plgpu.explain_config("attention", *arrays(d=64)))
    assert plgpu.explain_config("matmul", *[jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2).source == "heuristic"


def test_keys_are_buckets_of_lengths():
    attention = find_tunable("attention")
    keys = [
        attention.key(attention.parse(t, causal=True)) for t in ("b1s4096h4d64", "b8s2049h32d64", "b2s4000h8kv2d64")
    ]
    assert keys[0] == keys[1] == keys[2]
    for other in ("b1s4097h4d64", "b1s4096t8192h4d64", "b1s4096h4d128"):
        assert attention.key(attention.parse(other, causal=True)) != keys[0]
    assert attention.key(attention.parse("s4096h4d64", dtype="f16", causal=True)) != keys[0]


def test_of_workloads_with_one_key_the_most_alike(folder, fakes, h200):
    attention = find_tunable("attention")
    for text, n in (("b1s4096h8d128", 64), ("b16s4096h32d128", 96)):
        s = Store(folder, attention, attention.parse(text), fakes.DEVICE, fakes.TOOLCHAIN, fakes.PROTOCOL)
        s.add([{"status": "ok", "seconds": 1e-3, "config": AttentionConfig(block_kv=n).to_json()}])
    assert plgpu.explain_config("attention", *arrays(b=1)).config.block_kv == 64
    assert plgpu.explain_config("attention", *arrays(b=8, h=32, h_kv=32)).config.block_kv == 96


def test_an_argument_that_the_function_has_not():
    q = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    for kernel in ("attention", "attention_backward"):
        with pytest.raises(TypeError, match="attention has no argument cause; it has q, k, v, causal"):
            plgpu.explain_config(kernel, q, q, q, cause=True)
        assert "block_" in str(plgpu.explain_config(kernel, q, q, q, causal=True, deterministic=True))


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def refusals():
    from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig

    q, odd, three = of(2, 64, 4, 64), of(2, 64, 4, 100), of(2, 64, 3, 64)
    attention = [
        ("head dim", (odd, odd, odd), {}),
        ("head dims that differ", (q, odd, q), {}),
        ("heads", (q, three, three), {}),
        ("dtype", (of(2, 64, 4, 64, dtype=jnp.float32),) * 3, {}),
        ("rank", (of(64, 64),) * 3, {}),
        ("no v", (q, q), {}),
        ("no arrays", (1, q, q), {}),
        ("causal", (q, q, q), {"causal": "tl"}),
        ("scale", (q, q, q), {"scale": -1.0}),
        ("a flag", (q, q, q), {"return_lse": 1}),
        ("bias", (q, q, q), {"bias": of(4, 64, 63)}),
        ("mask", (q, q, q), {"mask": of(2, 4, 64, 64)}),
        ("config", (q, q, q), {"config": AttentionBackwardConfig()}),
        ("implementation", (q, q, q), {"implementation": "cuda"}),
    ]
    gradients = [("bias's gradients", (q, q, q), {"bias": of(2, 4, 64, 64)}), attention[7]]
    matmul = [("k", (of(64, 60), of(60, 64)), {}), ("inner", (of(64, 64), of(128, 64)), {})]
    for kernel, cases in (("attention", attention), ("attention_backward", gradients), ("matmul", matmul)):
        yield from (pytest.param(kernel, args, more, id=f"{kernel}: {what}") for what, args, more in cases)


@pytest.mark.parametrize("kernel,args,more", list(refusals()))
def test_what_the_call_refuses(kernel, args, more):
    """By the same error, for values as for names."""
    from mosaic_gpu.kernels import attention, matmul

    function = matmul.matmul if kernel == "matmul" else attention.attention

    def call(*args, **arrays):
        plain = {k: v for k, v in more.items() if k not in arrays}
        return function(*args, **plain, **arrays)

    def gradient(*args, **arrays):
        return jax.vjp(lambda *a: call(*a, **arrays), *args)[1](args[0])

    taken = gradient if kernel.endswith("_backward") else call
    with pytest.raises((TypeError, ValueError, MosaicGpuError)) as right:
        if args[0] == 1:
            taken(*args)
        jax.eval_shape(taken, *args, **{k: v for k, v in more.items() if k in ("bias", "mask")})
    with pytest.raises(type(right.value)) as found:
        plgpu.explain_config(kernel, *args, **more)
    assert getattr(found.value, "message", str(found.value)) == getattr(right.value, "message", str(right.value))


def test_a_call_of_xlas():
    q = of(2, 64, 4, 100)
    with pytest.raises(UnsupportedCall, match="runs XLA's, and takes no config"):
        plgpu.explain_config("attention", q, q, q, implementation="xla")
    with pytest.raises(UnsupportedCall, match="head dim"):
        plgpu.explain_config("attention", q, q, q, implementation=("mosaic_gpu", "xla"))
    q = of(2, 64, 4, 64)
    assert "block_kv" in str(plgpu.explain_config("attention", q, q, q, implementation=("mosaic_gpu", "xla")))
