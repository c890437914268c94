"""An image's key is of its bytes, and of everything that its answer depends on."""

import asyncio

import pytest

from app.caching import keys as keys_module
from app.caching.keys import HASHED_ON_LOOP_BYTES, KEY_BYTES, ImageKeys
from app.settings import Settings
from models.model_set import load_model_set
from tests.support.tiny_networks import write_tiny_set


def keys_of(folder, **settings: object) -> ImageKeys:
    return ImageKeys(Settings(model_set=str(folder), **settings), load_model_set(str(folder)))


def test_one_bit_makes_another_key(tiny_set):
    keys = keys_of(tiny_set)
    found = {keys.key(data) for data in (b"", b"a", b"b", b"a\0", b"\0a")}
    assert len(found) == 5
    assert all(len(key) == KEY_BYTES for key in found)
    assert keys.key(b"a") == keys_of(tiny_set).key(b"a")


@pytest.mark.parametrize(
    "changed",
    [
        {"cascade_margin": 0.5},
        {"max_pixels": 1000, "max_full_pixels": 1000},
        {"max_full_pixels": 1000},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_setting_that_changes_answers_changes_keys(tiny_set, changed):
    assert keys_of(tiny_set).key(b"a") != keys_of(tiny_set, **changed).key(b"a")


def test_a_setting_that_changes_no_answer_does_not(tiny_set):
    assert keys_of(tiny_set).key(b"a") == keys_of(tiny_set, decode_threads=7).key(b"a")


def test_another_precision_changes_keys_even_of_the_same_network(tiny_set, tmp_path):
    folder = write_tiny_set(tmp_path / "tiny", precision="FP16")
    assert keys_of(tiny_set).key(b"a") != keys_of(folder, precision="FP16").key(b"a")


def test_another_network_or_weight_changes_keys(tmp_path):
    folders = [
        write_tiny_set(tmp_path / "a", name="tiny"),
        write_tiny_set(tmp_path / "b", name="tiny", gains={"sure": 6.0, "unsure": 1.0}),
        write_tiny_set(tmp_path / "c", name="tiny", weights={"sure": 2.0, "unsure": 1.0}),
    ]
    assert len({keys_of(folder).key(b"a") for folder in folders}) == 3


def test_another_library_changes_keys(tiny_set, monkeypatch):
    before = keys_of(tiny_set).key(b"a")
    monkeypatch.setattr(keys_module, "version", lambda _: "another")
    assert keys_of(tiny_set).key(b"a") != before


@pytest.mark.parametrize("library", ["opencv-python-headless", "pillow", "pillow-heif", "openvino"])
def test_another_version_of_each_library_changes_keys(tiny_set, monkeypatch, library):
    """AVIF's pixels are Pillow's."""
    monkeypatch.setattr(keys_module, "version", lambda _: "1.0")
    before = keys_of(tiny_set).key(b"a")
    versions = {library: "1.1"}
    monkeypatch.setattr(keys_module, "version", lambda name: versions.get(name, "1.0"))
    assert keys_of(tiny_set).key(b"a") != before


@pytest.fixture
def handed_over(monkeypatch) -> list[object]:
    """What is called on a thread."""
    calls: list[object] = []
    real = asyncio.to_thread

    async def noted(call):
        calls.append(call)
        return await real(call)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    return calls


@pytest.mark.parametrize(("num_bytes", "is_on_loop"), [(250_000, True), (300_000, False)])
async def test_the_loop_hashes_about_a_quarter_of_a_mebibyte(
    tiny_set, handed_over, num_bytes, is_on_loop
):
    """Photos of small cameras, in less than half a millisecond."""
    await keys_of(tiny_set).of([bytes(num_bytes)])
    assert (handed_over == []) == is_on_loop


async def test_large_files_have_the_same_keys_from_a_thread(tiny_set, handed_over):
    keys = keys_of(tiny_set)
    small = [b"a", bytes(HASHED_ON_LOOP_BYTES - 1)]
    assert await keys.of(small) == [keys.key(data) for data in small]
    assert handed_over == []
    large = [*small, b"b"]
    assert await keys.of(large) == [keys.key(data) for data in large]
    assert len(handed_over) == 1
