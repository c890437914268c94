"""The fork server: imports the modules of Ray's processes, then forks for each of them.

``python -P -m app.launch.forks.server LISTENER MODULES``: the listener is a file descriptor, the
modules are separated by commas. None of them may be Ray's: at import its library seeds its random
numbers and reads the process's identity.

The server has one Python thread and starts no other processes, so a fork equals an interpreter that
has just imported the modules. It ends when its standard input is closed. Then Ray has ended, and
forks that still run after ``FORKS_END_WITHIN_S`` are killed.
"""

import contextlib
import gc
import importlib.util
import os
import select
import selectors
import signal
import socket
import sys
import time

from app.environment import SET_LATE, whole_environment
from app.launch.forks.request import ForkRequest, become, received

FORKS_END_WITHIN_S = 5.0
FORKED = b"forked\n"
# No module imported here reads variables with these prefixes.
RAY_PREFIXES = ("RAY_", "SPT_NOENV")


class ForkServer:
    """Answers one client at a time; in a fork, :meth:`serve` returns the process to become."""

    def __init__(self, listener: socket.socket) -> None:
        self._environment = whole_environment()
        self._listener = listener
        self._agents: dict[int, socket.socket] = {}  # by pid: the clients that wait for the end
        self._pids: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)

    def serve(self) -> ForkRequest | None:
        """Fork for each client; return None once standard input has been closed."""
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the signal wakes the loop
        for file in (self._listener, self._wakes, sys.stdin):
            self._selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if sys.stdin in ready:
                self._end_forks()
                return None
            if self._wakes in ready:
                self._wakes.recv(1024)
                self._reap()
            if self._listener in ready and (asked := self._accept()) is not None:
                return asked
            for pid in [pid for pid, client in self._agents.items() if client in ready]:
                self._forget(pid)
                os.kill(pid, signal.SIGTERM)  # Ray has ended the client, which stands for this fork

    def _accept(self) -> ForkRequest | None:
        client, _ = self._listener.accept()
        with contextlib.suppress(OSError, ValueError):  # the client then runs the script
            client.settimeout(FORKS_END_WITHIN_S)
            asked = received(client)
            if not (others := self._others(asked.environment)):
                return self._fork(client, asked)
            asked.close()
            client.sendall(f"refused: other {', '.join(others)}\n".encode())
        client.close()
        return None

    def _others(self, environment: dict[str, str]) -> list[str]:
        """Return the variables that differ from those that the imported modules may have read."""
        everything = {*environment, *self._environment}
        names = {name for name in everything - {*SET_LATE} if not name.startswith(RAY_PREFIXES)}
        return sorted(n for n in names if environment.get(n) != self._environment.get(n))

    def _fork(self, client: socket.socket, asked: ForkRequest) -> ForkRequest | None:
        if (pid := os.fork()) == 0:
            self._leave(client)
            return asked
        asked.close()
        self._pids.add(pid)
        client.sendall(FORKED)
        if asked.target is None:
            client.close()
        else:
            self._agents[pid] = client
            self._selector.register(client, selectors.EVENT_READ)
        return None

    def _leave(self, client: socket.socket) -> None:
        """Close the server's sockets and pipes, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for opened in (self._listener, self._wakes, self._woken, client, *self._agents.values()):
            opened.close()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self._pids.discard(pid)
                if pid in self._agents:
                    code = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(OSError):
                        self._agents[pid].sendall(b"%d\n" % (code if code >= 0 else 128 - code))
                    self._forget(pid)

    def _forget(self, pid: int) -> None:
        client = self._agents.pop(pid)
        self._selector.unregister(client)
        client.close()

    def _end_forks(self) -> None:
        ends = time.monotonic() + FORKS_END_WITHIN_S
        while self._pids and time.monotonic() < ends:
            self._reap()
            time.sleep(0.02)
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the pid is still the child's


def import_all(modules: list[str]) -> None:
    """Import the installed ones of these modules, for this process and its forks.

    Stops early if standard input is closed, so that a command that fails at once need not wait.
    """
    for module in modules:
        if select.select([sys.stdin], [], [], 0)[0]:
            return
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would write to every shared page


def main(listener: socket.socket, modules: list[str]) -> ForkRequest | None:
    """Import the modules, then answer clients."""
    # Ctrl-C in a terminal and systemd's SIGTERM are for the command, which ends this process after
    # Ray.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    server = ForkServer(listener)
    import_all(modules)
    return server.serve()


if __name__ == "__main__":
    _modules = sys.argv[2].split(",")
    if (_asked := main(socket.socket(fileno=int(sys.argv[1])), _modules)) is not None:
        become(_asked)
