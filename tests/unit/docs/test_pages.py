"""The pages of docs/ that people write: short sentences, plain words, options that exist."""

import pkgutil
import re
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from app.serve.scaling import ScalingOptions
from app.settings import Settings
from app.telemetry.metric_table import METRICS
from tests.support import readability
from tests.support.cases import cases
from tests.support.command_line import options_of
from tests.support.exposed_metrics import exposed
from tests.support.wrapped import WIDTH, wrapped

ROOT = Path(__file__).parents[3]
WRITTEN = sorted(
    [
        *(ROOT / "docs/tutorial").glob("*.md"),
        *(ROOT / "docs/how-to").glob("*.md"),
        *(ROOT / f"{name}/README.md" for name in ("examples", "configs")),
        *(ROOT / f".github/{name}.md" for name in ("SECURITY", "CODE_OF_CONDUCT")),
        ROOT / "docs/index.md",
    ]
)
OF_GITHUB = ".github/PULL_REQUEST_TEMPLATE.md"  # shown where it is needed
COMMANDS = "serve|classify-offline|classify|plan|drift|evaluate|quantize|bench|environment"
COMMAND = re.compile(rf"^\S*\btandem ({COMMANDS})(?=\s|$)([^#\n]*)", re.M)
HOW_TO = [page for page in WRITTEN if page.parent.name == "how-to"]
MAX_WORDS = 500  # of a page that says how to do a task
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
UNITS = {"Mi": 2**20, "MiB": 2**20, "s": 1, "files": 1, "": 1}
LIMITS = {  # setting, and its unit on the page of limits
    "max_body_bytes": "MiB",
    "max_files": "files",
    "request_timeout_s": "s",
    "max_bytes_in_flight": "MiB",
    "max_concurrent_requests": "",
    "max_pixels": "Mi",
    "max_full_pixels": "Mi",
    "max_heavy_pixels": "Mi",
}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", readability.every_page(), ids=named)
def test_sentences_are_short(page: Path):
    lengths = readability.lengths(page.read_text("utf-8"))
    assert statistics.median(lengths) <= readability.GOAL_MEDIAN
    assert readability.percentile(lengths, 0.9) <= readability.GOAL_P90
    if page in WRITTEN:
        assert max(lengths) <= 35


def test_lines_keep_to_the_width_also_those_that_a_program_writes():
    assert [
        f"{named(page)}:{number}"
        for page in readability.markdown_files()
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1)
        if len(line) > WIDTH and not line.lstrip().startswith("|") and "://" not in line
    ] == []
    words = "word " * 30
    page = f"# Title\n\n| {words} |\n\n{words}\n\n```sh\n{words}\n\n{words}\n```\n\nShort.\n"
    paragraph = textwrap.fill(words, WIDTH)
    assert paragraph.count("\n") == 1
    assert wrapped(page) == page.replace(f"\n\n{words}\n\n```", f"\n\n{paragraph}\n\n```")
    assert wrapped(wrapped(page)) == wrapped(page)


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_words_are_plain_and_what_is_named_exists(page: Path):
    text = page.read_text("utf-8")
    assert readability.GLUE.findall(text) == []
    for command, arguments in COMMAND.findall(text):
        assert set(re.findall(r"--[a-z0-9-]+", arguments)) <= options_of(command), arguments
    rows = re.findall(r"^\| `([a-z_]+)` \|", text, re.M)
    assert {name for name in rows if "_" in name} <= set(Settings.model_fields)
    names = {name for metric in METRICS for name in exposed(metric)}
    names |= {f"ray_{metric.name}" for metric in METRICS if metric.kind == "histogram"}
    assert set(re.findall(r"\bray_tandem_\w+", text)) <= names


@pytest.mark.parametrize("page", HOW_TO, ids=named)
def test_a_task_fits_its_page_and_its_lines_of_a_configuration_are_taken(page: Path):
    """Settings, the policy's options, and the functions that a page's YAML names."""
    text = page.read_text("utf-8")
    assert len(text.split()) <= MAX_WORDS
    for block in (block for kind, block in FENCED.findall(text) if kind == "yaml"):
        content = yaml.safe_load(textwrap.dedent(block))
        for part in (content, *content.get("applications", [])):
            assert set(part.get("args", {})) <= set(Settings.model_fields)
            policy = part.get("autoscaling_policy", {})
            ScalingOptions.model_validate(policy.get("policy_kwargs", {}))
            if function := policy.get("policy_function"):
                assert pkgutil.resolve_name(function)
        for function in content.get("grpc_options", {}).get("grpc_servicer_functions", []):
            assert pkgutil.resolve_name(function)


@pytest.mark.parametrize("page", readability.markdown_files(), ids=named)
def test_every_link_leads_somewhere(page: Path):
    for target, heading in LINK.findall(page.read_text("utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if heading:
            assert heading in headings(path), f"{target}#{heading}"


def test_readme_leads_to_every_page() -> None:
    reached: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            links = LINK.findall(page.read_text("utf-8"))
            ahead += [(page.parent / target).resolve() for target, _ in links]
    assert set(readability.markdown_files()) - reached == {ROOT / OF_GITHUB}


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    lines = [line for line in page.read_text("utf-8").splitlines() if line[:1] == "#"]
    return {re.sub(r"[^\w -]", "", li.lstrip("# ").lower()).replace(" ", "-") for li in lines}


def test_limits_are_the_defaults_of_the_settings():
    page = (ROOT / "docs/how-to/limits.md").read_text("utf-8")
    compared = set()
    for limit, value, names in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", page, re.M):
        for name in set(re.findall(r"`(\w+)`", names)) & set(LIMITS):
            default, unit = Settings.model_fields[name].default, LIMITS[name]
            assert f"{default / UNITS[unit]:g} {unit}".strip() in value, limit
            compared.add(name)
    assert compared == set(LIMITS)


def test_the_site_is_built_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".mkdocs.yml")]
    built = subprocess.run([*command, "-d", tmp_path], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    settings = (tmp_path / "reference" / "settings.html").read_text("utf-8")
    assert "<code>str | None</code>" in settings
    assert "\\|" not in settings
    assert "Model sets" in (tmp_path / "sets.html").read_text("utf-8")
    # The guide on sets is a page, and links to it lead there.
    assert 'href="sets.html"' in (tmp_path / "index.html").read_text("utf-8")


@cases(
    "text, expected",
    ("One two three. Four five.", [3, 2]),
    ("# A title is not counted\n\nOne two\nthree.", [3]),
    ("- one two\n- three", [2, 1]),
    ("See [the page](https://a.example/b.html) now.", [4]),
    ("One `a b` two:\n\n```sh\nnot this\n```\n\nThree.", [4, 1]),
    ("| a | b |\n| --- | --- |\n\nOne.", [1]),
    ("- An item:\n\n  ```sh\n  not this\n  ```\n\n  Two words.", [2, 2]),
    ("> One two.\n>\n> Three four five.", [2, 3]),
    ("With version 3.11 of e.g. that.", [6]),
)
def test_the_words_of_sentences_are_counted(text: str, expected: list[int]):
    assert readability.lengths(text) == expected


def test_a_percentile_is_a_value_of_the_list():
    assert readability.percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
    assert readability.percentile([7], 0.9) == 7
