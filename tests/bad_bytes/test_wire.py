"""Damaged and hostile messages, frames of the trainer's socket and small files of a node: one line, no other
exception, no hang, and no memory before what came is known to be as long as it says."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict  # noqa: E402

from holdfast.core.errors import HoldfastError, RunError  # noqa: E402
from holdfast.core.types import Field  # noqa: E402
from holdfast.deploy import trainer, wire  # noqa: E402
from holdfast.deploy.export import export_model  # noqa: E402
from holdfast.deploy.messaging import Malformed, read_client  # noqa: E402
from holdfast.deploy.node import Node  # noqa: E402
from holdfast.deploy.project import init  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from holdfast.storage.store import write_tensors  # noqa: E402
from tests.bad_bytes.helpers import DEEP, JUNK, LONG, altered, broken, budget, limited, one_line  # noqa: E402
from tests.deploy.wire_cases import (
    BANK,
    FIELDS,
    GOOD,
    HEADER,
    SCHEMA,
    exchange,
    header,
    npy,
    raw,
    sent,
    told,
)  # noqa: E402

# ---- the wire ----

SETTING = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, 2, 3, 2**40, 0.5, float("nan"), b"\xff", "x" * 3000]),
    st.text(max_size=4),
    st.lists(st.integers(-2, 2), max_size=3),
    st.lists(st.text(max_size=2), min_size=1, max_size=2),
)


def spoilt_record(draw: st.DrawFn, record: Any) -> Any:
    """One entry of a record taken out, renamed, added or replaced; or a record of another kind."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([MetricRecord({"a": 1}), ArrayRecord({}), ConfigRecord({})]))
    name = draw(st.sampled_from(sorted(record)) if len(record) else st.just("x"))
    arrays = isinstance(record, ArrayRecord)
    value = (
        raw(draw(altered(record[name].data if arrays and name in record else GOOD)))
        if arrays
        else draw(SETTING)
    )
    kept = {n: v for n, v in record.items() if n != name or draw(st.booleans())}
    where = draw(st.sampled_from([name, name, "other", "\x1b[31m\n" + "y" * 400]))
    return type(record)({**kept, where: value})


@st.composite
def spoilt(draw: st.DrawFn, content: RecordDict) -> RecordDict:
    """A message with one of its records damaged, missing or added."""
    name = draw(st.sampled_from(sorted(content)))
    where = draw(st.sampled_from([name] * 9 + ["more"]))
    kept = {n: record for n, record in content.items() if n != where and draw(st.integers(0, 19))}
    return RecordDict({**kept, where: spoilt_record(draw, content[name])})


@LONG
def test_no_request_is_another_exception_than_malformed(examples: int) -> None:
    @budget(examples)
    @given(spoilt(sent(wire.pack_exchange(exchange([[0, 2], [1, 1]]), 0, HEADER))))
    def check(content: RecordDict) -> None:
        with limited(mebibytes=4):
            try:
                got = wire.read_exchange(content, wire.read_header(content), 0, 4, torch.float32)
            except Malformed as error:
                one_line(error)
            else:
                assert got.bank.isfinite().all() and got.pick.shape[0] == 1 and got.bank.shape[1] == 4

    check()


@LONG
def test_no_reply_is_another_exception_than_malformed(examples: int) -> None:
    schema = {**SCHEMA, "yes": Field("score", (3,), dtype=torch.bool)}

    @budget(examples)
    @given(spoilt(sent(wire.pack_fields({**FIELDS, "yes": torch.tensor([[True, False, True]])}))))
    def check(content: RecordDict) -> None:
        with limited(mebibytes=4):
            try:
                got = wire.read_fields(content, schema, torch.float32)
            except Malformed as error:
                one_line(error)
            else:
                assert {name: (value.shape[1:], value.dtype) for name, value in got.items()} == {
                    name: (field.shape, field.dtype or torch.float32) for name, field in schema.items()
                }

    check()


@LONG
def test_no_array_is_another_exception_than_malformed(examples: int) -> None:
    """Also where neither shape nor dtype is known beforehand, as of what a server sends beside a model."""
    whole = [npy(value.numpy()) for value in (BANK, BANK[:, :0], BANK > 1, BANK.long(), BANK[0, 0])]

    @budget(examples)
    @given(st.sampled_from(whole).flatmap(altered))
    def check(data: bytes) -> None:
        with limited(mebibytes=4):
            try:
                assert wire._tensor("x", raw(data)).nbytes <= len(data)
            except Malformed as error:
                one_line(error)

    check()


@pytest.mark.parametrize(
    "data",
    [
        header(10**12) + b"\0" * 16,
        header(2**62, 2**62) + b"\0" * 16,
        header(0, 2**63),
        header(*[1] * 200) + b"\0" * 4,
        header(2**70, 0),
        told("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}"),
        told("(" * 900),
        told("{'descr': 'V9999999999', 'fortran_order': 0, 'shape': ()}"),
    ],
    ids=range(8),
)
def test_an_array_that_claims_what_cannot_be_is_malformed(data: bytes) -> None:
    with limited(mebibytes=4), pytest.raises(Malformed) as error:
        wire._tensor("x", raw(data))
    one_line(error.value, "x ")


def test_control_characters_of_a_name_do_not_reach_the_terminal() -> None:
    content = sent(wire.pack_exchange(exchange([[0], [1]]), 0, HEADER))
    content["extra"] = ArrayRecord({"\x1b[31m\n" + "y" * 5000: raw(b"")})
    with pytest.raises(Malformed, match=r"^extra\. y+ is not a readable array") as error:
        wire.read_exchange(content, HEADER, 0, 4, torch.float32)
    one_line(error.value)


def test_a_truth_value_of_the_wire_is_true_or_false() -> None:
    """Any other byte would count as more than one where truth values are added."""
    data = npy(torch.tensor([True, False, True]).numpy())[:-3] + b"\x07\x00\x80"
    got = wire._tensor("x", raw(data), (3,), torch.bool)
    assert got.tolist() == [True, False, True] and got.view(torch.uint8).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 10**6},
        {"round": 2**40, "committed": 2**40 - 1},
        {"step": 2**40},
        {"task": "x" * 10_000},
        {"world": "x" * 10_000},
    ],
    ids=str,
)
def test_a_header_beyond_what_a_server_asks_is_malformed(changes: dict[str, Any]) -> None:
    """Threads are started, and rounds and steps are parts of the names of files."""
    content = sent(wire.pack_exchange(exchange([[0], [1]]), 0, HEADER))
    content["header"] = ConfigRecord({**content["header"], **changes})
    with pytest.raises(Malformed) as error:
        wire.read_header(content)
    one_line(error.value)


@LONG
def test_no_client_id_is_another_exception_than_malformed(examples: int) -> None:
    @budget(examples)
    @given(spoilt(sent(RecordDict({"client": ConfigRecord({"client": 1})}))))
    def check(content: RecordDict) -> None:
        try:
            assert read_client(content, 4) in range(4)
        except Malformed as error:
            one_line(error)

    check()


# ---- frames of the trainer's socket ----

INDEX: dict[str, Any] = {
    "about": {"node": {"client-id": 1}, "run": {"config": "x"}, "attempt": "1"},
    "records": {
        "header": {"config": {"run": "x", "pick": [0, -1], "discard_state": False}},
        "bank": {
            "arrays": {
                "bank": ["float32", [4], "numpy.ndarray", 8],
                "more": ["float32", [], "numpy.ndarray", 0],
            }
        },
    },
}


def frame(
    index: Any, rest: bytes = b"12345678", long: int | None = None, claimed: int | None = None
) -> bytes:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return (
        struct.pack("<QQ", len(text) if long is None else long, len(rest) if claimed is None else claimed)
        + text
        + rest
    )


def received(content: bytes) -> tuple[dict[str, Any], RecordDict]:
    here, there = socket.socketpair()
    with here, there:
        feeding = threading.Thread(target=_feed, args=(here, content))
        feeding.start()
        try:
            return trainer._receive(there)
        finally:
            there.close()
            feeding.join()


def _feed(line: socket.socket, content: bytes) -> None:
    try:
        line.sendall(content)
    except OSError:  # the other side has had enough
        pass
    line.close()


def with_arrays(arrays: Any, **more: Any) -> dict[str, Any]:
    return {"about": {}, "records": {"bank": {"arrays": arrays}}, **more}


FRAMES = {
    "nothing": b"",
    "half a head": b"\0" * 9,
    "no index": frame(b"", b""),
    "not UTF-8": frame(b"\xff\xfe"),
    "deep": frame(DEEP),
    "a list": frame([]),
    "a number": frame(7),
    "no records": frame({"about": {}}),
    "records of no kind": frame({"about": {}, "records": 3}),
    "nothing about it": frame({"records": {}}, b""),
    "about a list": frame({"about": [], "records": {}}, b""),
    "a record that is a number": frame({"about": {}, "records": {"a": 3}}, b""),
    "a record of nothing": frame({"about": {}, "records": {"a": {}}}, b""),
    "settings that are a list": frame({"about": {}, "records": {"a": {"config": [1]}}}, b""),
    "settings within settings": frame({"about": {}, "records": {"a": {"config": {"b": {"c": 1}}}}}, b""),
    "settings that are nothing": frame({"about": {}, "records": {"a": {"config": {"b": None}}}}, b""),
    "a mixed list": frame({"about": {}, "records": {"a": {"config": {"b": [1, "x"]}}}}, b""),
    "arrays that are a list": frame(with_arrays([1])),
    "an array that is a number": frame(with_arrays({"a": 8})),
    "an array of three words": frame(with_arrays({"a": ["float32", [4], "numpy.ndarray"]})),
    "a size that is a word": frame(with_arrays({"a": ["float32", [4], "numpy.ndarray", "8"]})),
    "a size of a half": frame(with_arrays({"a": ["float32", [4], "numpy.ndarray", 7.5]})),
    "a size below 0": frame(with_arrays({"a": ["float32", [4], "numpy.ndarray", -8]})),
    "true bytes": frame(with_arrays({"a": ["float32", [4], "numpy.ndarray", True]}), b"1"),
    "a size beyond the frame": frame(with_arrays({"a": ["float32", [4], "numpy.ndarray", 1 << 50]})),
    "a size within the bound and beyond the frame": frame(
        with_arrays({"a": ["float32", [4], "numpy.ndarray", 1 << 33]})
    ),
    "a shape that is a number": frame(with_arrays({"a": ["float32", 4, "numpy.ndarray", 8]})),
    "a shape of words": frame(with_arrays({"a": ["float32", ["4"], "numpy.ndarray", 8]})),
    "a dtype that is a number": frame(with_arrays({"a": [7, [4], "numpy.ndarray", 8]})),
    "more than the arrays": frame(INDEX, b"0" * 9),
    "less than the arrays": frame(INDEX, b"0" * 7),
    "a frame of 2**64": struct.pack("<QQ", 2**64 - 1, 2**64 - 1),
    "an index of 8 GB": frame(b"{}", b"", long=1 << 33),
    "an index of 60 MB that does not come": frame(b"{}", b"", long=60_000_000),
    "an index of 0": frame(b"", b"", long=0),
    "16 GB that do not come": frame(
        with_arrays({"a": ["float32", [4], "numpy.ndarray", (1 << 34) - 4096]}), b"", claimed=(1 << 34) - 4096
    ),
    "infinity": frame(b'{"about": {"a": 1e999}, "records": {}}', b""),
}


@pytest.mark.parametrize("content", FRAMES.values(), ids=FRAMES)
def test_bytes_that_are_not_a_frame_are_refused_before_memory_is_taken(content: bytes) -> None:
    with limited(mebibytes=24), pytest.raises(ValueError) as error:
        received(content)
    one_line(error.value)


@LONG
def test_no_frame_is_another_exception_than_a_value_error(examples: int) -> None:
    whole = frame(INDEX)

    @budget(examples)
    @given(broken(INDEX).map(frame) | altered(whole) | st.binary(max_size=60))
    def check(content: bytes) -> None:
        with limited(mebibytes=24):
            try:
                about, records = received(content)
            except ValueError as error:
                one_line(error)
            else:
                assert isinstance(about, dict) and all(isinstance(name, str) for name in records)

    check()


def test_an_invalid_frame_does_not_end_the_trainer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each is one line in its log, and the next request is answered."""
    path = Path(f"/tmp/hf-{os.getpid()}-{tmp_path.name[-8:]}.sock")
    threading.Thread(target=trainer.serve, args=(path,), daemon=True).start()
    try:
        for content in (frame([]), frame({"about": {}, "records": {"a": 3}}, b""), frame(DEEP)):
            with _connected(path) as line:
                _feed(line, content)
        with pytest.raises(RuntimeError, match="Malformed: records none, expected bank, extra, header, post"):
            trainer.ask(str(path), RecordDict(), {"client-id": 1}, {"config": "x"}, "1")
        assert capfd.readouterr().err.count("a request failed") == 3
    finally:
        path.unlink()


def _connected(path: Path) -> socket.socket:
    for _ in range(400):
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(str(path))
            return line
        except OSError:
            line.close()
            threading.Event().wait(0.05)
    raise AssertionError("the trainer does not listen")


# ---- small files of a server and of a node ----


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 3}',
        b'{"a": "--help"}',
        b'{"a": "12 34"}',
        b'{"a": "9999999999999999999999999"}',
        b"[]",
        b"\xff",
        DEEP,
        b'{"a": "-1"}',
    ],
    ids=range(8),
)
def test_a_table_of_registered_nodes_that_is_damaged_is_one_line(tmp_path: Path, content: bytes) -> None:
    """Its values are arguments of Flower's command line."""
    project = init(tmp_path / "ward", 1, port=1)
    (project.server / "registered.json").write_bytes(content)
    with pytest.raises(RunError) as error:
        RunningFederation(project, print).register()
    one_line(error.value, "registered.json")


@pytest.mark.parametrize("reason", ["x" * 10_000, ["a", "b"], {"a": 1}, 7, "one\ntwo", None])
def test_the_reason_of_a_stop_is_one_line_whatever_the_file_holds(tmp_path: Path, reason: Any) -> None:
    project = init(tmp_path / "ward", 1, port=1)
    (project.server / "stopped.json").write_text(json.dumps({"reason": reason}))
    said = RunningFederation(project, print)._reason()
    assert said is None if reason is None else said is not None and "\n" not in said and len(said) < 1000


@LONG
def test_no_marks_of_a_node_are_another_exception_than_ours(tmp_path: Path, examples: int) -> None:
    node: Any = SimpleNamespace(folder=tmp_path)

    @budget(examples)
    @given(st.binary(max_size=40) | JUNK.map(lambda junk: json.dumps(junk).encode()))
    def check(content: bytes) -> None:
        (tmp_path / "attempt").write_bytes(content)
        (tmp_path / "data").write_bytes(content)
        try:
            assert all(isinstance(word, str) for word in Node._attempts(node, "never"))
            Node._note_data(node, "digest")
            assert (tmp_path / "data").read_text() == "digest"
        except HoldfastError as error:
            one_line(error)

    check()


@pytest.mark.parametrize("kind", ["folder", "pipe", "hole"])
@pytest.mark.parametrize("name", ["attempt", "data"])
def test_a_mark_of_a_node_that_is_no_file_is_one_line(tmp_path: Path, name: str, kind: str) -> None:
    file, node = tmp_path / name, SimpleNamespace(folder=tmp_path)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.touch()
        os.truncate(file, 1 << 40)
    read: Any = (
        (lambda: Node._attempts(node, "1")) if name == "attempt" else (lambda: Node._note_data(node, "1"))
    )  # type: ignore[arg-type]
    with limited(), pytest.raises(RunError) as error:
        read()
    one_line(error.value, str(file))


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"pipe"], ids=["nothing", "bytes", "pipe"])
def test_a_model_of_a_node_that_is_damaged_is_not_exported(tmp_path: Path, content: bytes) -> None:
    node = init(tmp_path / "ward", 1, port=1).node(0)
    model = node / "state" / "run" / "0" / "model.safetensors"
    model.parent.mkdir(parents=True)
    if content == b"pipe":
        os.mkfifo(model)
    else:
        model.write_bytes(content)
    with limited(), pytest.raises(RunError) as error:
        export_model(None, tmp_path / "out.safetensors", None, None, node)
    one_line(error.value, "model.safetensors cannot be read")
    assert not (tmp_path / "out.safetensors").exists()
    model.unlink()
    write_tensors(model, {"a": torch.ones(2)})
    assert "the model that client 0 uses" in export_model(
        None, tmp_path / "out.safetensors", None, None, node
    )
    assert (tmp_path / "out.safetensors").read_bytes() == model.read_bytes()
