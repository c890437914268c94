"""A service that lets in only clients with a certificate of its own root."""

import ssl

import httpx
import pytest

from tests.support.certificates import Root
from tests.support.services.live_service import run_tandem
from tests.support.services.processes import reachable_ports


@pytest.mark.slow
def test_with_client_certificates_it_gets_ready_and_lets_in_nobody_else(
    start_service, root, signed, photo, photo_label, tmp_path
):
    """The command that asks whether the service is ready has none of those certificates.

    In the fast tier: tests/unit/launch/test_haproxy_rules.py, tests/unit/app/test_access.py.
    """
    mine, stranger = root.sign("client"), Root(tmp_path).sign("stranger")
    tls = {"ssl_certfile": str(signed.certificate), "ssl_keyfile": str(signed.key)}
    service = start_service(http=tls | {"ssl_ca_certs": str(root.path)})
    url = service.url.replace("http:", "https:")
    for shown in (mine, stranger, None):
        context = ssl.create_default_context(cafile=root.path)
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
        with httpx.Client(base_url=url, verify=context, timeout=60) as client:
            if shown is mine:
                answer = client.post("/v1/classify", content=photo).raise_for_status()
                assert answer.json()["predictions"][0]["label"] == photo_label
            else:
                for path in ("/v1/models", "/readyz"):
                    with pytest.raises(httpx.TransportError):
                        client.get(path)
    (tmp_path / "photo.jpg").write_bytes(photo)
    roots = ["--ca", str(root.path)]
    own = ["--client-cert", str(mine.certificate), "--client-key", str(mine.key)]
    for options, is_let_in in (([*roots, *own], True), (roots, False)):
        load = ["bench", "--images", tmp_path, "--concurrency", "1", "--duration", "1"]
        for command in (["classify", tmp_path / "photo.jpg"], load):
            done = run_tandem(*command, "--url", url, *options, exit_code=None)
            assert (done.returncode == 0) == is_let_in, done.stderr + done.stdout
    assert "curl --cert CLIENT.pem --key CLIENT.key" in service.log.read_text()
    assert reachable_ports(service.process.pid) == set()
