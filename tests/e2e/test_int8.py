"""Float networks to a served INT8 set, with the real commands.

What is slow here starts services of its own, or looks at many photographs. In the fast tier each
step is covered by itself: adding in tests/unit/calibration/sets/test_add_set.py, quantising in
tests/unit/calibration/quantization/test_quantize_set.py, evaluating and ``--url`` in
tests/unit/calibration/evaluation/test_evaluate.py and test_live.py, and
the others as they say.
"""

import contextlib
import re
import signal
import subprocess
from pathlib import Path

import httpx
import openvino as ov
import pytest

from app.telemetry.metric_table import FAILED_GOLDEN_CHECKS
from models.ledger import judge
from models.manifest import read_manifest
from tests.support import tiny_networks
from tests.support.exposed_metrics import exposed
from tests.support.services.live_service import TANDEM, live_report, tandem_of
from tests.support.services.processes import wait_until

NUM_MEMBERS = 8  # as many as a set may have


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Three colours: ``calibration`` and ``eval``, no picture in both."""
    folder = tmp_path_factory.mktemp("pictures")
    tiny_networks.write_pictures(folder / "calibration", num_per_color=8, side=70)
    tiny_networks.write_pictures(folder / "eval", num_per_color=90, side=90)  # enough to verify
    return folder


@pytest.mark.slow
def test_quantise_evaluate_serve(pictures, tmp_path, start_service):
    """Everything a user does with networks of her own, in the order she does it.

    In the fast tier: each command's own unit tests (above), and /v1/models in test_http.py.
    """
    home = tmp_path / "home"
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(tiny_networks.LABELS))
    for name, gain in (("sure", 8.0), ("unsure", 3.0)):
        ov.save_model(
            tiny_networks.tiny_model(size=64, gain=gain, num_convolutions=3),
            tmp_path / f"{name}.xml",
        )
    members = [f"--member={name}={tmp_path / name}.xml" for name in ("sure", "unsure")]
    said = tandem_of(home, "models", "add", "colours", *members, "--labels", labels)
    assert "next: tandem quantize colours" in said
    folder = home / "tandem" / "models" / "colours"

    calibration = pictures / "calibration"
    tandem_of(home, "quantize", "colours", "--images", calibration, "--subset-size", 24)
    said = tandem_of(home, "evaluate", "colours", "--images", pictures / "eval")
    assert "1.0000" in said
    assert judge(read_manifest(folder)).status == "verified"
    said = tandem_of(home, "evaluate", "colours", "--images", calibration, exit_code=2)
    tandem_of(home, "models", "verify", "colours")

    service = start_service("--model-set", str(folder))
    assert "no accuracy record" not in service.log.read_text()
    served = httpx.get(f"{service.url}/v1/models", timeout=60).json()
    assert served["verified"] == "verified"
    assert served["accuracy"][0]["scores"]["INT8"]["ensemble"]["top1"] == 1.0
    assert served["accuracy"][0]["num_images"] == 270
    report = live_report(service.url, "colours", "--images", pictures / "eval", home=home)
    assert report["num_images"] == 270
    service.stop()


@pytest.mark.slow  # make test has tests/unit/calibration/quantization
def test_ctrl_c_while_quantising_leaves_the_set_as_it_was(pictures, tmp_path):
    """Nothing is moved in before the last of many members is done: the second has begun here."""
    gains = {f"member{n}": 2.0 + n for n in range(NUM_MEMBERS)}
    folder = tiny_networks.write_tiny_set(
        tmp_path / "slow", gains=gains, precision="FP16", num_convolutions=30, size=64
    )
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    arguments: list[str | Path] = ["--images", pictures / "calibration", "--subset-size", "24"]
    with subprocess.Popen(
        [TANDEM, "quantize", folder, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "member1: quantising" in line:
                break
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(60) in (1, 130), said
        assert f"member{NUM_MEMBERS - 1}: quantising" not in said
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.slow
def test_a_network_that_answers_otherwise_does_not_get_ready(tmp_path, start_service, free_port):
    """Golden answers of another network, hashes all right: as on a CPU that computes wrongly.

    In the fast tier: tests/unit/stages/test_classifier.py and tests/unit/models/test_golden.py
    refuse it, and tests/unit/launch/test_deploy.py ends the wait with a failed deployment's words.
    """
    one, two = tiny_networks.write_opposite_sets(tmp_path)
    tiny_networks.take_golden(one, two)
    metrics = free_port()
    service = start_service(
        "--model-set", str(one), "--metrics-port", str(metrics), is_awaited=False
    )
    failed = rf'{exposed(FAILED_GOLDEN_CHECKS)[0]}\{{.*member="sure".*\}} 1\.0'
    wait_until(
        lambda: re.search(failed, scraped(metrics)) or service.process.poll() is not None,
        120,
        "the replica neither ends nor tells why",
    )
    assert service.process.poll() is None, "the metrics do not tell of the failed check"
    assert service.process.wait(120) != 0
    log = service.log.read_text()
    assert "sure INT8 does not answer as where the set was made" in log
    assert "instruction set" in log


def scraped(port: int) -> str:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    return ""
