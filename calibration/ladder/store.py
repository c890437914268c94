"""The results of a ladder on disk: a file per rung, each written in one step."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibration.ladder.rung import LABELLED_FILES, LadderError, RungError, RungResult, read_result
from models.result_files import write_result

JOB_NAME = "job.json"
RESULTS, TASKS, LOGS = "results", "tasks", "logs"


class Store:
    """A work folder: results, and files that the rungs' processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def opened(self, facts: Mapping[str, Any], *, is_resumed: bool) -> Iterator[None]:
        """Make or continue the folder, and lock it during the block.

        Args:
            facts: :meth:`calibration.ladder.job.LadderJob.facts`, on which results depend.
            is_resumed: whether to keep earlier results, which must have the same facts.

        Raises:
            LadderError: another ladder uses the folder, its results have other facts, it is not
                writable, or it is neither empty nor a ladder's.

        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise LadderError(
                f"cannot write {self.folder}: {error.strerror}; give another --work"
            ) from error
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(dict(facts), is_resumed=is_resumed)
            yield
        except BlockingIOError as error:
            raise LadderError(
                f"another ladder is at work in {self.folder}; wait, or give another --work"
            ) from error
        finally:
            os.close(held)

    def _begin(self, facts: dict[str, Any], *, is_resumed: bool) -> None:
        if not (self.folder / JOB_NAME).exists() and any(self.folder.iterdir()):
            raise LadderError(
                f"{self.folder} has files that are no ladder's; give --work an empty folder"
            )
        there = self._facts()
        if is_resumed and there is not None and there != facts:
            other = sorted(key for key in facts if facts[key] != there.get(key))
            raise LadderError(
                f"--resume: the results in {self.folder} were measured with other "
                f"{', '.join(other)}; leave --resume out to begin anew, or give another --work"
            )
        if not is_resumed or there is None:
            self.remove_networks()
            for name in (RESULTS, TASKS, LOGS):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        write_result(self.folder / JOB_NAME, json.dumps(facts))  # first: it marks the folder
        for name in (RESULTS, TASKS, LOGS):
            (self.folder / name).mkdir(exist_ok=True)

    def _facts(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads((self.folder / JOB_NAME).read_text("utf-8"))
            return stored if isinstance(stored, dict) else None
        return None

    def read(self, name: str) -> RungResult | None:
        """Return a rung's result if it is final; failed ones are tried again."""
        try:
            result = read_result(self.folder / RESULTS / f"{name}.json")
        except RungError:  # missing, or from another version
            return None
        return None if result.outcome == "failed" else result

    def write(self, name: str, result: RungResult) -> None:
        """Store a rung's result."""
        write_result(self.folder / RESULTS / f"{name}.json", result.model_dump_json())

    def remove_networks(self) -> None:
        """Remove the rungs' shared files, so that they are made again."""
        for pattern in ("*.npy", "*.onnx", "*int8.xml", "*int8.bin", LABELLED_FILES):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*-random"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.folder / RESULTS).glob("prepare-*.json"):
            path.unlink(missing_ok=True)

    def task_files(self, name: str) -> tuple[Path, Path, Path]:
        """Return the paths of a process's task, result and log."""
        tasks = self.folder / TASKS
        return tasks / f"{name}.json", tasks / f"{name}-result.json", self.log(name)

    def log(self, name: str) -> Path:
        """Return the log of a rung's processes."""
        return self.folder / LOGS / f"{name}.log"
