import socket
import ssl
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from pliant.deploy.security import certificates
from pliant.deploy.security.certificates import (
    check_fleet_keys,
    check_private_file,
    find_device_files,
    make_keys,
    parse_host,
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "new"
    make_keys(folder, devices=2, hosts=("example.org", "10.0.0.7"))
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
    public_keys = set()
    for number in "01":
        private = load_ssh_private_key((keys / "devices" / number / "key").read_bytes(), None)
        public = load_ssh_public_key((keys / "devices" / number / "key.pub").read_bytes())
        assert private.public_key() == public
        public_keys.add((keys / "devices" / number / "key.pub").read_bytes())
    assert len(public_keys) == 2


def test_a_folder_that_is_not_empty_is_left_alone(keys):
    before = (keys / "ca.key").read_bytes()
    with pytest.raises(FileExistsError, match="not empty"):
        make_keys(keys, devices=1)
    assert (keys / "ca.key").read_bytes() == before


def test_a_federation_needs_a_device(tmp_path):
    with pytest.raises(ValueError, match="one device or more, got 0"):
        make_keys(tmp_path / "new", devices=0)


@pytest.mark.parametrize(
    "host", ["http://example.org:9092", "not a host!!", "", "a..b", "-a.org", "300.1.1.1", "[::1]"]
)
def test_an_invalid_host_is_refused_and_leaves_no_folder(tmp_path, host):
    with pytest.raises(ValueError, match="Expected --host with a host name or an address, got"):
        make_keys(tmp_path / "new", devices=1, hosts=(host,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["example.org", "vm-3", "my_host", "10.0.0.7", "fe80::1", "a1.b2"])
def test_names_and_addresses_are_hosts(host):
    parse_host(host, "a host")


def test_keys_are_written_completely_or_not_at_all(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError("the disk is full")

    monkeypatch.setattr(certificates, "make_device_key", fail)
    with pytest.raises(OSError, match="disk is full"):
        make_keys(tmp_path / "new", devices=1)
    assert list(tmp_path.iterdir()) == []


def test_a_fleet_needs_a_key_for_each_device(keys, tmp_path):
    check_fleet_keys(keys, 2)
    with pytest.raises(ValueError, match=r"expected keys for 3 devices \(`fleet.size`\), got 0, 1"):
        check_fleet_keys(keys, 3)
    with pytest.raises(FileNotFoundError, match="expected the keys of `pliant deploy init`"):
        check_fleet_keys(tmp_path, 1)
    (tmp_path / "devices" / "mine").mkdir(parents=True)
    with pytest.raises(ValueError, match="expected folders 0, 1, 2 and so on, got 'mine'"):
        check_fleet_keys(tmp_path, 1)


def test_a_device_without_a_key_sees_which_devices_have_one(keys, tmp_path):
    assert find_device_files(keys, 1) == (keys / "ca.crt", keys / "devices" / "1" / "key")
    with pytest.raises(FileNotFoundError, match=r"has no device 7; it has 0, 1$"):
        find_device_files(keys, 7)
    for number in "012":
        (tmp_path / "devices" / number).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"has no device 7; it has 0 to 2$"):
        find_device_files(tmp_path, 7)


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
