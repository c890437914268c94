"""Configurations of HAProxy: as Serve writes them from its template, and our additions to them."""

import json
import re
from pathlib import Path
from typing import Any

from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from app.launch.config import ADD_SERVICER
from app.launch.haproxy import max_connections
from app.launch.haproxy_rules import RuleOptions, section_text

APPLICATION, OTHER = "tandem", "other"
PORTS = (9101, 8404)  # of the metrics and the statistics
PROXY = "SERVE_PROXY_ACTOR-1"  # as Serve names it
# Every line that an edit of a service on one machine looks for, and some that look like them.
CONFIG = """\
global
    log 127.0.0.1:514 local0 info
    stats socket /tmp/x/admin.sock mode 666 level admin
defaults
    mode http
    option splice-request
    option splice-response
    errorfile 502 /tmp/x/500.http
    errorfile 503 /tmp/x/500.http
    errorfile 504 /tmp/x/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
    bind *:84040
    bind :9101 proto h2
    server s 10.0.0.1:9101
backend http-other
    http-reuse always
    http-request del-header x-other
backend http-tandem
    http-reuse always
frontend grpc_frontend
    bind 127.0.0.1:9000 proto h2
backend grpc-other
    http-reuse always
backend grpc-tandem
    http-reuse always
listen stats
  bind *:8404
    # bind *:8404
"""


def write_serves_config(
    path: Path,
    *,
    ports: tuple[int, int] = PORTS,
    http_port: int = 8000,
    grpc_port: int | None = None,
    replicas: dict[str, int] | None = None,
    others: dict[str, int] | None = None,
    log_target: str = "127.0.0.1:514",
    fallback: int | None = None,
    **changes: Any,
) -> Path:
    """Write what Serve writes.

    ``ports`` are those of the metrics and the statistics, ``replicas`` are ports by protocol
    ("http", "grpc"): one of each, none by default. ``others`` are those of another application,
    below /other. ``log_target`` is RAY_SERVE_HAPROXY_LOG_TARGET, ``fallback``
    the port of Serve's own proxy, and ``changes`` are other fields of its HAProxyConfig.
    """
    config = HAProxyConfig(
        log_target=log_target,
        maxconn=max_connections(),  # Ray 2.59 has 20,000, for which many machines have no files
        metrics_port=ports[0],
        stats_port=ports[1],
        socket_path=str(path.parent / "admin.sock"),
        server_state_base=str(path.parent),
        server_state_file=str(path.parent / "server-state"),
        metrics_socket_path=str(path.parent / "metrics.sock"),
        http_options=HTTPOptions(host="127.0.0.1", port=http_port),
        grpc_options=gRPCOptions(
            port=grpc_port or 9000, grpc_servicer_functions=[ADD_SERVICER] if grpc_port else []
        ),
        is_head=True,
        **changes,
    )
    backends = {
        f"{protocol}-{application}": BackendConfig(
            name=f"{protocol}-{application}",
            path_prefix=prefix,
            app_name=application,
            protocol=RequestProtocol[protocol.upper()],
            servers=[ServerConfig("one", "127.0.0.1", port)],
            fallback_server=ServerConfig(PROXY, "127.0.0.1", fallback) if fallback else None,
        )
        for application, prefix, servers in (
            (APPLICATION, "/", replicas),
            (OTHER, "/other", others),
        )
        for protocol, port in (servers or {}).items()
    }
    HAProxyApi(config, backends, str(path))._generate_config_file_internal()
    return path


def haproxys_errors() -> dict[tuple[int, str], str]:
    """Return the message of each error that HAProxy answers itself, by status and code."""
    texts = [section_text(f, RuleOptions(), None)[1] for f in ("defaults.cfg", "http_backend.cfg")]
    text = "".join(texts)
    set_unless = r"set-var-fmt\((\S+)\) '(.*)' unless tandem_protocol$"
    for name, value in re.findall(set_unless, text, re.MULTILINE):
        text = text.replace(f"%[var({name})]", value)
    text = text.replace("%[req.body_len] of %[req.body_size]", "N of M")
    forms = re.findall(r"http-error status (\d+) .*string '(.*)'", text)
    errors = [(int(status), json.loads(form)["error"]) for status, form in forms]
    return {(status, error["code"]): error["message"] for status, error in errors}
