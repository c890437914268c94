"""The ladder's order, what is asked of it, and the work folder with its results."""

import pytest

from calibration.ladder.rungs import SERVICE, LadderError, RungOptions, Store, rungs
from tests.support.calibration.ladders import measured

ORDER = [
    "eager",
    "inference_mode",
    "batches",
    "threads",
    "channels_last",
    "torchscript",
    "compile",
    "torch_bf16",
    "onnxruntime",
    "openvino",
    "latency",
    "throughput",
    "fixed_shapes",
    "streams",
    "low_precision",
    "int8",
    "ensemble",
    "fast",
    SERVICE,
]
FACTS = {"network": "a", "seconds": 1.0}


def test_from_eager_pytorch_to_the_service():
    assert [rung.name for rung in rungs(2)] == ORDER


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_every_choice_is_valid_and_uses_no_more_than_the_cores(cores):
    for rung in rungs(cores):
        choices = rung.choices(RungOptions())
        assert len(set(choices)) == len(choices) > 0
        for options in choices:
            RungOptions.model_validate(options.model_dump())  # model_copy checks nothing
            assert (options.threads or 1) * options.callers <= cores


def test_a_rung_changes_its_own_and_keeps_the_rest():
    base = RungOptions(batch=16, is_inference_mode=True)
    (channels_last,) = (r for r in rungs(2) if r.name == "channels_last")
    (options,) = channels_last.choices(base)
    assert options == base.model_copy(update={"is_channels_last": True})
    (int8,) = (r for r in rungs(2) if r.name == "int8")
    assert {o.float_type for o in int8.choices(RungOptions(float_type="bf16"))} == {"bf16", "f32"}
    assert {o.precision for o in int8.choices(RungOptions())} == {"INT8"}


def test_results_are_kept_for_resume_alone(tmp_path):
    store = Store(tmp_path / "new" / "work")
    with store.opened(FACTS, is_resumed=True):  # nothing there to resume: a beginning
        store.write("eager", measured(3.0))
    with store.opened(FACTS, is_resumed=True):
        assert store.read("eager") == measured(3.0)
    with store.opened(FACTS, is_resumed=False):
        assert store.read("eager") is None


def test_results_of_another_ladder_are_not_continued(tmp_path):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        store.write("eager", measured(3.0))
    with (
        pytest.raises(LadderError, match="other seconds"),
        store.opened(FACTS | {"seconds": 2.0}, is_resumed=True),
    ):
        pass
    with store.opened(FACTS, is_resumed=True):
        assert store.read("eager") is not None


def test_two_ladders_do_not_share_a_folder(tmp_path):
    with (
        Store(tmp_path).opened(FACTS, is_resumed=False),
        pytest.raises(LadderError, match="another ladder"),
        Store(tmp_path).opened(FACTS, is_resumed=False),
    ):
        pass


def test_the_files_of_somebody_else_stay(tmp_path):
    """A ladder removes what one before it left, also from results/ and logs/."""
    (tmp_path / "results").mkdir()
    kept = [tmp_path / "results" / "thesis.csv", tmp_path / "features.npy"]
    for path in kept:
        path.touch()
    for is_resumed in (False, True):
        with (
            pytest.raises(LadderError, match="no ladder's; give --work an empty folder"),
            Store(tmp_path).opened(FACTS, is_resumed=is_resumed),
        ):
            pass
    assert all(path.exists() for path in kept)


def test_networks_are_removed_with_the_parts_of_a_killed_preparation(tmp_path):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        before = sorted(tmp_path.iterdir())
        for name in ("int8.xml", "int8.bin", "partial-int8.xml", "partial-int8.bin", "a.onnx"):
            (tmp_path / name).touch()
        store.remove_networks()
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(LadderError, match="cannot write"),
        Store(tmp_path / "file").opened(FACTS, is_resumed=False),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{", '{"outcome": "measured", "speed": 3}'])
def test_a_damaged_result_is_measured_again(tmp_path, text):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        (tmp_path / "results" / "eager.json").write_text(text)
        assert store.read("eager") is None


def test_only_its_own_files_are_removed(tmp_path):
    with Store(tmp_path).opened(FACTS, is_resumed=False):
        pass
    (tmp_path / "holiday.jpg").touch()
    (tmp_path / "int8.xml").touch()
    with Store(tmp_path).opened(FACTS, is_resumed=False):
        assert (tmp_path / "holiday.jpg").exists()
        assert not (tmp_path / "int8.xml").exists()


def test_no_partial_file_stays(tmp_path):
    store = Store(tmp_path)
    with store.opened(FACTS, is_resumed=False):
        store.write("eager", measured(3.0))
    assert not list(tmp_path.rglob("*.partial"))
