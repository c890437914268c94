"""The key that a client sends, and the files with which it speaks TLS."""

import ssl

import pytest

from app.access import ApiKeyError, CertificateError, ClientTls, key_headers
from tests.support.certificates import Root, Signed


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(root: Root) -> Signed:
    return root.sign("client")


def test_without_files_each_library_has_its_own_way():
    assert ClientTls().context() is None


def test_the_roots_given_are_the_ones_trusted(root):
    context = ClientTls(roots=root.path).context()
    assert context is not None
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_a_certificate_with_its_key_beside_it_or_in_it(root, signed, tmp_path):
    assert ClientTls(root.path, signed.certificate, signed.key).context()
    both = tmp_path / "both.pem"
    both.write_bytes(signed.certificate.read_bytes() + signed.key.read_bytes())
    assert ClientTls(certificate=both).context()


def test_a_key_alone(signed):
    with pytest.raises(CertificateError, match=r"a key without its certificate: .*client\.key"):
        ClientTls(key=signed.key).context()


def test_files_that_cannot_be_used(root, signed, tmp_path):
    text, other = tmp_path / "text", root.sign("other")
    text.write_text("no certificate")
    hidden = root.sign("hidden", passphrase=b"secret")
    for tls, told in (
        (ClientTls(roots=tmp_path / "nothing"), r"^cannot use --ca .*nothing: No such file or dir"),
        (ClientTls(roots=text), r"^cannot use --ca .*text: no certificate and key in PEM"),
        (ClientTls(certificate=text), r"--client-cert .*text: no certificate and key in PEM"),
        (ClientTls(None, signed.certificate, other.key), "the key is not the certificate's"),
        (ClientTls(None, hidden.certificate, hidden.key), "openssl pkey"),
    ):
        with pytest.raises(CertificateError, match=told):
            tls.context()


KEY, OTHER = "k" * 32, "o" * 32


@pytest.mark.parametrize(
    ("in_file", "variable", "sent"),
    [
        (None, None, None),
        (f"# mine\n{KEY}\n{OTHER}\n", None, KEY),
        (f"team-a:{KEY}\n", None, KEY),  # its name is not sent
        (None, f" {OTHER}\n", OTHER),
        (KEY, f" {OTHER}\n", KEY),
    ],
)
def test_the_key_of_the_file_or_else_of_the_variable(
    tmp_path, monkeypatch, in_file, variable, sent
):
    monkeypatch.setenv("TANDEM_API_KEY", variable or "")
    if in_file is not None:
        (tmp_path / "key").write_text(in_file)
    headers = key_headers(None if in_file is None else tmp_path / "key")
    assert headers == ({} if sent is None else {"authorization": f"Bearer {sent}"})


def test_what_is_no_key_is_not_shown(monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEY", "not a key, yet a secret of somebody")
    with pytest.raises(ApiKeyError, match="TANDEM_API_KEY, line 1") as refused:
        key_headers(None)
    assert "secret" not in str(refused.value)
