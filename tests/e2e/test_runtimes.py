"""A set of both runtimes and all kinds of files: added, verified, served, compared.

In the fast tier: each runtime and a mixed set within one process in tests/unit/models/runtimes, and
``models add`` in tests/unit/calibration/sets/test_add_runtimes.py.
"""

import httpx
import openvino as ov
import pytest

from models.manifest import read_manifest
from tests.support.runtime_files import float_onnx, write_float_pt2
from tests.support.script_files import write_float_script
from tests.support.services.live_service import live_report, tandem_of
from tests.support.services.processes import mapped_runtimes
from tests.support.tiny_networks import LABELS, SIZE, tiny_model, write_pictures

pytestmark = [pytest.mark.slow, pytest.mark.torch]
GAIN = 8.0
RUNTIMES = ("openvino", "onnxruntime", "openvino", "onnxruntime")
PLAIN = ("--mean", "0,0,0", "--scale", "255,255,255", "--color-order", "BGR")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Add a set of four members that compute the same: IR, ONNX, PyTorch's two."""
    folder = tmp_path_factory.mktemp("runtimes")
    (folder / "labels.txt").write_text("\n".join(LABELS), "utf-8")
    ov.save_model(tiny_model(gain=GAIN), folder / "a.xml")
    (folder / "b.onnx").write_bytes(float_onnx(GAIN))
    write_float_pt2(folder / "c.pt2", GAIN)
    write_float_script(folder / "d.pt", GAIN)
    members = [f"--member={path.stem}={path}" for path in sorted(folder.glob("?.*"))]
    members = [member for member in members if not member.endswith(".bin")]
    runtimes = ("--runtime", "b=onnxruntime", "--runtime", "d=onnxruntime", "--trust")
    options = (*runtimes, *PLAIN, "--labels", folder / "labels.txt")
    said = tandem_of(folder, "models", "add", "mixed", *members, *options)
    assert f"b: FP16 on onnxruntime, {SIZE} px" in said
    assert f"c: FP16, {SIZE} px" in said
    assert f"d: FP16 on onnxruntime, {SIZE} px" in said
    return folder


def test_the_live_service_answers_as_in_process(home, start_service):
    folder = home / "tandem" / "models" / "mixed"
    manifest = read_manifest(folder)
    assert [m.runtimes for m in manifest.members] == [(runtime,) for runtime in RUNTIMES]
    assert "onnxruntime" in tandem_of(home, "models", "list")
    tandem_of(home, "models", "verify", "mixed")
    pictures = write_pictures(home / "pictures", num_per_color=10)
    assert "1.0000" in tandem_of(home, "evaluate", "mixed", "--images", pictures)
    service = start_service("--model-set", str(folder), args={"precision": "FP16"})
    assert live_report(service.url, "mixed", "--images", pictures, home=home)["num_images"] == 30
    picture = next(pictures.glob("*/*.png")).read_bytes()
    answer = httpx.post(f"{service.url}/v1/classify", content=picture, timeout=60).json()
    members = answer["members"].values()
    assert len(members) == 4
    probabilities = [member["predictions"][0]["probability"] for member in members]
    assert max(probabilities) - min(probabilities) < 1e-3  # the IR's weights are FP16
    assert mapped_runtimes(service.process.pid) == {"onnxruntime"}
    served = httpx.get(f"{service.url}/v1/models", timeout=60).json()["members"]
    assert [member["runtime"]["name"] for member in served] == list(RUNTIMES)
    assert all(member["runtime"]["version"][0].isdigit() for member in served)
    service.stop()
