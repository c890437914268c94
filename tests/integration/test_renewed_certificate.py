"""A renewed certificate: HAProxy, as Serve configures it, shows the new one without a restart."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.launch.checks import HttpOptions, tls_of
from app.launch.haproxy import CertificateRenewal, HaproxyCommand
from tests.support.certificates import Root, Signed
from tests.support.haproxy_configs import write_serves_config
from tests.support.haproxy_process import running
from tests.support.services.processes import wait_until


@dataclass
class Front:
    """HAProxy with TLS, and what watches its certificate."""

    port: int
    signed: Signed
    folder: Path
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        files = {"ssl_certfile": str(self.signed.certificate), "ssl_keyfile": str(self.signed.key)}
        self.http = HttpOptions(host="127.0.0.1", port=self.port, **files)
        self.renewal = CertificateRenewal(self.http, self.folder, self.warnings.append)

    def shown(self) -> str:
        """Return the certificate that a new connection is shown, without line ends."""
        return "".join(ssl.get_server_certificate(("127.0.0.1", self.port)).split())

    def is_up(self) -> bool:
        try:
            return bool(self.shown())
        except OSError:
            return False


def text_of(certificate: Path) -> str:
    return "".join(certificate.read_text().split())


@pytest.fixture
def root(tmp_path) -> Root:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Root(folder)


@pytest.fixture
def front(root, free_port, tmp_path):
    run = tmp_path / "run"
    (run / "node").mkdir(parents=True)  # Serve has its files in a folder for each node
    front = Front(free_port(), root.sign("service"), run)
    ports = (free_port(), free_port())
    command = HaproxyCommand(run / "haproxy.sh", ports)
    command.write(tls=tls_of(front.http))
    config = write_serves_config(run / "node" / "haproxy.cfg", ports=ports, http_port=front.port)
    with running(command, config):
        wait_until(front.is_up, 20, "HAProxy does not listen")
        yield front


def test_the_new_one_is_shown_at_once(front, root):
    before = front.shown()
    assert before == text_of(front.signed.certificate)
    assert not front.renewal.look()  # nothing is new
    root.sign("service")  # in the same files, as certbot's links
    assert front.renewal.look()
    assert front.warnings == []
    assert front.shown() == text_of(front.signed.certificate) != before
    assert not front.renewal.look()


def test_comments_of_the_file_are_left_out(front, root):
    """As openssl writes them: a friendly name, in any encoding, with empty lines."""
    before, renewed = front.shown(), root.sign("other")
    for new, of_front in ((renewed.certificate, front.signed.certificate),
                          (renewed.key, front.signed.key)):  # fmt: skip
        comment = "subject=O = Müller GmbH\n\n".encode("latin-1")
        of_front.write_bytes(comment + new.read_bytes() + comment)
    assert front.renewal.look(), front.warnings
    assert front.shown() == text_of(renewed.certificate) != before


def test_between_two_writes_the_old_one_holds(front, root):
    before, other = front.shown(), root.sign("other")
    other.certificate.replace(front.signed.certificate)
    assert not front.renewal.look()
    (warning,) = front.warnings
    assert "the one before holds" in warning
    assert "the key is not the certificate's" in warning
    assert front.shown() == before
    other.key.replace(front.signed.key)
    assert front.renewal.look()
    assert front.shown() == text_of(front.signed.certificate) != before


def test_a_haproxy_that_is_not_there_is_asked_later(front, root):
    before, admin = front.shown(), front.folder / "node" / "admin.sock"
    hidden = admin.rename(admin.with_name("hidden.sock"))
    root.sign("service")
    for _ in range(2):
        assert not front.renewal.look()
    (warning,) = front.warnings
    assert "HAProxy is not there" in warning
    root.sign("service")
    assert not front.renewal.look()
    assert len(front.warnings) == 2  # of another change
    hidden.rename(admin)
    assert front.renewal.look()
    assert front.shown() == text_of(front.signed.certificate) != before
    assert not front.renewal.look()
    assert len(front.warnings) == 2
