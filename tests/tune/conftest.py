"""Tuning caches in folders of the test's own, and the fakes."""

from __future__ import annotations

import pathlib
import sys

import pytest

from mosaic_gpu.tune import cache, lookup, tunable

FAKES = pathlib.Path(__file__).parent / "fakes.py"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The user's caches are here, the repository's in a folder beside; returns the user's."""
    user, repository = tmp_path / "user", tmp_path / "repository"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(user))
    monkeypatch.setattr(cache, "repository_folder", lambda: repository)
    for remembered in (cache._load, lookup._warn, lookup._tell):
        remembered.cache_clear()
    return user


@pytest.fixture
def repository(tmp_path):
    """The folder of the shipped caches."""
    return tmp_path / "repository"


@pytest.fixture(scope="session")
def fake():
    """The Tunable of fakes.py."""
    return tunable.find_tunable(f"{FAKES}:Fake")


@pytest.fixture(scope="session")
def fakes(fake):
    """The module that `fake` is in."""
    return sys.modules[type(fake).__module__]


@pytest.fixture
def store(fake, fakes, folder):
    """store(shape="m64n64", device=..., toolchain=..., protocol=...): of the fake kernel, in the user's folder."""
    from mosaic_gpu.tune.search import Store

    def make(shape="m64n64", device=fakes.DEVICE, toolchain=fakes.TOOLCHAIN, protocol=fakes.PROTOCOL, where=folder):
        return Store(where, fake, fake.parse(shape), device, toolchain, protocol)

    return make
