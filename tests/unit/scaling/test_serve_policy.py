"""The policy in Serve's hands: its contexts in, its decisions out, and never an exception."""

import inspect
import logging
from typing import Any

import cloudpickle
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from app.launch.config_check import POLICY
from app.scaling.serve_policy import EnsemblePolicy
from app.scaling.usage import FIGURES
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
