"""The real command as the tests share it: the bundled set, free ports.

The fast tier starts one of these services, ``make test-all`` all three. Each is stopped in one of
the ways that there are, and what is left of it then is part of the test
(tests/support/services/stopping.py):

- ``service`` (shipped/conftest.py): with traces and gRPC; stopped as by a terminal's Ctrl-C
- ``guarded`` (test_access.py): with keys and TLS; stopped as by ``kill``
- ``second`` (shipped/test_stopping.py): serve_config.yaml as it is, beside the first; stopped by an
  impatient user

test_notified.py stops one as systemd does. A file names the service that its ``client`` and its
pages ask, as ``service_url``.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from models.ensemble import average, tempered
from models.image import read_image
from models.model_set import load_model_set
from tests.support.certificates import Root, Signed
from tests.support.services.live_service import Service, Start, changed_config, drawn_photo
from tests.support.services.page_driver import browser, open_page, photo_file  # noqa: F401 (fixtures)

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: the folder that shares a service, then the slow files.

    Two processes then end at about the same time (Makefile: ``--no-loadscope-reorder``). In the
    folder the metrics are first: later tests give up requests, which then have no answer to count.
    """

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        is_later = item.path.name != "test_metrics.py"
        return item.path.parent == FOLDER, is_later, item.get_closest_marker("slow") is None

    own = [item for item in items if FOLDER in item.path.parents]
    others = [item for item in items if FOLDER not in item.path.parents]
    items[:] = sorted(own, key=place) + others


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give one process all files of a folder, so that their service starts once."""
    # Here: only where tests run in several processes.
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class FolderScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return file if folder == "tests/e2e" else folder

    return FolderScheduling(config, log)


@pytest.fixture(scope="session")
def temp():
    """Return the services' own /tmp, short enough for them (app/launch/run_folder.py)."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def start_process(tmp_path_factory, free_port, temp) -> Start:
    """Start a service with further arguments, which the caller stops.

    ``changes`` of serve_config.yaml: ``args`` of the application, ``http`` options, ``gateways``.
    """

    def start(*arguments, port=None, **changes):
        folder = tmp_path_factory.mktemp("serve")
        if changes:
            with changed_config(folder) as content:
                application = content["applications"][0]
                application["args"] |= changes.get("args", {})
                content["http_options"] |= changes.get("http", {})
                if "gateways" in changes:
                    application["deployments"][0]["num_replicas"] = changes["gateways"]
            arguments = ("--config", str(folder / "serve_config.yaml"), *arguments)
        return Service(port or free_port(), *arguments, log=folder / "log.txt", temp=temp)

    return start


@pytest.fixture(scope="module")
def start_service(start_process):
    """Start a service; all are stopped after the file: each takes a tenth of a core at rest."""
    with ExitStack() as stack:

        def start(*arguments, is_awaited=True, **options):
            service = start_process(*arguments, **options)
            stack.callback(service.stop)
            if is_awaited:
                service.wait_ready()
            return service

        yield start


@pytest.fixture(scope="module")
def grpc_port(free_port) -> int:
    return free_port()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Root:
    return Root(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(root) -> Signed:
    return root.sign("service")


@pytest.fixture
def client(service_url):
    with httpx.Client(base_url=service_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def photo() -> bytes:
    return drawn_photo()


@pytest.fixture(scope="session")
def in_process():
    """Classify without any server: bytes to the ensemble's probabilities (C,)."""
    from models.openvino_network import (  # here: one process needs OpenVINO
        CompiledNetwork,
        RuntimeOptions,
    )

    model_set = load_model_set("imagenette")
    manifest = model_set.manifest
    options = RuntimeOptions(batch_sizes=(1,))
    networks = {
        m.name: CompiledNetwork(model_set.network_path(m.name), options) for m in manifest.members
    }

    def classify(data: bytes) -> np.ndarray:
        image = read_image(data, manifest.image.rule)[np.newaxis]
        rows = {
            name: tempered(network.predict(image), manifest.member(name).temperature)
            for name, network in networks.items()
        }
        return average(rows, {m.name: m.weight for m in manifest.members}, manifest.temperature)[0]

    return classify


@pytest.fixture(scope="session")
def photo_label(photo, in_process) -> str:
    """What the networks say to the drawn picture when nothing is served."""
    return load_model_set("imagenette").labels[int(in_process(photo).argmax())]
