"""Settings: refused when unknown or out of range, frozen, and every one of them explained."""

import math
import os
from pathlib import Path

import pytest
from pydantic import ValidationError
from ray.serve._private import constants

from app.environment import node_environment, serve_environment, set_environment
from app.setting_values import form_places
from app.settings import Settings
from calibration.commands.options import user_sets_dir
from models.model_set import BUNDLED_DIR


def test_a_key_that_is_not_known_is_refused():
    with pytest.raises(ValidationError, match="modelset"):
        Settings.model_validate({"modelset": "x"})


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("affinity", True, "Whole num_cpus"),
        ("affinity", False, "numactl"),
        ("trace_dir", None, "Set trace_endpoint"),
        ("trace_mib", 64, "Set trace_endpoint"),
    ],
)
def test_a_setting_of_earlier_versions_is_refused_with_what_to_write(name, value, instead):
    with pytest.raises(ValidationError, match=rf"{name} is no setting any more: .*{instead}"):
        Settings.model_validate({name: value})


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().max_files = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_described(name):
    assert Settings.model_fields[name].description


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_sizes", ()),
        ("batch_sizes", (0,)),
        ("batch_sizes", (257,)),
        ("streams", -1),
        ("max_files", 0),
        ("precision", "FP8"),
        ("cascade_margin", 0),
        ("cascade_margin", 1),
        ("cascade_margin", -0.5),
        ("cascade_margin", math.nan),
        ("cascade_margin", "often"),
        ("request_timeout_s", 0),
        ("request_timeout_s", math.nan),
        ("request_timeout_s", math.inf),
        ("request_timeout_s", 3601),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ValidationError, match=name):
        Settings.model_validate({name: value})


def test_one_body_has_room_among_all():
    with pytest.raises(
        ValidationError, match=r"max_bytes_in_flight is 9 and max_body_bytes 10, .*raise"
    ):
        Settings(max_body_bytes=10, max_bytes_in_flight=9)
    assert Settings(max_body_bytes=10, max_bytes_in_flight=10).max_bytes_in_flight == 10


@pytest.mark.parametrize(("max_queued", "max_files"), [(85, 64), (1, 1), (4, 3), (3, 3)])
def test_a_form_has_room_in_a_members_queue(max_queued, max_files):
    settings = Settings(max_queued_images=max_queued, max_files=max_files)
    assert form_places(settings.max_queued_images) >= max_files


@pytest.mark.parametrize(
    ("max_queued", "max_files", "places", "least"),
    [(84, 64, 63, 85), (50, 64, 38, 85), (4, 4, 3, 5), (1, 2, 1, 2)],
)
def test_one_that_would_always_be_refused_is_found_at_once(max_queued, max_files, places, least):
    told = (
        rf"max_files is {max_files}, and of max_queued_images {max_queued} a form may fill "
        rf"{places}: .* raise max_queued_images to {least}, or lower max_files"
    )
    with pytest.raises(ValidationError, match=told):
        Settings(max_queued_images=max_queued, max_files=max_files)


def test_own_folders_are_searched_before_the_bundled(tmp_path):
    assert Settings(model_dirs=(tmp_path,)).model_search == (
        tmp_path,
        user_sets_dir(),
        BUNDLED_DIR,
    )


def test_what_the_user_set_in_the_environment_wins(monkeypatch):
    monkeypatch.setenv("TANDEM_TEST_A", "users")
    monkeypatch.delenv("TANDEM_TEST_B", raising=False)
    set_environment({"TANDEM_TEST_A": "ours", "TANDEM_TEST_B": "ours"})
    assert os.environ["TANDEM_TEST_A"] == "users"
    assert os.environ.pop("TANDEM_TEST_B") == "ours"


def test_two_services_on_one_machine_share_no_file_and_no_port(tmp_path):
    a, b = (serve_environment(tmp_path / n, p) for n, p in (("a", (1, 2)), ("b", (3, 4))))
    apart = {k for k in a if a[k] != b[k]}
    assert apart >= {k for k in a if any(w in k for w in ("_FILE", "_SOCKET", "_PORT"))}
    assert set(a) == set(b)
    assert a["RAY_SERVE_ENABLE_HA_PROXY"] == a["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


def test_serve_knows_every_variable_that_is_set(tmp_path):
    """A variable that Serve renamed would be ignored in silence."""
    source = Path(constants.__file__).read_text("utf-8")
    names = {n for n in serve_environment(tmp_path, (1, 2)) if n.startswith("RAY_SERVE_")}
    assert {n for n in names if f'"{n}"' not in source} == set()


def test_a_busy_machine_is_not_given_up_by_its_own_ray(tmp_path):
    """Ray's default is 5: beside two busy loops on two cores a node was declared dead once."""
    threshold = serve_environment(tmp_path, (1, 2))["RAY_health_check_failure_threshold"]
    assert int(threshold) >= 100
    assert "RAY_health_check_failure_threshold" not in node_environment(tmp_path)  # a cluster
