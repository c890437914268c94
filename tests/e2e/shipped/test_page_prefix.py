"""The pages in a real Chromium below a route_prefix, and behind a proxy that adds a path.

``make test`` has the page without a prefix, in test_page.py.
"""

import subprocess
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from app.launch.haproxy import haproxy_binary
from tests.support.services.live_service import Service, changed_config
from tests.support.services.page_driver import drop, watched
from tests.support.services.processes import EVENTUALLY_S, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PREFIX = "/pets/tandem"
# As an Ingress, nginx or Traefik has it: below a path is the service, which hears nothing of it.
PROXY = """\
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{port}
    http-request deny deny_status 404 unless {{ path_reg ^/(vision|deep/er)(/|$) }}
    use_backend prefixed if {{ path_beg /deep/er }}
    default_backend plain
backend plain
    http-request replace-path /vision/?(.*) /\\1
    server one 127.0.0.1:{plain}
backend prefixed
    http-request replace-path /deep/er/?(.*) /\\1
    server one 127.0.0.1:{prefixed}
"""


@pytest.fixture(scope="module")
def prefixed(start_service, tmp_path_factory) -> Service:
    folder = tmp_path_factory.mktemp("config")
    with changed_config(folder) as config:
        config["applications"][0]["route_prefix"] = PREFIX
    return start_service("--config", str(folder / "serve_config.yaml"))


@pytest.fixture(scope="module")
def proxy(service, prefixed, free_port, tmp_path_factory):
    port, config = free_port(), Path(tmp_path_factory.mktemp("proxy")) / "haproxy.cfg"
    config.write_text(PROXY.format(port=port, plain=service.port, prefixed=prefixed.port))
    process = subprocess.Popen([haproxy_binary(), "-db", "-f", config])
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        try:
            paths = ("/vision", f"/deep/er{PREFIX}")
            return all(httpx.get(f"{url}{path}/readyz").is_success for path in paths)
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up, EVENTUALLY_S, "the proxy answers")
        yield url
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(params=["/vision", f"/deep/er{PREFIX}"])
def base(proxy, request) -> str:
    return proxy + request.param


def test_a_photo_is_dropped(browser, base, photo_file, photo_label, tmp_path):
    with watched(browser, base, ()) as page:  # which lets it ask for nothing that is not below
        page.goto(f"{base}/")
        expect(page.locator("#labels li").first).to_be_visible()
        drop(page, photo_file)
        expect(page.locator("#headline")).to_have_text(photo_label)
        page.screenshot(path=tmp_path / "page.png")
        page.get_by_role("link", name="API").click()
        expect(page).to_have_url(f"{base}/docs")
        expect(page.locator(".opblock-summary-path").first).to_be_visible()


def test_the_documentation_tries_the_service_out(browser, base, tmp_path):
    with watched(browser, base, ()) as page:
        page.goto(f"{base}/docs")
        operation = page.locator(".opblock").filter(has_text="/readyz").first
        operation.locator(".opblock-summary").click()
        operation.get_by_role("button", name="Try it out").click()
        with page.expect_response("**/readyz") as response:
            operation.get_by_role("button", name="Execute").click()
        assert (response.value.url, response.value.status) == (f"{base}/readyz", 200)
        expect(operation.locator(".request-url, .curl").first).to_contain_text(f"{base}/readyz")
        page.screenshot(path=tmp_path / "docs.png")


def test_without_the_slash_at_the_end_of_the_proxys_path(browser, proxy, photo_file, photo_label):
    """It cannot see the difference; relative addresses would lead past its path."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{proxy}/vision")
    expect(page).to_have_url(f"{proxy}/vision/")
    drop(page, photo_file)
    expect(page.locator("#headline")).to_have_text(photo_label)
    context.close()
