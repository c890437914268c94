"""The real HAProxy with the edits of a service on one machine, and another application beside."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.launch.haproxy import edits
from app.launch.haproxy.command import haproxy_binary
from app.launch.haproxy.edit import sed_script

MAX_REQUESTS = 12
ORIGIN = "https://shop.example"  # of pages that may read its answers
# What matters of Serve's own (haproxy_templates.py).
CONFIG = """\
global
    tune.bufsize 65536
defaults
    mode http
    timeout connect 5s
    timeout client 20s
    timeout server 20s
    option abortonclose
    option redispatch 1
    retries 1
    retry-on conn-failure
    option idle-close-on-response
frontend http_frontend
    bind 127.0.0.1:{front}
    acl is_http-other path_beg /other/
    acl is_http-tandem path_beg /
    use_backend http-other if is_http-other
    use_backend http-tandem if is_http-tandem
backend http-other
    http-reuse always
    server one 127.0.0.1:{back}
backend http-tandem
    http-reuse always
    server one 127.0.0.1:{back}
"""


@contextmanager
def haproxy_before(front: int, back: int, folder: Path) -> Iterator[None]:
    """Run it at port ``front``; both applications' servers are at port ``back``."""
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(front=front, back=back), "ascii")
    ours = edits.backend_of("http", "tandem")
    rules = [
        *edits.always(),
        *edits.of_requests(ours, MAX_REQUESTS, [ORIGIN]),
        *edits.for_own(ours),
    ]
    subprocess.run(["sed", "-i", "-E", sed_script(rules), config], check=True)
    process = subprocess.Popen([haproxy_binary(), "-db", "-f", config])
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)
