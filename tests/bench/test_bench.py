"""The benchmark's form, not its numbers: how fast this machine is belongs into no test."""

from __future__ import annotations

import pytest
import torch

from holdfast.bench import steps
from holdfast.bench.steps import Bench, Work, run_bench
from holdfast.core.errors import ConfigError
from holdfast.local.batch_order import schedule
from holdfast.local.plan import Plan

TINY = Work(
    "tiny", {"name": "mlp", "hidden": 4}, {"name": "digits"}, clients=3, samples=12, epochs=2, batch_size=5
)


def test_rows_hold_a_time_and_a_ratio_for_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WORKS", (TINY,))
    monkeypatch.setattr(steps, "_BUDGET", {True: 0.0, False: 0.0})
    lines: list[str] = []
    result = run_bench(["tiny"], True, 1, lines.append)
    rows = {row["plan"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "loop", "vmap", "auto"]
    assert all(row["work"] == "tiny" and row["seconds"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert rows["plain"]["ratio"] == 1.0
    assert rows["plain"]["client_steps"] == 3 * 2 * 3
    assert rows["auto"]["seconds"] == max(rows[name]["seconds"] for name in rows["auto"]["picked"])
    assert (
        result["threads"] == 1
        and result["torch"] == torch.__version__
        and result["date"]
        and result["device"]
        and result["unit"]
    )
    assert len(lines) == 1 and lines[0].startswith("tiny")


def test_threads_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WORKS", ())
    before = torch.get_num_threads()
    assert run_bench(None, True, before + 1)["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_an_unknown_work_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'digits-mlp-100'"):
        run_bench(["digits-mlp"])


@pytest.mark.parametrize("plan", [Plan("loop"), Plan("vmap"), Plan("vmap", stack=2)])
def test_the_plain_loop_does_the_same_work(plan: Plan) -> None:
    """Given the same order of batches, the loop written by hand ends where `fit` does."""
    ready = Bench.of(TINY)
    count = ready.data.count.numpy()
    index = schedule(ready.key, count, TINY.batch_size, epochs=count * 0 + TINY.epochs).index

    def order(client: int, epoch: int) -> torch.Tensor:
        positions = index[3 * epoch : 3 * epoch + 3, client].flatten()
        return positions[positions >= 0]

    start = {name: tensor.clone() for name, tensor in ready.model.state_dict().items()}
    by_hand = ready.plain(ready.samples.batch(ready.data.rows), start, order)
    expected = torch.stack([ready.network.layout.flatten(model) for model in by_hand])
    assert not torch.allclose(expected, ready.initial.expand_as(expected), atol=1e-3)
    torch.testing.assert_close(ready.fit(plan), expected, atol=1e-5, rtol=1e-5)
