"""The input and the output that a classifier of any kind of file must have."""

from pathlib import Path

import pytest

from calibration.sets.options import check_ends, layout_and_size, num_classes_of
from models.errors import ModelSetError


@pytest.mark.parametrize(
    ("sides", "input_size", "layout", "expected"),
    [
        ((None, 3, 8, 8), None, None, ("NCHW", 8, None)),
        ((2, 8, 8, 3), 8, None, ("NHWC", 8, 2)),
        ((None, 3, None, None), 16, None, ("NCHW", 16, None)),
        ((None, 3, 3, 3), None, "NHWC", ("NHWC", 3, None)),
        ((1, None, None, None), 16, "NCHW", ("NCHW", 16, 1)),  # open channels, by the user's word
    ],
)
def test_layout_size_and_batch_of_an_input(sides, input_size, layout, expected):
    assert layout_and_size(sides, "net takes it", input_size, layout) == expected


@pytest.mark.parametrize(
    ("sides", "input_size", "layout", "says"),
    [
        ((), None, None, "; a member takes images"),
        ((None, 3, 8), None, None, "; a member takes images"),
        ((None, 8, 8, 1), None, None, "; no side is 3 channels"),
        ((None, None, 8, 8), None, None, "; no side is 3 channels"),
        ((None, 3, 8, 8), None, "NHWC", "; as NHWC that is 8 channels, a member takes 3"),
        ((None, 3, 8, None), None, None, "; a member takes squares"),
        ((None, 3, None, None), None, None, ": its size is open, so say --input-size"),
        ((None, 3, 8, 8), 16, None, "; it takes 8 px, --input-size says 16"),
    ],
)
def test_an_input_that_is_no_members(sides, input_size, layout, says):
    with pytest.raises(ModelSetError, match=f"^net takes it{says}"):
        layout_and_size(sides, "net takes it", input_size, layout)


def test_ends_that_are_not_one_image_and_one_row():
    check_ends(Path("net"), ["image"], ["rows"])
    for inputs, outputs, says in (
        (["a", "b"], ["rows"], r"^net has 2 inputs \(a, b\); a member has one image in and one"),
        (["image"], [], r"^net has 0 outputs \(\); a member has one image in"),
    ):
        with pytest.raises(ModelSetError, match=says):
            check_ends(Path("net"), inputs, outputs)


@pytest.mark.parametrize("sides", [(None, 4), (1, 4, 1, 1), (1, 1, 1, 4)])
def test_the_number_of_classes_of_an_output(sides):
    assert num_classes_of(sides, "net gives it") == 4


@pytest.mark.parametrize("sides", [(None,), (1, 4, 2), (1, None)])
def test_an_output_that_is_no_row_of_classes(sides):
    with pytest.raises(ModelSetError, match=r"^net gives it; a member gives probabilities"):
        num_classes_of(sides, "net gives it")
