"""What runs in a child instead of the graph: it dies, fails or hangs at a given moment."""

import os
import signal
import time
from multiprocessing.connection import Connection

from app.tune.replica import ReplicaFailed


def dies_at_start(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_when_loaded(_settings: object, _cores: object, _photos: object, pipe: Connection) -> None:
    pipe.send(1)
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def exits_at_start(*_: object) -> None:
    raise SystemExit(3)


def fails(_settings: object, _cores: object, _photos: object, pipe: Connection) -> None:
    pipe.send(ReplicaFailed("no such network"))


def hangs(*_: object) -> None:
    time.sleep(60)
