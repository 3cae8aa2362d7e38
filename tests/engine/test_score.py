"""The task of a committee member, which every method's clients have: try models on one's own validation
samples."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.registry import register
from holdfast.core.types import SCORE, Exchange, State, Uplink
from holdfast.detectors.base import Detector, Judgement
from holdfast.results.run import Run
from tests.helpers import built_in


@register("detector", "test-committee")
class Committee(Detector):
    """Clients 0 and 1 try everybody's model; the two that do worst are rejected for the round."""

    def judge(
        self, state: State, ctx: Any, models: Tensor, ids: Tensor
    ) -> Generator[Exchange, Uplink, Judgement]:
        members = torch.tensor([0, 1])
        bank = torch.cat([models, ctx.buffers], dim=1)
        up = yield Exchange(SCORE, members, bank, torch.arange(len(ids)).repeat(2, 1))
        mean = up["score"].double().mean(0)
        worst = {int(ids[i]): "worst" for i in mean.argsort()[:2]}
        return Judgement(state, {}, {"error": 1 - mean}, worst, {"votes": up["score"]})


@pytest.mark.parametrize(
    "split", [{"train": 0.5, "validation": 0.25, "test": 0.25}, {"train": 0.75, "test": 0.25}]
)
@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_scores_are_accuracies_on_the_members_own_samples(
    split: dict[str, float], plan: str, simulate: Callable[..., Run]
) -> None:
    run = simulate(
        method="fedavg",
        detectors=["test-committee"],
        data={"split": split},
        engine={"plan": plan},
        train={"rounds": 1},
        model={"name": "mlp", "hidden": 6, "batch_norm": True},
    )
    arrays = run.store.arrays(1)
    votes = arrays["verdict/tables/test-committee/votes"]
    assert votes.shape == (2, 5) and bool(((votes >= 0) & (votes <= 1)).all())
    assert torch.equal(arrays["verdict/scores/test-committee/error"], 1 - votes.double().mean(0))
    turned_away = (arrays["verdict/weights"] == 0).nonzero().flatten().tolist()
    assert len(turned_away) == 2 and sorted(int(c) for c in run.store.parts(1)[-1]["rejected"]) == turned_away
    table = (
        run._experiment.federation.validation if "validation" in split else run._experiment.federation.train
    )
    sizes = [len(table.client(member)[0]) for member in (0, 1)]
    for member, size in enumerate(sizes):  # each is a whole number of right answers of that many samples
        torch.testing.assert_close(votes[member] * size, (votes[member] * size).round(), rtol=0, atol=1e-9)
    assert arrays["verdict/tables/norms"].shape == (5,) and bool((arrays["verdict/tables/norms"] > 0).all())
    assert run.metrics["rejected"].iloc[-1] == 2


@pytest.mark.parametrize("name", [name for name, method in built_in("method").items() if method.reduces])
def test_every_method_can_have_a_committee(name: str, simulate: Callable[..., Run]) -> None:
    alone = (
        {"name": name, "committee": False} if name == "c-pfl" else name
    )  # else its own committee has its say first
    run = simulate(method=alone, detectors=["test-committee"])
    assert run.round in (2, 3) and (run.store.arrays(2)["verdict/weights"] == 0).sum() == 2
    assert (
        run.final["bytes/down"] > 2 * 5 * run._experiment.run_context.wire().size * 8
    )  # each member's copies are counted
