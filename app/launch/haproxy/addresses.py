"""Edits of the addresses on which HAProxy listens, with or without TLS."""

import re
from collections.abc import Sequence
from pathlib import Path

from app.launch.haproxy.edit import Edit, appended
from app.launch.haproxy.edits import HTTP, HTTP_BIND
from app.launch.haproxy.grpc_rules import BIND as GRPC_BIND
from app.launch.haproxy.grpc_rules import FRONTEND as GRPC


def on_loopback(ports: tuple[int, int]) -> Edit:
    """Return the edit that binds HAProxy's metrics and statistics ports to loopback.

    Serve's template binds these two ``ports`` to all interfaces. The service's own port follows
    http_options.host.
    """
    either = f"({ports[0]}|{ports[1]})"
    return Edit(
        "HAProxy's metrics and statistics on loopback alone",
        (
            r"^ *bind \*?:\{\{ config\.metrics_port \}\}$",
            r"^ *bind \*?:\{\{ config\.stats_port \}\}$",
        ),
        rf"s/^( *bind) \*?:{either}$/\1 127.0.0.1:\2/",
        patterns=tuple(rf"^ *bind 127\.0\.0\.1:{port}$" for port in ports),
        absent=f"^ *bind .*:{either}$",
        unless=rf"^ *bind 127\.0\.0\.1:{either}$",
    )


def listening_on(host: str, port: int, grpc_port: int | None) -> list[Edit]:
    """Return the edits with which HAProxy listens at ``host``.

    Serve's configured host becomes 127.0.0.1, where HAProxy reaches the Gateways. With ``host`` the
    Gateways would listen there too, past HAProxy's limits. With an IPv6 address HAProxy would not
    find them.
    """
    return [
        _moved("the address that clients reach", HTTP, port, host, ""),
        *([_moved("the address of gRPC", GRPC, grpc_port, host, " proto h2")] if grpc_port else []),
    ]


def _moved(purpose: str, frontend: str, port: int, host: str, words: str) -> Edit:
    local = rf"127\.0\.0\.1:{port}"
    return Edit(
        purpose,
        (HTTP_BIND if frontend == HTTP else GRPC_BIND,),
        rf"s/^( *bind ){local}({words})$/\1{host}:{port}\2/",
        patterns=(rf"^ *bind {re.escape(host)}:{port}( |$)",),
        per=rf"^{frontend}$",
    )


def locally(socket: Path, grpc_socket: Path) -> list[Edit]:
    """Return the edits with which HAProxy also listens on sockets in the run's folder.

    These need no TLS: only this user can enter the folder. ``tandem serve`` uses them to check
    readiness, since the public ports may require TLS and client certificates.
    """
    return [
        appended(
            "the socket on which tandem serve asks whether the service is ready",
            HTTP,
            [f"bind unix@{socket} mode 600"],
        ),
        appended(
            "the socket on which tandem serve asks whether gRPC is ready",
            GRPC,
            [f"bind unix@{grpc_socket} mode 600 proto h2"],
            per=f"^{GRPC}$",
        ),
    ]


def with_tls(words: str, ports: Sequence[int]) -> list[Edit]:
    """Return the edits with which the service's ports accept TLS only.

    ``words`` are the arguments after ``bind ADDRESS ssl``. ``ports`` stay without TLS, as do the
    sockets of :func:`locally`.
    """
    of_grpc = words.replace("alpn http/1.1", "alpn h2")
    plain = "|".join(map(str, ports))
    return [
        Edit(
            "TLS on every port that others reach",
            (HTTP_BIND,),
            rf"/^{HTTP}$/,/^ *bind /s|^( *bind [^ ]+)$|\1 ssl {words}|",
            patterns=(f"^ *bind [^ ]+ ssl {words}$",),
            absent="^ *bind ",
            unless=rf" ssl crt |^ *bind (127\.0\.0\.1:({plain})$|unix@)",
        ),
        Edit(
            "TLS on the port of gRPC",
            (GRPC_BIND,),
            rf"/^{GRPC}$/,/^ *bind /s|^( *bind [^ ]+) proto h2$|\1 ssl {of_grpc}|",
            patterns=(f"^ *bind [^ ]+ ssl {of_grpc}$",),
            per=f"^{GRPC}$",
        ),
    ]
