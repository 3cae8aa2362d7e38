from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import pytest

import holdfast.wrappers
from holdfast.aggregators.mean import Mean
from holdfast.core import registry
from holdfast.core.errors import ConfigError
from holdfast.core.registry import KINDS, Part, build, describe, find, load_plugin, parts, register, setting
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.manifest import config_of
from holdfast.methods.ditto import Ditto
from holdfast.results.run import Run

PLUGIN = '''
"""A user's file."""
from holdfast import Part, register, setting

@register("partition", "mine", paper="Somebody, 2026")
class Mine(Part):
    """Deals by hand.

    With care."""
    share: float = setting(0.5, "how much", ge=0, le=1)
    names: tuple[str, ...] = setting((), "who")
'''


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_listed_and_described(kind: str) -> None:
    for name, cls in parts(kind).items():
        about = describe(cls)
        assert about["name"] == name and about["kind"] == kind and about["summary"].endswith((".", "?"))
        assert all(s["help"] or s["name"] in {"shuffle"} for s in about["settings"]), about["settings"]


def test_parts_are_sorted() -> None:
    assert list(parts("method")) == sorted(parts("method"))


def test_a_far_name_is_not_suggested_and_what_exists_is_listed() -> None:
    with pytest.raises(ConfigError, match="unknown server 'scaffold'; known: fedadagrad, fedadam, "):
        find("server", "scaffold")


def test_of_many_parts_the_command_that_lists_them_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown attack 'scaffold'; `holdfast list attack` shows all \d\d$"
    ):
        find("attack", "scaffold")


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="unknown method 'dito'; did you mean 'ditto'"):
        find("method", "dito")
    with pytest.raises(ConfigError, match="unknown server 'zzzz'; known: .*fedadam, .*fedyogi"):
        find("server", "zzzz")
    with pytest.raises(ConfigError, match="unknown kind of part 'metod'; did you mean 'method'"):
        parts("metod")


def test_build() -> None:
    assert build("method", "ditto") == Ditto()
    assert build("method", {"name": "ditto", "lam": 2}) == Ditto(lam=2.0)
    part = Ditto(lam=3)
    assert build("method", part) is part
    with pytest.raises(ConfigError, match="'mean' is of kind aggregator, expected method"):
        build("method", Mean())
    with pytest.raises(ConfigError, match="unknown key 'method.lan'; did you mean 'lam'"):
        build("method", {"name": "ditto", "lan": 2})
    with pytest.raises(ConfigError, match=r"method.lam: .*greater than or equal to 0 \(got -1\)"):
        build("method", {"name": "ditto", "lam": -1})
    with pytest.raises(ConfigError, match="needs a name"):
        build("method", {"lam": 2})


def test_a_part_without_settings_says_so() -> None:
    with pytest.raises(ConfigError, match="^unknown key 'method.lamm'; method 'fedavg' has no settings$"):
        build("method", {"name": "fedavg", "lamm": 1})


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_are_finite(number: float) -> None:
    with pytest.raises(ConfigError, match="method.lam: .*finite"):
        build("method", {"name": "ditto", "lam": number})
    for section in ({"data": {"split": {"train": number}}}, {"train": {"augment": {"rotation": number}}}):
        with pytest.raises(ConfigError, match="finite"):
            make_config(section)


def test_a_part_is_frozen_and_comparable() -> None:
    assert Ditto(lam=1) == Ditto(lam=1.0) and hash(Ditto(lam=1)) == hash(Ditto(lam=1.0))
    with pytest.raises(ValueError, match="frozen"):
        Ditto().lam = 3.0  # type: ignore[misc]


def test_a_taken_name_is_refused_for_another_class(forget: None) -> None:
    with pytest.raises(
        ConfigError, match="aggregator 'mean' is registered already, by holdfast.aggregators.mean"
    ):

        @register("aggregator", "mean")
        class Other(Part):
            """Not the mean."""

    assert find("aggregator", "mean") is Mean
    assert register("aggregator", "mean")(Mean) is Mean
    with pytest.raises(ConfigError, match="unknown kind"):
        register("agregator", "x")(Mean)


def test_plugin_file(tmp_path: Path, forget: None) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    load_plugin(file)
    load_plugin(str(file))  # the same file again is no mistake
    about = describe(find("partition", "mine"))
    assert (
        about["summary"] == "Deals by hand."
        and about["paper"] == "Somebody, 2026"
        and "With care." in about["text"]
    )
    assert about["settings"][0] == {
        "name": "share",
        "default": 0.5,
        "required": False,
        "type": "float",
        "help": "how much",
    }
    assert build("partition", {"name": "mine", "share": 0.25}).share == 0.25


def test_a_second_plugin_with_the_same_name_is_refused(tmp_path: Path, forget: None) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(PLUGIN)
    load_plugin(tmp_path / "one.py")
    with pytest.raises(ConfigError, match="partition 'mine' is registered already"):
        load_plugin(tmp_path / "two.py")
    (tmp_path / "two.py").write_text(PLUGIN.replace('"mine"', '"yours"'))
    load_plugin(tmp_path / "two.py")  # a failed load can be tried again
    assert find("partition", "yours").__qualname__ == "Mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "failed to load: ZeroDivisionError"),
        ("def x(:", "failed to load: SyntaxError"),
        (None, "not found"),
    ],
)
def test_a_broken_plugin_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_plugin(file)


def test_settings_without_default_are_required(forget: None) -> None:
    class Needy(Part):
        """Needs a number."""

        n: int = setting(..., "a number")

    assert describe(Needy)["settings"][0]["required"] is True


def test_a_variant_presets_what_is_not_given(forget: None) -> None:
    @register("loss", "test-preset")
    class Preset(Part):
        """Has a variant."""

        presets: ClassVar[dict[str, dict[str, Any]]] = {"authors": {"share": 0.9, "times": 3}}
        variant: Literal["paper", "authors"] = setting("paper", "which")
        share: float = setting(0.5, "how much", le=1)
        times: int = setting(1, "how often")

    assert (Preset().share, Preset().times) == (0.5, 1)
    assert (Preset(variant="authors").share, Preset(variant="authors").times) == (0.9, 3)
    kept = build(
        "loss", {"name": "test-preset", "variant": "authors", "share": 0.5}
    )  # given, be it as the default
    assert (kept.share, kept.times) == (0.5, 3)
    assert Preset(**kept.settings()) == kept  # as a manifest spells it out
    with pytest.raises(ConfigError, match="variant"):
        build("loss", {"name": "test-preset", "variant": "other"})


WITH_VARIANTS = [
    (kind, name)
    for kind in KINDS
    for name, cls in parts(kind).items()
    if "paper" in get_args(getattr(cls.model_fields.get("variant"), "annotation", None))
]


@pytest.mark.parametrize(("kind", "name"), WITH_VARIANTS)
def test_the_variant_card_of_version_0_1_is_paper(kind: str, name: str) -> None:
    old, new = (build(kind, {"name": name, "variant": variant}) for variant in ("card", "paper"))
    assert old == new and old.settings()["variant"] == "paper"


def test_configs_that_say_card_and_paper_are_the_same_experiment() -> None:
    def config(variant: str) -> Config:
        wrap = [{"name": "bucketing", "variant": variant}]
        return make_config(
            {
                "method": {"name": "fedcap", "variant": variant},
                "aggregator": {"name": "multi-krum", "f": 1, "variant": variant, "wrap": wrap},
                "detectors": [{"name": "normality", "variant": variant}],
                "attack": {"name": "lie", "variant": variant, "knows": "everyone"},
            }
        )

    old, new = config("card"), config("paper")
    assert old.plain() == new.plain() and "card" not in repr(old.plain())
    assert old.parts() == new.parts() and old.parts().method.structure() == new.parts().method.structure()


def test_a_manifest_of_version_0_1_that_says_card_loads(simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": "fedcap", "variant": "paper"})
    file = run.path / "manifest.json"
    file.write_text(file.read_text().replace('"paper"', '"card"'))
    old = Run(run.path)
    assert old.manifest["config"]["method"]["variant"] == "card"
    assert old.config.plain() == run.config.plain()
    assert config_of(old.path, old.manifest, run.config) is run.config  # as a resume compares them
    assert old.vector(0).equal(run.vector(0))


def test_a_plug_in_may_have_a_variant_called_card(forget: None) -> None:
    @register("loss", "test-card")
    class Card(Part):
        """Has a variant of this name."""

        variant: Literal["card", "paper"] = setting("paper", "which")

    assert build("loss", {"name": "test-card", "variant": "card"}).variant == "card"


def test_a_part_is_found_because_its_file_is_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: None
) -> None:
    file = "from holdfast.core.registry import Part, register\n"
    file += "@register('wrapper', 'test-found')\nclass Found(Part):\n    'A wrapper that no list names.'\n"
    (tmp_path / "found_by_its_file.py").write_text(file)
    monkeypatch.setattr(holdfast.wrappers, "__path__", [*holdfast.wrappers.__path__, str(tmp_path)])
    registry._load_built_in.cache_clear()
    assert parts("wrapper")["test-found"].__module__ == "holdfast.wrappers.found_by_its_file"
    del sys.modules["holdfast.wrappers.found_by_its_file"]
