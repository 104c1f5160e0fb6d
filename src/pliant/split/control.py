"""The control traffic of split learning on real devices, by formula.

Every request and reply has a header, a SHA-256 and what gRPC, HTTP/2 and TLS add. These bytes are
charged to a client's ledger, but take no time in a simulation.
"""

from pliant.split.base import ClientCosts

REQUEST_BYTES = 474  # of a request and its reply together, without tensors
TENSOR_BYTES = 70  # name, type and place of a tensor
SETUP_BYTES = 11_900  # once per device: TLS, its key's proof, the experiment and its first request


def count_control_bytes(costs: ClientCosts, round_number: int) -> int:
    """Return what a client and the server exchange in a round besides what is charged already.

    >>> from pliant.split.base import ClientCosts
    >>> from pliant.split.control import count_control_bytes
    >>> count_control_bytes(ClientCosts(requests=2, tensors=1), round_number=1)
    1018
    """
    setup = SETUP_BYTES if round_number == 0 else 0
    traffic = costs.requests * REQUEST_BYTES + costs.tensors * TENSOR_BYTES + costs.shown
    return setup + traffic


def count_test_bytes(size: int, tensors: int) -> int:
    """Return the bytes of a test on a device, which gets the server's part of this size."""
    return REQUEST_BYTES + tensors * TENSOR_BYTES + size
