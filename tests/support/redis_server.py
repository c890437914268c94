"""Debian's redis-server on a free port of loopback, for one test or a module of them."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from app.launch.checks import free_port

PLACES = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
REDIS = os.environ.get("TANDEM_REDIS_SERVER") or shutil.which("redis-server", path=PLACES)
WITHIN_S = 60.0


class RedisServer:
    """A server that keeps nothing on disk; it can be frozen, stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        assert REDIS is not None
        self.process = subprocess.Popen(
            [
                *(REDIS, "--bind", "127.0.0.1", "--port", str(self.port)),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
                *("--loglevel", "warning", "--logfile", str(self._folder / "log.txt")),
            ]
        )
        deadline = time.monotonic() + WITHIN_S
        while not self._answers():
            assert self.process.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), self._connection() as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False

    def _connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def command(self, *words: str) -> bytes:
        """Send a command whose answer is one line, and return that."""
        with self._connection() as connection:
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            return connection.recv(2**16)

    def freeze(self) -> None:
        """Let it take connections and answer nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self.process.kill()
        self.process.wait(WITHIN_S)


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.stop()
