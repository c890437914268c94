"""The script that Ray starts instead of its own: asks the fork server for a fork.

``fork_client.py [TARGET.py] ARGUMENTS...``: without a target the process is a worker. A worker's
script ends once the fork runs, since Ray knows workers by their id. An agent's script stays as long
as the agent, since Ray waits for the process that it started. If the server is gone or refuses, the
script does the work itself, as Ray's own script would. The server refuses if the environment
differs from the environment in which it imported its modules.

To start fast, this module imports little of the standard library.
"""

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

SOCKET_VARIABLE = "TANDEM_FORK_SERVER"
METRICS_SOCKET = "scrapes.sock"  # beside the fork server's
WORKER_MODULE = "ray._private.workers.default_worker"
FORKED_WITHIN_S = 30.0  # the server is still importing while Ray starts
MAX_ANSWER_BYTES = 1024
# How often workers publish their metrics. With Ray's 10 s a queue's figure would outlive the queue.
# Ray's other processes keep the 10 s: their figures change slowly.
PUBLISHING = {"RAY_metrics_report_interval_ms": "3000"}
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Request a fork; without one, run the script in this process."""
    arguments = sys.argv[1:]
    target = arguments.pop(0) if arguments and arguments[0].endswith(".py") else None
    if (connection := _forked(target, arguments)) is None:
        own = str(Path(__file__).parent)
        sys.path[:] = [folder for folder in sys.path if folder != own]
        run(target, arguments)
    elif target is not None:
        # Become a shell, a hundredth of this process's memory, that ends when the fork does.
        connection.setblocking(True)
        os.dup2(connection.fileno(), 0)
        os.execv("/bin/sh", ["sh", "-c", "read status && exit $status; exit 1"])


def _forked(target: str | None, arguments: list[str]) -> socket.socket | None:
    """Return the connection to the server once it has forked; None if no fork was made."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(FORKED_WITHIN_S)
    try:
        connection.connect(os.environ.get(SOCKET_VARIABLE, ""))
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps(request(target, arguments)).encode() + b"\n")
        if (answer := connection.recv(MAX_ANSWER_BYTES)) == b"forked\n":
            return connection
        print("not forked:", answer.decode().strip(), file=sys.stderr)
    except OSError as error:  # the server has not started, or has ended
        print("not forked:", error, file=sys.stderr)
    connection.close()
    return None


def request(target: str | None, arguments: list[str]) -> dict[str, object]:
    """Return a fork request: this process's environment, arguments, folder and signal state."""
    return {
        "target": target,
        "arguments": arguments,
        "environment": {**(PUBLISHING if target is None else {}), **os.environ},
        "folder": str(Path.cwd()),
        "leads_group": os.getpgrp() == os.getpid(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [int(n) for n in ENDING if signal.getsignal(n) is signal.SIG_IGN],
    }


def run(target: str | None, arguments: list[str]) -> None:
    """Run one of Ray's scripts as an interpreter would."""
    if target is None:
        sys.argv = [WORKER_MODULE, *arguments]
        sys.modules.pop(WORKER_MODULE, None)  # it was imported for its imports
        runpy.run_module(WORKER_MODULE, run_name="__main__", alter_sys=True)
    else:
        if server := os.environ.get(SOCKET_VARIABLE):
            _show_metrics_at(Path(server).with_name(METRICS_SOCKET))
        sys.argv = [target, *arguments]
        sys.path.insert(0, str(Path(target).parent))
        runpy.run_path(target, run_name="__main__")


def _show_metrics_at(path: Path) -> None:
    """Let Ray's exporter listen on a Unix socket in place of a port.

    Every user of the machine reaches a port. The exporter serves one connection at a time, so one
    that sends nothing would block it.
    """
    from wsgiref import simple_server

    class Server(simple_server.WSGIServer):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            path.unlink(missing_ok=True)
            self.socket.bind(str(path))
            self.server_name, self.server_port = "localhost", 0
            self.setup_environ()

        def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
            return self.socket.accept()[0], ("localhost", 0)

    def make_server(_: str, port: int, app: Any, **__: Any) -> Server:
        server = Server(("", port), simple_server.WSGIRequestHandler)
        server.set_app(app)
        return server

    simple_server.make_server = make_server  # type: ignore[assignment]


if __name__ == "__main__":
    main()
