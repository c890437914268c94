"""The service where people run it: it starts, answers and stops, whatever it finds there.

What covers each of these in the fast tier: tests/unit/launch (test_run_folder, test_forks,
test_ray_cluster, test_serve, test_serve_options).
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.services.live_service import ROOT, Service, changed_config
from tests.support.services.processes import descendants, still_running
from tests.support.services.restricted import restricted, why_not

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent


@contextmanager
def stopped_after(service, number):
    """Stop the service, as a terminal does, and check that nothing of it is left running."""
    try:
        service.wait_ready()
        yield
        family = descendants(service.process.pid)
        service.send(number, is_for_all=True)
        service.process.wait(60)
        assert still_running(family) == []
        assert "nothing of it is left running" in service.log.read_text()
        assert "Traceback" not in service.log.read_text()
    finally:
        service.stop()


def test_make_serve_by_an_account_without_a_home_on_a_read_only_root(
    tmp_path, free_port, photo, photo_label
):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    port = free_port()
    with changed_config(tmp_path) as content:
        content["http_options"]["port"] = port
    venv = BIN.parent
    make = ["make", "--no-print-directory", f"VENV={venv}", "-o", f"{venv}/.serve", "serve"]
    configs = {ROOT / "serve_config.yaml": tmp_path / "serve_config.yaml"}
    service = Service(port, log=tmp_path / "log.txt", command=restricted(make, configs))
    with stopped_after(service, signal.SIGTERM):
        assert service.label(photo) == photo_label
    said = service.log.read_text()
    assert "compile_cache: cannot write to /.cache/tandem/openvino (Read-only file system)" in said


def test_a_folder_of_another_program_and_a_shell_with_its_variables(
    tmp_path, free_port, photo, photo_label
):
    folder, temp = tmp_path / "fastapi project", Path("/tmp", f"{os.getpid()}-" + 75 * "x")
    for name in ("app/__init__.py", "models/__init__.py", "requests.py", "typing_extensions.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('{name} of the working folder was imported')")
    unusual = {
        "PYTHONPATH": "",
        "HOME": str(tmp_path / "no home"),
        "TMPDIR": str(temp),
        "OTEL_PROPAGATORS": "b4",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "10s",
        "OTEL_SPAN_LINK_COUNT_LIMIT": "many",
    }
    others = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    temp.mkdir()
    try:
        service = Service(
            port := free_port(),
            log=tmp_path / "log.txt",
            command=["nohup", BIN / "tandem", "serve", "--port", str(port)],
            folder=folder,
            environment=others | unusual,
        )
        with stopped_after(service, signal.SIGINT):
            assert service.label(photo) == photo_label
            service.send(signal.SIGHUP, is_for_all=True)  # the terminal is closed
            assert service.label(photo) == photo_label
    finally:
        temp.rmdir()  # nothing was left in it
    for name in ("PROPAGATORS=b4", "EXPORTER_OTLP_TIMEOUT=10s", "SPAN_LINK_COUNT_LIMIT=many"):
        assert f"OTEL_{name} is left out: " in service.log.read_text()


def test_without_a_home_or_an_account_at_the_loopback_of_ipv6(
    tmp_path, free_port, photo, photo_label
):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    port = free_port()
    serve: list[str | Path] = [BIN / "tandem", "serve", "--host", "::1", "--port", str(port)]
    command = restricted(serve, {})
    command.remove("HOME=/")
    service = Service(port, log=tmp_path / "log.txt", command=command)
    service.url = f"http://[::1]:{port}"
    with stopped_after(service, signal.SIGTERM):
        assert service.label(photo) == photo_label


def test_a_limit_of_processes_that_is_too_low_is_a_line_before_ray_starts(tmp_path, free_port):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    port = str(free_port())
    serve = ["prlimit", "--nproc=250", str(BIN / "tandem"), "serve", "--port", port]
    done = subprocess.run(
        restricted(serve, {}), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2
    assert "ulimit -u, 250, leaves" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_limit_of_open_files_that_is_too_low_is_a_line_before_ray_starts(free_port):
    serve = ["prlimit", "--nofile=64", str(BIN / "tandem"), "serve", "--port", str(free_port())]
    done = subprocess.run(serve, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "need 256 open files or more, and ulimit -Hn is 64: raise it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shell_of_few_files_and_characters_without_memory_to_share(
    tmp_path, free_port, photo, photo_label
):
    """Each of these ended the start with a reason that was none, or with none for a minute."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    unusual = {"PYTHONOPTIMIZE": "2", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = 'mount -t tmpfs -o ro tmpfs /dev/shm; ulimit -Sn 64; exec "$@"'
    port, log = free_port(), tmp_path / "log.txt"
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh"]
    service = Service(
        port,
        log=log,
        command=[*private, BIN / "tandem", "serve", "--port", str(port)],
        environment=os.environ | unusual | {"PYTHONIOENCODING": "ascii"},
    )
    with stopped_after(service, signal.SIGTERM):
        assert service.label(photo) == photo_label
    assert "PYTHONOPTIMIZE=2 is left out: Ray's processes do" in log.read_text()


def test_with_standard_error_closed(tmp_path, free_port, photo, photo_label):
    port = free_port()
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", str(BIN / "tandem"), "serve", "--port", str(port)]
    service = Service(port, log=tmp_path / "log.txt", command=closed)
    try:
        service.wait_answering()
        assert service.label(photo) == photo_label
        family = descendants(service.process.pid)
        service.send(signal.SIGINT)
        assert service.process.wait(60) == 0
        assert still_running(family) == []
    finally:
        service.stop()
