"""What Serve would accept in silence is refused: misspelt options, bad values, too short times."""

import importlib
import re

import pytest
from ray import serve

from app.errors import ConfigError
from app.launch.checks import SERVE_DEFAULT_GRACE_S
from app.launch.config import ServeConfig
from app.launch.config_check import MOVED
from tests.support.configurations import (
    APPLICATION,
    GOOD,
    ROOT,
    SHIPPED,
    deployment_of,
    with_key,
    write,
)


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


POLICY = {"policy_function": "app.serve.scaling:EnsemblePolicy"}


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


OLD_EXPORTER = "app.tracing.pipeline:span_processors"
OLD_POLICY = "app.scaling.serve_policy:EnsemblePolicy"


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        (
            (),
            "tracing_config",
            {"enabled": True, "exporter_import_path": OLD_EXPORTER},
            f"tracing_config.exporter_import_path is {OLD_EXPORTER}, which has moved: "
            "write app.telemetry.export:span_processors",
        ),
        (
            ("applications", 0),
            "autoscaling_policy",
            {"policy_function": OLD_POLICY, "policy_kwargs": {"drain_s": 3}},
            f"applications[0].autoscaling_policy.policy_function is {OLD_POLICY}, which has moved: "
            "write app.serve.scaling:EnsemblePolicy",
        ),
    ],
)
def test_an_import_path_of_an_earlier_version_is_refused_with_todays(
    tmp_path, place, key, value, says
):
    path = write(tmp_path, with_key(GOOD, place, key, value))
    with pytest.raises(ConfigError) as caught:
        ServeConfig.read(path)
    assert caught.value.message == f"{path}: {says}"


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_import_path_that_moved_is_gone_and_the_new_one_is_there(old, new):
    module, _, name = new.partition(":")
    assert hasattr(importlib.import_module(module), name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(old.partition(":")[0])


def test_a_policy_of_somebody_elses_has_its_own_kwargs(tmp_path):
    policy = {"policy_function": "their.module:Policy", "policy_kwargs": {"x": 1}}
    content = with_key(GOOD, ("applications", 0), "autoscaling_policy", policy)
    assert ServeConfig.read(write(tmp_path, content)).as_dict() == content


def with_times(graceful_s: float | None, request_s: float, name: str = "Gateway") -> dict:
    options: dict[str, object] = {"name": name}
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


OTHER = {"name": "other", "route_prefix": "/other", "import_path": "their.module:app"}


def test_numbers_that_are_text_are_numbers_from_then_on(tmp_path):
    gateway = {
        "name": "Gateway",
        "graceful_shutdown_timeout_s": "12",
        "max_ongoing_requests": "512",
        "ray_actor_options": {"num_cpus": "0.5"},
        "autoscaling_config": {"min_replicas": "1", "max_replicas": "2"},
    }
    content = with_key(GOOD, ("applications", 0), "deployments", [gateway])
    content = with_key(content, ("http_options",), "port", "8100")
    config = ServeConfig.read(write(tmp_path, content))
    assert config.http.port == 8100
    assert deployment_of(config, "Gateway") == {
        "name": "Gateway",
        "graceful_shutdown_timeout_s": 12.0,
        "max_ongoing_requests": 512,
        "ray_actor_options": {"num_cpus": 0.5},
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
    }


def test_another_application_has_arguments_of_its_own(tmp_path):
    """Wherever ours stands in the file."""
    other = OTHER | {"args": {"port": 1}, "deployments": [{"name": "Gateway"}]}
    content = GOOD | {"applications": [other, *GOOD["applications"]]}
    config = ServeConfig.read(write(tmp_path, content))
    assert (config.name, config.url) == ("tandem", "http://127.0.0.1:8000")
    changed = config.with_arguments(max_files=3).as_dict()["applications"]
    assert changed[0] == other
    assert changed[1]["args"] == {"model_set": "imagenette", "max_files": 3}


def test_a_key_that_stands_twice(tmp_path):
    path = write(tmp_path, GOOD)
    path.write_text(path.read_text() + "http_options:\n  port: 1\n", "utf-8")
    with pytest.raises(ConfigError, match="'http_options' stands twice"):
        ServeConfig.read(path)


GATEWAY = {"name": "Gateway"}


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        ((), "proxy_location", "Disabled", "nobody would listen for clients; take EveryNode"),
        ((), "applications", [OTHER], "no application has import_path: app.main:build"),
        (("http_options",), "request_timeout_s", 10, "http_options.request_timeout_s is 10, and"),
        ((), "grpc_options", {"request_timeout_s": 3}, "grpc_options.request_timeout_s is 3, and"),
        (("applications", 0), "deployments", [GATEWAY, GATEWAY], "deployments has Gateway twice"),
        (("applications", 0), "deployments", [GATEWAY, None], "deployments[1] is no mapping"),
        ((), "applications", ["app.main:build"], "applications[0] is no mapping"),
        (("applications", 0), "route_prefix", "images", "ends with none: '/images'"),
        (("applications", 0), "route_prefix", "/images/", "ends with none: '/images'"),
        (("applications", 0), "route_prefix", "/{x}", "has no place in a path"),
        (("applications", 0), "route_prefix", None, "route_prefix: null"),
        (DEPLOYMENT, "max_ongoing_requests", 127, "args.max_concurrent_requests is 128"),
        (
            DEPLOYMENT,
            "user_config",
            {"max_batchsize": 4},
            "Gateway: user_config.max_batchsize: Extra inputs are not permitted; it has max_batch_",
        ),
        (DEPLOYMENT, "user_config", {"max_batch_size": 0}, "greater than or equal to 1"),
        (DEPLOYMENT, "user_config", {"max_queued_images": 3}, "a form may fill"),
        (
            ("applications", 0),
            "deployments",
            [{"name": "Decoder", "user_config": {"max_batch_size": 4}}],
            "Decoder takes no user_config",
        ),
        (
            (*DEPLOYMENT, "autoscaling_config"),
            "max_replicas",
            0,
            "max_replicas",
        ),
    ],
)
def test_what_serve_would_take_in_silence_and_the_service_stumble_over(
    tmp_path, place, key, value, says
):
    path = write(tmp_path, with_key(GOOD, place, key, value))
    with pytest.raises(ConfigError) as caught:
        ServeConfig.read(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ((), "proxy_location", "HeadOnly"),
        (("http_options",), "request_timeout_s", 60),
        (("applications", 0), "route_prefix", "/a/b"),
        (DEPLOYMENT, "max_ongoing_requests", 128),
        (DEPLOYMENT, "user_config", {"max_batch_size": 4}),
    ],
)
def test_what_is_well(tmp_path, place, key, value):
    content = with_key(GOOD, place, key, value)
    assert ServeConfig.read(write(tmp_path, content)).as_dict() == content
