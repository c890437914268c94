"""Edits of the manifest made while ``tandem quantize`` runs: kept, or a reason to stop."""

from collections.abc import Callable
from pathlib import Path

import pytest

from calibration.quantization import quantize_set as module
from calibration.quantization.quantize import quantize_within
from calibration.quantization.quantize_set import Request, quantize_set
from calibration.sets.durable import write_manifest
from models.errors import ModelSetError
from models.image_record import ImageRecord
from models.manifest import Manifest, QuantizationOptions, read_manifest
from models.model_set import load_model_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def edited_meanwhile(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: object) -> None:
    """Have somebody edit the manifest while the first member is being quantised."""
    real = quantize_within

    def quantize_and_edit(*arguments: object) -> object:
        write_manifest(folder, read_manifest(folder).model_copy(update=changes))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "quantize_within", quantize_and_edit)


def test_edits_of_the_manifest_while_it_runs_are_kept(
    folder: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = read_manifest(folder).members
    heavier = first.model_copy(update={"weight": 3.0, "source": "of my own"})
    edits = {"hint": "look", "description": "mine", "max_drop": 0.25}
    edited_meanwhile(monkeypatch, folder, members=(heavier, *others), **edits)
    quantize_set(load_model_set(str(folder)), Request(pictures, subset_size=12))
    made = load_model_set(str(folder))
    assert made.problems() == []
    assert {name: getattr(made.manifest, name) for name in edits} == edits
    assert made.manifest.members[0].weight == 3.0
    assert made.manifest.members[0].source == "of my own"
    assert [set(m.networks) for m in made.manifest.members] == [{"FP16", "INT8"}] * 2
    assert made.manifest.members[0].quantization.subset_size == 12


def test_a_max_drop_that_was_asked_for_is_kept_though_another_was_written_meanwhile(
    folder: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited_meanwhile(monkeypatch, folder, max_drop=0.25, hint="look")
    quantize_set(load_model_set(str(folder)), Request(pictures, subset_size=12, max_drop=0.125))
    assert (read_manifest(folder).max_drop, read_manifest(folder).hint) == (0.125, "look")


def other_options(manifest: Manifest) -> dict[str, object]:
    first, *others = manifest.members
    options = QuantizationOptions(preset="performance")
    return {"members": (first.model_copy(update={"quantization": options}), *others)}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda _: {"image": ImageRecord(input_size=16, resize_shorter=20)}, "image changed"),
        (lambda m: {"members": m.members[:1]}, "the members' networks, "),
        (other_options, "quantization options changed"),
        (lambda m: {"class_ids": m.labels}, "class ids changed"),
    ],
)
def test_an_edit_of_what_int8_is_made_from_is_refused_and_stays(
    folder: Path,
    pictures: Path,
    validation: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Manifest], dict[str, object]],
    says: str,
) -> None:
    edited_meanwhile(monkeypatch, folder, **edit(read_manifest(folder)))
    request = Request(pictures, validation=validation, subset_size=12)
    with pytest.raises(ModelSetError, match=rf"manifest\.yaml was edited .*{says}.*quantise again"):
        quantize_set(load_model_set(str(folder)), request)
    manifest = read_manifest(folder)
    assert [set(m.networks) for m in manifest.members] in ([{"FP16"}] * 2, [{"FP16"}])
    assert manifest == manifest.model_copy(update=edit(manifest))
    assert [p.name for p in folder.iterdir() if "int8" in p.name or p.name.startswith(".")] == []


def test_a_manifest_half_written_by_an_editor_is_not_written_over(
    folder: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = quantize_within

    def quantize_and_break(*arguments: object) -> object:
        (folder / "manifest.yaml").write_text("members: [")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "quantize_within", quantize_and_break)
    with pytest.raises(ModelSetError, match="is not YAML"):
        quantize_set(load_model_set(str(folder)), Request(pictures, subset_size=12))
    assert (folder / "manifest.yaml").read_text() == "members: ["
