"""A request to the fork server, and how a fork becomes the requested process."""

import json
import os
import signal
import socket
from dataclasses import dataclass

from app.environment import replace_environment
from app.launch.forks.client import ENDING, run

MAX_BODY_BYTES = 2**20
NUM_STREAMS = 3


@dataclass(frozen=True)
class ForkRequest:
    """A process that Ray wants started."""

    target: str | None  # the script; None for a worker
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    leads_group: bool  # a process group, as Ray's workers do, so that Ray ends their children
    blocked: list[int]  # blocked signals
    ignored: list[int]  # ignored signals, among those that end a process: nohup ignores SIGHUP
    streams: list[int]  # file descriptors: standard input, output and error

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream)


def received(client: socket.socket) -> ForkRequest:
    """Receive a request: a byte that brings the streams, then a line of JSON.

    Raises:
        OSError, ValueError: the message is incomplete, late or malformed.

    """
    _, streams, _, _ = socket.recv_fds(client, 1, NUM_STREAMS)
    try:
        with client.makefile("rb") as file:
            line = file.readline(MAX_BODY_BYTES)
        if not line.endswith(b"\n"):
            raise ValueError(f"a request without an end within {MAX_BODY_BYTES} bytes")
        if len(streams) != NUM_STREAMS:
            raise ValueError(f"{len(streams)} streams")
        try:
            return ForkRequest(**json.loads(line), streams=streams)
        except TypeError as error:  # other keys, or no mapping
            raise ValueError("not a request's keys") from error
    except BaseException:
        for stream in streams:
            os.close(stream)
        raise


def become(asked: ForkRequest) -> None:
    """Run the script in this process, as a new interpreter would; may not return."""
    for number, stream in enumerate(asked.streams):
        os.dup2(stream, number)
    asked.close()
    os.chdir(asked.folder)
    replace_environment(asked.environment)
    if asked.leads_group:
        os.setpgid(0, 0)
    for number in ENDING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked.ignored else default)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.blocked)
    run(asked.target, asked.arguments)
