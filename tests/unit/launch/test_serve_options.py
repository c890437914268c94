"""Options of tandem serve: a flag, else a variable, else the file; the origin; usable paths."""

import json
import os
import re
import subprocess
import threading
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.errors import ConfigError
from app.launch.config import ServeConfig, default_config
from app.launch.serve_options import (
    NO_SETTINGS,
    OPTIONS,
    ServeOptions,
    absolute,
    read_config,
    resolved,
    sets_of,
    settings_of_environment,
    unknown_variables,
    variable_of,
    with_usable_paths,
)
from app.settings import Settings
from models.record import YamlError
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.configurations import GOOD, write
from tests.support.services.live_service import ROOT, TANDEM
from tests.support.shipped_config import edited_config

# Settings that a variable says as Python would print them.
AS_PRINTED: dict[str, Any] = {
    "model_set": "imagenet", "precision": "FP16", "plan": "fast", "when_full": "fast",
    "answer_policy": "quorum", "member_patience_s": 0.5, "preprocess": "package.module:function",
    "combine": "package.module:function", "decoder": "deployment", "members": "deployment",
    "combiner": "deployment", "streams": 2, "decode_threads": 3, "shared_memory": "unproxied",
    "cache": "redis://10.0.0.5:6379/0", "cache_mib": 128, "max_body_bytes": 1000,
    "max_bytes_in_flight": 100_000_000, "max_pixels": 1000, "max_full_pixels": 1000,
    "max_heavy_pixels": 100_000_000, "max_files": 3, "max_concurrent_requests": 7,
    "max_queued_images": 256, "default_top_k": 1, "request_timeout_s": 2.5,
    "shadow": "imagenet@0123456789ab", "traffic_header": "x-user-id", "compare_ratio": 0.5,
    "copy_share": 0.05,
    "trace_exporter": "none", "trace_endpoint": "http://jaeger:4317", "sample_ratio": 0.5,
    "sample_dir": "/samples", "sample_mib": 8, "feedback_answers": 100,
    "api_keys_file": Path("/run/secrets/keys"),
}  # fmt: skip
# As it is written in the variable, and what the setting is then; every setting has a row.
VALUES = {name: (str(value), value) for name, value in AS_PRINTED.items()} | {
    "model_sets": ("[imagenette, imagenet]", ("imagenette", "imagenet")),
    "model_dirs": ("[/models, other]", (Path("/models"), Path("other"))),
    "weights": ("{resnet50: 2, densenet169: 1}", {"resnet50": 2.0, "densenet169": 1.0}),
    "allow_unverified": ("true", True),
    "key_names_in_metrics": ("true", True),
    "allowed_plans": ("[fast, full]", ("fast", "full")),
    "batch_sizes": ("[1, 4]", (1, 4)),
    "backlog_batches": ("false", False),
    "local_channels": ("no", False),
    "compile_cache": ("null", None),
    "allowed_origins": ("[https://shop.example]", ("https://shop.example",)),
    "set_functions": ("[pixels:clahe]", ("pixels:clahe",)),
    "trusted_proxies": ("[10.0.0.0/8]", (ip_network("10.0.0.0/8"),)),
    "traffic": ("{imagenette: 100}", {"imagenette": 100.0}),
    "open_traffic": ("true", True),
    "operator_hints": ("true", True),
    "target_wait_ms": ("null", None),
    "answer_timeout_s": ("1", 1.0),
    "unload_after_s": ("60", 60.0),
    "set_weights": ("{imagenet: 2}", {"imagenet": 2.0}),
    "feedback": ("true", True),
    "icc_profiles": ("convert", "convert"),
    "proxy_protocol": ("true", True),
    "sample_days": ("30", 30),
    "teach": ("true", True),
    "teach_dir": ("/taught", "/taught"),
    "teach_mib": ("64", 64),
    "teach_photographs": ("200", 200),
}
# A setting that is refused without another.
NEEDS = {"sample_ratio": "sample_dir", "teach": "teach_dir"}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_a_variable(monkeypatch, name):
    text, value = VALUES[name]
    monkeypatch.setenv(variable_of(name), text)
    if (other := NEEDS.get(name)) is not None:
        monkeypatch.setenv(variable_of(other), VALUES[other][0])
    assert getattr(read_config(ServeOptions()).settings, name) == value


def test_a_flag_before_a_variable_before_the_file(monkeypatch, tmp_path):
    config = edited_config(tmp_path, "args:", "args:\n      cache_mib: 3\n      max_files: 4")
    for name in ("MODEL_SET", "MAX_FILES", "API_KEYS_FILE"):
        monkeypatch.setenv(f"TANDEM_{name}", "9")
    options = ServeOptions(config=config, model_set="of-the-flag", api_keys_file=Path("/keys"))
    settings = read_config(options).settings
    assert (settings.model_set, settings.max_files, settings.cache_mib) == ("of-the-flag", 9, 3)
    assert settings.api_keys_file == Path("/keys")
    rows = resolved(options, {"config", "model_set", "api_keys_file"})
    assert rows["model_set"]["source"] == "--model-set"
    assert rows["max_files"]["source"] == "TANDEM_MAX_FILES"
    assert rows["cache_mib"]["source"] == str(config)
    assert rows["precision"]["source"] == rows["model_sets"]["source"] == "default"


@pytest.mark.parametrize("name", ["AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT"])
def test_a_hosts_port_unless_a_flag_or_our_variable_says_another(monkeypatch, name):
    monkeypatch.setenv(name, "8080")
    assert read_config(ServeOptions()).http.port == 8080
    assert resolved(ServeOptions(), ())["port"] == {"value": 8080, "source": name}
    assert read_config(ServeOptions(port=9000)).http.port == 9000
    for wrong in ("http", "0", "65536", "8080.0", "٨"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigError, match=f"{name} is {wrong!r}: a port is wanted"):
            read_config(ServeOptions())


@cases(
    "in_file, variables, flag, sets, source",
    ("model_sets: [a, b]", {}, None, ["a", ["a", "b"]], None),
    ("max_files: 1", {}, None, ["imagenette", None], "default"),
    ("model_set: c", {}, "a,b", ["a", ["a", "b"]], "--model-set"),
    ("model_sets: [a, b]", {}, "c", ["c", None], "--model-set"),
    ("model_set: c", {"MODEL_SETS": "[a,b]"}, None, ["a", ["a", "b"]], "TANDEM_MODEL_SETS"),
    ("model_sets: [a, b]", {"MODEL_SET": "c"}, None, ["c", None], "TANDEM_MODEL_SET"),
    ("model_set: c", {"MODEL_SET": "a,b"}, None, ["a", ["a", "b"]], "TANDEM_MODEL_SET"),
    ("model_set: d", {"MODEL_SETS": "[a,b]"}, "c", ["c", None], "--model-set"),
)
def test_a_set_and_several_have_the_source_that_decided_both(
    monkeypatch, tmp_path, in_file, variables, flag, sets, source
):
    config = edited_config(tmp_path, "model_set: imagenette", in_file)
    for name, value in variables.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    flags = [] if flag is None else ["--model-set", flag]
    done = tandem("serve", "--print-config", "--json", "--config", config, *flags)
    shown = json.loads(done.stdout)
    source = source or str(config)
    assert [shown["model_set"], shown["model_sets"]] == [
        {"value": value, "source": source} for value in sets
    ]


BOTH = "{tiny@aaaaaaaaaaaa: 60, tiny@bbbbbbbbbbbb: 40}"


@cases(
    "in_file, variables, source",
    (f"traffic: {BOTH}", {}, None),
    (f"model_set: tiny\n      traffic: {BOTH}", {}, None),
    ("model_set: tiny", {"TRAFFIC": BOTH}, "TANDEM_TRAFFIC"),
    (f"traffic: {BOTH}", {"MODEL_SET": "tiny"}, None),
)
def test_traffic_decides_the_set(monkeypatch, tmp_path, in_file, variables, source):
    config = edited_config(tmp_path, "model_set: imagenette", in_file)
    for name, value in variables.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    rows = resolved(ServeOptions(config=config), {"config"})
    assert rows["model_set"] == {"value": "tiny@aaaaaaaaaaaa", "source": source or str(config)}
    assert rows["model_sets"] == {"value": None, "source": "default"}


@pytest.mark.parametrize(("flag", "is_allowed"), [([], True), (["--no-allow-unverified"], False)])
def test_the_accuracy_gate_is_what_the_flag_says(monkeypatch, flag, is_allowed):
    monkeypatch.setenv("TANDEM_ALLOW_UNVERIFIED", "true")
    done = tandem("serve", "--print-config", "--json", *flag)
    shown = json.loads(done.stdout)["allow_unverified"]
    source = flag[0].replace("no-", "") if flag else "TANDEM_ALLOW_UNVERIFIED"
    assert shown == {"value": is_allowed, "source": source}


def test_a_file_that_can_be_read_once_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(default_config().read_bytes(),))
    writer.start()
    assert resolved(ServeOptions(config=pipe), {"config"})["model_set"]["value"] == "imagenette"
    writer.join()


def test_no_other_reader_of_a_file_takes_variables(monkeypatch):
    """Only the start applies variables; replicas read nothing but their arguments."""
    monkeypatch.setenv("TANDEM_CACHE_MIB", "9")
    assert ServeConfig.read(ROOT / "serve_config.yaml").settings.cache_mib == 64
    assert Settings().cache_mib == 64
    monkeypatch.setenv("TANDEM_CACHE_MIB", "")  # counts as not set
    assert settings_of_environment() == {}


@cases(
    "name, text, says",
    ("CACHE_MIB", "many", "with TANDEM_CACHE_MIB: cache_mib: Input should be a valid integer"),
    ("DEFAULT_TOP_K", "x", "unable to parse string as an integer, not 'x'"),
    ("BATCH_SIZES", "3", "batch_sizes: Input should be a list, as [A, B], not '3'"),
    ("PRECISION", "INT4", "TANDEM_PRECISION: precision: Input should be"),
    ("MAX_BODY_BYTES", "999999999", "max_bytes_in_flight is 268435456"),
    ("REQUEST_TIMEOUT_S", "40", "Gateway has a graceful_shutdown_timeout_s of 12"),
    ("CACHE", "redis://:secret@host", "cache is no address of a Redis"),
    ("BATCH_SIZES", "[1, 4", "TANDEM_BATCH_SIZES is not YAML"),
)
def test_a_bad_value_names_its_variable(monkeypatch, name, text, says):
    monkeypatch.setenv(f"TANDEM_{name}", text)
    error = YamlError if says.endswith("not YAML") else ConfigError
    with pytest.raises(error, match=re.escape(says)) as refused:
        read_config(ServeOptions())
    assert f"TANDEM_{name}" in str(refused.value)
    assert "secret" not in str(refused.value)


@cases(
    "name, hint",
    ("TANDEM_MODELSET", "did you mean TANDEM_MODEL_SET?"),
    ("TANDEM_CACHE_MB", "did you mean TANDEM_CACHE_MIB?"),
    ("TANDEM_PROT", "did you mean TANDEM_PORT?"),
    ("TANDEM_QQQ", "--print-config names all"),
    ("TANDEM_AFFINITY", "leave it out. Whole num_cpus"),
)
def test_an_unknown_variable_is_warned_of(monkeypatch, name, hint):
    monkeypatch.setenv(name, "secret")
    warning = next(line for line in unknown_variables() if line.startswith(f"{name} "))
    assert hint in warning
    assert "secret" not in warning


def test_no_variable_of_the_project_is_warned_of(monkeypatch):
    """Those that are no settings are listed: every name in code, files and tests counts."""
    folders = ("app", "configs", "examples", "tests/e2e", "tests/load", "tests/support", ".ci")
    suffixes, this = (".py", ".yaml", ".sh", ".service", ".yml"), Path(__file__)
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path != this]
    texts = [path.read_text("utf-8") for path in paths if path.suffix in suffixes]
    used = set(re.findall(r"\bTANDEM_[A-Z_]+\b", "\n".join(texts)))
    assert used >= {"TANDEM_API_KEYS", "TANDEM_LOG_FORMAT", "TANDEM_CHROMIUM"}
    options = set(map(variable_of, OPTIONS))
    assert options >= {"TANDEM_HOST", "TANDEM_PORT", "TANDEM_MODEL_SET"}
    for name in used | options | NO_SETTINGS:
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == []


def printed(*arguments: str, **variables: str) -> str:
    command: list[Any] = [TANDEM, "serve", "--print-config", *arguments]
    env, pipe = os.environ | variables, subprocess.PIPE
    return subprocess.run(command, env=env, cwd=ROOT, stdout=pipe, text=True, check=True).stdout


def test_print_config_shows_values_and_sources():
    variables = {"TANDEM_HOST": "0.0.0.0", "TANDEM_PORT": "1", "TANDEM_STREAMS": "2"}
    variables["TANDEM_CACHE"] = "redis://user:secret@host:6379/1"
    text = printed("--port", "8001", **variables)
    assert "secret" not in text
    sources = dict(re.findall(r"^(\w+): .*  # (.*)$", text, re.MULTILINE))
    values = yaml.safe_load(text)
    assert values.keys() == sources.keys() >= Settings.model_fields.keys()
    shown = {name: (values[name], source) for name, source in sources.items()}
    assert shown == shown | {
        "port": (8001, "--port"),
        "host": ("0.0.0.0", "TANDEM_HOST"),
        "streams": (2, "TANDEM_STREAMS"),
        "cache": ("redis://***@host:6379/1", "TANDEM_CACHE"),
        "model_set": ("imagenette", "serve_config.yaml"),
        "cache_mib": (64, "default"),
    }
    rows = json.loads(printed("--port", "8001", "--json", **variables))
    assert {name: (row["value"], row["source"]) for name, row in rows.items()} == shown


def test_log_options_may_be_empty(tmp_path):
    path = write(tmp_path, GOOD | {"logging_config": None})
    config = read_config(ServeOptions(config=path, log_format="json"))
    assert config.content["logging_config"] == {"encoding": "JSON"}


def test_a_flag_that_does_not_fit_the_file_is_named(tmp_path):
    config = edited_config(tmp_path, "model_set: imagenette", "weights: {resnet50: 1}")
    with pytest.raises(ConfigError, match=r"yaml with --model-set: weights names members of one"):
        read_config(ServeOptions(config=config, model_set="a,b"))


@pytest.mark.parametrize("options", [ServeOptions(), ServeOptions(model_set="a")])
def test_variables_of_a_set_and_of_several_are_refused_together(monkeypatch, options):
    monkeypatch.setenv("TANDEM_MODEL_SET", "a")
    monkeypatch.setenv("TANDEM_MODEL_SETS", "[b, c]")
    with pytest.raises(ConfigError, match="TANDEM_MODEL_SETS both name the served sets: leave"):
        read_config(options)


def test_sets_of_the_command_line(tmp_path):
    """A folder with a comma in its name is a single set."""
    for text in ("a,b", "a, b", " a ,b "):
        assert sets_of(text) == {"model_sets": ["a", "b"]}
    (folder := tmp_path / "a, b").mkdir()
    assert sets_of(str(folder)) == {"model_set": str(folder)}
    for text in ("a,", ",a", "a,,b", ","):
        with pytest.raises(ConfigError, match=r"--model-set '.*' has an empty name; separate"):
            sets_of(text)


def config_of(*, http: dict[str, Any] | None = None, **arguments: Any):
    application = {"name": "tandem", "import_path": "app.main:build", "args": arguments}
    return ServeConfig.of({"http_options": http or {}, "applications": [application]})


def arguments_of(checked: ServeConfig) -> dict[str, Any]:
    return dict(checked.as_dict()["applications"][0]["args"])


def test_what_is_named_relatively_is_of_the_commands_folder(tmp_path, monkeypatch):
    """Ray's processes work in another one."""
    monkeypatch.chdir(tmp_path)
    paths: dict[str, Any] = {"compile_cache": "cache", "api_keys_file": "/etc/keys"}
    files = {"ssl_certfile": "tls.pem", "ssl_keyfile": "/etc/tls.key"}
    asked = config_of(http=files, model_set="./sets/a", model_dirs=["d"], **paths)
    checked, _ = with_usable_paths(asked)
    assert arguments_of(checked) == {
        "model_set": str(tmp_path / "sets" / "a"),
        "model_dirs": [str(tmp_path / "d")],
        "compile_cache": str(tmp_path / "cache"),
        "api_keys_file": "/etc/keys",
    }
    http = checked.http
    assert (http.ssl_certfile, http.ssl_keyfile) == (str(tmp_path / "tls.pem"), "/etc/tls.key")
    several, _ = with_usable_paths(config_of(model_sets=["imagenette", "./sets/a"]))
    assert several.settings.model_sets == ("imagenette", str(tmp_path / "sets" / "a"))


def test_a_folder_that_cannot_be_written_is_left_out_with_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    lost = tmp_path / "file" / "below"
    checked, warning = with_usable_paths(config_of(compile_cache=str(lost)))
    assert checked.settings.compile_cache is None
    why = f"cannot write to {lost} (Not a directory)"
    assert warning == f"compile_cache: {why}: networks are compiled at each start"


@pytest.mark.parametrize("folder", ["a/b", None])
def test_one_that_can_is_made_and_nothing_is_said_of_what_is_not_wanted(tmp_path, folder):
    path = folder and str(tmp_path / folder)
    asked = config_of(model_set="imagenette", compile_cache=path)
    assert with_usable_paths(asked) == (asked, None)
    assert path is None or Path(path).is_dir()


def test_an_account_without_a_home_is_told_what_it_misses(monkeypatch, tmp_path):
    monkeypatch.setattr(Settings.model_fields["compile_cache"], "default", None)
    Settings.model_rebuild(force=True)
    try:
        _, warning = with_usable_paths(config_of())
    finally:
        monkeypatch.undo()
        Settings.model_rebuild(force=True)
    assert warning is not None
    assert warning.startswith("compile_cache: this account has no home folder: ")


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("compile_cache", "api_keys_file", "sample_dir", "model_set")
    paths: dict[str, Any] = {name: f"~/{name}" for name in names} | {"model_dirs": ["~/sets"]}
    arguments = arguments_of(with_usable_paths(config_of(**paths))[0])
    expected: dict[str, Any] = {name: str(tmp_path / name) for name in names}
    assert arguments == expected | {"model_dirs": [str(tmp_path / "sets")]}
    assert absolute("~nobody-of-this-name/x") == str(Path.cwd() / "~nobody-of-this-name" / "x")
    settings = Settings.model_validate({"model_dirs": ["~/sets"], "compile_cache": "~/cache"})
    assert settings.model_dirs == (tmp_path / "sets",)
    assert settings.compile_cache == tmp_path / "cache"
