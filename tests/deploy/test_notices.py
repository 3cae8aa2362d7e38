"""Notices between ServerApp and proxy, and what the proxy holds until there is one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse  # noqa: E402
from flwr.proto.message_pb2 import Message, Metadata, PushObjectRequest  # noqa: E402

from holdfast.deploy import proxy_holds  # noqa: E402
from holdfast.deploy.fleet_rules import ANNOUNCE, PULL, PUSH  # noqa: E402
from holdfast.deploy.messaging import Messaging  # noqa: E402
from holdfast.deploy.notices import ANSWERED, POSTED, Notices  # noqa: E402
from holdfast.deploy.proxy_holds import Holds  # noqa: E402
from holdfast.deploy.sockets import remove_left_over  # noqa: E402
from tests.deploy.local_grid import LocalRuntime  # noqa: E402
from tests.deploy.test_messaging import Nodes, honest, requests, silent  # noqa: E402

NODE: Any = SimpleNamespace(fingerprint="f")


def test_notices_reach_the_other_side_and_nobody_there_is_no_error(tmp_path: Path) -> None:
    app = Notices(tmp_path, ANSWERED)
    app.send(POSTED)
    assert app.wait(0.0) == []
    proxy = Notices(tmp_path, POSTED)
    for number in range(3):
        proxy.send(f"{number}")
    assert app.wait(5.0) == ["0", "1", "2"] and app.wait(0.0) == []
    for _ in range(10_000):  # a reader that hangs makes nobody wait
        app.send(POSTED)
    assert proxy.path.stat().st_mode & 0o077 == 0 or proxy.path.parent.stat().st_mode & 0o077 == 0
    proxy.close()
    assert not proxy.path.exists()
    app.socket.close()  # killed
    remove_left_over()
    assert not app.path.exists()


def announced(session: str, message: str, *objects: str) -> tuple[Any, bytes]:
    about = Metadata(reply_to_message_id=message)
    request = PushMessagesRequest(messages_list=[Message(metadata=about)])
    return request, PushMessagesResponse(session_id=session, objects_to_push=objects).SerializeToString()


def test_a_reply_is_noticed_when_all_of_it_is_there(tmp_path: Path) -> None:
    async def play() -> list[list[str]]:
        app, proxy = Notices(tmp_path, ANSWERED), Notices(tmp_path, POSTED)
        holds, seen = Holds(proxy), []
        holds.take_note(ANNOUNCE, *announced("s", "m1", "a", "b"), NODE)
        for session, name in (("other", "a"), ("s", "a"), ("s", "a"), ("s", "b"), ("s", "b")):
            holds.take_note(PUSH, PushObjectRequest(session_id=session, object_id=name), b"", NODE)
            seen.append(app.wait(0.0))
        holds.take_note(ANNOUNCE, *announced("t", "m2"), NODE)  # all of it was there before
        holds.take_note(PULL, None, b"", NODE)
        seen.append(app.wait(0.0))
        assert not holds.announced
        app.close()
        proxy.close()
        return seen

    assert asyncio.run(play()) == [[], [], [], ["m1"], [], ["m2"]]


def test_an_empty_answer_is_held_until_there_might_be_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        app, proxy = Notices(tmp_path, ANSWERED), Notices(tmp_path, POSTED)
        holds = Holds(proxy)
        waiting = [asyncio.create_task(holds.hold(holds.posted)) for _ in range(3)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        before = holds.posted
        app.send(POSTED)
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        await asyncio.wait_for(holds.hold(before), 5)  # it came between the question and its answer
        monkeypatch.setattr(proxy_holds, "HOLD", 0.2)
        await asyncio.wait_for(holds.hold(holds.posted), 5)
        monkeypatch.setattr(proxy_holds, "HOLD", 60.0)
        last = asyncio.create_task(holds.hold(holds.posted))
        await asyncio.sleep(0.05)
        holds.end()
        await asyncio.wait_for(last, 5)
        await asyncio.wait_for(holds.hold(holds.posted), 5)  # the proxy is stopping
        assert not holds.waiting
        app.close()
        proxy.close()

    asyncio.run(play())


def test_with_notices_the_superlink_is_asked_only_for_what_was_answered(tmp_path: Path) -> None:
    """Without them it is asked for every reply several times a second."""

    class Counting(LocalRuntime):
        count = 0

        def PullMessages(self, request: Any) -> Any:  # noqa: N802, Flower's name
            Counting.count += 1
            return super().PullMessages(request)

    app, proxy = Notices(tmp_path, ANSWERED), Notices(tmp_path, POSTED)

    class Noticing(Nodes):
        def push_messages(self, messages: Any) -> list[str]:
            names = super().push_messages(messages)
            proxy.send(names[0])
            proxy.send("f" * 64)  # what nobody waits for
            return names

    asked = requests([1], 5.0) | requests([2], 0.5)
    nodes = Noticing({1: honest, 2: silent}, Counting)
    began = time.monotonic()
    replies = Messaging(nodes, poll=0.01, notices=app).ask("query", asked)  # type: ignore[arg-type]
    assert replies.answers == {1: 7} and replies.late == {2} and time.monotonic() - began < 3
    assert Counting.count <= 4 and proxy.wait(1.0) == [POSTED]
    app.close()
    proxy.close()
