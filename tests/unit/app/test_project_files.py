"""Files around the code agree with each other: constraints, hooks, CI, the pages of .github."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT, MYPY = PYPROJECT["project"], PYPROJECT["tool"]["mypy"]
MAX_UNTYPED = 155  # of some 560 test modules; lower it with each one that is mended
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
DEVELOPMENT = "tests/constraints.txt"
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
PYTHONS = Requirement(f"python{PROJECT['requires-python']}").specifier


def pins(name: str) -> set[tuple[str, str]]:
    """Return the (distribution, version) pairs of a constraints file."""
    lines = [line for line in (ROOT / name).read_text("utf-8").splitlines() if line[0] != "#"]
    requirements = [Requirement(line) for line in lines]
    assert all(r.url is None and str(r.specifier).startswith("==") for r in requirements)
    return {(canonicalize_name(r.name), str(r.specifier)[2:]) for r in requirements}


def serving_extras() -> list[str]:
    (extras,) = re.findall(r"^SERVING := (.*)$", MAKEFILE, re.MULTILINE)
    return extras.split()


@pytest.mark.parametrize(
    ("name", "extras"),
    [("constraints.txt", serving_extras()), (DEVELOPMENT, list(PROJECT["optional-dependencies"]))],
)
def test_every_dependency_is_pinned_to_a_version_that_is_allowed(name: str, extras: list[str]):
    wanted = [*PROJECT["dependencies"]]
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    pinned = dict(pins(name))
    assert {
        str(requirement): pinned.get(canonicalize_name(requirement.name))
        for requirement in map(Requirement, wanted)
        if requirement.name != PROJECT["name"]
        and not requirement.specifier.contains(
            pinned.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    } == {}


def test_development_has_the_versions_of_serving():
    assert pins("constraints.txt") <= pins(DEVELOPMENT)


def test_hooks_before_a_commit_are_the_commands_of_make_check():
    (recipe,) = re.findall(r"^check: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repo["repo"] == "local"
    assert [hook["entry"] for hook in repo["hooks"]] == commands
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}  # nothing is fetched


def test_paths_of_tests_that_the_makefile_names_are_there():
    paths = re.findall(r"\btests/[\w/]+(?:\.\w+)?(?![\w*.])", MAKEFILE)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_ci_runs_scripts_and_targets_that_are_there():
    runs = [step["run"] for step in STEPS if "run" in step]
    for command, *arguments in map(shlex.split, runs):
        if command == "make":
            assert arguments[0] in TARGETS
        else:
            assert (ROOT / command).stat().st_mode & 0o100, command
    assert {".ci/run", ".ci/floors"} <= set(runs)


def test_ci_tries_every_python_that_is_supported():
    versions = {step["with"]["python-version"] for step in STEPS if "with" in step}
    versions |= set(WORKFLOW["jobs"]["python"]["strategy"]["matrix"]["version"])
    supported = {f"3.{minor}" for minor in range(30) if f"3.{minor}" in PYTHONS}
    assert {version for version in versions if "{" not in version} == supported


def test_the_pages_of_github_name_targets_and_files_that_are_there():
    for page in (ROOT / ".github").rglob("*.md"):
        text = page.read_text("utf-8")
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= TARGETS, page
        named = re.findall(r"`([\w./-]+\.(?:md|py|json|txt|yaml))`", text)
        assert [name for name in named if not (ROOT / name).exists()] == [], page


def test_forms_of_github_have_what_it_asks_of_them():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        if path.stem == "config":
            assert set(form) <= {"blank_issues_enabled", "contact_links"}
            continue
        assert {"name", "description", "body"} <= set(form)
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert all({"id", "attributes"} <= set(field) for field in fields)
        assert len({field["id"] for field in fields}) == len(fields)


def test_the_container_of_editors_runs_a_target_and_forwards_the_ports_of_the_service():
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    assert settings["postCreateCommand"].split()[1] in TARGETS
    assert settings["forwardPorts"] == [8000, 9464]


def test_the_tests_are_typed_but_for_a_few_that_are_there():
    """The list of those with errors only gets shorter."""
    assert "tests" in MYPY["files"]
    assert MYPY["strict"] is True
    parts = [part for part in MYPY["overrides"] if part.get("ignore_errors")]
    exempt = [name for part in parts for name in part["module"]]
    tests = {name for name in exempt if name.startswith("tests.")}
    assert len(tests) <= MAX_UNTYPED
    assert [name for name in tests if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []
