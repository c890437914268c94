"""``tandem quantize`` of a multi-label set: INT8 is made; what it costs is for evaluate to say."""

import pytest

from models.ledger import judge
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.calibration.evaluated_sets import evaluated
from tests.support.command_line import tandem
from tests.support.scored_sets import write_scored_images, write_scored_set
from tests.support.tiny_networks import write_pictures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("data") / "calibration", num_per_color=5)


@pytest.fixture
def float_set(tmp_path):
    return write_scored_set(tmp_path / "scored", precision="FP16", threshold=0.4)


def test_int8_is_made_and_measured_by_evaluate(tmp_path, float_set, pictures):
    done = tandem("quantize", float_set, "--images", pictures, "--subset-size", 12)
    assert done.exit_code == 0, done.output
    assert "scored is multi-label; tandem evaluate" in " ".join(done.output.split())
    made = load_model_set(str(float_set))
    assert [set(m.networks) for m in made.manifest.members] == [{"FP16", "INT8"}] * 2
    assert (made.manifest.task, made.manifest.threshold) == ("multi_label", 0.4)
    assert judge(made.manifest).status == "unmeasured"
    images = write_scored_images(tmp_path / "images", num_per_picture=70)
    assert evaluated(float_set, "--images", images).exit_code == 0
    assert judge(read_manifest(float_set)).status == "verified"


def test_validation_by_top1_is_refused_and_changes_nothing(tmp_path, float_set, pictures):
    before = (float_set / "manifest.yaml").read_bytes()
    images = write_scored_images(tmp_path / "images")
    asked = ("--images", pictures, "--subset-size", 12, "--validation", images)
    done = tandem("quantize", float_set, *asked)
    assert "--validation: scored is multi-label" in str(done.exception)
    assert (float_set / "manifest.yaml").read_bytes() == before
