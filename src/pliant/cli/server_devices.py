"""`pliant server devices`: enrol, approve and revoke devices, also while the server runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from pliant.cli import INTEGER

if TYPE_CHECKING:
    from pliant.deploy.security.registry import DeviceRegistry

HELP = """\
List, enrol, approve and revoke devices; a running server follows at once.

Example: pliant server devices token --keys keys"""
MAX_MINUTES = 7 * 24 * 60

app = App(name="devices", help=HELP, help_format="plaintext")

Numbers = Annotated[list[Annotated[int, INTEGER]], Parameter(negative=())]


@app.command(name="list")
def list_devices(*, keys: Path) -> None:
    """List the devices with their status and the fingerprint of their key.

    Example: pliant server devices list --keys keys

    Args:
        keys: Folder made by `pliant deploy init`.
    """
    for number, device in _open_registry(keys).read().items():
        sys.stdout.write(f"{number}  {device.status:<8}  {device.fingerprint}".rstrip() + "\n")


@app.command
def token(
    number: Annotated[int | None, INTEGER] = None,
    *,
    keys: Path,
    minutes: float = 60.0,
    count: Annotated[int | None, INTEGER] = None,
) -> None:
    """Print a token with which one device can enrol, once; with --count, one for each of many.

    Example: pliant server devices token --keys keys

    Args:
        number: Number of the device; by default the first that was never given away.
        keys: Folder made by `pliant deploy init`.
        minutes: Time in which the token is valid.
        count: Number of tokens, for the first devices that were never given away.
    """
    _check_number(number)
    seconds, registry = _parse_minutes(minutes), _open_registry(keys)
    if count is None:
        tokens = [registry.issue_token(number, seconds=seconds)]
    elif number is not None or count < 1:
        raise ValueError("Expected either the number of a device or --count of at least 1")
    else:
        tokens = registry.issue_tokens(count, seconds=seconds)
    sys.stdout.writelines(f"{token}\n" for token in tokens)


@app.command
def approve(numbers: Numbers, *, keys: Path) -> None:
    """Accept the keys that devices have enrolled.

    Example: pliant server devices approve 0 1 2 --keys keys

    Args:
        numbers: Numbers of the devices. Compare their fingerprints first.
        keys: Folder made by `pliant deploy init`.
    """
    registry = _open_registry(keys)
    for number, device in zip(numbers, registry.approve(*numbers), strict=True):
        sys.stdout.write(f"{number}  approved  {device.fingerprint}\n")


@app.command
def revoke(numbers: Numbers, *, keys: Path) -> None:
    """Refuse devices from their next message on; their keys are never accepted again.

    Example: pliant server devices revoke 2 --keys keys

    Args:
        numbers: Numbers of the devices.
        keys: Folder made by `pliant deploy init`.
    """
    registry = _open_registry(keys)
    for number in numbers:
        registry.revoke(number)
        sys.stdout.write(f"{number}  revoked\n")


@app.command
def rotate(number: Annotated[int, INTEGER], *, keys: Path, minutes: float = 60.0) -> None:
    """Print a token with which a device can replace its key; until then the old one is valid.

    Example: pliant server devices rotate 0 --keys keys

    Args:
        number: Number of the device, which must still have its key.
        keys: Folder made by `pliant deploy init`.
        minutes: Time in which the token is valid.
    """
    _check_number(number)
    seconds, registry = _parse_minutes(minutes), _open_registry(keys)
    sys.stdout.write(f"{registry.issue_token(number, seconds=seconds, is_rotation=True)}\n")


def _check_number(number: int | None) -> None:
    if number is not None and number < 0:
        raise ValueError(f"Expected a number of a device from 0, got {number}")


def _parse_minutes(minutes: float) -> float:
    if not 0 < minutes <= MAX_MINUTES:
        raise ValueError(f"Expected --minutes above 0 and up to {MAX_MINUTES}, got {minutes:g}")
    return 60 * minutes


def _open_registry(keys: Path) -> "DeviceRegistry":
    from pliant.extras import require

    require("cryptography", "deploy")
    from pliant.deploy.security.certificates import check_server_keys
    from pliant.deploy.security.registry import DeviceRegistry

    check_server_keys(keys)
    return DeviceRegistry(keys)
