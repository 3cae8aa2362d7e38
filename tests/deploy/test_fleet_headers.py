"""The headers of a node's requests, against those of Flower's own interceptors."""

from __future__ import annotations

import base64
import subprocess
import sys
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flwr.supercore.constant import (  # noqa: E402
    FLEET_HTTP_SIGNATURE_HEADER,
    VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor  # noqa: E402
from flwr.supercore.primitives.asymmetric import verify_signature  # noqa: E402
from flwr.supercore.protobuf.client import ProtobufRequestContext  # noqa: E402
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # noqa: E402

from holdfast.deploy.fleet_headers import FleetHeaders  # noqa: E402


def sent(*interceptors: Any, warning: str = "") -> dict[str, str]:
    request = httpx.Request("POST", "http://127.0.0.1:1/v1")
    answer = httpx.Response(200, headers={VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY: warning})
    for each in interceptors:
        each.intercept(ProtobufRequestContext("m", None, request), lambda _: answer)  # type: ignore[arg-type]
    return dict(request.headers)


def test_a_node_says_what_flowers_own_says() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    ours = sent(FleetHeaders(key, key.public_key()))
    flowers = sent(
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    )
    changes = {"flwr-timestamp", FLEET_HTTP_SIGNATURE_HEADER}
    assert ours.keys() == flowers.keys() and changes < ours.keys()
    assert {k: v for k, v in ours.items() if k not in changes} == {
        k: v for k, v in flowers.items() if k not in changes
    }
    signature = base64.b64decode(ours[FLEET_HTTP_SIGNATURE_HEADER])
    assert verify_signature(key.public_key(), ours["flwr-timestamp"].encode("ascii"), signature)


def test_a_warning_of_the_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    with caplog.at_level("WARNING", logger="flwr"):
        sent(FleetHeaders(key, key.public_key()), warning="another version")
    assert "another version" in caplog.text


@pytest.mark.slow
def test_a_node_loads_no_web_server() -> None:
    code = "import sys, holdfast.deploy.supernode; print(*{'fastapi', 'requests'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "\n"
