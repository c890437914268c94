"""The sticky choice: as often as shares say, the same each time, and kept when a share grows."""

import pytest

from app.traffic.choice import HASHED_BYTES, chosen, sticky_key

A, B, C = "imagenet@aaaaaaaaaaaa", "imagenet@bbbbbbbbbbbb", "imagenet@cccccccccccc"
NUM = 20_000
KEYS = [sticky_key(None, b"photo %d" % number) for number in range(NUM)]


def keys_of(name: str, shares: dict[str, float]) -> set[bytes]:
    return {key for key in KEYS if chosen(key, shares) == name}


@pytest.mark.parametrize("share", [1, 5, 50])
def test_a_version_is_chosen_as_often_as_its_share_says(share: float) -> None:
    number = len(keys_of(B, {A: 100 - share, B: share}))
    assert number == pytest.approx(NUM * share / 100, abs=5 * (NUM * share / 100) ** 0.5)


def test_a_version_whose_share_grows_keeps_its_photos() -> None:
    before, after = keys_of(B, {A: 95, B: 5}), keys_of(B, {A: 90, B: 10})
    assert before < after
    assert keys_of(B, {B: 10, A: 90}) == after  # in whatever order they are named


def test_it_keeps_them_with_three_versions_too() -> None:
    before, after = {A: 90.0, B: 5.0, C: 5.0}, {A: 85.0, B: 10.0, C: 5.0}
    assert keys_of(B, before) < keys_of(B, after)


def test_without_a_share_a_version_is_never_chosen() -> None:
    assert keys_of(B, {A: 100, B: 0}) == set()
    assert len(keys_of(B, {A: 0, B: 100})) == NUM


def test_the_header_decides_where_there_is_a_value() -> None:
    assert sticky_key("anna", b"one") == sticky_key("anna", b"other")
    assert sticky_key("anna", b"one") != sticky_key("ben", b"one")
    assert sticky_key(None, b"one") != sticky_key(None, b"other")


def test_photos_that_begin_alike_differ_by_length() -> None:
    photo = bytes(HASHED_BYTES)
    assert sticky_key(None, photo + b"a") != sticky_key(None, photo)
