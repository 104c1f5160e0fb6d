"""Server settings for real devices, in addition to the experiment."""

from typing import Literal

from pliant.value import Count, NonNegative, Positive, Value

# Whether devices follow their own measurements or the traces of the simulated fleet.
Pace = Literal["measured", "simulated"]


class ServerSettings(Value, frozen=True):
    """How long a server waits for real devices, and by which clock they pace themselves.

    A device has `fleet.round_seconds` from the arrival of its request, and the rules' `grace`. The
    server waits `allowance` longer, as Flower polls every three seconds on both sides and starts a
    process per message. The first round waits up to `patience` for devices, later rounds up to
    `allowance`; then a round starts with the devices that are online. A round without a merged
    update is repeated from the same model, up to `retries` times in a row.
    """

    allowance: NonNegative = 15.0  # seconds
    patience: Positive = 120.0  # seconds to wait for devices at the start, or for a quorum
    retries: Count = 10
    pace: Pace = "measured"
