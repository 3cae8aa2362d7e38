"""What travels arrives bit by bit, and nothing malformed gets through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: E402

from holdfast.core.types import Exchange, Field  # noqa: E402
from holdfast.deploy import wire  # noqa: E402
from holdfast.deploy.messaging import Malformed  # noqa: E402
from tests.deploy.wire_cases import BANK, FIELDS, GOOD, HEADER, SCHEMA, exchange, header, npy, raw, sent, told  # noqa: E402


def read(content: RecordDict, client: int = 0) -> Exchange:
    content = sent(content)
    header = wire.read_header(content)
    assert header == HEADER
    return wire.read_exchange(content, header, client, 4, torch.float32)


@pytest.mark.parametrize("pick", [[[0], [0]], [[0], [2]], [[2, 0], [1, 1]], [[-1, 2], [2, -1]], [[-1], [0]]])
def test_each_client_gets_its_own_models_and_rows(pick: list[list[int]]) -> None:
    whole = exchange(pick)
    for place in range(2):
        content = wire.pack_exchange(whole, place, HEADER)
        got = read(content, client=place * 5)
        assert (got.task, got.step, got.to.tolist()) == ("train", 1, [place * 5])
        for had, has in zip(pick[place], got.pick[0].tolist(), strict=True):
            assert (had < 0) == (has < 0)
            if had >= 0:
                assert torch.equal(got.bank[has], BANK[had])
        distinct = {p for p in pick[place] if p >= 0}
        assert len(content["bank"]) == bool(distinct)
        assert len(got.bank) == max(1, len(distinct))  # nobody else's models travel
        for name, value in whole.extra.items():
            assert (
                torch.equal(got.extra[name], value[place : place + 1])
                and got.extra[name].dtype == value.dtype
            )


def test_a_request_without_models() -> None:
    whole = Exchange(
        "ask", torch.tensor([4]), torch.zeros(0, 0), torch.zeros(1, 0, dtype=torch.int64), {}, step=0
    )
    got = read(wire.pack_exchange(whole, 0, HEADER), 4)
    assert got.pick.shape == (1, 0) and got.bank.shape == (0, 4)


def spoil_header(**changes: object) -> RecordDict:
    content = wire.pack_exchange(exchange([[0], [1]]), 0, HEADER)
    content["header"] = ConfigRecord({**content["header"], **changes})
    return content


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "../elsewhere"},
        {"run": ""},
        {"run": ".."},
        {"run": "a/b"},
        {"run": "x" * 200},
        {"task": "os.system"},
        {"task": ""},
        {"round": "3"},
        {"round": 3.0},
        {"round": 2},
        {"step": -1},
        {"committed": -1},
        {"committed": 3},
        {"threads": 0},
        {"world": 1},
        {"more": 1},
        {"pick": [1]},
        {"pick": [-2]},
        {"pick": [0.0]},
        {"pick": 0},
        {"pick": []},
    ],
)
def test_a_client_refuses_a_malformed_header(changes: dict[str, object]) -> None:
    content = sent(spoil_header(**changes))
    with pytest.raises(Malformed):
        wire.read_exchange(content, wire.read_header(content), 0, 4, torch.float32)


@pytest.mark.parametrize(
    "bank",
    [
        BANK[:1, :3],
        BANK[:2],
        BANK[:1].double(),
        BANK[0],
        torch.full((1, 4), float("nan")),
        torch.full((1, 4), float("inf")),
    ],
)
def test_a_client_refuses_a_malformed_model(bank: torch.Tensor) -> None:
    content = sent(wire.pack_exchange(exchange([[0], [1]]), 0, HEADER))
    content["bank"] = ArrayRecord({"bank": Array(bank.numpy())})
    with pytest.raises(Malformed):
        wire.read_exchange(content, HEADER, 0, 4, torch.float32)


def test_a_client_refuses_missing_records_and_rows_of_others() -> None:
    content = sent(wire.pack_exchange(exchange([[0], [1]]), 0, HEADER))
    content["extra"] = ArrayRecord({"weights": Array(np.zeros((2, 2)))})
    with pytest.raises(Malformed, match="one row"):
        wire.read_exchange(content, HEADER, 0, 4, torch.float32)
    del content["extra"]
    with pytest.raises(Malformed, match="records bank, header, post, expected"):
        wire.read_header(content)


def test_a_reply_arrives_bit_by_bit() -> None:
    got = wire.read_fields(sent(wire.pack_fields(FIELDS)), SCHEMA, torch.float32)
    assert got.keys() == FIELDS.keys()
    for name, value in FIELDS.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape
        assert got[name].numpy().tobytes() == value.numpy().tobytes()
        got[name].zero_()  # it is the server's own memory


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a readable array"),
        (b"\x93NUMPYgarbage", "not a readable array"),
        (GOOD[:20], "not a readable array"),
        (GOOD[:-1], "15 bytes of values"),
        (GOOD + b"\0", "17 bytes of values"),
        (GOOD + b"\0" * 5000, "bytes, expected about 16"),
        (npy(np.zeros(3, dtype=np.float32)), r"shape \(3,\), expected \(4,\)"),
        (npy(np.zeros((2, 2), dtype=np.float32)), "shape"),
        (npy(np.zeros(4, dtype=np.float64)), "float64, expected torch.float32"),
        (npy(np.zeros(4, dtype=">f4")), ">f4"),
        (npy(np.zeros(4, dtype=np.float16)), "float16"),
        (npy(np.zeros(4, dtype=np.int32)), "int32"),
        (npy(np.array([{"a": 1}] * 4, dtype=object)), "object"),
        (npy(np.zeros((2, 2), dtype=np.float32, order="F"), True), "shape"),
        (header(10**12) + b"\0" * 16, "shape"),
        (header(-4) + b"\0" * 16, "shape"),
        (b"\x93NUMPY\x02\x00" + GOOD[8:], "version"),
        (npy(np.zeros((), dtype=np.float32)), "shape"),
        (told("((("), "TokenError"),
        (told("  x\n y\n  z"), "IndentationError"),
        (told("{[]: 1}"), "TypeError"),
        (told("{'descr': ('<f4',), 'fortran_order': False, 'shape': (4,)}"), "IndexError"),
    ],
)
def test_a_malformed_array_is_refused(data: bytes, reason: str) -> None:
    content = sent(wire.pack_fields(FIELDS))
    del content["small"]["update"]
    content["fields"]["update"] = raw(data)
    with pytest.raises(Malformed, match=f"^update .*({reason})"):
        wire.read_fields(content, SCHEMA, torch.float32)


def test_wrong_names_are_refused() -> None:
    extra, missing = {**FIELDS, "more": torch.zeros(1)}, {k: v for k, v in FIELDS.items() if k != "loss"}
    for fields in (extra, missing, {}):
        with pytest.raises(Malformed, match="fields .*, expected buffers, count, loss, update"):
            wire.read_fields(sent(wire.pack_fields(fields)), SCHEMA, torch.float32)
    for content in (RecordDict(), sent(RecordDict()), RecordDict({"fields": ArrayRecord({})})):
        with pytest.raises(Malformed, match="records"):
            wire.read_fields(content, SCHEMA, torch.float32)
    with pytest.raises(Malformed, match="not a table of arrays"):
        wire.read_fields(
            sent(RecordDict({"fields": ConfigRecord({}), "small": ConfigRecord({})})), SCHEMA, torch.float32
        )
    with pytest.raises(Malformed, match="not a table of settings"):
        wire.read_fields(
            sent(RecordDict({"fields": ArrayRecord({}), "small": ArrayRecord({})})), SCHEMA, torch.float32
        )


@pytest.mark.parametrize(
    "digits", ["", "00" * 15, "00" * 17, " " + "00" * 15 + " ", "zz" * 16, "0" * 31, 5, [0.0]]
)
def test_malformed_digits_of_a_small_field_are_refused(digits: object) -> None:
    content = sent(wire.pack_fields(FIELDS))
    content["small"]["update"] = digits
    with pytest.raises(Malformed, match="update is not the 32 digits of a small field"):
        wire.read_fields(content, SCHEMA, torch.float32)


def test_a_field_that_is_there_twice_or_is_too_large_for_digits_is_refused() -> None:
    content = sent(wire.pack_fields(FIELDS))
    content["fields"]["update"] = raw(GOOD)
    with pytest.raises(Malformed, match="update is there twice"):
        wire.read_fields(content, SCHEMA, torch.float32)
    large = {"update": Field("update", (100,))}
    content = sent(RecordDict({"fields": ArrayRecord({}), "small": ConfigRecord({"update": "00" * 400})}))
    with pytest.raises(Malformed, match="digits of a small field"):
        wire.read_fields(content, large, torch.float32)


def test_a_reason_cannot_command_the_operators_terminal() -> None:
    with pytest.raises(Malformed) as caught:
        wire.read_fields(
            sent(wire.pack_fields({"\x1b[2Jx\nround 9: all is well": torch.zeros(1)})), SCHEMA, torch.float32
        )
    assert (
        str(caught.value).isprintable()
        and "x round 9" in str(caught.value)
        and "[2J" not in str(caught.value)
    )


def test_a_reason_stays_short() -> None:
    fields = {"x" * 10_000 + str(i): torch.zeros(1) for i in range(50)}
    with pytest.raises(Malformed) as caught:
        wire.read_fields(sent(wire.pack_fields(fields)), SCHEMA, torch.float32)
    assert len(str(caught.value)) < 600


def test_headers_say_where_the_run_stands() -> None:
    with pytest.raises(Malformed, match="are not possible"):
        replace(HEADER, committed=3)
