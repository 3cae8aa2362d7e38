"""Attacks on updates, by hand: four clients, of which two attack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.attacks import Adversary, Attack, View
from holdfast.attacks.base import REACH
from holdfast.attacks.lie import formula
from holdfast.attacks.target import Target
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import ROOT, Field, Schema, Uplink, broadcast
from tests.helpers import built_in

SCHEMA: Schema = {
    "update": Field("update", (2,)),
    "buffers": Field("buffer", (1,)),
    "count": Field("count", low=0),
    "trust": Field("score"),
}
HONEST = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [-2.0, 6.0]], dtype=torch.float64)
UP = Uplink(
    torch.tensor([0, 2, 3, 6]),
    {
        "update": HONEST,
        "buffers": torch.ones(4, 1),
        "count": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "trust": torch.full((4,), 0.5),
    },
)
ATTACKERS = [1, 3]  # rows of clients 2 and 6


def adversary(name: str, **settings: Any) -> Adversary:
    made = Adversary(build("attack", {"name": name, "clients": (2, 6), **settings}), torch.arange(10), Key(0))
    made.target = Target(build("aggregator", "median"))
    return made


def sent(name: str, up: Uplink = UP, **settings: Any) -> Tensor:
    """What arrives; whatever else there is must be as it was."""
    after = adversary(name, **settings).poison(
        "train", SCHEMA, up, Key(1), 0, broadcast("train", torch.tensor([1.0, 3.0, 9.0]), up.ids)
    )
    mine = torch.isin(up.ids, torch.tensor([2, 6]))
    assert torch.equal(after["update"][~mine], up["update"][~mine])
    assert all(after[field] is up[field] for field in ("buffers", "count", "trust")) and torch.equal(
        UP["update"], HONEST
    )
    return after["update"][mine]


def test_sign_flip_and_replacement() -> None:
    assert sent("sign-flip").tolist() == [[-3, -4], [2, -6]] and sent("sign-flip", scale=2.0)[0].tolist() == [
        -6,
        -8,
    ]
    assert sent("replacement").tolist() == [[12, 16], [-8, 24]] and sent("replacement", factor=0.5)[
        1
    ].tolist() == [-1, 3]


@pytest.mark.parametrize(
    ("clients", "attackers", "z"),
    [(20, 6, 0.366), (36, 10, 0.396), (20, 8, 0.674), (20, 10, 1.282), (20, 2, 0.0)],
)
def test_z_of_the_card(clients: int, attackers: int, z: float) -> None:
    assert formula(clients, attackers) == pytest.approx(z, abs=5e-4)


def test_z_is_clamped_where_the_formula_has_no_finite_value() -> None:
    assert formula(20, 11) == formula(5, 5) == float("inf") and formula(20, 1) == pytest.approx(
        -0.066, abs=1e-3
    )
    assert formula(2, 0) == -float("inf")


def test_lie_by_hand() -> None:
    """Mean (.5, 3), unbiased spread sqrt(13 / 3) and sqrt(20 / 3); 2 of 4 attack: z = 0 by the formula."""
    mean, spread = (
        torch.tensor([0.5, 3.0], dtype=torch.float64),
        torch.tensor([13 / 3, 20 / 3], dtype=torch.float64).sqrt(),
    )
    assert formula(4, 2) == 0.0 and torch.equal(sent("lie"), mean.expand(2, 2))
    torch.testing.assert_close(sent("lie", z=1.5), (mean - 1.5 * spread).expand(2, 2))
    of_benign = torch.tensor([0.5 - 0.5**0.5, 1 - 2**0.5], dtype=torch.float64)
    torch.testing.assert_close(sent("lie", z=1.0, statistics="benign"), of_benign.expand(2, 2))
    of_colluders = torch.tensor([0.5 - 12.5**0.5, 5 - 2**0.5], dtype=torch.float64)
    torch.testing.assert_close(sent("lie", z=1.0, knows="colluders"), of_colluders.expand(2, 2))


def test_the_clamp_of_lie_is_noted() -> None:
    only = UP.only(torch.tensor(ATTACKERS))
    attack = adversary("lie", z_max=2.0)
    after = attack.poison("train", SCHEMA, only, Key(1))
    mean, spread = HONEST[ATTACKERS].mean(0), HONEST[ATTACKERS].std(0)
    torch.testing.assert_close(after["update"], (mean - 2 * spread).expand(2, 2))
    assert (
        attack.take_notes() == ["lie: z = inf for 2 attackers among 2 clients, clamped to 2"]
        and attack.take_notes() == []
    )
    attack = adversary("lie", variant="authors")
    assert not torch.isfinite(
        attack.poison("train", SCHEMA, only, Key(1))["update"]
    ).any()  # screening will refuse them
    assert attack.take_notes() == [
        "lie: z = inf for 2 attackers among 2 clients, so what they send is not finite"
    ]
    alone = adversary("lie").poison(
        "train", SCHEMA, UP.only(torch.tensor([1])), Key(1)
    )  # nothing to take a spread of
    assert alone["update"].tolist() == [[3, 4]]


def spread_out(n: int, d: int, seed: int = 0) -> Uplink:
    x = Key(seed).normal(n, d, dtype=torch.float64) * torch.linspace(0.1, 2, d) + 0.3
    return Uplink(torch.arange(n), {"update": x})


@pytest.mark.parametrize("perturbation", ["std", "unit", "sign"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_min_max_and_min_sum_sit_on_their_bounds(name: str, scale: float, perturbation: str) -> None:
    up = spread_out(9, 40)
    x = up["update"] * scale
    attack = build("attack", {"name": name, "clients": (2, 6), "perturbation": perturbation})
    schema: Schema = {"update": Field("update", (40,))}
    row = Adversary(attack, torch.arange(9), Key(0)).poison(
        "train", schema, Uplink(up.ids, {"update": x}), Key(1)
    )["update"][2]
    to_row, pairs = torch.cdist(row[None], x)[0], torch.cdist(x, x)
    if name == "min-max":
        reached, bound = to_row.max(), pairs.max()
    else:
        reached, bound = (to_row**2).sum(), (pairs**2).sum(1).max()
    assert float(bound) * (1 - 1e-4) <= float(reached) <= float(bound) * (1 + 1e-9)
    away = row - x.mean(0)
    direction = {"std": -x.std(0), "unit": -x.mean(0), "sign": -x.mean(0).sign()}[perturbation]
    assert float(torch.cosine_similarity(away, direction, dim=0)) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_the_coarse_search_of_the_authors(name: str) -> None:
    """Never beyond the bound (here on distances that are not squared), and within two steps of it."""
    up = spread_out(9, 40)
    x = up["update"]
    attack = build("attack", {"name": name, "clients": (2, 6), "variant": "authors"})
    row = Adversary(attack, torch.arange(9), Key(0)).poison(
        "train", {"update": Field("update", (40,))}, up, Key(1)
    )["update"][2]
    gamma = float((x.mean(0) - row).norm() / x.std(0).norm())

    def within(gamma: float) -> bool:
        to_row, pairs = torch.cdist((x.mean(0) - gamma * x.std(0))[None], x)[0], torch.cdist(x, x)
        return (
            bool(to_row.max() <= pairs.max())
            if name == "min-max"
            else bool(to_row.sum() <= pairs.sum(1).max())
        )

    assert within(gamma - 1e-9) and not within(gamma + 0.1)


@pytest.mark.parametrize("name", ["min-max", "min-sum"])
def test_nothing_to_hide_among(name: str) -> None:
    same = Uplink(UP.ids, {**UP.fields, "update": torch.ones(4, 2, dtype=torch.float64)})
    assert torch.equal(sent(name, same), torch.ones(2, 2))  # clients that do not differ
    assert sent(name, UP.only(torch.tensor([1]))).tolist() == [[3, 4]]  # or nobody else


def test_ipm_turns_the_mean() -> None:
    assert sent("ipm").tolist() == [[-2, -4], [-2, -4]]  # -4 * (.5, 1)
    assert sent("ipm", eps=0.5)[0].tolist() == [-0.25, -0.5] and sent("ipm", eps=1.0, knows="colluders")[
        0
    ].tolist() == [-0.5, -5]
    up = spread_out(10, 30)
    attack = Adversary(build("attack", {"name": "ipm", "fraction": 0.3}), torch.arange(10), Key(0))
    after = attack.poison("train", {"update": Field("update", (30,))}, up, Key(1))["update"]
    benign = up["update"][attack.benign(up.ids)].mean(0)
    assert float(after.mean(0) @ benign) < 0


def test_gaussian() -> None:
    many = Uplink(UP.ids, {**UP.fields, "update": torch.zeros(4, 20000, dtype=torch.float64)})
    drawn = sent("gaussian", many)
    assert drawn.std().item() == pytest.approx(0.05, rel=0.02) and abs(drawn.mean().item()) < 1e-3
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(drawn, sent("gaussian", many))
    assert torch.equal(sent("gaussian", sigma=0.0), torch.zeros(2, 2))
    # parameters 1 and 3 have a standard deviation of sqrt(2); the third number is a buffer
    torch.testing.assert_close(sent("gaussian", scale="model"), sent("gaussian") * 2**0.5)
    with pytest.raises(RunError, match='set attack.scale = "absolute"'):
        adversary("gaussian", scale="model").poison("train", SCHEMA, UP, Key(1))


def test_mimic() -> None:
    assert sent("mimic").tolist() == [[1, 0], [1, 0]]
    five = Uplink(
        torch.tensor([0, 1, 2, 3, 6]),
        {
            **{name: torch.cat([value[:1], value]) for name, value in UP.fields.items()},
            "update": torch.tensor([[1.0, 0.0], [2.0, 0.1], [9.0, 9.0], [7.0, 0.2], [8.0, 8.0]]),
        },
    )
    assert sent("mimic", five, whom="spread")[0].tolist() == pytest.approx([7.0, 0.2])
    assert sent("mimic", UP.only(torch.tensor(ATTACKERS))).tolist() == [[3, 4], [-2, 6]]


def test_adaptive_stays_inside_the_norm_test() -> None:
    benign = HONEST[[0, 2]].mean(0)
    for align in (0.0, 0.3, -0.5):
        row = sent("adaptive", t_norm=2.0, margin=0.1, align=align)[0]
        assert float(row.norm()) == pytest.approx(1.8)
        assert float(row @ benign / row.norm() / benign.norm()) == pytest.approx(align, abs=1e-9)
    same = Uplink(UP.ids, {**UP.fields, "update": torch.ones(4, 2, dtype=torch.float64)})
    assert float(sent("adaptive", same, align=0.0)[0].norm()) == pytest.approx(9.5)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"name": "lie", "knows": "own"},
            'attack: \'lie\' needs more than knows = "own"; set knows = "colluders" or more',
        ),
        ({"name": "mimic", "knows": "colluders"}, 'set knows = "everyone" or more'),
        ({"name": "adaptive", "knows": "everyone"}, 'set knows = "defence" or more'),
        ({"name": "ipm", "redraw": True, "clients": [1]}, "leave one of the two out"),
        (
            {"name": "ipm", "fraction": 0.2, "clients": [1]},
            "clients names who attacks, fraction says how many; leave one of the two out",
        ),
        ({"name": "ipm", "lies": {"cuont": 2.0}}, "attack.lies"),
        (
            {"name": "label-flip", "skew": 0.25},
            'attack: skew needs random labels, but flip is "next"; set flip = "random"',
        ),
    ],
)
def test_settings_that_cannot_be(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("attack", table)


def test_lies_about_other_fields() -> None:
    liar = adversary("sign-flip", lies={"count": 10.0}, claims={"score": 1.0})
    after = liar.poison("train", SCHEMA, UP, Key(1))
    assert after["count"].tolist() == [1, 20, 3, 40] and after["trust"].tolist() == [0.5, 1, 0.5, 1]
    assert (
        after["update"][1].tolist() == [-3, -4]
        and after["buffers"] is UP["buffers"]
        and UP["count"].tolist() == [1, 2, 3, 4]
    )
    scores: Schema = {"trust": Field("score")}  # a task in which the attack itself has nothing to say
    only = liar.poison("score", scores, Uplink(UP.ids, {"trust": UP["trust"]}), Key(1))
    assert only["trust"].tolist() == [0.5, 1, 0.5, 1]


def test_the_servers_own_row_is_out_of_sight() -> None:
    """A root update (fltrust) is neither counted nor seen."""
    ids = torch.cat([torch.tensor([ROOT]), UP.ids])
    with_root = Uplink(ids, {name: torch.cat([100 * value[:1], value]) for name, value in UP.fields.items()})
    for name in ("replacement", "lie", "ipm", "min-max", "mimic"):
        assert torch.equal(sent(name, with_root), sent(name)), name


def test_a_cohort_without_clients_to_learn_from_is_noted() -> None:
    """An attack that cannot do its work is not to pass for one that was resisted."""
    alone, partial = UP.only(torch.tensor([1])), {"clients": (2,), "knows": "colluders"}
    cases: list[tuple[str, Uplink, dict[str, Any]]] = [
        ("min-max", UP, partial),
        ("min-sum", UP, partial),
        ("lie", UP, {**partial, "z": 1.0}),
        ("mimic", alone, {}),
    ]
    for name, up, settings in cases:
        attack = adversary(name, **settings)
        assert torch.equal(attack.poison("train", SCHEMA, up, Key(1))["update"], up["update"])
        assert len(attack.take_notes()) == 1, name
        attack = adversary(name)
        assert (
            not torch.equal(attack.poison("train", SCHEMA, UP, Key(1))["update"], HONEST)
            and attack.take_notes() == []
        )


def test_replies_are_not_to_be_written_to() -> None:
    class Vandal(Attack):
        """Spoils what others send."""

        knows: Any = "everyone"

        def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> dict[str, Tensor]:
            view.everyone("update")[0] = 9.0
            return {}

    own = Uplink(UP.ids, {name: value.clone() for name, value in UP.fields.items()})
    with pytest.raises(RunError, match="changed replies in place"):
        Adversary(Vandal(clients=(2, 6)), torch.arange(10), Key(0)).poison("train", SCHEMA, own, Key(1))


def test_a_share_that_rounds_to_no_attacker_is_refused() -> None:
    """Else a run without attackers would pass for one that was resisted."""
    for redraw in (False, True):
        with pytest.raises(
            ConfigError,
            match="attack.fraction: 0.09 of 10 clients rounds to 0 attackers; raise it, or name them",
        ):
            Adversary(
                build("attack", {"name": "lie", "fraction": 0.09, "redraw": redraw}), torch.arange(10), Key(0)
            )
    assert not len(
        Adversary(build("attack", {"name": "lie", "fraction": 0.0}), torch.arange(10), Key(0)).malicious
    )


@pytest.mark.parametrize("name", built_in("attack"))
def test_what_is_not_known_changes_nothing(name: str) -> None:
    """Other benign updates, the same attackers: what these send stays the same, to the bit, unless they may
    know everyone."""
    least = built_in("attack")[name].least
    others = Uplink(
        UP.ids,
        {
            **UP.fields,
            "update": torch.where(torch.isin(UP.ids, torch.tensor([2, 6]))[:, None], HONEST, 7 - HONEST),
        },
    )
    for knows in [level for level in ("own", "colluders") if REACH[level] >= REACH[least]]:
        assert torch.equal(sent(name, knows=knows), sent(name, others, knows=knows)), knows
    if least in ("everyone", "defence"):
        assert not torch.equal(sent(name), sent(name, others))


@pytest.mark.parametrize("name", ["lie", "min-max", "min-sum", "ipm", "adaptive", "mimic"])
def test_a_client_whose_training_diverged_does_not_stop_the_attack(name: str) -> None:
    """They send what they would if it were not there: such an update is refused anyway."""
    settings = {"lie": {"z": 1.0}, "ipm": {"eps": 2.0}, "mimic": {"whom": "spread"}}.get(name, {})
    ran_away = Uplink(UP.ids, {**UP.fields, "update": HONEST.clone()})
    ran_away["update"][0, 1] = float("nan")
    attack = adversary(name, **settings)
    with_it, without = (
        attack.poison("train", SCHEMA, up, Key(1))["update"]
        for up in (ran_away, UP.only(torch.tensor([1, 2, 3])))
    )
    assert torch.equal(with_it[ATTACKERS], without[[0, 2]])
    all_gone = Uplink(UP.ids, {**UP.fields, "update": torch.full_like(HONEST, float("nan"))})
    assert not torch.isfinite(attack.poison("train", SCHEMA, all_gone, Key(1))["update"]).any()
