"""What a server says about itself, and which versions understand each other.

Importing this does not load torch.
"""

from importlib.metadata import version
from typing import Any, Literal

import msgspec
from msgspec import Struct

PROTOCOL_VERSION = 7
SERVER_HEADER = "pliant-server"  # of HTTP and gRPC
DESCRIBE_ROUTE = "/health"  # of HTTP
DESCRIBE_CALL = "/pliant.Split/Describe"  # of gRPC
ENROL_ROUTE, ENROL_CALL = "/pliant/enrol", "/pliant.Split/Enrol"
ENROL_HEADER = "pliant-enrolment"  # of the request and of the answer

# of the run; federated ones are over Flower unless they are over gRPC
ServerKind = Literal["split", "federated", "federated_grpc"]


class Versions(Struct, frozen=True):
    """The versions of a sender; only the protocol must be the receiver's."""

    protocol: int = PROTOCOL_VERSION
    pliant: str = version("pliant")
    torch: str = version("torch")


class ServerInfo(Struct, frozen=True):
    """What a server says about itself to everyone."""

    kind: ServerKind
    federation: str = ""
    versions: Versions = Versions()


def find_version_problem(header: Any) -> str | None:
    """Return which versions are expected of the sender of a header, if its protocol is another.

    The header is JSON or plain data, of which nothing else is known to be valid.
    """
    try:
        if isinstance(header, str | bytes):
            header = msgspec.json.decode(header)
        found = header.get("versions", {})
        protocol, pliant = found.get("protocol"), found.get("pliant")
    except (AttributeError, msgspec.DecodeError, RecursionError):
        protocol, pliant = None, None
    if protocol == PROTOCOL_VERSION:
        return None
    own = f"protocol {PROTOCOL_VERSION} of pliant {Versions().pliant}"
    if not isinstance(protocol, int):
        return f"{own}, got an older version"
    return f"{own}, got protocol {protocol} of pliant {str(pliant)[:40]}"
