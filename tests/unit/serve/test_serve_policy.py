"""The policy in Serve's hands: its contexts in, its decisions out, and never an exception.

Serve's log on stderr has the lines of its files: with the handlers that Ray itself makes.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from ray.serve._private import logging_utils
from ray.serve._private.common import DeploymentID, ReplicaID, ServeComponentType, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from app.launch.config import POLICY
from app.queueing.usage import FIGURES
from app.serve.serve_policy import EnsemblePolicy, write_to_stderr_as_to_files
from tests.support.drawn_reports import reports


def series(replicas):
    """Replicas' reports as Serve's controller holds them."""
    return {
        name: {
            replica: [TimeStampedValue(report.at, getattr(report, name)) for report in found]
            for replica, found in replicas.items()
        }
        for name in FIGURES
    }


def context(name, *found, target=1, now=0.0, raw_metrics=None, limits=(1, 20)):
    deployment = DeploymentID(name=name, app_name="tandem")
    replicas = {
        ReplicaID(unique_id=str(i), deployment_id=deployment): r for i, r in enumerate(found)
    }
    config = AutoscalingConfig(
        min_replicas=limits[0], max_replicas=limits[1], upscale_delay_s=0, downscale_delay_s=0
    )
    only_in_2_59 = {"total_pending_async_requests"} & {
        *inspect.signature(AutoscalingContext).parameters
    }
    return AutoscalingContext(
        **dict.fromkeys(only_in_2_59, 0),
        deployment_id=deployment,
        deployment_name=name,
        app_name="tandem",
        current_num_replicas=len(found) or target,
        target_num_replicas=target,
        running_replicas=list(replicas),
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=lambda: series(replicas) if raw_metrics is None else raw_metrics,
        capacity_adjusted_min_replicas=limits[0],
        capacity_adjusted_max_replicas=limits[1],
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=config,
    )


def asked(policy, *contexts):
    decisions, _ = policy({c.deployment_id: c for c in contexts})
    return {deployment.name: replicas for deployment, replicas in decisions.items()}


def test_all_stages_follow_one_rate():
    found = asked(
        EnsemblePolicy(),
        context("Gateway", reports(400, cpu_ms=5), reports(200, cpu_ms=5)),
        context("resnet50", reports(500, cpu_ms=20)),  # behind: it does not see all of it yet
        context("densenet169", reports(500, cpu_ms=10)),
    )
    # 600/s, each replica 4 cores at 0.7: 2800 CPU-ms a second
    assert found == {"Gateway": 2, "resnet50": 5, "densenet169": 3}


def test_through_serves_own_wrapper_the_decision_stands_at_once():
    decide: Any = EnsemblePolicy()
    policy = _apply_app_level_autoscaling_config(decide)
    one = context("resnet50", reports(500, cpu_ms=20))
    decisions, _ = policy({one.deployment_id: one})
    assert decisions == {one.deployment_id: 4}


def test_what_is_given_or_expected_counts_until_it_is_measured():
    quiet = reports(100, cpu_ms=0.0, idle_ms=10.0)
    assert asked(EnsemblePolicy(), context("resnet50", quiet)) == {"resnet50": 1}  # 15 CPU-ms
    given = EnsemblePolicy(cpu_ms={"resnet50": 100})
    assert asked(given, context("resnet50", quiet)) == {"resnet50": 4}


def test_it_never_scales_to_nothing():
    assert asked(EnsemblePolicy(), context("resnet50", reports(0), limits=(0, 20))) == {
        "resnet50": 1
    }


def test_a_stage_that_was_taken_away_tells_nothing_any_more():
    policy = EnsemblePolicy(scale_down_after_s=1)
    one = context("resnet50", reports(50, cpu_ms=20), now=1)
    assert asked(policy, context("Gateway", reports(900, cpu_ms=2)), one)["resnet50"] == 7
    asked(policy, context("resnet50", reports(50, cpu_ms=20), now=2))
    assert asked(policy, context("resnet50", reports(50, cpu_ms=20), now=9)) == {"resnet50": 1}


def test_without_reports_everything_stays(caplog):
    assert asked(EnsemblePolicy(), context("Gateway"), context("resnet50", target=7)) == {}
    assert not caplog.records


def test_what_it_does_not_understand_changes_nothing_and_is_told_once_a_minute(caplog):
    policy = EnsemblePolicy()
    broken = {name: {"replica": ["no point"]} for name in FIGURES}
    for now in (0.0, 1.0, 59.0):
        assert asked(policy, context("Gateway", now=now, raw_metrics=broken)) == {}
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
    assert asked(policy, context("Gateway", now=61.0, raw_metrics=broken)) == {}
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 2


def test_wrong_kwargs_are_told_and_nothing_scales(caplog):
    policy = EnsemblePolicy(drain=3)
    assert "drain" in caplog.text
    assert asked(policy, context("resnet50", reports(500))) == {}


def test_serve_can_import_it_pickle_it_and_make_it():
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"drain_s": 3})
    made = cloudpickle.loads(policy.get_serialized_policy_def())(**policy.policy_kwargs)
    assert asked(made, context("resnet50", reports(500, cpu_ms=20))) == {"resnet50": 4}


@pytest.mark.parametrize("missing", FIGURES)
def test_a_replica_of_an_older_version_is_left_out(missing):
    deployment = context("resnet50", reports(500, cpu_ms=20))
    metrics = {name: of for name, of in deployment.raw_metrics.items() if name != missing}
    assert asked(EnsemblePolicy(), context("resnet50", raw_metrics=metrics)) == {}


Configure = Callable[[str, bool], None]
logger = logging.getLogger("ray.serve")


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """Make a replica's handlers as Ray does, of an encoding, with stderr or without."""
    before = list(logger.handlers), logger.propagate, logger.level

    def configure(encoding: str, has_stderr: bool) -> None:
        monkeypatch.setattr(logging_utils, "RAY_SERVE_LOG_TO_STDERR", has_stderr)
        logging_utils.configure_component_logger(
            component_name="tandem_Gateway",
            component_id="abc",
            logging_config=LoggingConfig(encoding=encoding, logs_dir=str(tmp_path)),
            component_type=ServeComponentType.REPLICA,
            max_bytes=2**20,
            backup_count=1,
        )

    yield configure
    for handler in logger.handlers:
        if isinstance(handler, MemoryHandler):
            handler.target.close()
        handler.close()
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def in_files(folder: Path) -> str:
    for handler in logger.handlers:
        handler.flush()
    (file,) = folder.iterdir()
    return file.read_text("utf-8")


def test_stderr_has_the_json_of_the_files(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("JSON", True)
    write_to_stderr_as_to_files()
    write_to_stderr_as_to_files()  # a process may have several stages
    logger.info("a line")
    try:
        raise KeyError("reason")
    except KeyError:
        logger.exception("an error")
    said = capsys.readouterr().err
    line, error = map(json.loads, said.splitlines())
    assert (line["message"], line["levelname"]) == ("a line", "INFO")
    assert (line["deployment"], line["replica"]) == ("tandem_Gateway", "abc")
    assert "KeyError: 'reason'" in error["exc_text"]
    assert in_files(tmp_path) == said


def test_without_us_it_is_text(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """When Ray writes JSON there by itself, app/serve/serve_policy.py can go."""
    configure("JSON", True)
    logger.info("a line")
    assert capsys.readouterr().err.startswith("INFO ")


def test_text_stays_text(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("TEXT", True)
    write_to_stderr_as_to_files()
    logger.info("a line")
    said = capsys.readouterr().err
    assert said.startswith("INFO ")
    assert in_files(tmp_path) == said


def test_where_serve_logs_to_files_alone_stderr_stays_empty(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    for name in ("builtins.print", "sys.stdout", "sys.stderr"):  # which Ray replaces then
        module, _, attribute = name.partition(".")
        monkeypatch.setattr(name, getattr(__import__(module), attribute))
    configure("JSON", False)
    write_to_stderr_as_to_files()
    logger.info("a line")
    assert json.loads(in_files(tmp_path))["message"] == "a line"
    assert capfd.readouterr().err == ""
