"""The fork server: a process that imports what Ray's processes need, then forks for each of them.

``python -P -m app.launch.forks.server LISTENER MODULES``: the listener is a file descriptor, the
modules are separated by commas. None of them is Ray's: when its library is loaded it seeds its
random numbers and reads whose the process is.

The server has one thread of Python and starts nothing, so a fork is as an interpreter that has just
imported the modules. It ends when its standard input does; what it forked and is still there
``FORKS_END_WITHIN_S`` later it kills: Ray has ended.
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

from app.environment import whole_environment
from app.launch.forks.request import ForkRequest, become, received

FORKS_END_WITHIN_S = 5.0
FORKED = b"forked\n"
# Nothing that is imported here reads what begins with these.
OF_RAY = ("RAY_", "SPT_NOENV")


class ForkServer:
    """Answers one client after the other; in a fork, :meth:`serve` returns what it becomes."""

    def __init__(self, listener: socket.socket) -> None:
        self._environment = whole_environment()
        self._listener = listener
        self._agents: dict[int, socket.socket] = {}  # and who waits for their end
        self._pids: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)

    def serve(self) -> ForkRequest | None:
        """Fork for whoever asks; return None once standard input has ended."""
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # or it would wake nobody
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
                os.kill(pid, signal.SIGTERM)  # Ray has ended the client in its place

    def _accept(self) -> ForkRequest | None:
        client, _ = self._listener.accept()
        with contextlib.suppress(OSError, ValueError, KeyError):  # the client does it itself
            client.settimeout(FORKS_END_WITHIN_S)
            asked = received(client)
            if not (others := self._others(asked.environment)):
                return self._fork(client, asked)
            asked.close()
            client.sendall(f"refused: other {', '.join(others)}\n".encode())
        client.close()
        return None

    def _others(self, environment: dict[str, str]) -> list[str]:
        """Return the variables that what was imported may have read otherwise."""
        everything = {*environment, *self._environment}
        names = {name for name in everything if not name.startswith(OF_RAY)}
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
        """Close, in a fork, what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._listener, self._wakes, self._woken, client, *self._agents.values()):
            one.close()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there is none at all
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
            os.kill(pid, signal.SIGKILL)  # a child that nobody has waited for: the pid is its own


def import_all(modules: list[str]) -> None:
    """Import modules, of those that are installed, for this process and what it will fork.

    No more of them once standard input has ended: a command that is refused ends without them.
    """
    for module in modules:
        if select.select([sys.stdin], [], [], 0)[0]:
            return
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to every page that is shared


def main(listener: socket.socket, modules: list[str]) -> ForkRequest | None:
    """Import the modules, then answer those who connect."""
    # A terminal's Ctrl-C, or systemd's SIGTERM, is for the command, which ends us after Ray.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    server = ForkServer(listener)
    import_all(modules)
    return server.serve()


if __name__ == "__main__":
    _modules = sys.argv[2].split(",")
    if (_asked := main(socket.socket(fileno=int(sys.argv[1])), _modules)) is not None:
        become(_asked)
