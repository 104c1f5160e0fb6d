"""Tokens and keys in the registry: each attack on it is refused and changes nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pliant.deploy.security.certificates import (
    format_public_key,
    make_device_key,
    make_keys,
    parse_public_key,
)
from pliant.deploy.security.registry import (
    REGISTRY_FILE,
    DeviceRegistry,
    EnrolmentRefused,
    parse_token,
)


@pytest.fixture
def registry(tmp_path):
    make_keys(tmp_path / "keys")
    registry = DeviceRegistry(tmp_path / "keys", clock=lambda: registry.now)
    registry.now, registry.path = 1000.0, tmp_path / "keys" / REGISTRY_FILE
    return registry


def make_public_key():
    return parse_public_key(make_device_key()[1])


def enrol(registry, token, key=None, **options):
    registry.enrol(token.number, token.secret, key or make_public_key(), **options)


def test_a_key_waits_for_approval_and_tokens_go_to_the_next_device(registry):
    tokens = [registry.issue_token(None, seconds=60) for _ in range(3)]
    assert [token.number for token in tokens] == [0, 1, 2]
    key = make_public_key()
    enrol(registry, tokens[1], key)
    assert [device.status for device in registry.read().values()] == [
        "invited",
        "pending",
        "invited",
    ]
    assert registry.read_public_keys() == {}
    registry.approve(1)
    assert registry.read_public_keys() == {1: key}
    assert registry.issue_token(None, seconds=60).number == 3


def test_the_file_has_no_secret_and_only_its_owner_reads_it(registry):
    token = registry.issue_token(None, seconds=60)
    assert registry.path.stat().st_mode & 0o777 == 0o600
    assert token.secret not in registry.path.read_text()
    assert parse_token(f" {token}\n") == token


@pytest.mark.parametrize("text", ["", "0", "0-12-34", "x-" + 32 * "a" + "-" + 32 * "b"])
def test_another_text_is_no_token(text):
    with pytest.raises(ValueError, match="Expected a token of `pliant server devices token`"):
        parse_token(text)


def test_a_token_is_valid_once_for_its_number_and_for_a_time(registry):
    token, _ = (registry.issue_token(None, seconds=60) for _ in range(2))
    forged = parse_token(f"0-{32 * 'a'}-{token.authority}")
    under_another_name = parse_token(str(token).replace("0-", "1-", 1))
    for wrong in (forged, under_another_name):
        with pytest.raises(EnrolmentRefused, match="expected a token that was issued and not used"):
            enrol(registry, wrong)
    registry.now += 61
    with pytest.raises(EnrolmentRefused, match="the token has expired"):
        enrol(registry, token)
    token = registry.issue_token(0, seconds=60)  # the expired one is replaced
    enrol(registry, token)
    before = registry.read()[0]
    with pytest.raises(EnrolmentRefused, match="issued and not used"):
        enrol(registry, token)
    other = registry.issue_token(1, seconds=60)
    with pytest.raises(EnrolmentRefused, match="expected a new key, got one that is registered"):
        enrol(registry, other, parse_public_key(before.pending))
    assert registry.read()[0] == before


def test_a_token_used_by_many_at_once_enrols_one(registry):
    token = registry.issue_token(None, seconds=60)

    def attempt(key):
        try:
            DeviceRegistry(registry.path.parent, clock=lambda: 1000.0).enrol(0, token.secret, key)
        except EnrolmentRefused:
            return None
        return format_public_key(key)

    keys = [make_public_key() for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        enrolled = [key for key in pool.map(attempt, keys) if key is not None]
    assert enrolled == [registry.read()[0].pending]


def test_a_revoked_key_and_its_tokens_are_not_accepted_again(registry):
    key, token = make_public_key(), registry.issue_token(0, seconds=60)
    enrol(registry, token, key)
    registry.approve(0)
    rotation = registry.issue_token(0, seconds=60, is_rotation=True)
    registry.revoke(0)
    assert registry.read_public_keys() == {}
    with pytest.raises(EnrolmentRefused):
        enrol(registry, rotation, has_old_key=lambda key: True)
    with pytest.raises(EnrolmentRefused, match="expected a new key"):
        enrol(registry, registry.issue_token(0, seconds=60), key)
    assert registry.issue_token(None, seconds=60).number == 1  # numbers are not given away again


def test_a_key_is_replaced_only_by_who_has_the_old_one(registry):
    with pytest.raises(LookupError, match="expected an approved key to replace"):
        registry.issue_token(0, seconds=60, is_rotation=True)
    old, new = make_public_key(), make_public_key()
    enrol(registry, registry.issue_token(0, seconds=60), old)
    registry.approve(0)
    with pytest.raises(ValueError, match="expected no key, got a device that is approved"):
        registry.issue_token(0, seconds=60)
    token = registry.issue_token(0, seconds=60, is_rotation=True)
    with pytest.raises(EnrolmentRefused, match="expected a proof of the key"):
        enrol(registry, token, new)
    assert registry.read_public_keys() == {0: old}
    enrol(registry, token, new, has_old_key=lambda key: key == format_public_key(old))
    assert registry.read_public_keys() == {0: new}


def test_a_fourth_device_changes_no_other(registry):
    for number in range(3):
        enrol(registry, registry.issue_token(None, seconds=60))
        registry.approve(number)
    before = dict(registry.read())
    enrol(registry, registry.issue_token(None, seconds=60))
    registry.approve(3)
    assert {number: registry.read()[number] for number in range(3)} == before
