"""What a client half sees of its method."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest

from holdfast.core.errors import SettingError
from holdfast.core.registry import parts, setting
from holdfast.local.function_identity import same
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Method


class Told(Method):
    """Has a setting of every kind."""

    Client = ClientRule
    Server = Averaging
    lam: float = setting(0.1, "differs by client")
    share: float = setting(0.5, "decides what travels", static=True)
    mode: str = setting("plain", "structure")
    widths: list[int] = setting([1, 2], "structure that cannot be hashed")
    clip: float = setting(1.0, "only the server reads it", server=True)
    votes: int = setting(3, "only the server reads it", server=True)

    @property
    def half(self) -> float:
        return self.lam / 2

    @cached_property
    def twice(self) -> float:
        return self.share * 2

    def scaled(self, by: float) -> float:
        return by * self.share

    def leaks(self) -> float:
        return self.scaled(self.lam)


def seen(**settings: Any) -> Any:
    return Told(**settings).client_half().method


def test_structure_is_read_as_it_is() -> None:
    method = seen(share=0.25)
    assert (method.share, method.mode, method.widths, method.name, method.deploys) == (
        0.25,
        "plain",
        [1, 2],
        "",
        "global",
    )
    assert method.scaled(4.0) == 1.0 and method.twice == 0.5 and isinstance(method, Told)


@pytest.mark.parametrize("name", ["lam", "half", "leaks", "settings", "row_settings", "structure"])
def test_a_setting_that_may_differ_is_refused_by_every_way(name: str) -> None:
    with pytest.raises(
        SettingError,
        match=r"self.method.lam cannot be read in a client half.*read local.settings.lam.*static=True",
    ):
        value = getattr(seen(), name)
        value()


@pytest.mark.parametrize("name", ["model_dump", "__dict__", "model_copy", "model_dump_json"])
def test_a_client_half_cannot_get_the_whole_method(name: str) -> None:
    with pytest.raises((SettingError, AttributeError, KeyError)):
        value = getattr(seen(), name)
        value["lam"] if isinstance(value, dict) else value()


def test_server_settings_are_refused_and_do_not_separate_experiments() -> None:
    with pytest.raises(SettingError, match="self.method.votes is declared as the server's"):
        _ = seen().votes
    assert Told().structure() == Told(votes=5, clip=2.0, lam=3.0).structure()


@pytest.mark.parametrize("change", [{"share": 0.4}, {"mode": "other"}, {"widths": [2, 1]}])
def test_structure_separates(change: dict[str, Any]) -> None:
    assert Told().structure() != Told(**change).structure() and hash(Told().structure()) == hash(
        Told(widths=[1, 2]).structure()
    )


def test_a_program_is_shared_by_views_that_show_the_same() -> None:
    class Plain(Method):
        """Nothing but a real number."""

        Client, Server = ClientRule, Averaging
        lam: float = setting(0.1, "differs by client")

    assert same(Plain(lam=1.0).client_half().method) == same(Plain(lam=2.0).client_half().method)
    one, two, other = (
        Told(lam=lam, share=share).client_half().method
        for lam, share in ((1.0, 0.5), (2.0, 0.5), (1.0, 0.25))
    )
    assert one == two != other and hash(one) == hash(two)


def test_no_method_overrides_what_may_be_fused() -> None:
    for name, method in parts("method").items():
        for function in ("structure", "row_settings", "static_settings"):
            assert getattr(method, function) is getattr(Method, function), (name, function)
