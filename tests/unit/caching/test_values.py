"""What comes back from a store that others can write to: right, or nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from app.caching.values import VALUE_HEAD, RowsFormat

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
FORM = RowsFormat("0123456789ab", (1, 2), 3)  # one: of a cascade
ROWS = np.array([[0.1, 0.8, 0.1], [0.2, 0.5, 0.3]], np.float32)
NUM_BYTES = len(FORM.pack(KEY, ROWS))
BOUNDED = settings(max_examples=300, database=None)
PROBABILITY = st.floats(0, 1, width=32)


@BOUNDED
@given(
    rows=arrays(np.float32, st.sampled_from([(1, 3), (2, 3)]), elements=PROBABILITY),
    key=st.binary(min_size=32, max_size=32),
)
def test_what_was_packed_is_read_to_the_last_bit(rows, key):
    data = FORM.pack(key, rows)
    read = FORM.read(key, data)
    assert read is not None
    assert (read.dtype, read.shape) == (np.float32, rows.shape)
    assert read.tobytes() == rows.tobytes()


@BOUNDED
@given(data=st.binary(max_size=2 * NUM_BYTES))
def test_any_bytes_are_a_miss(data):
    assert FORM.read(KEY, data) is None


def test_a_value_that_is_cut_or_longer_is_a_miss():
    data = FORM.pack(KEY, ROWS)
    assert all(FORM.read(KEY, data[:end]) is None for end in range(len(data)))
    assert FORM.read(KEY, data + b"\0") is None


def test_a_value_with_one_bit_changed_is_a_miss():
    data = FORM.pack(KEY, ROWS)
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        assert FORM.read(KEY, bytes(changed)) is None, place


def test_a_value_with_a_number_of_rows_that_no_image_has_is_a_miss():
    assert RowsFormat("0123456789ab", (2,), 3).read(KEY, FORM.pack(KEY, ROWS[:1])) is None


def test_another_images_value_is_a_miss():
    assert FORM.read(OTHER_KEY, FORM.pack(KEY, ROWS)) is None


@pytest.mark.parametrize(
    "other", [RowsFormat("ba9876543210", (2,), 3), RowsFormat("0123456789ab", (3,), 2)]
)
def test_a_value_of_another_set_or_shape_is_a_miss(other):
    assert other.read(KEY, FORM.pack(KEY, ROWS)) is None


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -0.1, 1.5])
def test_numbers_that_are_no_probabilities_are_a_miss(wrong):
    """With a checksum that is right: whoever wrote it knew how."""
    rows = ROWS.copy()
    rows[1, 2] = wrong
    assert FORM.read(KEY, FORM.pack(KEY, rows)) is None


def test_the_head_is_small():
    assert VALUE_HEAD.size <= 48
