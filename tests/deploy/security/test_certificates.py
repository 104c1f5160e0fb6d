import socket
import ssl
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from tests.deploy.federation_keys import make_federation_keys

from pliant.deploy.security import certificates
from pliant.deploy.security.certificates import (
    check_private_file,
    check_server_keys,
    find_device_files,
    make_keys,
    parse_host,
)
from pliant.deploy.security.registry import DeviceRegistry
from pliant.storage.formats import UnsupportedFormat


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "new"
    make_federation_keys(folder, devices=2, hosts=("example.org", "10.0.0.7"))
    return folder


def test_secrets_are_for_their_owner_only(keys):
    secrets = ("ca.key", "server.key", "devices/0/key", "devices/1/key")
    assert {oct((keys / name).stat().st_mode & 0o777) for name in secrets} == {"0o600"}
    for name in secrets:
        check_private_file(keys / name)


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_text("secret")
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        check_private_file(path)


def test_the_authority_signs_the_server_certificate(keys):
    authority = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "example.org" in names.get_values_for_type(x509.DNSName)
    assert socket.gethostname() in names.get_values_for_type(x509.DNSName)
    assert {str(a) for a in names.get_values_for_type(x509.IPAddress)} >= {"127.0.0.1", "10.0.0.7"}


def test_python_accepts_them_for_tls(keys):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    ssl.create_default_context(cafile=str(keys / "ca.crt"))


def test_each_device_has_its_own_openssh_key_pair(keys):
    devices = DeviceRegistry(keys).read()
    for number, device in devices.items():
        private = load_ssh_private_key((keys / "devices" / str(number) / "key").read_bytes(), None)
        assert private.public_key() == load_ssh_public_key(device.key.encode())
    assert devices[0].key != devices[1].key


def test_a_folder_that_is_not_empty_is_left_alone(keys):
    before = (keys / "ca.key").read_bytes()
    with pytest.raises(FileExistsError, match="not empty"):
        make_keys(keys)
    assert (keys / "ca.key").read_bytes() == before


@pytest.mark.parametrize(
    "host", ["http://example.org:9092", "not a host!!", "", "a..b", "-a.org", "300.1.1.1", "[::1]"]
)
def test_an_invalid_host_is_refused_and_leaves_no_folder(tmp_path, host):
    with pytest.raises(ValueError, match="Expected --host with a host name or an address, got"):
        make_keys(tmp_path / "new", hosts=(host,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["example.org", "vm-3", "my_host", "10.0.0.7", "fe80::1", "a1.b2"])
def test_names_and_addresses_are_hosts(host):
    parse_host(host, "a host")


def test_keys_are_written_completely_or_not_at_all(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(certificates, "_encode_key", fail)
    with pytest.raises(OSError, match="disk is full"):
        make_keys(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_server_needs_all_its_keys(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the keys of `pliant deploy init`"):
        check_server_keys(tmp_path)
    make_keys(tmp_path / "keys")
    check_server_keys(tmp_path / "keys")
    (tmp_path / "keys" / "format").write_text("2")
    with pytest.raises(UnsupportedFormat, match="got format 2 of an older pliant; make new ones"):
        check_server_keys(tmp_path / "keys")


def test_a_device_needs_the_folder_that_it_has_enrolled(keys, tmp_path):
    folder = keys / "devices" / "1"
    assert find_device_files(folder) == (folder / "ca.crt", folder / "key", 1)
    with pytest.raises(FileNotFoundError, match="expected the keys of `pliant device enrol`"):
        find_device_files(tmp_path)
    with pytest.raises(UnsupportedFormat, match="got format 1 of an older pliant"):
        find_device_files(keys)  # as pliant 0.1 wrote them, with all keys in one folder


def test_openssl_agrees(keys):
    try:
        completed = subprocess.run(
            ["openssl", "verify", "-CAfile", str(keys / "ca.crt"), str(keys / "server.pem")],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert completed.returncode == 0, completed.stdout + completed.stderr
