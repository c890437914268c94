"""Creates a set in a process of its own, since a damaged file can crash the library that reads it.

For example, OpenVINO 2026.4 crashes on a convolution without weights.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from calibration.sets.add_set import NewSet, Say, add_set
from models.errors import ModelSetError, TandemError
from models.manifest import read_manifest
from models.model_set import ModelSet


def add_set_apart(new: NewSet, into: Path, *, is_replaced: bool, say: Say) -> ModelSet:
    """Create the set like :func:`calibration.sets.add_set.add_set`, in another process.

    Raises:
        ModelSetError: what that function raises, or a file crashed the process.

    """
    reader, writer = os.pipe()
    line = [sys.executable, "-P", "-m", "calibration.sets.own_process", str(writer)]
    process = subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # some parsers print there
        pass_fds=[writer],
    )
    os.close(writer)
    assert process.stdin is not None
    try:
        with os.fdopen(reader, "rb") as messages:
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps((new, into, is_replaced)))
                process.stdin.flush()
            made = _followed(messages, say)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()  # if it still works, that interrupts it
        code = process.wait()
    if made is None:
        raise ModelSetError(_death(new, code))
    return ModelSet(made, read_manifest(made))


def _followed(messages: IO[bytes], say: Say) -> Path | None:
    """Pass on the process's messages and error; return the set's folder, or None if it died."""
    while True:
        try:
            kind, value = pickle.load(messages)
        except (EOFError, pickle.UnpicklingError):
            return None
        if kind == "said":
            say(*value)
        elif kind == "failed":
            raise value
        else:
            return Path(value)


def _death(new: NewSet, code: int) -> str:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    files = ", ".join(str(path) for _, path in new.members)
    if code == -signal.SIGKILL:
        return f"{files}: the process that read this was killed: memory ran out, most likely"
    which = "" if len(new.members) == 1 else " Add them one by one to see which"
    return (
        f"{files}: the process that read this died ({how}): a file is damaged, or its runtime "
        f"cannot take it. Export it again, or try another --runtime.{which}"
    )


def add_set_here(new: NewSet, into: Path, *, is_replaced: bool, say: Say) -> ModelSet:
    """Create the set in this process, with the manifest's errors as one line.

    Raises:
        ModelSetError: as of :func:`add_set_apart`, except for a crash.

    """
    try:
        return add_set(new, into, is_replaced=is_replaced, say=say)
    except ValidationError as error:
        raise ModelSetError(_in_a_line(error)) from None


def _in_a_line(error: ValidationError) -> str:
    """Return the first invalid value of a manifest, and why it is invalid, as one line."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "set"
    value = first["input"]
    shown = f" (given: {value!r})" if isinstance(value, str | int | float) else ""
    return f"{where}: {first['msg']}{shown}"


def _interrupt_at_end_of_stdin() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)  # the parent is gone, or was interrupted


def main() -> None:
    """Run the task from stdin; write messages to the file descriptor in the argument."""
    writer = int(sys.argv[1])

    def send(kind: str, value: Any) -> None:
        with os.fdopen(os.dup(writer), "wb") as messages:
            pickle.dump((kind, value), messages)

    try:
        new, into, is_replaced = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_interrupt_at_end_of_stdin, daemon=True).start()
        made = add_set_here(
            new, into, is_replaced=is_replaced, say=lambda *said: send("said", said)
        )
        send("made", str(made.folder))
    except TandemError as error:
        send("failed", error)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(0)  # no thread of a runtime's is waited for


if __name__ == "__main__":
    main()
