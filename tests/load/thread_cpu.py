"""CPU time of a service by process and thread, from /proc.

Threads of Python have the names that py-spy (which Ray brings) reads from outside; others have the
kernel's. Threads of OpenVINO have none of their own and are told as ``native``.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil

from app.bench.measurement import REPLICA, stage_of

PY_SPY = Path(sys.executable).with_name("py-spy")
NATIVE = "native"  # OpenVINO's, for one
Threads = dict[tuple[int, int], float]  # CPU s so far by process and thread


def watched(root: psutil.Process) -> dict[int, str]:
    """Return the replicas' processes and their stages; of a server without Ray, the server."""
    found = {}
    for process in (root, *root.children(recursive=True)):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words and words[0].startswith(REPLICA):
            found[process.pid] = stage_of(words)
    return found or {root.pid: "server"}


def thread_seconds(pids: Mapping[int, str]) -> Threads:
    found: Threads = {}
    for pid in pids:
        try:
            threads = psutil.Process(pid).threads()
        except psutil.Error:
            continue
        found |= {(pid, one.id): one.user_time + one.system_time for one in threads}
    return found


def by_thread(pids, before, after, num_images):
    """Return the CPU ms of an image by stage and thread, the largest first."""
    spent: dict[str, Counter[str]] = {stage: Counter() for stage in pids.values()}
    names = {pid: _names(pid) for pid in pids}
    for (pid, thread), seconds in after.items():
        name = names[pid].get(thread, "ended")
        spent[pids[pid]][name] += seconds - before.get((pid, thread), 0.0)
    return {
        stage: {
            name: ms
            for name, seconds in of.most_common()
            if (ms := round(seconds / num_images * 1e3, 3)) >= 0.01
        }
        for stage, of in spent.items()
    }


def _names(pid: int) -> dict[int, str]:
    """Return what each thread of a process is called, without numbers."""
    names, python = {}, _python_names(pid)
    own = _comm(pid, pid)
    for task in Path(f"/proc/{pid}/task").iterdir():
        thread = int(task.name)
        comm = _comm(pid, thread)
        name = python.get(thread) or (NATIVE if comm == own or comm.startswith("ray::") else comm)
        names[thread] = re.sub(r"[-_ ]*\d+$|[-_ ]?\d+(?=\W)", "", name)
    return names


def _comm(pid: int, thread: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{thread}/comm").read_text("utf-8").strip()
    except OSError:
        return "ended"


def _python_names(pid: int) -> dict[int, str]:
    """Ask py-spy; it stops the process for some milliseconds."""
    command = [str(PY_SPY), "dump", "--pid", str(pid), "--json"]
    try:
        told = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {
        thread["os_thread_id"]: thread["thread_name"]
        for thread in json.loads(told)
        if thread.get("os_thread_id") and thread.get("thread_name")
    }
