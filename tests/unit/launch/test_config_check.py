"""What Serve would accept in silence is refused: misspelt options, bad values, too short times."""

import re

import pytest
from ray import serve

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.config_check import SERVE_DEFAULT_GRACE_S
from tests.support.configurations import APPLICATION, GOOD, ROOT, SHIPPED, with_key, write


def test_there_is_something_to_check():
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_is_clean(path):
    assert ServeConfig.read(path).content["applications"]


DEPLOYMENT = ("applications", 0, "deployments", 0)


@pytest.mark.parametrize(
    ("place", "misspelt", "says"),
    [
        ((), "aplications", "aplications is no option; did you mean applications?"),
        (("http_options",), "prot", "http_options.prot is no option; did you mean port?"),
        (
            ("applications", 0),
            "import_pth",
            "applications[0].import_pth is no option; did you mean import_path?",
        ),
        (
            DEPLOYMENT,
            "max_ongoing_request",
            "applications[0].deployments[0].max_ongoing_request is no option; "
            "did you mean max_ongoing_requests?",
        ),
        (
            (*DEPLOYMENT, "autoscaling_config"),
            "max_replica",
            "applications[0].deployments[0].autoscaling_config.max_replica is no option; "
            "did you mean max_replicas?",
        ),
    ],
)
def test_a_misspelt_key_is_refused_with_a_suggestion(tmp_path, place, misspelt, says):
    path = write(tmp_path, with_key(GOOD, place, misspelt, 1))
    with pytest.raises(ConfigError) as caught:
        ServeConfig.read(path)
    assert says in caught.value.message
    assert str(path) in caught.value.message


def test_every_misspelt_key_is_named_at_once(tmp_path):
    content = with_key(with_key(GOOD, (), "zzz", 1), ("http_options",), "hots", "x")
    with pytest.raises(ConfigError, match=r"hots is no option; did you mean host\?.*zzz is no"):
        ServeConfig.read(write(tmp_path, content))


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        (("applications", 0, "args"), "modelset", "x", "modelset: Extra inputs"),
        (("applications", 0, "args"), "max_files", 0, "max_files: .*greater than or equal to 1"),
        (("applications", 0), "args", None, "args"),
        (("http_options",), "port", "eighty", "port"),
        ((), "applications", None, "applications"),
        (DEPLOYMENT, "max_ongoing_requests", "many", "max_ongoing_requests"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(tmp_path, place, key, value, says):
    with pytest.raises(ConfigError, match=says):
        ServeConfig.read(write(tmp_path, with_key(GOOD, place, key, value)))


POLICY = {"policy_function": "app.scaling.serve_policy:EnsemblePolicy"}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (POLICY | {"policy_kwarg": {}}, "no option; did you mean policy_kwargs?"),
        (POLICY | {"policy_kwargs": {"drains_s": 3}}, "did you mean drain_s?"),
        (POLICY | {"policy_kwargs": {"target_utilization": 7}}, "less than or equal to 1"),
    ],
)
def test_the_autoscaling_policy_is_read_as_strictly(tmp_path, policy, says):
    content = with_key(GOOD, ("applications", 0), "autoscaling_policy", policy)
    with pytest.raises(ConfigError, match=re.escape(says)):
        ServeConfig.read(write(tmp_path, content))


def test_a_policy_of_somebody_elses_has_its_own_kwargs(tmp_path):
    policy = {"policy_function": "their.module:Policy", "policy_kwargs": {"x": 1}}
    content = with_key(GOOD, ("applications", 0), "autoscaling_policy", policy)
    assert ServeConfig.read(write(tmp_path, content)).as_dict() == content


def with_times(graceful_s: float | None, request_s: float, name: str = "Gateway") -> dict:
    options = {"name": name}
    if graceful_s is not None:
        options["graceful_shutdown_timeout_s"] = graceful_s
    application = APPLICATION | {"args": {"request_timeout_s": request_s}, "deployments": [options]}
    return GOOD | {"applications": [application]}


@pytest.mark.parametrize(
    ("graceful_s", "request_s", "name", "told"),
    [
        (5, 10, "Gateway", "Gateway has a graceful_shutdown_timeout_s of 5, .* of 10 s:"),
        (9.5, 10, "resnet50", "resnet50 has a graceful_shutdown_timeout_s of 9.5, .* of 10 s:"),
        (0, 1, "Gateway", "Gateway has a graceful_shutdown_timeout_s of 0, .* of 1 s:"),
        (None, 30, "Gateway", r"of 20 \(Serve's default\), .* of 30 s:"),
        (60, 30, "resnet50", r"Gateway has a .* of 20 \(Serve's default\), .* of 30 s:"),
    ],
)
def test_an_update_must_not_cut_answers_that_are_in_time(
    tmp_path, graceful_s, request_s, name, told
):
    path = write(tmp_path, with_times(graceful_s, request_s, name))
    with pytest.raises(ConfigError, match=told) as caught:
        ServeConfig.read(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(("graceful_s", "request_s"), [(10, 10), (12, 10), (None, 20), (5, 4)])
def test_an_update_that_waits_long_enough(graceful_s, request_s):
    ServeConfig.of(with_times(graceful_s, request_s))


def test_what_serve_waits_without_the_option():
    deployment = serve.deployment(name="x")(type("X", (), {}))
    assert deployment._deployment_config.graceful_shutdown_timeout_s == SERVE_DEFAULT_GRACE_S


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_waits_for_its_requests(path):
    config = ServeConfig.read(path)
    for deployment in config.deployments:
        grace_s = deployment.get("graceful_shutdown_timeout_s", SERVE_DEFAULT_GRACE_S)
        # Serve lets a replica have new requests for another second.
        assert grace_s >= config.settings.request_timeout_s + 1, deployment["name"]
