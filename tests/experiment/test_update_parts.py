from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.experiment.config import completed, make_config
from holdfast.experiment.config_tables import assign, merge
from tests.helpers import tiny

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"optimizer": "adam", "train": {"momentum": 0.9}},
        "train.momentum: optimizer 'adam' does not use it.*betas",
    ),
    ({"optimizer": "adamw", "train": {"weight_decay": 0.1}}, "set optimizer.weight_decay in its place"),
    (
        {"optimizer": "torch:Adagrad", "train": {"momentum": 0.1}},
        "'torch:Adagrad' does not use it; leave it out$",
    ),
    ({"optimizer": "nadam"}, 'write optimizer.name = "torch:NAdam"'),
    ({"optimizer": "Adam"}, 'unknown optimizer .Adam.; write "adam", or "torch:Adam" for the class'),
    ({"optimizer": "adem"}, "unknown optimizer 'adem'; did you mean 'adam'"),
    ({"optimizer": "torch:LBFGS"}, "torch:LBFGS cannot train a stack"),
    (
        {"optimizer": {"name": "sgd", "persist": True}},
        "'sgd' keeps nothing between steps; set train.momentum",
    ),
    ({"optimizer": {"name": "torch:NAdam", "persist": True}}, "'torch:NAdam' cannot be kept between rounds"),
    ({"optimizer": {"name": "sgd", "nesterov": True}}, "set train.momentum"),
    ({"optimizer": {"name": "adam", "betas": [0.9, 1.0]}}, "optimizer.betas.1"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "not an object of one"),
    ({"method": "pfedme", "optimizer": "adam"}, "optimizer: method 'pfedme' cannot use it"),
    ({"method": "pfedme", "train": {"clip_gradient": 1.0}}, "train.clip_gradient: method 'pfedme'"),
    ({"method": "apfl", "train": {"clip_gradient": 1.0}}, "method 'apfl' .*one network"),
    ({"train": {"clip_gradient": 0.0}}, "train.clip_gradient: input should be greater than 0"),
    ({"schedule": "cos"}, "unknown schedule 'cos'; did you mean 'cosine'"),
    ({"schedule": {"name": "cosine", "over": "epochs"}}, "schedule.over"),
]


@pytest.mark.parametrize(("sections", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_would_be_ignored_is_an_error(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(HoldfastError, match=words) as error:
        tiny(**sections).parts()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given", ["torch:nadam", "torch.optim.NAdam", torch.optim.NAdam, {"name": torch.optim.NAdam}]
)
def test_a_class_of_torch_is_found_again_by_its_name(given: Any) -> None:
    plain = tiny(optimizer=given).plain()["optimizer"]
    assert plain in ("torch:NAdam", {"name": "torch:NAdam"})
    assert tiny(optimizer=plain).parts().optimizer.name == "torch:NAdam"


def test_a_schedule_of_the_name_none_is_none() -> None:
    assert tiny(schedule="none").parts().schedule is None
    assert tiny(schedule={"name": "none"}).parts().schedule is None


def test_settings_by_dots_name_the_default_part() -> None:
    table: dict[str, Any] = {}
    assign(table, "optimizer.persist", True)
    assign(table, "schedule.warmup", 3)
    assert table == {
        "optimizer": {"name": "sgd", "persist": True},
        "schedule": {"name": "constant", "warmup": 3},
    }
    assert merge(table, {"schedule": {"name": "cosine"}})["schedule"] == {"name": "cosine", "warmup": 3}
    assert merge({"optimizer": "adam"}, {"optimizer": {"eps": 0.1}})["optimizer"] == {
        "name": "adam",
        "eps": 0.1,
    }


def test_a_config_of_an_earlier_version_means_sgd() -> None:
    old = tiny().plain()
    for name in ("optimizer", "schedule"):
        old.pop(name)
    old["train"].pop("clip_gradient")
    assert completed(old) == tiny().plain()
    parts = make_config(old).parts()
    assert parts.optimizer.name == "sgd" and parts.schedule is None
