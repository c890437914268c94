"""Calls and answers as bytes: what goes in comes out, and nothing else is believed."""

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.answers import Decoded, Fault, MemberAnswer
from app.errors import DeadlineError, NotReadyError, OtherSetError, OverloadedError
from app.serve.shared_calls import (
    MessageError,
    Question,
    SharedCall,
    pack_call,
    pack_classified,
    pack_decoded,
    read_call,
    read_classified,
    read_decoded,
)
from app.telemetry.spans import SpanIds

FAULT = Fault(400, "not_an_image", "these bytes are no image: é")
SPAN = SpanIds(2**127 + 5, 2**63 + 7)
spans = st.none() | st.builds(SpanIds, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
lanes = st.sampled_from(("interactive", "bulk"))


def images(count: int, height: int = 4, width: int = 5) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), np.uint8)


@given(
    st.lists(st.tuples(st.lists(st.binary(max_size=20), max_size=4), st.floats(), spans)),
    lanes,
    st.booleans(),
)
def test_files_arrive_as_they_were_sent(parts, lane, is_alone) -> None:
    asked = [Question(files, None, left_s, span) for files, left_s, span in parts]
    call = read_call(pack_call(SharedCall(asked, lane, is_alone)))
    assert (call.lane, call.is_alone) == (lane, is_alone)
    for found, expected in zip(call.questions, asked, strict=True):
        assert (found.files, found.images, found.span) == (
            list(expected.files),
            None,
            expected.span,
        )
        assert found.left_s == expected.left_s or math.isnan(expected.left_s)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), lanes)
def test_images_arrive_as_they_were_sent(counts, lane) -> None:
    asked = [Question((), images(count), 1.5, SPAN) for count in counts]
    call = read_call(pack_call(SharedCall(asked, lane)))
    for found, expected in zip(call.questions, asked, strict=True):
        assert found.images is not None
        np.testing.assert_array_equal(found.images, expected.images)
        assert found.span == SPAN
        assert not found.images.flags.writeable


def test_an_array_that_is_no_block_of_memory_is_copied() -> None:
    block = images(4)[::2]
    (found,) = read_call(pack_call(SharedCall([Question((), block, 1, None)], "bulk"))).questions
    np.testing.assert_array_equal(found.images, block)


def decoded(count: int, faults: dict[int, Fault] | None = None) -> Decoded:
    return Decoded(images(count), faults or {}, tuple(float(i) for i in range(count)), "set é")


def test_what_the_decoder_found_arrives() -> None:
    answers: list[Any] = [
        decoded(2, {1: FAULT}),
        DeadlineError("late"),
        decoded(0, {0: FAULT}),
        decoded(1),
    ]
    found: list[Any] = read_decoded(pack_decoded(answers))
    assert isinstance(found[1], DeadlineError)
    for one, expected in ((found[0], answers[0]), (found[3], answers[3])):
        np.testing.assert_array_equal(one.images, expected.images)
        assert one._replace(images=None) == expected._replace(images=None)
    assert (len(found[2].images), found[2].faults) == (0, {0: FAULT})


def test_inputs_of_several_sizes_arrive() -> None:
    flat = np.random.default_rng(1).integers(0, 256, (3, 60), np.uint8)
    answers = [Decoded(flat[:2], {}, (1.0, 2.0), "set"), Decoded(flat[2:], {}, (3.0,), "set")]
    for one, expected in zip(read_decoded(pack_decoded(answers)), answers, strict=True):
        np.testing.assert_array_equal(one.images, expected.images)


def answer(count: int) -> MemberAnswer:
    rows = np.random.default_rng(count).random((count, 3), np.float32)
    numbers = tuple(float(i) for i in range(count))
    return MemberAnswer(rows, numbers, numbers, tuple(range(1, count + 1)), "set")


def test_what_a_member_found_arrives() -> None:
    answers: list[Any] = [answer(2), OverloadedError("full", 7), answer(1)]
    found: list[Any] = read_classified(pack_classified(answers))
    for one, expected in ((found[0], answers[0]), (found[2], answers[2])):
        np.testing.assert_array_equal(one.probabilities, expected.probabilities)
        assert one._replace(probabilities=None) == expected._replace(probabilities=None)
    assert isinstance(found[1], OverloadedError)
    assert (found[1].message, found[1].limit) == ("full", 7)
    assert all(type(size) is int for size in found[0].batch_size)


def test_nothing_but_errors_arrives_too() -> None:
    (found,) = read_classified(pack_classified([OtherSetError("other")]))
    assert isinstance(found, OtherSetError)
    (late,) = read_decoded(pack_decoded([DeadlineError("late")]))
    assert isinstance(late, DeadlineError)


def test_what_is_no_error_of_ours_is_a_stage_that_failed() -> None:
    """By the class's name alone: its arguments may be anything."""
    (found,) = read_classified(pack_classified([KeyError("secret", object())]))
    assert type(found) is NotReadyError
    assert found.message == "a stage of the graph failed (KeyError); try again"


MESSAGES = {
    "files": (pack_call(SharedCall([Question([b"one", b""], None, 1, SPAN)], "bulk")), read_call),
    "images": (pack_call(SharedCall([Question((), images(2), 1, None)], "bulk")), read_call),
    "decoded": (pack_decoded([decoded(2, {1: FAULT})]), read_decoded),
    "classified": (pack_classified([answer(2), DeadlineError("late")]), read_classified),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_cut_or_has_more_is_refused(name: str) -> None:
    message, read = MESSAGES[name]
    read(message)
    for end in range(len(message)):
        with pytest.raises(MessageError):
            read(message[:end])
    with pytest.raises(MessageError):
        read(message + b"x")


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_another_version_is_refused(name: str) -> None:
    message, read = MESSAGES[name]
    with pytest.raises(MessageError, match="this version"):
        read(b"TnX9" + message[4:])


@pytest.mark.parametrize("name", MESSAGES)
@given(place=st.integers(4, 27), byte=st.integers(0, 255))
def test_a_head_with_other_numbers_is_not_believed(name: str, place: int, byte: int) -> None:
    message, read = MESSAGES[name]
    damaged = bytearray(message)
    damaged[place] = byte
    with suppress(MessageError):
        read(bytes(damaged))
