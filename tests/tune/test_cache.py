"""The cache file: round trip, what is refused, and that the dispatcher takes what the search wrote."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from mosaic_gpu.errors import CacheInvalid
from mosaic_gpu.kernels import attention as dispatcher
from mosaic_gpu.kernels.sm90.attention import AttentionConfig, default_config
from mosaic_gpu.tune import cache

GOOD = {"schema": cache.SCHEMA, "device": "nvidia_h200", "kernel": "attention", "best": {}}


def write(folder, content):
    path = folder / "nvidia_h200" / "attention.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    cache.load.cache_clear()


def test_round_trip(folder):
    assert cache.load("nvidia_h200", "attention") == {}
    data = cache.load_for_update("nvidia_h200", "attention")
    data["best"]["key"] = {"config": {"x": 1}}
    path = cache.store(data)
    assert path == folder / "nvidia_h200" / "attention.json" and [p.name for p in path.parent.iterdir()] == [path.name]
    assert cache.load("nvidia_h200", "attention") == data


def test_changing_a_copy_leaves_the_cache_alone():
    cache.store(GOOD | {"best": {"key": {"config": {}}}})
    cache.load_for_update("nvidia_h200", "attention")["best"].clear()
    assert "key" in cache.load("nvidia_h200", "attention")["best"]


@pytest.mark.parametrize(
    "content, why",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no JSON object"),
        (GOOD | {"schema": 0}, "schema 0"),
        (GOOD | {"device": "nvidia_h100"}, "nvidia_h100"),
        (GOOD | {"kernel": "matmul"}, "matmul"),
        (GOOD | {"best": []}, "`best`"),
        (GOOD | {"best": {"key": {"tflops": 1}}}, "`best`"),
        (GOOD | {"best": {"key": 3}}, "`best`"),
    ],
)
def test_invalid_files(folder, content, why):
    write(folder, content)
    with pytest.raises(CacheInvalid, match="tune run") as caught:
        cache.load("nvidia_h200", "attention")
    assert why in str(caught.value)


def test_a_folder_that_cannot_be_written(folder):
    (folder / "nvidia_h200").write_text("a file where the folder should be")
    with pytest.raises(CacheInvalid, match="cannot be written"):
        cache.store(GOOD)


def test_the_dispatcher_reads_it(monkeypatch):
    q = jax.ShapeDtypeStruct((1, 4000, 8, 128), jnp.bfloat16)
    key = dispatcher.tuning_key(q.shape, q.shape, "bfloat16", False)
    tuned = AttentionConfig(block_kv=96, num_stages=3)
    cache.store(GOOD | {"best": {key: {"config": tuned.to_json()}}})
    assert dispatcher.choose_config(q, q, q, False) == default_config(128)  # no GPU here
    monkeypatch.setattr(cache, "device_key", lambda: "nvidia_h200")
    assert dispatcher.choose_config(q, q, q, False) == tuned
    assert dispatcher.choose_config(q, q, q, True) == default_config(128)
