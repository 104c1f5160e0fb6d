"""Forty kinds of bad answers, as functions of the bytes of an honest one; and a device of them.

Run as a program it is a device's worker whose answer to round n is of kind n.
"""

import os
import sys

import msgspec
import torch

from pliant.deploy import worker
from pliant.deploy.device import Device
from pliant.deploy.letters import packed, read_answer


def spoiled(change):
    """Return what makes bytes of bytes by a function of their head and tensors."""
    return lambda raw: packed(*change(*read_answer(raw)))


def told(**claims):
    return spoiled(lambda head, groups: (msgspec.structs.replace(head, **claims), groups))


def claimed(**claims):
    """Return what says things that no head of ours can hold."""

    def change(raw):
        head, groups = read_answer(raw)
        made = msgspec.defstruct("Head", [(name, object) for name in {*_plain(head), *claims}])
        return packed(made(**{**_plain(head), **claims}), groups)

    return change


def changed(spoil):
    """Return what changes the tensors of the update, as a dictionary."""
    return spoiled(lambda head, groups: (head, {**groups, "change": spoil(dict(groups["change"]))}))


def tensor(spoil):
    """Return what changes the largest tensor."""

    def change(tensors):
        name = max(tensors, key=lambda key: tensors[key].numel())
        return tensors | {name: spoil(tensors[name].clone())}

    return changed(change)


def number(value):
    def spoil(values):
        values.view(-1)[0] = value
        return values

    return tensor(spoil)


def group(**tensors):
    return spoiled(lambda head, groups: (head, {**groups, **tensors}))


def _plain(head):
    return msgspec.to_builtins(head)


def _without_one(tensors):
    return dict(list(tensors.items())[1:])


def _renamed(tensors):
    first, *rest = tensors
    return {f"{first}.": tensors[first]} | {name: tensors[name] for name in rest}


def _swapped(tensors):
    first, *_, last = tensors
    return tensors | {first: tensors[last], last: tensors[first]}


BAD = {
    "a NaN": number(float("nan")),
    "an infinity": number(float("inf")),
    "a negative infinity": number(float("-inf")),
    "a huge number": number(1e30),
    "another shape": tensor(lambda values: values[:1].clone()),
    "one dimension": tensor(lambda values: values.reshape(-1)),
    "no numbers at all": tensor(lambda values: values[:0].clone()),
    "one number that would broadcast": tensor(lambda values: torch.zeros(1)),
    "another type": tensor(lambda values: values.to(torch.float64)),
    "half precision that nobody asked for": tensor(lambda values: values.to(torch.float16)),
    "integers": tensor(lambda values: values.to(torch.int32)),
    "truths": tensor(lambda values: values > 0),
    "no tensors": spoiled(lambda head, groups: (head, {})),
    "one too many": changed(lambda tensors: tensors | {"x": torch.ones(1)}),
    "one too few": changed(_without_one),
    "a tensor of another name": changed(_renamed),
    "two tensors in each other's place": changed(_swapped),
    "another extra": group(extra={"x": torch.ones(1)}),
    "masks of nothing": group(trained={"masks": torch.zeros(1, 3)}),
    "too much compute": told(macs=1e12),
    "compute beyond numbers": told(macs=1e300),
    "no compute": told(macs=0.0),
    "negative compute": told(macs=-1.0),
    "compute in words": claimed(macs="all"),
    "too many samples": told(samples=10**9),
    "no samples": told(samples=0),
    "negative samples": told(samples=-5),
    "half a sample": claimed(samples=0.5),
    "another's samples": told(owned=10**6),
    "another device": told(device=2),
    "another round": told(round=7_000),
    "a kind that is not there": claimed(kind="gift"),
    "steps that nobody asked for": told(rows=(0,) * 500, times=(0.0,) * 501),
    "rows that are not there": told(rows=(99,) * 5, times=(0.0,) * 6),
    "rows below zero": told(rows=(-1,) * 5, times=(0.0,) * 6),
    "times that go back": told(times=(3.0, 2.0, 1.0, 0.5, 0.25, 0.1)),
    "a time before the order": told(seconds=1e9),
    "fewer times than steps": told(times=(0.0,)),
    "nothing": lambda raw: b"",
    "noise": lambda raw: bytes(1000),
    "one bit": lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
    "the first half": lambda raw: raw[: len(raw) // 2],
    "the same twice": lambda raw: raw + raw,
    "twenty megabytes": lambda raw: bytes(20_000_000),
}


class BadDevice(Device):
    """A device that trains as it should and then says something else."""

    def answer(self, raw, queued=0.0):
        honest = super().answer(raw, queued)
        head, _ = read_answer(honest)
        kinds = list(BAD.values())
        return honest if head.kind == "hello" else kinds[head.round % len(kinds)](honest)


if __name__ == "__main__":
    worker.work(msgspec.json.decode(sys.argv[1].encode(), type=worker.Setup), BadDevice)
    os._exit(0)
