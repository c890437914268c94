"""Fixtures that every test may use."""

import ctypes
import gc
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from app.environment import NICENESS
from app.launch import checks

pytest.register_assert_rewrite("tests.support")  # before they are imported
from tests.support import container_image, manifests  # noqa: E402
from tests.support.client_environments import KSERVE, NEIGHBOURS  # noqa: E402
from tests.support.durations import LONG_TESTS  # noqa: E402
from tests.support.prometheus_programs import PROMETHEUS, PROMTOOL  # noqa: E402
from tests.support.redis_server import REDIS  # noqa: E402

SHARED_DATA = Path(
    os.environ.get("TANDEM_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
)


# How long an example takes, and how fast they are drawn, is a matter of what else the machine does.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

SS_DISABLE = 2  # of Linux
CHROMIUM = os.environ.get("TANDEM_CHROMIUM") or shutil.which("chromium")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine cannot run (the header names it), and mark the long tests."""
    lacking = _lacking()
    absent = [item for item in items if any(item.get_closest_marker(m) for m in lacking)]
    items[:] = [item for item in items if item not in absent]
    config.hook.pytest_deselected(items=absent)
    long_tests = frozenset((config.rootpath / LONG_TESTS).read_text("utf-8").splitlines())
    for item in items:
        if item.nodeid in long_tests:
            item.add_marker("long")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's own model sets out of the tests, and the tests' out of theirs.

    Each of pytest-xdist's workers does the same for itself. And SIGINT is as in a terminal: a shell
    that starts the tests in the background has it ignored, which all that they start would inherit.
    """
    if config.getoption("dist", "no") == "no":  # not pytest-xdist's master, which collects none
        gc.disable()  # modules and tests stay: going through all of them takes a second each time
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A test's own Ray, too, does not starve beside what is busy.
    os.environ[NICENESS] = "0"
    os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="tandem-tests-")
    os.environ["TANDEM_LOG_FORMAT"] = "text"  # what people read; tests of the other say so
    # The user's own keys and terminal. pytest imports readline, which gives child processes, such
    # as pytest-xdist's workers, a size of its own: Rich would take it for the width of all output.
    for name in ("TANDEM_API_KEY", "TANDEM_API_KEYS", "COLUMNS", "LINES"):
        os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    gc.enable()


class SignalStack(ctypes.Structure):
    """``stack_t`` of sigaltstack(2)."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def pytest_runtest_setup() -> None:
    """Let signals have the thread's own stack: an earlier test of NNCF may have left a freed one.

    The next signal would end this process (:mod:`calibration.quantization.quantize_set`).
    """
    none = SignalStack(None, SS_DISABLE, 0)
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(none), None) == 0


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_DATA_HOME"], ignore_errors=True)


def pytest_report_header() -> list[str]:
    return [f"left out: tests marked {marker} ({why})" for marker, why in _lacking().items()]


def _lacking() -> dict[str, str]:
    lacking = {}
    if not SHARED_DATA.is_dir():
        lacking["shared_data"] = f"no photographs in {SHARED_DATA}"
    if CHROMIUM is None and not os.environ.get("CI"):  # CI installs it: there it must not lack
        lacking["browser"] = "no chromium; apt-get install chromium or set TANDEM_CHROMIUM"
    if None in (PROMETHEUS, PROMTOOL) and not os.environ.get("CI"):
        lacking["prometheus"] = "no prometheus; see tests/e2e/install_prometheus.sh"
    if REDIS is None:
        lacking["redis"] = "no redis-server; apt-get install it, or set TANDEM_REDIS_SERVER"
    elif find_spec("redis") is None:
        lacking["redis"] = "no Python package redis; pip install 'tandem-serve[redis]'"
    if not KSERVE.exists():
        lacking["kserve"] = f"no {KSERVE}; make test-all makes it, or set TANDEM_KSERVE_PYTHON"
    if not NEIGHBOURS.exists():
        why = f"no {NEIGHBOURS}; make test-all makes it, or set TANDEM_NEIGHBOURS_PYTHON"
        lacking["neighbours"] = why
    if find_spec("torch") is None:
        lacking["torch"] = "no Python package torch; pip install 'tandem-serve[torch]'"
    return lacking | _lacking_of_deployments()


def _lacking_of_deployments() -> dict[str, str]:
    """Return which tests of configs/docker, systemd and kubernetes cannot run here."""
    lacking = {}
    if why := container_image.why_not():
        lacking["container"] = why
    if manifests.KUSTOMIZE is None and manifests.KUBECTL is None:
        lacking["kubernetes"] = "neither kustomize nor kubectl"
    elif find_spec("kubernetes_validate") is None:
        lacking["kubernetes"] = "no Python package kubernetes-validate"
    if shutil.which("systemd-analyze") is None:
        lacking["systemd"] = "no systemd-analyze; apt-get install systemd"
    return lacking


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return SHARED_DATA


@pytest.fixture(scope="session")
def free_port():
    """Find a port of the loopback interface that nobody listens on."""

    return checks.free_port


@pytest.fixture(scope="session")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model set made in code; not to be written to."""
    from tests.support.tiny_networks import write_tiny_set  # here: most processes need no OpenVINO

    return write_tiny_set(tmp_path_factory.mktemp("sets") / "tiny")
