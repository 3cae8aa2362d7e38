"""What every request of a node says in its headers: the version of Flower that it speaks, its public key, and
a signature of the time by its private one.

Flower's own interceptors write the same headers. They are not used here, because with them come the web
server of the SuperLink and its libraries, which take 20 MB on every node. A test compares the two."""

from __future__ import annotations

from base64 import b64encode
from logging import WARN

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common import log
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_COMPONENT_NAME_METADATA_KEY,
    FLWR_PACKAGE_NAME_METADATA_KEY,
    FLWR_PACKAGE_VERSION_METADATA_KEY,
    VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY,
)
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.version import package_name, package_version


class FleetHeaders:
    """Adds the headers of one node to its requests."""

    def __init__(self, private: ec.EllipticCurvePrivateKey, public: ec.EllipticCurvePublicKey):
        self.private = private
        self.fixed = {
            FLWR_PACKAGE_NAME_METADATA_KEY: package_name,
            FLWR_PACKAGE_VERSION_METADATA_KEY: package_version,
            FLWR_COMPONENT_NAME_METADATA_KEY: "SuperNode",
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(public)).decode("ascii"),
        }

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        time = now().isoformat()
        signature = sign_message(self.private, time.encode("ascii"))
        context.request.headers.update(
            {
                **self.fixed,
                TIMESTAMP_HEADER: time,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
            }
        )
        response = call_next(context)
        if warning := response.headers.get(VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY):
            log(WARN, warning)
        return response
