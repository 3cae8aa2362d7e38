"""A reply is bounded before memory is taken: objects, bytes, levels, and how long its arrays become."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects  # noqa: E402

from holdfast.core.types import Field  # noqa: E402
from holdfast.deploy import wire  # noqa: E402
from holdfast.deploy.replies import (
    Malformed,
    NeverComes,
    NotProven,
    NotThere,
    Reply,
    ReplyLimits,
)  # noqa: E402
from tests.deploy.local_grid import be_server  # noqa: E402

Objects = dict[str, bytes]


class Store:
    """Objects by name; fetching one that is empty is too early."""

    def __init__(self, objects: Objects):
        self.objects, self.fetched = objects, 0

    def announced(self, letter: str) -> Any: ...

    def piece(self, name: str) -> bytes:
        if name not in self.objects:
            raise NeverComes
        if not self.objects[name]:
            raise NotThere
        self.fetched += len(self.objects[name])
        return self.objects[name]

    def confirm(self, name: str) -> None: ...


def put(objects: Objects, kind: str, children: list[str], body: bytes) -> str:
    """An object as Flower writes it, whatever it says."""
    content = f"{kind} {','.join(children)} {len(body)}".encode() + b"\x00" + body
    name = hashlib.sha256(content).hexdigest()
    objects[name] = content
    return name


def written(content: RecordDict) -> tuple[Objects, str]:
    """As Flower sends it."""
    be_server()
    message = Message(content, 7, "train")
    return {name: part.deflate() for name, part in get_all_nested_objects(message).items()}, message.object_id


def around(objects: Objects, field: str) -> str:
    """A whole reply whose only field is this object."""
    record = put(objects, "ArrayRecord", [field], json.dumps({"update": field}).encode())
    envelope = ConfigRecord({"nonce": "n"})
    objects[envelope.object_id] = envelope.deflate()
    table = put(
        objects,
        "RecordDict",
        [record, envelope.object_id],
        json.dumps({"fields": record, "post": envelope.object_id}).encode(),
    )
    return put(objects, "Message", [table], b"")


def read(objects: Objects, name: str, limits: ReplyLimits) -> tuple[RecordDict, Store]:
    store = Store(objects)
    reply = Reply(store, name, limits)
    reply.prove(lambda envelope, digests: None)
    return reply.read(), store


def array(objects: Objects, chunks: list[str], order: list[Any]) -> str:
    about = {"dtype": "float32", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": order}
    return put(objects, "Array", chunks, json.dumps(about).encode())


LIMITS = ReplyLimits(objects=20, size=1 << 17)


def test_what_an_honest_client_sends_is_within_the_limits_of_its_schema() -> None:
    """Small fields, one of several chunks, one whose chunks are all equal, one without numbers."""
    shapes = {"update": (4_000_000,), "zeros": (3_000_000,), "count": (), "none": (0,)}
    schema = {name: Field("scalar", shape) for name, shape in shapes.items()}
    sent = {
        name: torch.rand(1, *shape) if name != "zeros" else torch.zeros(1, *shape)
        for name, shape in shapes.items()
    }
    content = wire.pack_fields(sent)
    content["post"] = ConfigRecord({"nonce": "n", "signature": "0" * 210})
    objects, name = written(content)
    found, _ = read(objects, name, wire.limits_of(schema, torch.float32))
    got = wire.read_fields(found, schema, torch.float32)
    assert all(torch.equal(got[field], sent[field]) for field in shapes)


def test_one_chunk_named_many_times_is_refused_before_it_is_built() -> None:
    """5 MB that would become 6 GB."""
    objects: Objects = {}
    chunk = put(objects, "ArrayChunk", [], bytes(5_000_000))
    name = around(objects, array(objects, [chunk], [0] * 1300))
    tracemalloc.start()
    with pytest.raises(Malformed, match="arrays of 6500026000 bytes, its task allows 6000000"):
        read(objects, name, ReplyLimits(20, 6_000_000))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_too_many_objects_are_not_fetched() -> None:
    objects: Objects = {}
    chunks = [put(objects, "ArrayChunk", [], b"%d" % number) for number in range(500)]
    name = around(objects, array(objects, chunks, list(range(500))))
    with pytest.raises(Malformed, match="more than 20 objects"):
        read(objects, name, LIMITS)


def test_too_many_bytes_are_not_fetched() -> None:
    objects: Objects = {}
    chunks = [put(objects, "ArrayChunk", [], bytes([number]) * 100_000) for number in range(10)]
    name = around(objects, array(objects, chunks, list(range(10))))
    store = Store(objects)
    with pytest.raises(Malformed, match="more than 131072 bytes"):
        Reply(store, name, LIMITS).read()
    assert store.fetched < 250_000


def nested(objects: Objects) -> str:
    inner = put(objects, "ArrayChunk", [], b"x")
    for _ in range(10):
        inner = put(objects, "ArrayRecord", [inner], b"{}")
    return around(objects, inner)


def large_beside(objects: Objects) -> str:
    return around(objects, put(objects, "Array", [], b" " * 70_000))


def not_its_digest(objects: Objects) -> str:
    chunk = put(objects, "ArrayChunk", [], b"good")
    objects[chunk] = b"ArrayChunk  3\x00bad"
    return around(objects, array(objects, [chunk], [0]))


def no_digest(objects: Objects) -> str:
    return around(objects, array(objects, ["../../secret"], [0]))


def places_outside(objects: Objects) -> str:
    return around(objects, array(objects, [put(objects, "ArrayChunk", [], b"x")], [7]))


def places_no_numbers(objects: Objects) -> str:
    return around(objects, array(objects, [put(objects, "ArrayChunk", [], b"x")], [True]))


def deep_json(objects: Objects) -> str:
    return around(objects, put(objects, "Array", [], b"[" * 30_000))


def another_class(objects: Objects) -> str:
    return around(objects, put(objects, "Message", [], b"junk"))


def head_without_end(objects: Objects) -> str:
    content = b"ArrayChunk " + b"a" * 100_000
    name = hashlib.sha256(content).hexdigest()
    objects[name] = content
    return around(objects, name)


@pytest.mark.parametrize(
    "build",
    [
        nested,
        large_beside,
        not_its_digest,
        no_digest,
        places_outside,
        places_no_numbers,
        deep_json,
        another_class,
        head_without_end,
    ],
)
def test_objects_that_are_not_a_reply_are_malformed(build: Callable[[Objects], str]) -> None:
    objects: Objects = {}
    name = build(objects)
    with pytest.raises(Malformed) as caught:
        read(objects, name, LIMITS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_the_envelope_comes_first_and_nothing_else_is_fetched_before_it_is_proven() -> None:
    content = RecordDict(
        {
            "fields": ArrayRecord({"update": Array(np.random.rand(2_000_000))}),
            "post": ConfigRecord({"nonce": "n"}),
        }
    )
    objects, name = written(content)
    store = Store(objects)

    def never(envelope: ConfigRecord, digests: dict[str, str]) -> None:
        assert envelope["nonce"] == "n" and digests == {"fields": content["fields"].object_id}
        raise NotProven("no")

    with pytest.raises(NotProven):
        Reply(store, name, ReplyLimits(20, 1 << 30)).prove(never)
    assert store.fetched < 2_000


@pytest.mark.parametrize(
    "table", [b"[]", b'{"post": 5}', b'{"fields": "x"}', b"[" * 30_000, b"\xff", b"x" * 70_000]
)
def test_an_envelope_that_cannot_be_found_proves_nothing(table: bytes) -> None:
    objects: Objects = {}
    name = put(objects, "Message", [put(objects, "RecordDict", [], table)], b"")
    with pytest.raises(NotProven):
        Reply(Store(objects), name, LIMITS).prove(lambda envelope, digests: None)


def test_a_piece_that_comes_later_is_waited_for_and_the_others_are_not_fetched_again() -> None:
    objects: Objects = {}
    chunk = put(objects, "ArrayChunk", [], b"x")
    name = around(objects, array(objects, [chunk], [0]))
    later, objects[chunk] = objects[chunk], b""
    store = Store(objects)
    reply = Reply(store, name, LIMITS)
    reply.prove(lambda envelope, digests: None)
    with pytest.raises(NotThere):
        reply.read()
    fetched, objects[chunk] = store.fetched, later
    assert reply.read()["fields"]["update"].data == b"x" and store.fetched == fetched + len(later)
    del objects[chunk]
    with pytest.raises(NeverComes):
        Reply(store, name, LIMITS).read()


KINDS = [
    "Message",
    "RecordDict",
    "ArrayRecord",
    "ConfigRecord",
    "MetricRecord",
    "Array",
    "ArrayChunk",
    "Nothing",
    "",
]
BODIES = st.one_of(
    st.binary(max_size=40),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ).map(
        lambda value: json.dumps(
            {"arraychunk_ids": value, "dtype": "f", "shape": value, "stype": "s"}
        ).encode()
    ),
)
PIECES = st.lists(
    st.tuples(st.sampled_from(KINDS), BODIES, st.lists(st.integers(0, 9), max_size=4), st.booleans()),
    min_size=1,
    max_size=8,
)


UNREADABLE_ENVELOPE = [
    ("ConfigRecord", b"", [], True),
    ("Message", b"", [0], True),
    ("Message", b"", [1], False),
]


@given(pieces=PIECES, cut=st.integers(0, 60))
@example(pieces=UNREADABLE_ENVELOPE, cut=60)
@settings(max_examples=150, deadline=None)
def test_any_reply_is_read_or_malformed(pieces: list[tuple[str, bytes, list[int], bool]], cut: int) -> None:
    """Objects of any kind, with any content, of which some name the ids of their children in their bodies;
    one is cut short."""
    objects: Objects = {}
    names: list[str] = []
    for kind, body, chosen, named in pieces:
        children = [names[place] for place in chosen if place < len(names)]
        said = json.dumps(
            {("post" if place == 0 else f"f{place}"): child for place, child in enumerate(children)}
        ).encode()
        names.append(put(objects, kind, children, said if named else body))
    if cut < len(names):
        objects[names[cut]] = objects[names[cut]][: cut + 3]
    reply = Reply(Store(objects), names[-1], LIMITS)
    try:
        reply.prove(lambda envelope, digests: None)
        assert isinstance(reply.read(), RecordDict)
    except (Malformed, NotProven, NotThere, NeverComes):
        pass
    with contextlib.suppress(Malformed, NotThere, NeverComes):
        assert isinstance(Reply(Store(objects), names[-1], LIMITS).read(), RecordDict)
