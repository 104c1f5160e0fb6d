"""Envelopes of the messages of federated rounds on a gRPC stream.

After a broken stream, the server sends a request again: by its id, the device knows that it has it,
and repeats its reply. Importing this does not load torch.
"""

import struct

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


def seal(envelope: Envelope, body: bytes = b"") -> bytes:
    """Return a message as it is sent.

    >>> from pliant.deploy.grpc.envelopes import Envelope, open_envelope, seal
    >>> open_envelope(seal(Envelope("1f"), b"body"))
    (Envelope(id='1f', is_hello=False, seconds=0.0, reason=''), b'body')
    """
    header = msgspec.json.encode(envelope)
    return _LENGTH.pack(len(header)) + header + body


def open_envelope(raw: bytes) -> tuple[Envelope, bytes]:
    """Return the envelope and the body of a message."""
    try:
        (length,) = _LENGTH.unpack_from(raw)
        body_start = _LENGTH.size + length
        header = raw[_LENGTH.size : body_start]
        return msgspec.json.decode(header, type=Envelope), raw[body_start:]
    except (struct.error, msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"a message in an envelope: {error}") from None
