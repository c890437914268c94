"""Fuzzes ONNX files through what ``tandem models add`` does: the right answer, or a clear error.

The file is read in a worker process, as the command's own process reads it: a library may die of a
file. The first that dies of each signal is added by the command's own function, which must say so.

A worker takes one file after another. It is forked from a process that has imported everything, so
that another is there in milliseconds.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnxruntime

from calibration.sets import onnx_graph  # noqa: F401  before the workers are forked
from calibration.sets.add_set import NewSet, add_set_apart
from calibration.sets.ending import is_distribution
from calibration.sets.importing import answers_of, import_member
from calibration.sets.input import Normalisation, trial_images
from calibration.sets.options import FileOptions, MemberOptions
from models.errors import TandemError
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.onnx_mutations import NUM_CLASSES, spoilt, whole

NUM_IMAGES = 4
LIMIT_S = 60  # of one file, on a machine however busy: a reader that hangs is ended
CLOSE = 0.02  # of probabilities; INT8 rounds
SCALE = (64.0,) * 3
HOW = FileOptions(normalisation=Normalisation((0.0,) * 3, SCALE, "BGR"))
Answer = tuple[str, str]  # what became of a file, and more of it


class OnnxFuzz:
    """Spoils an ONNX file and has it added, for either runtime.

    Args:
        folder: where the file is written.

    """

    def __init__(self, folder: Path) -> None:
        self._content, self._path = whole(), folder / "net.onnx"
        self._labels = folder / "labels.txt"
        self._labels.write_text("\n".join("abc"[:NUM_CLASSES]), "utf-8")
        self._deaths: set[str] = set()  # that the command was tried with
        self._workers: subprocess.Popen[bytes] | None = None

    def __call__(self, rng: Random) -> str:
        self._path.write_bytes(spoilt(rng, self._content))
        runtime = rng.choice(["openvino", "onnxruntime"])
        what, more = self._asked(runtime)
        assert what not in ("traceback", "wrong", "hung"), f"{what}: {more}"
        if what != "died":
            return what
        if more not in self._deaths:
            self._deaths.add(more)
            self._add(runtime)
        return f"died {more}"

    def close(self) -> None:
        if self._workers is not None:
            self._workers.communicate()  # they end with their stdin
            self._workers = None

    def _asked(self, runtime: str) -> Answer:
        if self._workers is None:
            self._workers = subprocess.Popen(
                [sys.executable, "-m", "tests.support.onnx_fuzz"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._workers.stdin is not None
        assert self._workers.stdout is not None
        self._workers.stdin.write(pickle.dumps((self._path, runtime)))
        self._workers.stdin.flush()
        answer: Answer = pickle.load(self._workers.stdout)
        return answer

    def _add(self, runtime: Any) -> None:
        """Let the command's function add the file: it must survive, and may say why it does not."""
        new = NewSet(
            name="made",
            members=[("a", self._path)],
            labels=self._labels,
            options=MemberOptions(color_order="BGR", mean=(0.0,) * 3, scale=SCALE),
            runtimes={"a": runtime},
        )
        message = str(self._path)
        try:
            add_set_apart(new, self._path.parent, is_replaced=True, say=lambda *_: None)
        except TandemError as error:
            message = error.message
        assert _is_clear(message, self._path), message


def _is_clear(message: str, path: Path) -> bool:
    """Whether an error's message names the file, in a line."""
    return str(path) in message and "\n" not in message and len(message) < 2000


def _added(path: Path, runtime: Any) -> Answer:
    """Add a file in this process; what is taken must be what ONNX Runtime makes of the file."""
    try:
        made = import_member(path, runtime, HOW)
    except TandemError as error:
        is_clear = _is_clear(error.message, path)
        return ("model_set", "") if is_clear else ("wrong", f"error: {error.message}")
    except Exception:
        return "traceback", traceback.format_exc()
    images = trial_images(NUM_IMAGES, (made.input_size, made.input_size, 3))
    if isinstance(made.network, bytes):
        rows = answers_of(made, path, images)
    else:
        network = CompiledNetwork(made.network, RuntimeOptions(batch_sizes=(1,)))
        rows = np.concatenate([network.predict(image[None]) for image in images])
    is_row = bool(np.isfinite(rows).all()) and rows.min() >= -1e-3 and rows.max() <= 1 + 1e-2
    if not is_row or (made.task == "classification" and not is_distribution(rows)):
        return "wrong", f"rows {rows}"
    expected = _expected(path, images)
    if expected is None or made.doubt is not None or made.task == "multi_label":
        return "taken", "unknown"
    if np.abs(rows - expected).max() > CLOSE:
        return "wrong", f"{rows} for {expected}"
    return "taken", "right"


def _expected(path: Path, images: np.ndarray) -> np.ndarray | None:
    """Return what ONNX Runtime gives for the file as it is; None: it does not run it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        (taken,) = session.get_inputs()
        planes = images.transpose(0, 3, 1, 2).astype(np.float32) / 64
        if taken.type != "tensor(float)" or tuple(taken.shape[1:]) != planes.shape[1:]:
            return None
        rows = np.concatenate([session.run(None, {taken.name: one[None]})[0] for one in planes])
    except Exception:
        return None
    rows = rows.reshape(len(images), -1)
    if is_distribution(rows):
        return np.asarray(rows)
    exponentials = np.exp(rows - rows.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def _work(answers: int) -> None:
    """Answer what comes on stdin until it ends."""
    while True:
        try:
            path, runtime = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.alarm(LIMIT_S)  # what hangs in a library dies of it
        answer = _added(path, runtime)
        signal.alarm(0)
        os.write(answers, pickle.dumps(answer))


def _death(status: int) -> Answer:
    """Say how a worker ended; ``status`` is of waitpid(2)."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return "hung", f"over {LIMIT_S} s"
    return "died", signal.Signals(-code).name if code < 0 else f"exit code {code}"


def main() -> None:
    """Fork workers, one after another, until one of them has no more to do."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    while True:
        worker = os.fork()
        if worker == 0:
            _work(answers)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        if status == 0:
            return
        os.write(answers, pickle.dumps(_death(status)))


if __name__ == "__main__":
    main()
