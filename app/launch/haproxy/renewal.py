"""Loads a renewed certificate into HAProxy over its admin socket, without ending connections."""

import contextlib
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

from app.access.file_stamp import Stamp, file_stamp
from app.errors import ConfigError
from app.launch.http_options import CHAIN, HttpOptions, Tls, tls_of

RENEWAL_EVERY_S = 5.0
ANSWERS_WITHIN_S = 5.0
# The file's other lines are comments, in any encoding, which HAProxy's commands do not take.
PEM_BLOCK = re.compile(rb"-----BEGIN ([^-]+)-----.+?-----END \1-----", re.DOTALL)
ADMIN_SOCKETS = ("admin.sock", "*/admin.sock")  # Serve's HAProxy: a single one, or one per node


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
        lines = b"\n".join(
            line for line in pem.splitlines() if line.strip()
        )  # an empty one ends it
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
