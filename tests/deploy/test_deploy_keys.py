import socket
import ssl
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from pliant.deploy import keys as keys_module
from pliant.deploy.keys import device_files, make_keys, need_fleet, need_host, need_private


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "new"
    make_keys(folder, devices=2, hosts=("example.org", "10.0.0.7"))
    return folder


def test_secrets_are_for_their_owner_only(keys):
    secrets = ("ca.key", "server.key", "superexec.secret", "devices/0/key", "devices/1/key")
    assert {oct((keys / name).stat().st_mode & 0o777) for name in secrets} == {"0o600"}
    for name in secrets:
        need_private(keys / name)


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_text("secret")
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        need_private(path)


def test_the_authority_vouches_for_the_server(keys):
    authority = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "example.org" in names.get_values_for_type(x509.DNSName)
    assert socket.gethostname() in names.get_values_for_type(x509.DNSName)
    assert {str(a) for a in names.get_values_for_type(x509.IPAddress)} >= {"127.0.0.1", "10.0.0.7"}


def test_python_takes_them_for_tls(keys):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    ssl.create_default_context(cafile=str(keys / "ca.crt"))


def test_each_device_has_its_own_pair_in_the_form_of_openssh(keys):
    publics = set()
    for number in "01":
        private = load_ssh_private_key((keys / "devices" / number / "key").read_bytes(), None)
        public = load_ssh_public_key((keys / "devices" / number / "key.pub").read_bytes())
        assert private.public_key() == public
        publics.add((keys / "devices" / number / "key.pub").read_bytes())
    assert len(publics) == 2


def test_a_folder_that_is_not_empty_is_left_alone(keys):
    before = (keys / "ca.key").read_bytes()
    with pytest.raises(FileExistsError, match="not empty"):
        make_keys(keys, devices=1)
    assert (keys / "ca.key").read_bytes() == before


def test_a_federation_has_a_device(tmp_path):
    with pytest.raises(ValueError, match="one device or more, got 0"):
        make_keys(tmp_path / "new", devices=0)


@pytest.mark.parametrize(
    "host", ["http://example.org:9092", "not a host!!", "", "a..b", "-a.org", "300.1.1.1", "[::1]"]
)
def test_what_is_no_host_is_refused_and_leaves_no_folder(tmp_path, host):
    with pytest.raises(ValueError, match="Expected --host with a host name or an address, got"):
        make_keys(tmp_path / "new", devices=1, hosts=(host,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["example.org", "vm-3", "my_host", "10.0.0.7", "fe80::1", "a1.b2"])
def test_names_and_addresses_are_hosts(host):
    need_host(host, "one")


def test_keys_are_made_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError("the disk is full")

    monkeypatch.setattr(keys_module, "device_key", fail)
    with pytest.raises(OSError, match="disk is full"):
        make_keys(tmp_path / "new", devices=1)
    assert list(tmp_path.iterdir()) == []


def test_a_fleet_needs_a_key_for_each_device(keys, tmp_path):
    need_fleet(keys, 2)
    with pytest.raises(ValueError, match=r"expected keys for 3 devices \(`fleet.size`\), got 0, 1"):
        need_fleet(keys, 3)
    with pytest.raises(FileNotFoundError, match="expected the keys of `pliant deploy init`"):
        need_fleet(tmp_path, 1)
    (tmp_path / "devices" / "mine").mkdir(parents=True)
    with pytest.raises(ValueError, match="expected folders 0, 1, 2 and so on, got 'mine'"):
        need_fleet(tmp_path, 1)


def test_a_device_that_has_no_key_is_told_who_has(keys, tmp_path):
    assert device_files(keys, 1) == (keys / "ca.crt", keys / "devices" / "1" / "key")
    with pytest.raises(FileNotFoundError, match=r"has no device 7; it has 0, 1$"):
        device_files(keys, 7)
    for number in "012":
        (tmp_path / "devices" / number).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"has no device 7; it has 0 to 2$"):
        device_files(tmp_path, 7)


def test_openssl_agrees(keys):
    try:
        done = subprocess.run(
            ["openssl", "verify", "-CAfile", str(keys / "ca.crt"), str(keys / "server.pem")],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert done.returncode == 0, done.stdout + done.stderr
