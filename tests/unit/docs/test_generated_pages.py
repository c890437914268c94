"""docs/reference is what the code says."""

import pytest

from tests.support import reference

REMAKE = "run make reference, and commit what it writes"


@pytest.mark.parametrize("name", reference.pages())
def test_the_reference_is_what_the_code_says(name: str):
    assert (reference.FOLDER / name).read_text("utf-8") == reference.pages()[name], REMAKE


def test_the_folder_has_no_other_page():
    assert {path.name for path in reference.FOLDER.iterdir()} == set(reference.pages())


def test_every_command_has_its_options_and_what_they_do():
    page = reference.command_line_page()
    for command in ("serve", "classify", "models add", "quantize", "evaluate", "plan"):
        assert f"## tandem {command}\n" in page
    assert "| `--api-keys-file` |" in page.replace(" | `", " | `")
    assert "|  |\n" not in page  # a description is missing
