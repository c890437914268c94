"""Settings: what is refused, the share of each set, weights of members, what parts get of them."""

import ast
import math
import os
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from app.environment import node_environment, serve_environment, set_environment
from app.errors import ConfigError
from app.graph.request import ClassifyRequest
from app.launch.config import ServeConfig, checked_content
from app.serve.gateway import assemble
from app.setting_groups import LimitSettings
from app.setting_values import check_redis_client, form_places
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry.metrics import RequestObserver
from calibration.commands.models import user_sets_dir
from models.errors import ModelSetError
from models.model_set import BUNDLED_DIR
from tests.support.cases import cases
from tests.support.configurations import ROOT
from tests.support.tiny_networks import picture

Function = ast.FunctionDef | ast.AsyncFunctionDef
GROUPS = ("Settings", "LimitSettings", "RecordSettings", "SetSettings")
MOST_WITH_ALL = 49  # functions of app that take all settings; only lower it
TRACES = [
    ("otlp", "http://jaeger:4317"), ("otlp", "https://[::1]:4318/v1/traces"), ("otlp", None),
    ("jaeger", "udp://agent"), ("jaeger", "http://collector:14268"), ("none", "whatever"),
]  # fmt: skip
CACHES = ("none", "local", "redis://10.0.0.5:6379/1", "rediss://c:1")


def reads_one(function: Function, name: str) -> bool:
    """Whether ``function`` only ever reads one field of its argument ``name``."""
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    attributes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    fields = [a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id == name]
    return len(uses) == len(fields) and len(set(fields)) == 1 and fields[0] != "model_copy"


def taking(source, *groups):
    """Yield the functions that take an argument of these groups of settings, and its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if argument.annotation and ast.unparse(argument.annotation) in groups:
                    yield node, argument.arg


def too_wide(source):
    for function, argument in taking(source, *GROUPS):
        if reads_one(function, argument):
            yield function.name


def test_a_function_gets_the_setting_that_it_reads() -> None:
    files = sorted((ROOT / "app").rglob("*.py"))
    assert len(files) > 100
    assert not {f"{path}: {name}" for path in files for name in too_wide(path.read_text("utf-8"))}


def test_no_more_functions_take_all_settings() -> None:
    sources = [path.read_text("utf-8") for path in sorted((ROOT / "app").rglob("*.py"))]
    assert sum(len([*taking(source, "Settings")]) for source in sources) <= MOST_WITH_ALL


def test_what_reads_one_setting_is_seen() -> None:
    assert list(too_wide("def f(settings: Settings): return settings.cache")) == ["f"]
    assert not list(too_wide("def f(settings: Settings): return g(settings, settings.cache)"))
    assert not list(too_wide("def f(s: Settings): return s.cache, s.streams"))


NULLABLE = ("target_wait_ms", "answer_timeout_s")  # where 0, or null, has a meaning of its own
STAGES = ("decoder", "members", "combiner")
OTLP, JAEGER = "otlp takes http://HOST:4317", "jaeger takes udp://HOST:6831"
FORM = "max_files is {}, and of max_queued_images {} a form may fill {}: .* to {}, or lower max_f"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cache": "memory"}, "cache is 'memory': give none, local, or redis://HOST:PORT/DB"),
    ({"cache": ""}, "give none, local, or"),
    ({"cache": None}, "valid string"),
    ({"cache": True}, "valid string"),
    ({"cache": "redis://cache"}, "no host or no port"),
    ({"cache": "redis://cache:6379/one"}, "number of a database"),
    ({"cache_mib": 0}, "greater than or equal to 1"),
    ({"cache_mib": 2**16 + 1}, "less than or equal to 65536"),
    ({"cache_mib": "much"}, "valid integer"),
    *(({name: 0}, "greater than") for name in LimitSettings.model_fields if name not in NULLABLE),
    (
        {"max_body_bytes": 10, "max_bytes_in_flight": 9},
        "max_bytes_in_flight is 9 and max_body_bytes 10, .*raise",
    ),
    ({"trace_endpoint": "jaeger:4317"}, OTLP),
    ({"trace_endpoint": "udp://jaeger:6831"}, OTLP),
    ({"trace_endpoint": "http://"}, OTLP),
    ({"trace_endpoint": "http://jaeger:port"}, OTLP),
    ({"trace_endpoint": "http://[::1"}, OTLP),
    ({"trace_endpoint": ""}, OTLP),
    ({"trace_exporter": "jaeger", "trace_endpoint": "agent:6831"}, JAEGER),
    ({"trace_exporter": "jaeger", "trace_endpoint": "http://collector:99999"}, JAEGER),
    ({"trace_exporter": "file"}, "file is no exporter any more: .*trace_endpoint"),
    ({"modelset": "x"}, "modelset"),
    ({"affinity": True}, "affinity is no setting any more: .*Whole num_cpus"),
    ({"affinity": False}, "affinity is no setting any more: .*numactl"),
    ({"trace_dir": None}, "trace_dir is no setting any more: .*Set trace_endpoint"),
    ({"trace_mib": 64}, "trace_mib is no setting any more: .*Set trace_endpoint"),
    *(({"batch_sizes": sizes}, "batch_sizes") for sizes in ((), (0,), (257,))),
    ({"streams": -1}, "streams"),
    ({"precision": "FP8"}, "precision"),
    ({"cascade_margin": 0.5}, "cascade_margin is no setting any more: write plan: fast"),
    *(({"plan": p}, "plan") for p in ("quick", None, 1)),
    *(({"allowed_plans": p}, "allowed_plans") for p in ([], ["quick"], "fast")),
    ({"plan": "fast", "allowed_plans": ["full"]}, r"allowed_plans \['full'\]: add it there"),
    ({"when_full": "wait"}, "when_full"),
    ({"plan": "fast", "weights": {"a": 1.0}}, "weights is set and plan fast"),
    *(({"request_timeout_s": s}, "request_timeout_s") for s in (0, math.nan, math.inf, 3601)),
    ({"max_queued_images": 84, "max_files": 64}, FORM.format(64, 84, 63, 85)),
    ({"max_queued_images": 50, "max_files": 64}, FORM.format(64, 50, 38, 85)),
    ({"max_queued_images": 4, "max_files": 4}, FORM.format(4, 4, 3, 5)),
    ({"max_queued_images": 1, "max_files": 2}, FORM.format(2, 1, 1, 2)),
    ({"model_set": "a", "model_sets": ["b"]}, "leave one of them out"),
    ({"model_sets": []}, "at least 1"),
    ({"model_sets": "a"}, "tuple"),
    ({"model_sets": ["a", "b"], "weights": {"m": 1}}, "weights names members of one set"),
    *(
        ({"model_sets": ["a", "b"], stage: "deployment"}, f"2 sets and {stage} is deployment")
        for stage in STAGES
    ),
    *(({"unload_after_s": seconds}, "unload_after_s") for seconds in (0, -1, "soon")),
    *(({"set_weights": w}, "set_weights") for w in ({}, {"a": 0}, {"a": -1}, {"a": math.inf})),
    *(({"weights": w}, "weights") for w in ({}, {"a": 0}, {"a": -1}, {"a": math.nan}, ["a"])),
]


@pytest.mark.parametrize(("values", "says"), REFUSED)
def test_what_is_refused(values, says):
    with pytest.raises(ValidationError, match=says) as caught:
        Settings.model_validate(values)
    assert [*values][-1] in str(caught.value)


def test_a_file_with_a_bad_cache_is_refused_without_its_password():
    application = {"import_path": "app.main:build", "args": {"cache": "redis://:s3cret@c:x/1"}}
    with pytest.raises(ConfigError, match="its port is no number") as caught:
        checked_content({"applications": [application]}, "serve_config.yaml")
    assert "s3cret" not in str(caught.value)


def test_a_redis_wants_its_client(monkeypatch):
    monkeypatch.setattr("app.setting_values.find_spec", lambda _: None)
    for cache in ("none", "local"):
        check_redis_client(cache)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-serve\[redis\]'"):
        check_redis_client("redis://cache:6379/1")


@pytest.mark.parametrize("cache", ["redis://u:s3cret@cache:none/0", "redsi://:s3cret@cache:1/0"])
def test_what_serve_prints_of_a_bad_address_has_no_password(cache):
    """``serve deploy`` shows the error as pydantic words it."""
    with pytest.raises(ValidationError) as raised:
        Settings(cache=cache)
    assert "s3cret" not in str(raised.value)


@cases(
    "values",
    *({"cache": cache} for cache in CACHES),
    *({"trace_exporter": exporter, "trace_endpoint": where} for exporter, where in TRACES),
    {"max_body_bytes": 10, "max_bytes_in_flight": 10},
    *({"model_sets": ("a",), stage: "deployment"} for stage in STAGES),
)
def test_what_is_taken(values):
    settings = Settings(**values)
    assert {name: getattr(settings, name) for name in values} == values


def test_answers_are_kept_only_where_that_is_asked_for():
    assert Settings().cache == "none"


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().max_files = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_described(name):
    assert Settings.model_fields[name].description


@pytest.mark.parametrize(("max_queued", "max_files"), [(85, 64), (1, 1), (4, 3), (3, 3)])
def test_a_form_has_room_in_a_members_queue(max_queued, max_files):
    settings = Settings(max_queued_images=max_queued, max_files=max_files)
    assert form_places(settings.max_queued_images) >= max_files


def test_own_folders_are_searched_before_the_bundled(tmp_path):
    assert Settings(model_dirs=(tmp_path,)).model_search == (tmp_path, user_sets_dir(), BUNDLED_DIR)


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


def test_a_busy_machine_is_not_given_up_by_its_own_ray(tmp_path):
    """Ray's default is 5: beside two busy loops on two cores a node was declared dead once."""
    assert int(serve_environment(tmp_path, (1, 2))["RAY_health_check_failure_threshold"]) >= 100
    assert "RAY_health_check_failure_threshold" not in node_environment(tmp_path)  # a cluster


def test_the_first_set_is_the_default():
    settings = Settings(model_sets=("a", "b"))
    assert settings.model_set == "a"
    assert [own.model_set for own in settings.of_each_set()] == ["a", "b"]


@pytest.mark.parametrize("one", [Settings(), Settings(model_sets=("a",))])
def test_one_set_has_all_of_the_limits(one):
    assert one.of_each_set() == [one]


def test_limits_of_a_gateway_are_divided_evenly():
    settings = Settings(model_sets=("a", "b", "c"), max_concurrent_requests=10, cache_mib=2)
    for own in settings.of_each_set():
        assert (own.max_concurrent_requests, own.cache_mib) == (3, 1)
        assert own.max_bytes_in_flight == settings.max_bytes_in_flight // 3
    many = Settings(model_sets=("a", "b"), max_body_bytes=90, max_bytes_in_flight=100)
    assert [own.max_bytes_in_flight for own in many.of_each_set()] == [90, 90]


def test_one_way_of_naming_sets_takes_the_place_of_the_other():
    content = {"applications": [{"import_path": "app.main:build", "args": {"model_set": "a"}}]}
    several = ServeConfig.of(content).changed(model_sets=["b", "c"])
    assert several.settings.model_sets == ("b", "c")
    again = several.changed(max_files=3).changed(model_set="d")
    assert again.content["applications"][0]["args"] == {"model_set": "d", "max_files": 3}


def test_a_set_that_is_loaded_later_has_the_share_of_one_more():
    own = Settings(model_sets=("a", "b"), max_concurrent_requests=9, weights=None).of_one_more("c")
    assert (own.model_set, own.max_concurrent_requests) == ("c", 3)
    assert own.has_several_sets
    alone = Settings(model_set="a", max_concurrent_requests=8, weights={"m": 2.0}).of_one_more("c")
    assert (alone.model_set, alone.max_concurrent_requests) == ("c", 4)
    assert alone.weights is None  # they are of the other set's members


def settings_of(tiny_set, **settings: object) -> Settings:
    return Settings(model_set=str(tiny_set), compile_cache=None, **settings)


async def test_only_these_members_are_compiled_and_asked(tiny_set):
    graph = assemble(settings_of(tiny_set, weights={"unsure": 2.0}))
    request = ClassifyRequest([picture("red")], 1, 60.0, "id", RequestObserver())
    (answer,) = await graph.service.classify(request)
    assert answer.members.keys() == {"unsure"}
    assert answer.predictions[0].label == "mostly red"
    (served,) = graph.service.served_models().members
    assert (served.name, served.weight) == ("unsure", 2.0)


async def test_the_average_has_these_weights(tiny_set):
    combiner = Combiner(settings_of(tiny_set, weights={"sure": 0.25, "unsure": 0.75}))
    rows = {"sure": np.array([[1, 0, 0]], np.float32), "unsure": np.array([[0, 1, 0]], np.float32)}
    (answer,) = await combiner.combine(rows, 2)
    assert [p.probability for p in answer.predictions] == [0.75, 0.25]


def test_other_weights_are_another_set_to_caches_and_updates(tiny_set):
    some = [None, {"sure": 1.0}, {"sure": 2.0, "unsure": 1.0}, {"sure": 1.0, "unsure": 2.0}]
    found = {settings_of(tiny_set, weights=w).load_set().fingerprint() for w in some}
    assert len(found) == len(some)


def test_a_member_that_is_not_there(tiny_set):
    with pytest.raises(ModelSetError, match="has no member 'other'; it has: sure, unsure"):
        settings_of(tiny_set, weights={"other": 1.0}).load_set()


def test_deployments_are_fitted_to_the_members_that_are_served(tiny_set):
    config = ServeConfig.read(ROOT / "configs" / "separate.yaml")
    config = config.changed(model_set=str(tiny_set), weights={"sure": 1.0})
    fitted = config.fitted_to(config.settings.load_set().manifest)
    assert {d["name"] for d in fitted.deployments} == {"Gateway", "Decoder", "sure"}
