"""The examples in configs/functions: a majority vote, and test-time mirroring."""

import numpy as np
import pytest

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.serve import _checked_config
from app.launch.serve_options import ServeOptions
from configs.functions.geometric_mean import geometric_mean
from configs.functions.majority_vote import majority_vote
from configs.functions.mirroring import with_mirror_images
from models import machine
from models.machine import MissingExtraError
from tests.support.cases import cases
from tests.support.configurations import ROOT

FIRST, SECOND, THIRD = ([0.6, 0.4, 0], [0.4, 0.6, 0], [0, 0.51, 0.49])


@cases(
    "rows, weights, winner",
    (([0.9, 0.1, 0], SECOND, THIRD), (1 / 3, 1 / 3, 1 / 3), 1),  # the average's is class 0's
    ((FIRST, SECOND, THIRD), (0.6, 0.2, 0.2), 0),  # weights are votes
    (([0.9, 0.1, 0], SECOND), (0.5, 0.5), 0),  # a tie is the average's
    ((FIRST, [0.1, 0.9, 0]), (0.5, 0.5), 1),
)
def test_the_class_with_most_votes_wins(rows, weights, winner):
    members = {str(i): np.array([row], np.float32) for i, row in enumerate(rows)}
    (row,) = majority_vote(members, dict(zip(members, weights, strict=True)))
    assert (row.argmax(), row.dtype) == (winner, np.float32)
    assert row.sum() == pytest.approx(1)


def test_a_geometric_mean_is_normalised_and_has_vetoes():
    members = {
        "a": np.array([[0.5, 0.5, 0], [1, 0, 0]], np.float32),
        "b": np.array([[0, 0.6, 0.4]] * 2, np.float32),
    }
    rows = geometric_mean(members, {"a": 0.5, "b": 0.5})
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows.sum(axis=1), 1, rtol=1e-6)
    assert rows[0].argmax() == 1  # the one class that neither rules out
    assert rows[0, 1] > 0.99
    alone = geometric_mean({"b": members["b"]}, {"b": 1.0})
    np.testing.assert_allclose(alone, members["b"], atol=1e-6)


def test_every_image_has_its_mirror_image():
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    both = with_mirror_images(images)
    assert both.shape == (4, 4, 4, 3)
    np.testing.assert_array_equal(both[:2], images)
    np.testing.assert_array_equal(both[2:, :, ::-1], images)


@pytest.mark.parametrize("name", ["majority-vote.yaml", "mirroring.yaml"])
def test_serve_takes_the_files(tiny_set, free_port, name):
    config, port = ROOT / "configs" / name, free_port()
    options = ServeOptions(config=config, model_set=str(tiny_set), port=port)
    settings = _checked_config(options).settings
    assert (settings.combine or settings.preprocess or "").startswith("configs.functions.")


def test_serve_refuses_a_function_before_ray_starts(tiny_set, free_port, tmp_path):
    config = ServeConfig.read(ROOT / "configs" / "mirroring.yaml").as_dict()
    path = tmp_path / "c.yaml"
    text = (ROOT / "configs" / "mirroring.yaml").read_text("utf-8")
    name = config["applications"][0]["args"]["preprocess"]
    path.write_text(text.replace(name, "no_such_package.module:f"), "utf-8")
    options = ServeOptions(config=path, model_set=str(tiny_set), port=free_port())
    with pytest.raises(ConfigError, match="there is no module no_such_package; install it"):
        _checked_config(options)


def test_a_missing_extra_is_said_before_ray_starts(tiny_set, free_port, monkeypatch):
    monkeypatch.setenv("TANDEM_ICC_PROFILES", "convert")
    options = ServeOptions(model_set=str(tiny_set), port=free_port())
    assert _checked_config(options).settings.icc_profiles == "convert"
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"icc_profiles: convert needs PIL.*\[color\]"):
        _checked_config(options)


def test_serve_run_refuses_it_too(tiny_set):
    from app.main import build
    from app.settings import Settings

    with pytest.raises(ConfigError, match="has no no_such"):
        build(Settings(model_set=str(tiny_set), combine="configs.functions.mirroring:no_such"))
