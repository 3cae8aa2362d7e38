"""Nodes at the proxy without a SuperNode: signed requests with Flower's own client, and a tiny SuperLink
behind it."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import (
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from holdfast.core.files import write_json
from holdfast.core.reading import read_json
from holdfast.deploy.enrolment import fingerprint_of
from holdfast.deploy.processes import Processes, free_port
from holdfast.deploy.project import Project

RUN = 7
SESSION = "0a8b7c6d-0000-4000-8000-000000000000"


def object_id(word: object) -> str:
    return hashlib.sha256(str(word).encode()).hexdigest()


def number_of(client: int) -> int:
    """Of the node of a client, at the tiny SuperLink."""
    return 2**40 + client


def register(project: Project, *clients: int) -> None:
    """As `up` does it."""
    known = {fingerprint_of((project.node(c) / "key.pub").read_text()): str(number_of(c)) for c in clients}
    write_json(
        project.server / "registered.json", {**(read_json(project.server / "registered.json") or {}), **known}
    )


class Sender:
    """One node. `letter` is what it was sent last."""

    def __init__(self, project: Project, client: int, address: str = "", folder: Path | None = None):
        private = load_ssh_private_key(((folder or project.node(client)) / "key").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        self.number, self.letter, self.address = number_of(client), object_id(f"letter {client}"), address
        self.signer = NodeAuthHttpInterceptor(private, private.public_key())
        self.context = ssl.create_default_context(cafile=project.server / "ca.pem")
        authority = (project.server / "ca.pem").read_bytes()
        self.client = (
            FleetHttpClient.from_server_address(address, False, authority, [self.signer]) if address else None
        )

    def headers(self) -> dict[str, str]:
        request = httpx.Request("POST", "https://x/")
        context = ProtobufRequestContext("", Node(), request)
        self.signer.intercept(context, lambda _: httpx.Response(200))
        kept = {name: value for name, value in request.headers.items() if name.startswith("flwr-")}
        return {**kept, "content-type": "application/protobuf", "accept": "application/protobuf"}

    def post(self, path: str, body: bytes, **more: Any) -> httpx.Response:
        return httpx.post(
            f"https://{self.address}{path}",
            content=body,
            headers=self.headers(),
            verify=self.context,
            timeout=20,
            **more,
        )

    def pull(self) -> PullMessagesResponse:
        assert self.client is not None
        return self.client.PullMessages(PullMessagesRequest(node=Node(node_id=self.number)))

    def reply(self, objects: int = 5, **changed: Any) -> PushMessagesRequest:
        """A reply to the last letter, as Flower announces it; `changed` is of its metadata."""
        root = ObjectTree(
            object_id=object_id("reply"),
            children=[ObjectTree(object_id=object_id(i)) for i in range(objects - 1)],
        )
        about: dict[str, Any] = {
            "run_id": RUN,
            "message_id": root.object_id,
            "src_node_id": self.number,
            "dst_node_id": 1,
            "reply_to_message_id": self.letter,
            "ttl": 60.0,
            "message_type": "train",
            "created_at": time.time(),
            "dst_task_id": 70,
        }
        message = Message(metadata=Metadata(**{**about, **changed}), content=RecordDict())
        node = Node(node_id=self.number)
        return PushMessagesRequest(
            node=node, messages_list=[message], message_object_trees=[root], clientapp_runtime_list=[1.0]
        )


def letter_response(client_number: int) -> bytes:
    client = client_number - number_of(0)
    about = Metadata(
        run_id=RUN, message_id=object_id(f"letter {client}"), src_node_id=1, dst_node_id=client_number
    )
    return PullMessagesResponse(messages_list=[Message(metadata=about)]).SerializeToString()


class TinyLink:
    """A SuperLink that takes everything and remembers it; `large` bytes are its answer to whoever pulls an
    object."""

    def __init__(self, project: Project):
        self.seen: list[tuple[str, bytes]] = []
        self.large = 1000
        link = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                link.seen.append((self.path, body))
                content = link.answer(self.path, body)
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:  # the proxy may leave in the midst of an answer
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(project.server / "server.pem", project.server / "server.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.address = f"https://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> bytes:
        if path.endswith("/pull-messages"):
            return letter_response(PullMessagesRequest.FromString(body).node.node_id)
        if path.endswith("/push-messages"):
            return PushMessagesResponse(session_id=SESSION).SerializeToString()
        return b"x" * self.large if path.endswith("/pull-object") else b""


@contextmanager
def proxy_process(
    project: Project, upstream: str, **settings: object
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The real one; gives its address."""
    server, port = project.server, int(str(settings.pop("port", free_port())))
    options = {
        "host": "127.0.0.1",
        "port": port,
        "upstream": upstream,
        "authority": server / "ca.pem",
        "certificate": server / "server.pem",
        "key": server / "server.key",
        "registered": server / "registered.json",
        "refusals": server / "refusals.jsonl",
        "round": project.run / "head.json",
        **settings,
    }
    command = [
        sys.executable,
        "-m",
        "holdfast.deploy.proxy",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    project.logs.mkdir(exist_ok=True)
    processes = Processes(server / "flower", project.logs)
    with open(project.logs / "proxy.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    processes.started["proxy"] = process
    try:
        processes.wait_for_port(port, "proxy", seconds=60)
        yield f"127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            code = process.wait(20)
        finally:
            process.kill()
        assert code == 0, (project.logs / "proxy.log").read_text()
