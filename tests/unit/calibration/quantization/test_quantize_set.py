"""``tandem quantize`` on whole sets: what is written, kept, or left when it fails or is ended."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import nncf
import numpy as np
import pytest

from calibration.quantization import quantize_set as module
from calibration.quantization.quantize import quantize_within
from calibration.quantization.quantize_set import (
    Request,
    interrupted_on_another_thread,
    quantize_set,
)
from calibration.sets.transaction import write_manifest
from models import golden
from models.ensemble import SureRecord
from models.errors import ModelSetError
from models.ledger import judge
from models.manifest import Manifest, MemberRecord, QuantizationOptions, read_manifest
from models.model_set import ModelSet, load_model_set, read_lines
from models.openvino_network import CompiledNetwork, RuntimeOptions
from models.record import ImageRecord, sha256_of
from models.stores import VERSIONS_NAME
from tests.support import tiny_networks
from tests.support.cases import cases
from tests.support.command_line import tandem

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def quantised(folder: Path, images: Path, subset_size: int = 12, **asked: Any) -> ModelSet:
    """Quantise the set and return it as it is then."""
    quantize_set(load_model_set(str(folder)), Request(images, subset_size=subset_size, **asked))
    return load_model_set(str(folder))


def calibrated_on(made: ModelSet) -> list[str]:
    """Return the hashes of the recorded calibration images."""
    assert made.manifest.calibration is not None
    return list(read_lines(made.verified(made.manifest.calibration)))


def run(folder, images, *more):
    return tandem("quantize", folder, "--images", images, "--subset-size", 12, *more)


def refused(says, done):
    assert isinstance(done.exception, ModelSetError), done.output
    assert says in str(done.exception)


def test_a_float_set_becomes_an_int8_set(folder, pictures):
    done = run(folder, pictures)
    assert done.exit_code == 0, done.output
    made = load_model_set(str(folder))
    assert made.problems() == []
    assert [set(m.networks) for m in made.manifest.members] == [{"FP16", "INT8"}] * 2
    assert made.manifest.members[0].quantization.subset_size == 12
    assert made.golden is not None
    for member in made.manifest.members:
        network = CompiledNetwork(made.network_path(member.name), RuntimeOptions())
        golden.check(made.golden, member.name, "INT8", network)
    assert judge(made.manifest).status == "unmeasured"
    assert f"tandem evaluate {folder} --images DIR" in done.output  # its name alone says nothing


def test_members_that_came_as_int8_stay_and_the_others_are_quantised_at_their_sizes(
    tmp_path, pictures
):
    small = {"small": ImageRecord(input_size=8, resize_shorter=9)}
    gains = {"usual": 8.0, "small": 4.0, "came": 2.0}
    folder = tiny_networks.write_tiny_set(
        tmp_path / "three", gains=gains, images=small, precision="FP16"
    )
    manifest = read_manifest(folder)
    (*floats, came) = manifest.members
    network = {"INT8": came.networks["FP16"]}
    came = came.model_copy(update={"networks": network, "imported_int8": True})
    write_manifest(folder, manifest.model_copy(update={"members": (*floats, came)}))
    made = quantised(folder, pictures)
    assert made.problems() == []
    assert [set(m.networks) for m in made.manifest.members[:2]] == [{"FP16", "INT8"}] * 2
    assert made.manifest.members[2] == came
    options = RuntimeOptions(batch_sizes=(1,))
    assert CompiledNetwork(made.network_path("small"), options).input_shape == (8, 8, 3)


def test_the_calibration_images_are_recorded_by_hash_and_drawn_again(folder, pictures):
    first, second = (calibrated_on(quantised(folder, pictures, 9)) for _ in "ab")
    assert (first, len(set(first))) == (second, 9)
    assert set(first) < {sha256_of(path) for path in pictures.glob("*/*")}


def test_a_second_run_replaces_the_first_and_leaves_no_old_file(folder, pictures):
    made = [quantised(folder, pictures, size) for size in (12, 14)][1]
    assert made.problems() == []
    named = {record.path for record in made.manifest.files} | {"manifest.yaml", VERSIONS_NAME}
    assert {p.name for p in folder.iterdir()} == named


def test_one_member_alone_keeps_the_others_calibration_images(folder, pictures, tmp_path):
    before = quantised(folder, pictures, 15).manifest
    others = tiny_networks.write_pictures(tmp_path / "others", num_per_color=4, side=30)
    made = quantised(folder, others, members=("unsure",))
    assert len(calibrated_on(made)) == 15 + 12
    assert made.manifest.member("sure") == before.member("sure")
    assert made.problems() == []


def test_accuracy_that_was_measured_on_other_networks_goes(folder, pictures):
    measured = tiny_networks.with_accuracy(
        quantised(folder, pictures).manifest, {"ensemble": 1.0}, {"ensemble": 0}
    )
    sure = SureRecord(
        probability=0.9, target=0.9, num_images=9, share=0.5, right=1, right_interval=(0.7, 1)
    )
    write_manifest(folder, measured.model_copy(update={"sure": sure}))
    again = quantised(folder, pictures, 13).manifest
    assert (again.accuracy, again.sure) == ((), None)


def test_a_refusal_of_a_member_that_stays_as_it_is_stays_too(folder, pictures):
    tops, lost = {"sure": 1.0, "ensemble": 1.0}, {"sure": 0.08, "ensemble": 0.0}
    measured = tiny_networks.with_accuracy(quantised(folder, pictures).manifest, tops, lost)
    assert judge(measured).status == "dropped"
    write_manifest(folder, measured)
    assert judge(quantised(folder, pictures, 13, members=("unsure",)).manifest).status == "dropped"
    assert quantised(folder, pictures, 13, members=("sure",)).manifest.accuracy == ()


def fragile_set(folder: Path) -> Path:
    tiny_networks.write_tiny_set(folder, precision="FP16", gains={"sure": 8.0})
    network = tiny_networks.save_model(tiny_networks.fragile_model(), folder, "fragile")
    manifest = read_manifest(folder)
    fragile = MemberRecord(name="fragile", source="", networks={"FP16": network})
    write_manifest(folder, manifest.model_copy(update={"members": ((*manifest.members, fragile))}))
    return folder


def test_a_member_that_drops_keeps_layers_float_and_says_which(tmp_path, pictures):
    folder = fragile_set(tmp_path / "fragile")
    validation = tiny_networks.write_pictures(tmp_path / "validation", num_per_color=6, side=20)
    done = run(folder, pictures, "--validation", validation)
    assert done.exit_code == 0, done.output
    assert "fragile keeps float: gather" in done.stdout
    made = load_model_set(str(folder))
    assert "gather" in made.manifest.member("fragile").left_float
    assert made.manifest.member("sure").left_float == ()
    # The validation images chose the layers: they cannot prove the result.
    assert {sha256_of(path) for path in validation.glob("*/*")} < set(calibrated_on(made))


@pytest.mark.parametrize("num_left", [3, 60])
def test_without_labels_float_and_int8_are_compared(tmp_path, pictures, num_left):
    """The colours' classes are other ones in ``fragile`` once it is INT8; in ``sure`` none is."""
    folder, images = fragile_set(tmp_path / "fragile"), tmp_path / "images"
    flat = tiny_networks.write_pictures(tmp_path / "data", (12 + num_left) // 3)
    images.mkdir()
    for number, path in enumerate(flat.rglob("*.png")):
        shutil.copy(path, images / f"{number}.png")
    facts = json.loads(run(folder, images, "--json").stdout)
    of, sure = (facts["members"][name]["changes"] for name in ("fragile", "sure"))
    assert facts["compared_on"] == (
        "photographs that calibration left" if num_left == 60 else "calibration images"
    )
    assert of["num_images"] == sure["num_images"] == (60 if num_left == 60 else 12)
    assert sure["num_changed"] == 0
    assert of["num_changed"] > of["num_images"] / 4
    low, high = of["interval"]
    assert low < of["num_changed"] / of["num_images"] < high
    assert of["mean_difference"] > 10 * sure["mean_difference"] > 0
    said = run(folder, images).output
    assert f"fragile: INT8 changes the class of {of['num_changed']} of {of['num_images']}" in said


def test_json_is_all_there_is_on_stdout(folder, pictures):
    facts = json.loads(run(folder, pictures, "--json").stdout)
    assert (facts["set"], set(facts["members"])) == ("tiny", {"sure", "unsure"})


def test_unreadable_images_are_listed_and_passed_over(folder, pictures, tmp_path):
    mixed = shutil.copytree(pictures, tmp_path / "mixed")
    (mixed / tiny_networks.LABELS[0] / "bad.jpg").write_bytes(b"no image")
    (mixed / tiny_networks.LABELS[1] / "empty.png").touch()
    done = tandem("quantize", folder, "--images", mixed, "--subset-size", 15)
    assert done.exit_code == 0, done.output
    assert "2 images cannot be read" in done.stdout
    assert "bad.jpg" in done.stdout


@cases(
    "arguments, says",
    (["--images", "{pictures}"], "has 15 images; 300 are the set's quantization.subset_size"),
    (["--images", "{pictures}", "--subset-size", "16"], "16 are asked for"),
    (["--images", "{tmp}"], "no images in"),
    (["--images", "{tmp}/none"], "is not a folder"),
    (["--images", "{pictures}", "--subset-size", "9", "--member", "x"], "no member 'x'"),
    (
        ["--images", "{pictures}", "--subset-size", "9", "--validation", "{tmp}/none"],
        "neither a folder nor a list",
    ),
)
def test_bad_input_is_said_and_the_set_is_as_it_was(folder, pictures, tmp_path, arguments, says):
    before = content(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = tandem("quantize", folder, *(a.format(pictures=pictures, tmp=empty) for a in arguments))
    refused(says, done)
    assert content(folder) == before


def test_a_preset_that_is_none_is_a_matter_of_usage(folder):
    before = content(folder)
    done = tandem("quantize", folder, "--preset", "fast")
    assert done.exit_code == 2
    assert "'fast' is not one of 'mixed', 'performance'" in done.output
    assert content(folder) == before
    member, *_ = read_manifest(folder).members
    with pytest.raises(ModelSetError, match="--preset 'fast'"):
        Request(None, preset="fast").options_of(member)


@cases(
    "field, name, says",
    ("ignored_names", "Convolution_x", "quantization.ignored_names: its network has no"),
    ("ignored_types", "Convolutoin", "did you mean Convolution"),
)
def test_an_operation_that_is_not_in_the_network(folder, pictures, field, name, says):
    manifest = read_manifest(folder)
    options = manifest.members[1].quantization.model_copy(update={field: (name,)})
    second = manifest.members[1].model_copy(update={"quantization": options})
    write_manifest(folder, manifest.model_copy(update={"members": ((manifest.members[0], second))}))
    before = content(folder)
    done = run(folder, pictures)
    refused(says, done)
    assert f"member {second.name}" in str(done.exception)
    assert "quantising" not in done.output  # it is seen before any work
    assert content(folder) == before


def test_a_full_disk_is_seen_before_any_work(folder, pictures, monkeypatch):
    before = content(folder)
    usage = shutil.disk_usage(folder)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    done = run(folder, pictures)
    refused("0 MB are free there", done)
    assert "reading" not in done.output
    assert content(folder) == before


def test_what_nncf_cannot_do_is_said_in_a_line(folder, pictures, monkeypatch):
    def fail(*_: object, **__: object) -> object:
        raise nncf.UnsupportedModelError("Exception from src/x.cpp:1:\nno such layer\n\n")

    monkeypatch.setattr(nncf, "quantize", fail)
    refused("NNCF cannot quantise member sure: no such layer. ", run(folder, pictures))


def test_a_set_without_float_networks_says_so(tmp_path, pictures):
    done = run(tiny_networks.write_tiny_set(tmp_path / "int8"), pictures)
    refused("member sure has no float network to quantise: it is INT8 already. Evaluate it", done)


def test_ctrl_c_half_way_leaves_the_set_as_it_was(folder, pictures, monkeypatch):
    before = content(folder)
    done: list[Any] = []
    real = quantize_within

    def interrupted(*arguments: object, **options: object) -> object:
        if done:
            raise KeyboardInterrupt
        done.append(real(*arguments, **options))  # type: ignore[arg-type]
        return done[0]

    monkeypatch.setattr(module, "quantize_within", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantised(folder, pictures)
    assert done
    assert content(folder) == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("0" * 64 + "\n")])
def test_quantising_a_member_needs_the_others_calibration_list_before_any_work(
    folder, pictures, damage
):
    quantised(folder, pictures, 9)
    damage(folder / "calibration-images.txt")
    before, said = content(folder), list[str]()
    request = Request(pictures, subset_size=9, members=("unsure",))
    with pytest.raises(ModelSetError, match=r"calibration-images\.txt (is missing|was altered)"):
        quantize_set(load_model_set(str(folder)), request, said.append)
    assert not said
    assert content(folder) == before
    quantised(folder, pictures, 9)  # makes it again


def test_pixels_come_through_the_one_pixel_function(pictures):
    from calibration.quantization.calibration_images import draw_images
    from models.image import ImageInputs, ImageRule, read_image

    rule = ImageRule(16, 18)
    chosen = draw_images(pictures, 5, ImageInputs({"a": rule}))
    for path, pixels in zip(chosen.paths, chosen.pixels, strict=True):
        np.testing.assert_array_equal(pixels, read_image(path.read_bytes(), rule))


# As NNCF leaves it: the thread's signal stack is memory that is gone.
FREED_STACK = """
import ctypes, mmap, os, signal

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SIZE = 1 << 16
place = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
assert libc.sigaltstack(ctypes.byref(Stack(place, 0, SIZE)), None) == 0
libc.munmap(place, SIZE)
"""
INTERRUPTED = f"""
import contextlib, time
from calibration.quantization.quantize_set import interrupted_on_another_thread
{FREED_STACK}
with BLOCK:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.01)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def run_script(block: str) -> "subprocess.CompletedProcess[str]":
    script = INTERRUPTED.replace("BLOCK", block)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_ctrl_c_is_an_interrupt_though_the_signal_stack_is_freed():
    ended = run_script("interrupted_on_another_thread()")
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr
    # Or the test above says nothing.
    assert run_script("contextlib.nullcontext()").returncode == -signal.SIGSEGV


def test_the_thread_and_the_mask_are_gone_after_the_block():
    before, threads = signal.pthread_sigmask(signal.SIG_BLOCK, ()), threading.active_count()
    with suppress(KeyError), interrupted_on_another_thread():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        raise KeyError
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert threading.active_count() == threads


def test_only_the_main_thread_may_enter():
    raised: SimpleQueue[Exception | None] = SimpleQueue()

    def enter() -> None:
        try:
            with interrupted_on_another_thread():
                raised.put(None)
        except RuntimeError as error:
            raised.put(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert isinstance(raised.get(), RuntimeError)


def meanwhile(monkeypatch, edit):
    """Have somebody edit the set while a member is being quantised."""
    real = quantize_within

    def quantize_and_edit(*arguments: Any) -> object:
        edit()
        return real(*arguments)

    monkeypatch.setattr(module, "quantize_within", quantize_and_edit)


def edited_meanwhile(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: object) -> None:
    def edit() -> None:
        write_manifest(folder, read_manifest(folder).model_copy(update=changes))

    meanwhile(monkeypatch, edit)


def test_edits_of_the_manifest_while_it_runs_are_kept(folder, pictures, monkeypatch):
    first, *others = read_manifest(folder).members
    heavier = first.model_copy(update={"weight": 3.0, "source": "of my own"})
    edits = {"hint": "look", "description": "mine", "max_drop": 0.25}
    edited_meanwhile(monkeypatch, folder, members=(heavier, *others), **edits)
    made = quantised(folder, pictures)
    assert made.problems() == []
    assert {name: getattr(made.manifest, name) for name in edits} == edits
    assert made.manifest.members[0].weight == 3.0
    assert made.manifest.members[0].source == "of my own"
    assert [set(m.networks) for m in made.manifest.members] == [{"FP16", "INT8"}] * 2
    assert made.manifest.members[0].quantization.subset_size == 12


def test_a_max_drop_that_was_asked_for_is_kept_though_another_was_written_meanwhile(
    folder, pictures, monkeypatch
):
    edited_meanwhile(monkeypatch, folder, max_drop=0.25, hint="look")
    made = quantised(folder, pictures, max_drop=0.125).manifest
    assert (made.max_drop, made.hint) == (0.125, "look")


def other_options(manifest: Manifest) -> dict[str, object]:
    first, *others = manifest.members
    options = QuantizationOptions(preset="performance")
    return {"members": (first.model_copy(update={"quantization": options}), *others)}


@cases(
    "edit, says",
    (lambda _: {"image": ImageRecord(input_size=16, resize_shorter=20)}, "image changed"),
    (lambda m: {"members": m.members[:1]}, "the members' networks, "),
    (other_options, "quantization options changed"),
    (lambda m: {"class_ids": m.labels}, "class ids changed"),
)
def test_an_edit_of_what_int8_is_made_from_is_refused_and_stays(
    folder, pictures, validation, monkeypatch, edit, says
):
    edited_meanwhile(monkeypatch, folder, **edit(read_manifest(folder)))
    request = Request(pictures, validation=validation, subset_size=12)
    with pytest.raises(ModelSetError, match=rf"manifest\.yaml was edited .*{says}.*quantise again"):
        quantize_set(load_model_set(str(folder)), request)
    manifest = read_manifest(folder)
    assert [set(m.networks) for m in manifest.members] in ([{"FP16"}] * 2, [{"FP16"}])
    assert manifest == manifest.model_copy(update=edit(manifest))
    assert [p.name for p in folder.iterdir() if "int8" in p.name or p.name.startswith(".")] == []


def test_a_manifest_half_written_by_an_editor_is_not_written_over(folder, pictures, monkeypatch):
    manifest = folder / "manifest.yaml"
    meanwhile(monkeypatch, lambda: manifest.write_text("members: ["))
    with pytest.raises(ModelSetError, match="is not YAML"):
        quantised(folder, pictures)
    assert manifest.read_text() == "members: ["
