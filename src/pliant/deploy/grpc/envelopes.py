"""Envelopes of the messages of federated rounds on a gRPC stream.

After a broken stream, the server sends a request again: by its id, the device knows that it has it,
and repeats its reply. Importing this does not load torch.
"""

import struct
from typing import IO

import msgspec
from msgspec import Struct

from pliant.deploy.settings import MalformedMessage

MAX_ENVELOPE_BYTES = 1024
MAX_REASON_CHARS = 200
_LENGTH = struct.Struct("<H")


class Envelope(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What precedes the body of a message."""

    id: str  # 128 bits, of a request and of its reply
    is_hello: bool = False
    seconds: float = 0.0  # in which the device must reply
    reason: str = ""  # why there is no reply


def seal(envelope: Envelope) -> bytes:
    """Return what precedes the body of a message.

    >>> from io import BytesIO
    >>> from pliant.deploy.grpc.envelopes import Envelope, open_envelope, seal
    >>> message = BytesIO(seal(Envelope("1f")) + b"body")
    >>> open_envelope(message), message.read()
    (Envelope(id='1f', is_hello=False, seconds=0.0, reason=''), b'body')
    """
    header = msgspec.json.encode(envelope)
    return _LENGTH.pack(len(header)) + header


def open_envelope(message: IO[bytes]) -> Envelope:
    """Return the envelope of a message, whose body is read next."""
    try:
        (length,) = _LENGTH.unpack(message.read(_LENGTH.size))
        return msgspec.json.decode(message.read(min(length, MAX_ENVELOPE_BYTES)), type=Envelope)
    except (struct.error, msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"a message in an envelope: {error}") from None
