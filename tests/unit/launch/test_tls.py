"""TLS by Serve's options: every mistake is told before Ray starts."""

import pytest

from app.errors import ConfigError
from app.launch.checks import HttpOptions, Tls, tls_of
from app.launch.config import ServeConfig
from tests.support.certificates import Root

APPLICATIONS = [{"import_path": "app.main:build"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return Root(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(root):
    return root.sign("service")


def options(signed, **more):
    return {
        "host": "127.0.0.1",
        "port": 8000,
        "ssl_certfile": str(signed.certificate),
        "ssl_keyfile": str(signed.key),
        **{name: str(value) for name, value in more.items()},
    }


def tls(options: dict) -> Tls | None:
    return tls_of(HttpOptions.model_validate({"port": 8000} | options))


def served(options: dict) -> ServeConfig:
    return ServeConfig.of({"http_options": options, "applications": APPLICATIONS})


def test_without_the_options_there_is_none():
    assert tls({"host": "127.0.0.1", "ssl_certfile": None, "ssl_keyfile": None}) is None


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_keyfile_password"])
def test_what_would_be_ignored_without_a_certificate_is_refused(name):
    with pytest.raises(ConfigError, match="give ssl_certfile and ssl_keyfile too"):
        tls({"host": "127.0.0.1", name: "x"})


def test_a_pair_that_fits(signed, root):
    found = tls(options(signed, ssl_ca_certs=root.path))
    assert (found.certificate, found.key) == (signed.certificate, signed.key)
    assert found.clients == root.path


def test_serve_itself_gets_none_of_it(signed, root):
    config = served(options(signed, ssl_ca_certs=root.path))
    assert config.without_tls().as_dict()["http_options"] == {
        "host": "127.0.0.1",
        "port": 8000,
    }


def test_a_key_of_another_certificate(signed, root):
    wrong = options(signed) | {"ssl_keyfile": str(root.sign("other").key)}
    with pytest.raises(ConfigError, match=r"the key is not the certificate's \(.*service.pem"):
        tls(wrong)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_that_is_missing_or_something_else(signed, tmp_path, name):
    with pytest.raises(ConfigError, match=r"No such file or directory \(.*nothing"):
        tls(options(signed) | {name: str(tmp_path / "nothing")})
    (tmp_path / "text").write_text("this is no certificate")
    with pytest.raises(ConfigError, match=r"no certificate and key in PEM .*text"):
        tls(options(signed) | {name: str(tmp_path / "text")})


def test_a_key_with_a_passphrase_is_told_how_to_lose_it(signed, root):
    hidden = root.sign("hidden", passphrase=b"a passphrase")
    with pytest.raises(ConfigError, match="openssl pkey"):
        tls(options(hidden))
    with pytest.raises(ConfigError, match="openssl pkey") as refused:
        tls(options(hidden, ssl_keyfile_password="a passphrase"))
    assert "a passphrase" not in str(refused.value)
