"""The options of ``tandem evaluate`` that several of its runs read."""

from pathlib import Path

import pytest

from calibration.commands.evaluate import EvaluateOptions, sampled
from calibration.datasets import Dataset, LabelledImage
from models.errors import ModelSetError
from models.model_set import load_model_set


def test_class_ids_are_as_many_as_the_sets_classes(tiny_set, tmp_path):
    (ids := tmp_path / "ids.txt").write_text("n1\nn2\nn3\n", "utf-8")
    model_set = load_model_set(str(tiny_set))
    assert EvaluateOptions("tiny").ids_of(model_set) is None
    options = EvaluateOptions("tiny", class_ids=ids)
    assert tuple(options.ids_of(model_set) or ()) == ("n1", "n2", "n3")
    ids.write_text("n1\nn2\n", "utf-8")
    with pytest.raises(ModelSetError, match=r"ids\.txt has 2 class ids, 2 different ones, for 3"):
        options.ids_of(model_set)


def test_labelled_images_are_needed_to_fit():
    with pytest.raises(ModelSetError, match="--sure-at needs labelled images: --images DIR"):
        _ = EvaluateOptions("tiny", sure_at=0.9).labelled
    assert EvaluateOptions("tiny", Path("val")).labelled == Path("val")


def test_a_sample_is_the_same_each_time_and_says_so():
    images = tuple(LabelledImage(Path(f"{n}.jpg"), 0) for n in range(9))
    dataset = Dataset("photos/val", images, ())
    assert sampled(dataset, 0) is sampled(dataset, 9) is dataset
    some = sampled(dataset, 3)
    assert some == sampled(dataset, 3)
    assert (len(some.images), some.notes) == (3, ("a random sample of 3 of 9 images",))
