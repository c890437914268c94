"""What runs in a child process: it answers, dies or hangs."""

import os
import sys
import time
from multiprocessing.connection import Connection


def adds(number: int, connection: Connection) -> None:
    while True:
        connection.send(number + connection.recv())


def dies(code: int, _: Connection) -> None:
    sys.exit(code)


def hangs(_: Connection) -> None:
    time.sleep(600)


def tells_and_hangs(connection: Connection) -> None:
    connection.send(os.getpid())
    time.sleep(600)
