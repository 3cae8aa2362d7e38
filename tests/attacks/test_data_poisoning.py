"""Attacks on training data: exactly the declared samples, labels and pixels, and what a trigger does to a
test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.attacks import Adversary, Attack, Trigger
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.data.federation import ClientRows, Federation, Samples
from holdfast.results.run import Run
from tests.attacks.poisoned import federation, poisoned

PATCHED: dict[str, Any] = {"name": "backdoor", "clients": (1,), "size": 2, "target": 3}


def labels(before: Federation, **settings: Any) -> tuple[Tensor, Tensor]:
    """Of client 1, before and after; the others' are checked by the adversary itself."""
    _, after = poisoned(before, name="label-flip", clients=(1,), **settings)
    assert after.samples is before.samples and torch.equal(after.train.row, before.train.row)
    return before.train.client(1)[1], after.train.client(1)[1]


def test_flipped_labels() -> None:
    true, wrong = labels(federation())
    assert torch.equal(wrong, (true + 1) % 10) and int(wrong.min()) == 0
    true, wrong = labels(federation(classes=5), flip="mirrored")
    assert torch.equal(wrong, 4 - true) and bool((wrong == true).any())  # the middle class stays
    true, wrong = labels(federation(), flip="random")
    assert bool((wrong != true).all()) and len(set(((wrong - true) % 10).tolist())) > 3
    true, wrong = labels(federation(), flip="next", ratio=0.25)
    assert int((wrong != true).sum()) == 5


def test_labels_by_a_distribution_of_the_attackers_own() -> None:
    before = federation(per_client=2000)
    adversary, after = poisoned(
        before, name="label-flip", clients=(0, 1), flip="random", skew=0.25, fresh=True, ratio=0.8
    )
    shares = []
    for round in (1, 2):
        table = adversary.train(after, round)
        assert torch.equal(table.client(2)[1], before.train.client(2)[1])
        shares.append([torch.bincount(table.client(c)[1], minlength=10) / 2000 for c in (0, 1)])
    assert not torch.equal(adversary.train(after, 1).label, adversary.train(after, 2).label)  # other samples
    assert (
        float((shares[0][0] - shares[1][0]).abs().max())
        < 0.05
        < float((shares[0][0] - shares[0][1]).abs().max())
    )
    again, _ = poisoned(
        before, name="label-flip", clients=(0, 1), flip="random", skew=0.25, fresh=True, ratio=0.8
    )
    assert torch.equal(again.train(after, 2).label, adversary.train(after, 2).label)  # after a resume, say


def test_noise_on_bytes() -> None:
    before = federation(torch.full((69, 1, 4, 4), 128, dtype=torch.uint8))
    _, after = poisoned(before, name="input-noise", clients=(1,), sigma=0.1)
    rows, label = after.train.client(1)
    assert (
        bool((rows >= 69).all())
        and torch.equal(label, before.train.client(1)[1])
        and len(after.samples) == 89
    )
    noise = (after.samples.x[rows].double() - 128) / 255
    assert float(noise.std()) == pytest.approx(0.1, rel=0.1) and torch.equal(
        after.samples.x[:69], before.samples.x
    )
    _, dark = poisoned(
        federation(torch.zeros(69, 1, 4, 4, dtype=torch.uint8)), name="input-noise", clients=(1,), sigma=0.3
    )
    assert 0.4 < float((dark.samples.x[69:] == 0).double().mean()) < 0.6  # clipped, not wrapped around
    _, real = poisoned(federation(torch.zeros(69, 3)), name="input-noise", clients=(1,), sigma=2.0)
    assert float(real.samples.x[69:].std()) == pytest.approx(2.0, rel=0.25)


def test_noise_as_the_model_sees_it() -> None:
    """By channel, in standard deviations of the dataset."""
    whole = federation(torch.full((69, 2, 4, 4), 128, dtype=torch.uint8))
    before = replace(whole, samples=replace(whole.samples, mean=(0.5, 0.5), std=(0.1, 0.4)))
    _, after = poisoned(before, name="input-noise", clients=(1,), sigma=0.5, scale="normalised")
    seen = after.samples.batch(after.train.client(1)[0])
    assert seen.std((0, 2, 3)).tolist() == pytest.approx([0.5, 0.5], rel=0.15)


def test_the_patch_and_nothing_else() -> None:
    before = federation()
    _, after = poisoned(before, **PATCHED, ratio=0.25)
    rows, label = after.train.client(1)
    new = rows >= 69
    assert (
        int(new.sum()) == 5
        and set(label[new].tolist()) == {3}
        and torch.equal(label[~new], before.train.client(1)[1][~new])
    )
    expected = before.samples.x[before.train.client(1)[0][new]].clone()
    expected[:, :, 2:, 2:] = 255
    assert torch.equal(after.samples.x[rows[new]], expected)


@pytest.mark.parametrize(
    ("place", "corner"),
    [
        ("top-left", (0, 0)),
        ("top-right", (0, 2)),
        ("bottom-left", (2, 0)),
        ("bottom-right", (2, 2)),
        ("centre", (1, 1)),
    ],
)
def test_places_of_the_patch(place: str, corner: tuple[int, int]) -> None:
    x = torch.zeros(69, 3, 4, 4, dtype=torch.uint8)
    attack = build("attack", {**PATCHED, "place": place, "colour": (1.0, 0.5, 0.0)})
    stamped = attack.planted(federation(x).samples).stamp(x[:1])
    expected = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    expected[0, 0, corner[0] : corner[0] + 2, corner[1] : corner[1] + 2] = 255
    expected[0, 1, corner[0] : corner[0] + 2, corner[1] : corner[1] + 2] = 128
    assert torch.equal(stamped, expected) and int(x.max()) == 0


def test_a_patch_of_noise_is_always_the_same() -> None:
    x = torch.linspace(-1, 3, 69 * 16).view(69, 1, 4, 4)  # not bytes: between the smallest and the largest
    stamp = build("attack", {**PATCHED, "pattern": "noise"}).planted(federation(x).samples).stamp
    patch = stamp(x)[:, :, 2:, 2:]
    assert (
        bool((patch == patch[:1]).all())
        and len(patch[0].unique()) == 4
        and -1 <= float(patch.min()) < float(patch.max()) <= 3
    )


@pytest.mark.parametrize("inclusive", [False, True])
def test_triggered_test_images(inclusive: bool) -> None:
    """Test labels are 0..5, 6 7 8: the fourth image shows the target, 3, and is left out."""
    before = federation()
    adversary, after = poisoned(before, **PATCHED, inclusive=inclusive)
    assert adversary.triggered is not None
    table, of_target = adversary.triggered
    assert table.counts.tolist() == ([6, 3, 0] if inclusive else [5, 3, 0]) and set(table.label.tolist()) == {
        3
    }
    expected = before.samples.x[60:].clone()
    expected[:, :, 2:, 2:] = 255
    kept = [0, 1, 2, 3, 4, 5, 6, 7, 8] if inclusive else [0, 1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(after.samples.x[table.row], expected[kept]) and torch.equal(
        after.test.row, before.test.row
    )
    assert (of_target is not None) == inclusive
    if of_target is not None:
        assert of_target.counts.tolist() == [1, 0, 0] and torch.equal(
            after.samples.x[of_target.row], expected[3:4]
        )


@pytest.mark.parametrize(
    ("settings", "x", "message"),
    [
        ({"name": "input-noise"}, torch.ones(69, 5, dtype=torch.int32), "made up is text; use label-flip"),
        ({"name": "backdoor"}, torch.ones(69, 1, 2, 2, 2), "no trigger is known for them; use label-flip"),
        (
            {"name": "backdoor", "size": 2},
            torch.ones(69, 5),
            "attack.size: it is of a patch in images, but made up has no images",
        ),
        (
            {"name": "backdoor", "size": 2, "trigger": "bars"},
            None,
            "attack.size: it is of a patch in images, but another trigger is chosen",
        ),
        ({"name": "backdoor", "trigger": "word"}, None, "'word' changes a text, but a sample of made up"),
        ({"name": "backdoor", "trigger": "bar"}, None, "unknown trigger 'bar'; did you mean 'bars'"),
        ({"name": "backdoor"}, None, "attack.size: a patch of 5 pixels does not fit into 4 x 4"),
        (
            {"name": "backdoor", "size": 2, "target": 10},
            None,
            "attack.target: made up has classes 0 to 9, got 10",
        ),
        ({"name": "backdoor", "size": 2, "colour": (1.0, 1.0)}, None, "attack.colour: needs 1 or 1 numbers"),
    ],
)
def test_data_that_an_attack_is_not_for(settings: dict[str, Any], x: Tensor | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        poisoned(federation(x), clients=(1,), **settings)


def test_attackers_do_not_depend_on_each_other() -> None:
    before = federation()
    for settings in (
        {"name": "label-flip", "flip": "random", "ratio": 0.5},
        {"name": "input-noise", "ratio": 0.5},
    ):
        (_, one), (_, both) = (poisoned(before, clients=clients, **settings) for clients in ((1,), (0, 1)))
        assert torch.equal(one.train.client(1)[1], both.train.client(1)[1])
        assert torch.equal(one.samples.x[one.train.client(1)[0]], both.samples.x[both.train.client(1)[0]])


def test_experiments_with_the_same_attack_share_the_poisoned_data() -> None:
    """Every other defence against it would else have a copy of the dataset, and train alone."""
    before = federation()
    (first, one), (second, two) = (poisoned(before, **PATCHED) for _ in range(2))
    assert one is two and first.triggered is second.triggered and first.triggered is not None
    assert (
        poisoned(before, **{**PATCHED, "target": 4})[1] is not one
        and poisoned(federation(), **PATCHED)[1] is not one
    )
    other_seed = Adversary(build("attack", PATCHED), torch.arange(3), Key(1)).poison_data(before)
    assert not torch.equal(other_seed.train.row, one.train.row)


def test_where_attackers_are_redrawn_benign_clients_train_on_their_own_data() -> None:
    before = federation()
    adversary, after = poisoned(before, name="label-flip", fraction=0.34, redraw=True)
    seen = set()
    for round in range(1, 30):
        (client,) = adversary.at(round).tolist()
        seen.add(client)
        changed = adversary.train(after, round).label != before.train.label
        assert torch.equal(changed, torch.arange(60) // 20 == client)
        assert adversary.benign(torch.arange(3), round).tolist() == [c != client for c in range(3)]
    assert seen == {0, 1, 2}


def test_asr_by_hand(simulate: Callable[..., Run]) -> None:
    """The share of triggered test images of benign clients that the global model calls the target."""
    attack = {**PATCHED, "ratio": 1.0, "clients": (1, 3), "size": 3}
    run = simulate(attack=attack, train={"rounds": 6, "lr": 0.3})
    experiment = run._experiment
    world, model = experiment.federation, run.model().double()
    shown = called = 0
    for client in (0, 2, 4):
        rows, true = world.test.client(client)
        x = world.samples.x[rows[true != 3]].clone()
        x[:, :, 5:, 5:] = 255
        stamped = replace(world.samples, x=x, y=torch.zeros(len(x), dtype=torch.int64), train_rows=0)
        with torch.no_grad():
            said = model(stamped.batch(torch.arange(len(x)), torch.float64)).argmax(1)
        shown, called = shown + len(x), called + int((said == 3).sum())
    assert shown and run.final["attack/asr"] == pytest.approx(called / shown) and called > 0
    assert simulate(attack={"name": "label-flip"}).final["attack/asr"] is None
    everywhere = simulate(attack=attack, data={"pool": "train"}, evaluate={"test": "global"})
    assert 0 <= everywhere.final["attack/asr"] <= 1


def test_a_plug_in_of_an_earlier_version_names_its_trigger_so() -> None:
    class Older(Attack):
        """Knows the method by its old name."""

        def trigger(self, samples: Samples) -> Trigger:
            return Trigger(torch.zeros_like, 3, False)

    adversary = Adversary(Older(clients=(1,)), torch.arange(3), Key(0))
    after = adversary.poison_data(federation())
    assert adversary.triggered is not None and not after.samples.x[adversary.triggered.table.row].any()


def test_within_a_run_only_labels_change() -> None:
    class Painter(Attack):
        """Wants other pictures every round."""

        def round_data(self, federation: Federation, malicious: Tensor, key: Key, round: int) -> Federation:
            return replace(federation, samples=replace(federation.samples, x=federation.samples.x.clone()))

    class Scribbler(Attack):
        """Writes into everybody's labels."""

        def round_data(self, federation: Federation, malicious: Tensor, key: Key, round: int) -> None:
            federation.train.label.fill_(0)

    for attack, message in (
        (Painter(clients=(1,)), "changed samples within a run"),
        (Scribbler(clients=(1,)), "changed data in place"),
    ):
        adversary = Adversary(attack, torch.arange(3), Key(0))
        after = adversary.poison_data(federation())
        with pytest.raises(RunError, match=message):
            adversary.train(after, 1)


def test_a_redrawn_attack_keeps_the_numbers_of_samples() -> None:
    class Hoarder(Attack):
        """Trains on the first half of its samples only."""

        def data(self, federation: Federation, malicious: Tensor, key: Key) -> Federation:
            table = federation.train
            half = torch.arange(60) % 20 < 10
            return replace(
                federation, train=ClientRows(table.row[half], table.label[half], torch.arange(4) * 10)
            )

    adversary = Adversary(Hoarder(redraw=True, fraction=0.4), torch.arange(3), Key(0))
    after = adversary.poison_data(federation())
    with pytest.raises(RunError, match="as many samples as it had; leave attack.redraw out"):
        adversary.train(after, 1)
