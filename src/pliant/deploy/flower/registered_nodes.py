"""Keep Flower's nodes the same as the devices that the server has registered."""

import threading
from collections.abc import Callable
from typing import Any

from pliant.deploy.security.certificates import parse_public_key
from pliant.deploy.security.registry import DeviceRegistry


class RegisteredNodes:
    """Register approved keys with SuperLink under their devices' numbers, and delete all others."""

    def __init__(self, registry: DeviceRegistry, get_state: Callable[[], Any]) -> None:
        self._registry, self._get_state = registry, get_state
        self._lock, self._version = threading.Lock(), object()
        self._pending: set[bytes] = set()

    def is_pending(self, key: bytes) -> bool:
        """Return whether a key waits for approval."""
        return key in self._pending

    def update(self) -> None:
        """Follow the registry, if it has changed since the last call."""
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
        from flwr.supercore.constant import NodeStatus
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        with self._lock:
            version = self._registry.version
            if version == self._version:
                return
            devices, keys = self._registry.read(), self._registry.read_public_keys()
            names = {public_key_to_bytes(key): str(number) for number, key in keys.items()}
            state = self._get_state()
            alive = [NodeStatus.REGISTERED, NodeStatus.ONLINE, NodeStatus.OFFLINE]
            for node in state.get_node_info(statuses=alive):
                if names.get(node.public_key) != node.name:
                    state.delete_node(NOOP_FLWR_AID, node.node_id)
            for key, name in names.items():
                if state.get_node_id_by_public_key(key) is None:
                    state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=name)
            waiting = [device.pending for device in devices.values() if device.pending]
            self._pending = {public_key_to_bytes(parse_public_key(key)) for key in waiting}
            self._version = version
