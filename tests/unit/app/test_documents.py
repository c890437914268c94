"""docs/ is what its commands write; the files that documents name are there."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.cases import cases

ROOT = Path(__file__).parents[3]

FOLDERS = "app|models|calibration|client|configs|tests"
NAMED = re.compile(rf"\b(?:{FOLDERS})/[\w/.-]+\.(?:py|sh|yaml|proto|json)\b")
OF_A_COMMIT = re.compile(r"`[^`]*`\s\(at\s[0-9a-f]{7,8}\)")  # a command that is no longer here
HISTORY = ("CHANGELOG.md", "durations.md")  # they tell of what was


def test_the_files_that_documents_name_are_there():
    pages = [path for path in ROOT.glob("*.md") if path.name not in HISTORY]
    for folder in (*FOLDERS.split("|"), "docs"):
        pages += [path for path in (ROOT / folder).rglob("*.md") if path.name not in HISTORY]
    assert {
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in NAMED.findall(OF_A_COMMIT.sub("", page.read_text("utf-8")))
        if not (ROOT / name).exists()
    } == set()


@cases(
    "network, linked",
    ("resnet50", "[resnet50](../docs/ladder/resnet50.html)"),
    ("densenet169", "[densenet169](../docs/ladder/densenet169.html)"),
    ("vit_b_16", "[vit_b_16](../docs/ladder/vit_b_16.html)"),
    ("resnet50-vnni", "[resnet50](../docs/ladder/resnet50-vnni.json), EPYC without AMX"),
)
def test_what_is_said_of_the_ladder_is_in_its_result(network, linked):
    told = (ROOT / "calibration/README.md").read_text("utf-8")
    result = json.loads((ROOT / f"docs/ladder/{network}.json").read_text("utf-8"))
    rates = {r["name"]: r["images_per_s"] for r in result["rungs"] if "images_per_s" in r}
    figures = [f"{rates[name]:.1f}" for name in ("eager", "torch_bf16", "onnxruntime", "openvino")]
    times = next(f"{r['speedup_over_first']:.1f}" for r in result["rungs"] if r["name"] == "int8")
    figures += [f"{rates[name]:.0f}" for name in ("low_precision", "int8")]
    row = [*figures, times, f"{rates['service']:.0f}"]
    assert f"| {linked} | {' | '.join(row)} |" in told, row


def test_the_page_of_imagenet_is_written_from_its_result():
    script = (
        "import json, pathlib, sys; sys.path.insert(0, 'tests/load'); import imagenet_set; "
        "result = json.loads(pathlib.Path('tests/load/results/imagenet.json').read_text()); "
        "sys.stdout.write(imagenet_set.page(result))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode() == (ROOT / "docs/imagenet.md").read_text("utf-8")


def test_what_is_said_of_the_tflite_set_is_in_its_result():
    told = (ROOT / "calibration/README.md").read_text("utf-8")
    result = json.loads((ROOT / "tests/load/results/mobilenets.json").read_text("utf-8"))
    scores, names = result["scores"]["INT8"], ("v2", "v1", "small", "ensemble")
    v2, v1, small, ensemble = (f"{scores[name]['top1']:.3f}" for name in names)
    assert f"{v2}, {v1}, {small} on 1,000 photographs; their average {ensemble}" in told


def test_what_is_said_of_transformers_is_in_the_result():
    page = (ROOT / "calibration/README.md").read_text("utf-8")
    path = ROOT / "tests/load/results/transformer_int8.json"
    found = json.loads(path.read_text("utf-8"))["evaluated"]
    exact, so = (found["scores"][p]["recommended"]["top1"] for p in ("FP16", "INT8"))
    otherwise = found["scores"]["INT8"]["as_convolutional"]["top1"]
    assert f"on {found['num_images']:,} photographs with a small ViT" in page
    drops = {name: drop["top1"] for name, drop in found["drops"].items()}
    assert drops["recommended"] <= found["max_drop"] < drops["as_convolutional"]
    cpu_ms = found["cpu_ms_per_image"]["recommended"]
    assert f"| float | {exact:.3f} | {cpu_ms['FP16']:.2f} |" in page
    assert f"| INT8, as a transformer | {so:.3f} | {cpu_ms['INT8']:.2f} |" in page
    assert f"| INT8, as a convolutional network: over the limit | {otherwise:.3f} | |" in page
