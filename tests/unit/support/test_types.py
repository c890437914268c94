"""Mypy checks every module of the project and of its tests."""

import tomllib

from tests.support.module_tests import ROOT


def test_no_module_is_exempt_but_those_that_protoc_wrote() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    assert {"app", "models", "calibration", "tests"} < set(settings["files"])
    exempt = [
        module
        for override in settings["overrides"]
        if override.get("ignore_errors")
        for module in override["module"]
    ]
    assert exempt
    assert [module for module in exempt if "_pb2" not in module] == []
