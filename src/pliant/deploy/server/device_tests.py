"""Let devices test the network on their own images."""

from collections.abc import Callable
from secrets import token_hex
from typing import Any

from msgspec.structs import replace

from pliant.deploy.messages import (
    PARAMS,
    SharedEncoder,
    TrainReply,
    TrainRequest,
    decode_message,
)
from pliant.deploy.server.replies import NONCE_BYTES, OVERHEAD_BYTES, MessageTransport, RawReply
from pliant.deploy.settings import MalformedMessage
from pliant.engine.device_scores import DeviceScores
from pliant.engine.evaluation import settle_statistics
from pliant.engine.round_loop import Run


def score_on_devices(
    run: Run,
    messages: MessageTransport,
    devices: list[int],
    config: Any,
    seconds: float,
    wait: Callable[[], bool],
) -> DeviceScores | None:
    """Return the results of the devices that have test images and reply in time.

    `wait` waits a little, and returns False when the `seconds` are over.
    """
    number, context = run.state.next_round - 1, run.context
    declared = {device: run.state.declarations[device] for device in devices}
    waiting = {device for device in devices if declared[device].tests}
    params, how = run.state.trained_params, run.settings.evaluation
    settled = settle_statistics(context.net.module, params, context.data, how)
    requests, nonces, encoder = {}, {}, SharedEncoder()
    for device in sorted(waiting):
        nonces[device] = token_hex(NONCE_BYTES)
        request = TrainRequest("test", config, device, number, nonce=nonces[device])
        request = replace(request, declaration=declared[device])
        requests[device] = encoder.encode(request, {PARAMS: settled})
    messages.send(requests, round=number, seconds=seconds)
    scores: dict[int, TrainReply] = {}
    sizes, has_time = {device: len(raw) for device, raw in requests.items()}, True
    while waiting and has_time:
        for message in messages.poll_replies():
            waiting.discard(message.device)
            sizes[message.device] += len(message.raw or b"")
            score = _read_score(message, number, declared[message.device].tests)
            if score is not None and score.nonce == nonces[message.device]:
                scores[message.device] = score
        has_time = not waiting or wait()
    if not scores:
        return None
    numbers = tuple(sorted(scores))
    correct, tests = (tuple(getattr(scores[d], n) for d in numbers) for n in ("correct", "tests"))
    sent = sum(size + messages.count_carrier_bytes(size) for size in sizes.values())
    return DeviceScores(numbers, correct, tests, sent)


def _read_score(message: RawReply, round: int, max_tests: int) -> TrainReply | None:
    """Return the result of a device's test of the network, or None if it is not possible."""
    if message.raw is None or len(message.raw) > OVERHEAD_BYTES:
        return None
    try:
        reply: TrainReply = decode_message(message.raw, TrainReply)[0]
    except MalformedMessage:
        return None
    is_known = (reply.kind, reply.device, reply.round) == ("score", message.device, round)
    is_possible = 0 <= reply.correct <= reply.tests and 1 <= reply.tests <= max_tests
    return reply if is_known and is_possible else None
