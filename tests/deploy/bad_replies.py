"""Over forty kinds of bad replies, as functions of an honest reply, and a device that sends them.

Run as a program, it is a device's worker whose reply to round n is of kind n.
"""

from functools import partial

import msgspec
import torch

from pliant.deploy.device.agent import DeviceAgent
from pliant.deploy.device.host import DeviceSetup
from pliant.deploy.device.worker import run_worker
from pliant.deploy.messages import TrainReply, decode_message, encode_message
from pliant.deploy.settings import run_process
from pliant.params import group_subtrees


def decode_reply(raw):
    header, tensors = decode_message(raw, TrainReply)
    return header, group_subtrees(tensors)


def edit_reply(edit):
    """Return a function that changes an encoded reply by `edit(header, groups)`."""
    return lambda raw: encode_message(*edit(*decode_reply(raw)))


def set_fields(**fields):
    return edit_reply(lambda header, groups: (msgspec.structs.replace(header, **fields), groups))


def set_invalid_fields(**fields):
    """Return a function that writes values of types that a `TrainReply` cannot hold."""

    def edit(raw):
        header, groups = decode_reply(raw)
        values = msgspec.to_builtins(header) | fields
        header_class = msgspec.defstruct("Header", [(name, object) for name in values])
        return encode_message(header_class(**values), groups)

    return edit


def edit_delta(edit):
    """Return a function that changes the tensors of the update, as a dictionary."""
    return edit_reply(
        lambda header, groups: (header, {**groups, "change": edit(dict(groups["change"]))})
    )


def edit_largest(edit):
    """Return a function that changes the largest tensor."""

    def edit_tensors(tensors):
        name = max(tensors, key=lambda key: tensors[key].numel())
        return tensors | {name: edit(tensors[name].clone())}

    return edit_delta(edit_tensors)


def set_number(value):
    def edit(values):
        values.view(-1)[0] = value
        return values

    return edit_largest(edit)


def set_groups(**tensors):
    return edit_reply(lambda header, groups: (header, {**groups, **tensors}))


def _drop_first(tensors):
    return dict(list(tensors.items())[1:])


def _rename_first(tensors):
    first, *rest = tensors
    return {f"{first}.": tensors[first]} | {name: tensors[name] for name in rest}


def _swap_ends(tensors):
    first, *_, last = tensors
    return tensors | {first: tensors[last], last: tensors[first]}


BAD_REPLIES = {
    "a NaN": set_number(float("nan")),
    "an infinity": set_number(float("inf")),
    "a negative infinity": set_number(float("-inf")),
    "a huge number": set_number(1e30),
    "another shape": edit_largest(lambda values: values[:1].clone()),
    "one dimension": edit_largest(lambda values: values.reshape(-1)),
    "no numbers at all": edit_largest(lambda values: values[:0].clone()),
    "one number that would broadcast": edit_largest(lambda values: torch.zeros(1)),
    "another type": edit_largest(lambda values: values.to(torch.float64)),
    "half precision that was not requested": edit_largest(lambda values: values.to(torch.float16)),
    "integers": edit_largest(lambda values: values.to(torch.int32)),
    "booleans": edit_largest(lambda values: values > 0),
    "no tensors": edit_reply(lambda header, groups: (header, {})),
    "one tensor too many": edit_delta(lambda tensors: tensors | {"x": torch.ones(1)}),
    "one tensor too few": edit_delta(_drop_first),
    "a tensor with another name": edit_delta(_rename_first),
    "two tensors swapped": edit_delta(_swap_ends),
    "another extra": set_groups(extra={"x": torch.ones(1)}),
    "masks of nothing": set_groups(trained={"masks": torch.zeros(1, 3)}),
    "too much compute": set_fields(macs=1e12),
    "compute beyond numbers": set_fields(macs=1e300),
    "no compute": set_fields(macs=0.0),
    "negative compute": set_fields(macs=-1.0),
    "compute as text": set_invalid_fields(macs="all"),
    "too many samples": set_fields(samples=10**9),
    "no samples": set_fields(samples=0),
    "negative samples": set_fields(samples=-5),
    "half a sample": set_invalid_fields(samples=0.5),
    "another device's samples": set_fields(num_samples=10**6),
    "another device": set_fields(device=2),
    "another round": set_fields(round=7_000),
    "the nonce of another request": set_fields(nonce="0" * 32),
    "another protocol": set_invalid_fields(versions={"protocol": 3, "pliant": "0.1"}),
    "no version": set_invalid_fields(versions={}),
    "an unknown kind": set_invalid_fields(kind="gift"),
    "too many steps": set_fields(rows=(0,) * 500, times=(0.0,) * 501),
    "unknown rows": set_fields(rows=(99,) * 5, times=(0.0,) * 6),
    "negative rows": set_fields(rows=(-1,) * 5, times=(0.0,) * 6),
    "times that run backwards": set_fields(times=(3.0, 2.0, 1.0, 0.5, 0.25, 0.1)),
    "more time than has passed": set_fields(seconds=1e9),
    "fewer times than steps": set_fields(times=(0.0,)),
    "nothing": lambda raw: b"",
    "noise": lambda raw: bytes(1000),
    "one bit": lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
    "the first half": lambda raw: raw[: len(raw) // 2],
    "the same twice": lambda raw: raw + raw,
    "twenty megabytes": lambda raw: bytes(20_000_000),
}


class BadDevice(DeviceAgent):
    """A device that trains correctly and then sends a bad reply."""

    def handle_request(self, raw, queued=0.0):
        honest = super().handle_request(raw, queued)
        header, _ = decode_reply(honest)
        kinds = list(BAD_REPLIES.values())
        return honest if header.kind == "hello" else kinds[header.round % len(kinds)](honest)


if __name__ == "__main__":
    run_process(partial(run_worker, agent_class=BadDevice), DeviceSetup)
