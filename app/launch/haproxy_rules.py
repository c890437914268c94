"""HAProxy's rules: the texts of haproxy_cfg/, and the edits that put them into Serve's file.

Serve has no options for these lines (decision 0049), so each start of HAProxy edits the file that
Serve wrote. An edit that matches nothing would leave the service without limits, with open ports.
So each edit names the lines of Serve's template that it needs, which are checked before anything
starts. It also says how often it must match, or HAProxy is not started.

This file is also the program that edits and then starts HAProxy (:func:`main`). So it imports the
standard library alone, as :mod:`models.files` does, and starts in 30 ms.
"""

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn

FOLDER = Path(__file__).with_name("haproxy_cfg")
EX_CONFIG = 78  # sysexits.h: a configuration error
PR_SET_PDEATHSIG = 1  # linux/prctl.h: a signal once the parent ends; it stays after execv
APPLICATION = "tandem"  # the name in serve_config.yaml
# The first line of an edited file. It names the file that Serve wrote, which is kept for the next
# edit, and for an operator who compares the two.
MARK, ORIGINAL = "# Edited by tandem. Serve wrote: ", ".serve"
PREFIX = "@prefix@"  # in the texts: the application's route prefix, which Serve's file has
ONCE, NEVER = r"\A", r"(?!)"  # values of Edit.per

# Lines of Serve's template.
NAME = r"\{\{ backend\.name or 'unknown' \}\}"
BACKEND = f"^backend {NAME}$"
HTTP_BIND = (
    r"^frontend http_frontend\n *bind \{\{ config\.frontend_host \}\}:"
    r"\{\{ config\.frontend_port \}\}$"
)
GRPC_BIND = (
    r"^ *bind \{\{ config\.grpc_frontend_host \}\}:\{\{ config\.grpc_frontend_port \}\} proto h2$"
)
LINES = r"(?:(?!\w).*\n)*?"  # of one section, whose first line alone is not indented
# The texts, the protection that each gives, and how often Serve's file has its section.
TEXTS = (
    ("global.cfg", "the size of kept buffers", ONCE),
    ("defaults.cfg", "the time limit of headers", ONCE),
    ("http_frontend.cfg", "rooms for connections, and HTTP/1.1 alone", ONCE),
    ("grpc_frontend.cfg", "the limits of gRPC connections", None),
    ("http_backend.cfg", "the limits of HTTP requests", None),
    ("grpc_backend.cfg", "the limits of gRPC calls", None),
)


class RuleOptions(NamedTuple):
    """The values on which the rules of every HAProxy depend."""

    application: str = APPLICATION  # the only one to which the limits apply
    max_requests: int | None = None  # under way per Gateway; HAProxy refuses others; None: no limit
    origins: tuple[str, ...] = ()  # pages of these may read HAProxy's own answers; * allows all
    headers_within_s: int = 3  # time limit of HTTP's headers, from the connection's beginning
    begin_within_s: int = 10  # time limit of a body's or message's first bytes, and gRPC's headers
    max_connections: int = 4096  # of all clients; HTTP's have 3/4 of them, gRPC's 3/16
    max_calls: int = 4096  # gRPC calls under way in all places
    gateway_timeout_ms: int = 5000  # without an answer; then a cluster's HAProxy asks again
    answer_timeout_ms: int = 10_500  # without an answer; then one machine's HAProxy answers 504
    whole_bytes: int = 49_152  # a body up to this size fits in HAProxy's buffer beside its headers
    keys_map: str = ""  # the file of the accepted keys' hashes; "" for a service without keys
    accepts_proxy: bool = False  # whether connections begin with the PROXY protocol
    health_route: str = ""  # a further path of /readyz, and one of /invocations (Vertex AI)
    predict_route: str = ""
    is_logged: bool = False  # whether HAProxy logs every request, as an operator asked it to


class OwnService(NamedTuple):
    """The addresses of the HAProxy of a service on one machine.

    ``host`` is the address that clients reach. Serve's own is 127.0.0.1, where HAProxy finds the
    Gateways: at ``host`` they would listen too, past HAProxy's limits.
    """

    host: str
    sockets: tuple[Path, Path]  # for HTTP and gRPC, in the run's folder, without TLS
    tls: str = ""  # the words after ``bind ADDRESS ssl``; "" without TLS


class Edit(NamedTuple):
    """A replacement in HAProxy's configuration, by regular expressions."""

    purpose: str  # the protection that would be missing without it; part of error messages
    anchors: Sequence[str]  # each must match in Serve's template
    pattern: str  # for the file; ^ and $ match at every line
    replacement: str  # as :func:`re.sub` takes it
    per: str | None = ONCE  # ``pattern`` must match as often as this does; None: any number


class MissingEditError(Exception):
    """An edit does not fit; the message is its purpose."""


# With splicing, bytes of a body stay in HAProxy's pipe if the answer comes first. The client's
# connection would then hang and never be closed.
UNSPLICED = Edit(
    "bodies copied, not spliced: a client that was answered early would hang",
    (r"^ *option splice-request$", r"^ *option splice-response$"),
    r"^ *option +splice-.*\n",
    "",
    per=None,
)
# Serve makes HAProxy send a UDP datagram per request to this machine's syslog port, whatever
# enable_access_log says. Usually nothing listens there. It takes a quarter of HAProxy's time for a
# small request.
UNLOGGED = Edit(
    "no datagram for each request",
    (r"^ *log \{\{ config\.log_target \}\} local0 info$",),
    r"^ *log +127\.0\.0\.1:514 .*\n",
    "",
    per=None,
)
# A node that is cut off acknowledges nothing: with the keepalive of the texts its connections end
# within 3 s, and their requests go to others. default-server does not hand tcp-ut on.
SILENCED = Edit(
    "requests of a node that is cut off go to others within 3 s",
    (r"^ *server \{\{ server\.name \}\} \{\{ server\.host \}\}:\{\{ server\.port \}\} check",),
    r"^( *server \S+ \S+:\d+ check\b.*)$",
    r"\1 tcp-ut 2s",
    per=None,
)
# The texts are placed by the names that Serve gives to sections.
NAMED = Edit(
    "backends named by protocol and application",
    (BACKEND,),
    r"^backend (?!(default_backend|default_grpc_backend|grpc_fallback_backend"
    r"|(http|grpc)-[A-Za-z0-9._-]+)$)",
    r"\g<0>",
    per=NEVER,
)


def edits_of(options: RuleOptions, own: OwnService | None) -> list[Edit]:
    """Return all edits of Serve's file; ``own`` is None for a cluster.

    If a Gateway dies on a cluster, or leaves a request unanswered, a second Gateway is asked.
    """
    backend = f"backend {re.escape(backend_name('http', options.application))}"
    return [
        UNSPLICED,
        NAMED,
        *([] if options.is_logged else [UNLOGGED]),
        # HAProxy would close a client's connection without a response if a reused one to a Gateway
        # breaks.
        Edit(
            "an answer of HAProxy's where a Gateway dies: reused connections are known to work",
            (r"^ *http-reuse always$",),
            rf"^({backend}\n{LINES} *http-reuse) always$",
            r"\1 safe",
            per=f"^{backend}$",
        ),
        *_statistics(own),
        *([SILENCED] if own is None else _addresses(own, options)),
        *_added(options, own),
    ]


def backend_name(protocol: str, application: str) -> str:
    """Return the name that Serve gives to an application's backend; ``protocol``: http or grpc."""
    name = f"{protocol}-{application}".replace("#", "-").replace("/", ".")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def _statistics(own: OwnService | None) -> Iterable[Edit]:
    """Yield the edits that show metrics and statistics to this user, or to a cluster's node."""
    wilds = ("frontend prometheus", "", "metrics"), ("listen stats", r"\*", "stats")
    for first, wild, name in wilds:
        place = r"127.0.0.1:\g<2>"
        if own is not None:
            place = f"unix@{own.sockets[0].with_name(name)}-page.sock mode 600"
        yield Edit(
            "HAProxy's metrics and statistics away from other machines",
            (rf"^{first}\n *bind {wild}:\{{\{{ config\.{name}_port \}}\}}$",),
            rf"^({first}\n *bind ){wild}:(\d+)$",
            rf"\g<1>{place}",
        )
    yield Edit(
        "HAProxy's control away from other users",
        (r"^ *stats socket \{\{ config\.socket_path \}\} mode 666 ",),
        r"^( *stats socket \S+ mode )666 ",
        r"\g<1>600 ",
        per="^ *stats socket ",
    )


def _addresses(own: OwnService, options: RuleOptions) -> Iterable[Edit]:
    """Yield the edits of the addresses on which HAProxy of one machine listens.

    The public ones do not take all connections, so that its sockets and the metrics answer.
    """
    proxy = " accept-proxy" * options.accepts_proxy
    rooms = http_rooms(options.max_connections), options.max_connections * 3 // 16
    words = f" ssl {own.tls}" if own.tls else ""
    yield Edit(
        "the address and the TLS of HTTP",
        (HTTP_BIND,),
        r"^(frontend http_frontend\n *bind )127\.0\.0\.1:(\d+)$",
        rf"\g<1>{own.host}:\g<2>" + _literal(words) + f" maxconn {rooms[0]}{proxy}",
    )
    words = words.replace("alpn http/1.1", "alpn h2") or " proto h2"
    yield Edit(
        "the address and the TLS of gRPC",
        (GRPC_BIND,),
        rf"^(frontend grpc_frontend\n{LINES} *bind )127\.0\.0\.1:(\d+) proto h2$",
        rf"\g<1>{own.host}:\g<2>" + _literal(words) + f" maxconn {rooms[1]}{proxy}",
        per="^frontend grpc_frontend$",
    )
    if own.tls:
        yield Edit(
            "TLS on every port that others reach",
            (HTTP_BIND,),
            r"^ *bind (?!\S+ ssl crt |unix@)",
            r"\g<0>",
            per=NEVER,
        )


def http_rooms(max_connections: int) -> int:
    """Return how many of the connections HTTP's clients may have."""
    return max_connections * 3 // 4


def _added(options: RuleOptions, own: OwnService | None) -> Iterable[Edit]:
    """Yield the edits that put the texts at the beginning of their sections."""
    for file, purpose, per in TEXTS:
        first, lines = section_text(file, options, own)
        anchor = BACKEND if file.endswith("_backend.cfg") else f"^{first}$"
        yield Edit(purpose, (anchor,), f"^{re.escape(first)}\n", r"\g<0>" + _literal(lines), per)
    first, lines = section_text("default_backend.cfg", options, own)
    yield Edit(
        "503 in place of 404 while no application is known",
        (f"^{first}$", rf"^ *use_backend {NAME} if is_{NAME}$"),
        rf"\A(?:(?! *use_backend http-).*\n)*{first}\n",
        r"\g<0>" + _literal(lines),
        per=None,
    )


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


def section_text(file: str, options: RuleOptions, own: OwnService | None) -> tuple[str, str]:
    """Return a section's first line and the lines to add to it, with their values.

    HAProxy itself evaluates the lines ``.if`` of the texts.
    """
    protocol = "grpc" if file.startswith("grpc") else "http"
    local, local_grpc = own.sockets if own else ("", "")
    rooms = http_rooms(options.max_connections)
    values = {
        "backend": backend_name(protocol, options.application),
        "is_own": int(own is not None),
        "is_cluster": int(own is None),
        "has_handshake": int(own is not None and (bool(own.tls) or options.accepts_proxy)),
        # Rules of a session are evaluated once the PROXY protocol has said who calls.
        "level": "session" if options.accepts_proxy else "connection",
        "has_limit": int(options.max_requests is not None),
        "max_requests": options.max_requests,
        "has_keys": int(bool(options.keys_map)),
        "keys_map": options.keys_map,
        "has_origins": int(bool(options.origins)),
        "any_origin": int("*" in options.origins),
        "origins": " ".join(options.origins),
        "headers_within_s": options.headers_within_s,
        **{
            f"rooms_{share}": max(1, rooms * share // 512)
            for share in (1, 2, 8, 32, 96, 120, 128, 256, 384, 480, 512)
        },
        "begin_within_s": options.begin_within_s,
        "has_routes": int(bool(options.health_route or options.predict_route)),
        "health_route": options.health_route or "/readyz",
        "predict_route": options.predict_route or "/invocations",
        "max_calls": options.max_calls,
        "gateway_timeout_ms": options.gateway_timeout_ms,
        "answer_timeout_ms": options.answer_timeout_ms,
        "whole_bytes": options.whole_bytes,
        "local_socket": local,
        "local_grpc_socket": local_grpc,
    }
    text = re.sub(r"\$\{(\w+)\}", lambda m: str(values[m[1]]), (FOLDER / file).read_text("utf-8"))
    first = re.search(r"^\w.*\n", text, re.MULTILINE)
    assert first is not None  # each text has the first line of its section
    return first[0].rstrip(), text[first.end() :]


def unanchored(edits: Iterable[Edit], template_module: str) -> list[str]:
    """Return the purposes of edits whose anchors are missing in Serve's template, with the anchors.

    ``template_module`` is the source of the Python module that holds the template.
    """
    template = template_module.replace('"""', "\n")
    return [
        f"{edit.purpose} (no line {anchor})"
        for edit in edits
        for anchor in edit.anchors
        if not re.search(anchor, template, re.MULTILINE)
    ]


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return Serve's configuration with all edits; raise :class:`MissingEditError` without one."""
    for edit in edits:
        before = text
        text, num = re.subn(edit.pattern, edit.replacement, before, flags=re.MULTILINE)
        if edit.per is not None and num != len(re.findall(edit.per, before, re.MULTILINE)):
            raise MissingEditError(edit.purpose)
    return text


def with_unkept(text: str, backend: str) -> str:
    """Return the configuration with a second entry for each Gateway, without reused connections.

    Requests that HAProxy cannot repeat take one of these entries, each with the same probability.
    As their weight is 0, no other request does, and they are not counted as Gateways.
    """
    section = re.compile(rf"^backend {re.escape(backend)}\n{LINES}(?=\w|\Z)", re.MULTILINE)
    if (match := section.search(text)) is None:
        return text
    servers = re.findall(r"^ *server (\S+) (\S+) check(?! backup)", match[0], re.MULTILINE)
    lines = "".join(
        f"    server {name}-unkept {address} no-check track {backend}/{name} weight 0"
        " pool-max-conn 0\n"
        f"    use-server {name}-unkept if {{ var(txn.once) -m bool }} {{ rand({left}) eq 0 }}\n"
        for left, (name, address) in zip(range(len(servers), 0, -1), servers, strict=True)
    )
    return f"{text[: match.end()]}{lines}{text[match.end() :]}"


def edit_file(path: str, edits: Iterable[Edit], backend: str) -> None:
    """Edit the file at ``path`` in place; an edited file is made again of what Serve wrote."""
    encoding = {"encoding": "utf-8", "errors": "surrogateescape"}
    text = Path(path).read_text(**encoding)
    if text.startswith(MARK):
        text = Path(path + ORIGINAL).read_text(**encoding)
    else:
        Path(path + ORIGINAL).write_text(text, **encoding)
    new = Path(f"{path}.{os.getpid()}")
    text = with_unkept(edited(text, edits), backend).replace(PREFIX, _prefix(text, backend))
    new.write_text(f"{MARK}{path}{ORIGINAL}\n{text}", **encoding)
    new.replace(path)


def _prefix(text: str, backend: str) -> str:
    """Return what the paths of our application begin with: "" for the route prefix /."""
    match = re.search(rf"^ *acl is_{re.escape(backend)} path_beg (\S*)/$", text, re.MULTILINE)
    return match[1] if match else ""


def main(job_file: str, *words: str) -> None:
    """Edit the configuration after ``-f``, then become HAProxy with these ``words``.

    ``job_file`` is JSON: the edits, our backend's name, the file for the reason why HAProxy is not
    started, the text that says what to do, and HAProxy's path.
    """
    sys.path.append(str(Path(__file__).parents[2]))
    from models.files import ForeignError, check_place

    parent = os.getppid()
    job = json.loads(Path(job_file).read_text("ascii"))
    try:
        for before, path in pairwise(words):
            if before == "-f":
                check_place(path)  # a cluster's Serve writes it below /tmp
                edit_file(path, [Edit(*fields) for fields in job["edits"]], job["backend"])
    except MissingEditError as error:
        _refuse(str(error), job)
    except ForeignError as error:
        _refuse(f"a folder of its own: {error.strerror}", job | {"remedy": "have it removed"})
    except (OSError, ValueError) as error:
        _refuse(f"every edit: {error}", job)
    if sys.platform == "linux":  # or it would hold the ports after Serve's manager has ended
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the signal was asked for
            sys.exit(1)
    os.execv(job["binary"], [job["binary"], *words])


def _refuse(lost: str, job: dict[str, str]) -> NoReturn:
    reason = f"HAProxy is not started: its configuration lacks {lost}; {job['remedy']}"
    print(reason, file=sys.stderr)
    with suppress(OSError):  # the folder of a cluster's command may be another user's
        Path(job["refusal"]).write_text(f"{reason}\n", "utf-8", "replace")
    sys.exit(EX_CONFIG)


if __name__ == "__main__":
    main(*sys.argv[1:])
