import ssl
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from pliant.deploy.keys import make_keys, need_private


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
