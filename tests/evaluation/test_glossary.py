from __future__ import annotations

import pytest

from holdfast.evaluation.glossary import GLOSSARY, explain
from holdfast.evaluation.metrics import NAMES, SECONDS


@pytest.mark.parametrize("name", [*NAMES, *(f"seconds/{part}" for part in SECONDS)])
def test_what_every_result_has_is_explained(name: str) -> None:
    assert explain(name)


def test_names_that_are_made_from_others() -> None:
    assert explain("rounds_to/0.80") == "first round whose accuracy reaches 0.80"
    assert explain("validation/loss") == f"{GLOSSARY['loss']}, on validation data instead of test data"
    assert explain("auc/personal") == f"{GLOSSARY['auc']}, here of the personal model"
    assert explain("attack/asr/personal") == f"{GLOSSARY['attack/asr']}, here of the personal model"
    assert explain("attack/asr/strict/global") == f"{GLOSSARY['attack/asr/strict']}, here of the global model"
    assert explain("macro_f1/std") == f"standard deviation over clients of: {GLOSSARY['macro_f1']}"
    assert "score norm/norm" in (explain("detection/auc/norm/norm") or "")
    assert explain("no such figure") is None
