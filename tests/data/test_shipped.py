"""Samples of another machine: they are fetched once, and found by their digest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from holdfast.core.errors import DataError
from holdfast.data.federation import load_samples
from holdfast.data.shipped import find, keep
from holdfast.experiment.build import sample_key
from holdfast.experiment.config import make_config
from holdfast.sweeps import ray_task
from holdfast.sweeps.launch import arrays_of, facts_of
from holdfast.sweeps.unit_process import _Samples


def test_samples_arrive_with_their_digest_and_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({})
    samples = load_samples(config.data)
    calls: list[str] = []

    def fetched(arrays: list[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
        calls.append("fetched")
        return dict(arrays)

    monkeypatch.setattr(ray_task, "fetched", fetched)
    sent = samples.digest, ray_task.json.dumps(facts_of(samples)), list(arrays_of(samples).items())
    for _ in range(2):
        assert ray_task.fetch_samples([sent], None) is None  # type: ignore[arg-type]
    assert calls == ["fetched"]
    (found,) = _Samples([[sample_key(config), samples.digest]]).load([config])
    assert found.digest == samples.digest and torch.equal(found.x, samples.x)
    for field in dataclasses.fields(samples):
        if field.name not in ("x", "y", "user") and not field.name.startswith("_"):
            assert getattr(found, field.name) == getattr(samples, field.name), field.name


def test_samples_with_another_content_than_their_digest_says_are_refused() -> None:
    config = make_config({})
    samples = load_samples(config.data)
    keep("a" * 64, facts_of(samples), lambda: arrays_of(samples))
    with pytest.raises(DataError, match="do not have the digest aaaaaaaaaaaa"):
        _Samples([[sample_key(config), "a" * 64]]).load([config])


@pytest.mark.parametrize("digest, words", [("b" * 64, "does not hold the samples"), ("../x", "no digest")])
def test_samples_that_are_not_there_are_one_line(digest: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        find(digest)
