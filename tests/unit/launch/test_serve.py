"""``tandem serve`` as a module: what importing it must not do, and parts of a start."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.launch import serve
from app.launch.config import ServeConfig, default_config
from app.launch.ports import METRICS_PORT
from app.launch.resolved_config import ServeOptions

LOADED = "import sys; import app.cli.main, app.launch.serve; print('ray' in sys.modules)"


def test_the_command_line_and_serve_are_imported_without_ray() -> None:
    """Ray reads its environment when it is imported; tandem serve sets it first."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


@pytest.mark.parametrize("option", ["port", "grpc_port"])
def test_metrics_have_none_of_the_services_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    ports = []

    @contextmanager
    def local_ray(port: int, *_: object) -> Iterator[None]:
        ports.append(port)
        yield

    monkeypatch.setattr(serve, "local_ray", local_ray)
    monkeypatch.setattr(serve, "metrics_urls", list)
    overrides: dict[str, Any] = {option: METRICS_PORT}
    config = ServeConfig.read(default_config()).with_overrides(**overrides)
    with serve._ray(ServeOptions(), config, None, tmp_path):
        pass
    assert METRICS_PORT not in ports


@pytest.mark.parametrize("host", ["fd00::5", "2001:db8:a::1"])
def test_an_address_is_printed_as_it_is(
    tiny_set: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """Brackets around letters are markup to rich, and ":a:" is a picture."""
    config = ServeConfig.read(default_config())
    config = config.with_overrides(host=host, grpc_port=9000, model_set=str(tiny_set))
    serve._welcome(config, [f"http://[{host}]:9464/metrics"], has_keys=False)
    said = capsys.readouterr().err
    assert f"ready at http://[{host}]:8000 (the page), http://[{host}]:8000/docs" in said
    assert f"@photo.jpg http://[{host}]:8000/v1/classify" in said
    assert f"gRPC: [{host}]:9000" in said
    assert f"metrics: http://[{host}]:9464/metrics" in said
