"""How a server runs its rounds on real devices, beyond what the experiment says."""

from pliant.deploy.letters import Pace
from pliant.deploy.squeeze import AnySqueeze, Plain
from pliant.value import Count, NonNegative, Positive, Value


class Service(Value, frozen=True):
    """What real devices need: time for transport, patience, smaller updates.

    A device has the experiment's `fleet.round_seconds` from the moment at which it gets its order;
    the server waits for `allowance` longer, as Flower polls every three seconds on both sides and
    starts a process for each message. The first round waits up to `patience` for devices, later
    ones up to `allowance`, and then goes on with those that are there. A round to which nothing
    came is begun again from the same model, `retries` times in a row at most.
    """

    allowance: NonNegative = 15.0  # seconds
    patience: Positive = 120.0  # seconds to wait for devices at the start, or for a quorum
    retries: Count = 10
    squeeze: AnySqueeze = Plain()
    pace: Pace = "measured"
