"""The book of feedback: what it remembers, refuses and counts, and the Gateways' way to it."""

import asyncio
import dataclasses
import stat
from pathlib import Path

import pytest
from opentelemetry import trace

from app.answers import Classified, Fault
from app.errors import (
    BadParameterError,
    FeedbackExistsError,
    NotReadyError,
    TaughtFullError,
    UnknownRequestError,
)
from app.samples import feedback as gateways
from app.samples.feedback import AnsweredRequest, Feedback, FeedbackBook, TaughtFolder
from app.serve.replica import Hub
from app.settings import Settings
from models.ensemble import Prediction
from tests.support.answers import answer_of
from tests.support.cases import cases
from tests.support.fakes import FakeHandle
from tests.support.full_disk import full_disk
from tests.support.hand_clock import HandClock

X, Y = {"fake": "x"}, {"fake": "y"}  # the labels that are meant, by set
FAULT = Fault(400, "not_an_image", "these bytes are no image")


class Replica(Hub):
    """The book's replica in this process; it may be gone."""

    is_gone = False
    gate: asyncio.Event | None = None  # it hangs until this is set

    async def ask(self, method, *arguments):
        if method == "remember" and self.is_gone:
            raise NotReadyError("it is gone")
        if method == "remember" and self.gate is not None:
            await self.gate.wait()
        return await super().ask(method, *arguments)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)
    monkeypatch.setattr(gateways, "SEND_EVERY_S", 0.01)
    return Replica(Settings(), FeedbackBook(100))


@pytest.fixture
def feedback(replica: Replica) -> Feedback:
    return Feedback(FakeHandle(replica))


def note(feedback: Feedback, request_id: str = "1") -> None:
    feedback.note(request_id, [b""], [answer_of()])


async def is_right(feedback: Feedback, request_id: str = "1") -> bool:
    return (await feedback.judge(request_id, "x", None, X)).is_right


async def test_what_was_answered_can_be_judged_at_once(feedback: Feedback) -> None:
    note(feedback)
    assert await is_right(feedback)


async def test_a_report_begins_no_trace(feedback, replica, monkeypatch):
    spans = []

    async def ask(method: str, *_: object) -> None:
        if method == "remember":
            spans.append(trace.get_current_span().get_span_context())

    monkeypatch.setattr(replica, "ask", ask)
    note(feedback)
    await feedback.figures()  # reports at once
    (span,) = spans
    # Serve begins a trace where there is none, and continues this one, which is not sampled.
    assert span.is_valid
    assert not span.trace_flags.sampled


async def test_answers_are_reported_without_being_asked_for(feedback, replica):
    for number in (1, 2):  # the second after the first task has ended
        note(feedback, str(number))
        async with asyncio.timeout(30):
            while (await replica.ask("figures")).remembered_answers < number:
                await asyncio.sleep(0.005)


async def test_another_gateways_answer_that_is_on_its_way_is_waited_for(feedback, replica):
    other = Feedback(FakeHandle(replica))
    judging = asyncio.create_task(is_right(feedback))
    await asyncio.sleep(0)  # it has asked, and waits
    note(other)
    assert await judging
    with pytest.raises(UnknownRequestError):
        await is_right(feedback, "2")


async def test_a_replica_that_is_gone_is_no_answers_trouble(feedback, replica, caplog):
    replica.is_gone = True
    for number in range(3):
        note(feedback, str(number))
        await feedback.figures()
    assert caplog.messages == ["answers were not recorded for feedback: it is gone"]


async def test_a_replica_that_hangs_is_an_error(feedback, replica, monkeypatch):
    monkeypatch.setattr(gateways, "ANSWERS_WITHIN_S", 0.05)

    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(replica, "ask", hangs)
    async with asyncio.timeout(30):
        with pytest.raises(NotReadyError, match="the deployment Feedback did not answer within"):
            await feedback.figures()


async def test_a_caller_that_leaves_takes_no_answers_along(feedback, replica):
    """It sends the answers of other requests, whose feedback would be refused."""
    replica.gate = asyncio.Event()
    note(feedback)
    leaving = asyncio.create_task(is_right(feedback))
    while feedback._unsent:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    replica.gate.set()
    assert await is_right(feedback)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def book(clock: HandClock) -> FeedbackBook:
    return FeedbackBook(4, clock.monotonic)


def answered(request_id: str, *answers: Classified | Fault) -> list[AnsweredRequest]:
    return [AnsweredRequest.of(request_id, answers or [answer_of()])]


def of_version(version: str) -> Classified:
    return dataclasses.replace(answer_of(), model_version=version)


def test_right_and_wrong_by_version(book: FeedbackBook) -> None:
    book.remember(answered("1", of_version("a")) + answered("2", of_version("a")))
    book.remember(answered("3", of_version("b")))
    first = book.judge("1", "x", None, X)
    assert (first.is_right, first.is_new, first.answer.labels) == (True, True, ("x",))
    assert not book.judge("2", "y", None, Y).is_right
    assert book.judge("3", "x", 0, X).is_right
    figures = book.figures()
    counts = [(v.model_set, v.model_version, v.feedback, v.right) for v in figures.versions]
    assert counts == [("fake", "a", 2, 1), ("fake", "b", 1, 1)]
    assert [v.accuracy for v in figures.versions] == [0.5, 1.0]
    # Wilson's interval of one in two, as in Newcombe 1998.
    assert figures.versions[0].interval == (0.0945, 0.9055)
    assert (figures.remembered_answers, figures.max_answers) == (3, 4)


def test_the_first_label_counts_and_the_same_again_changes_nothing(book: FeedbackBook) -> None:
    book.remember(answered("1"))
    assert book.judge("1", "x", None, X).is_new
    assert not book.judge("1", "x", None, X).is_new
    with pytest.raises(FeedbackExistsError, match="has the label 'x' already; the first counts"):
        book.judge("1", "y", None, Y)
    assert [(v.feedback, v.right) for v in book.figures().versions] == [(1, 1)]


def test_an_unknown_request_is_told_what_is_remembered(book, clock):
    book.remember(answered("1", *[answer_of()] * 3))
    clock.now += 61.0
    message = (
        "no request 'other' is remembered: there are 3 answers of the last 61 s, at most 4; "
        "send feedback sooner, or raise feedback_answers"
    )
    with pytest.raises(UnknownRequestError) as raised:
        book.judge("other", "x", None, X)
    assert (raised.value.message, raised.value.status) == (message, 404)
    with pytest.raises(UnknownRequestError, match="there are 0 answers of the last 0 s"):
        FeedbackBook(1).judge("1" * 5000, "x", None, X)


def test_the_oldest_are_forgotten_and_what_they_counted_stays(book: FeedbackBook) -> None:
    book.remember(answered("1"))
    book.judge("1", "x", None, X)
    book.remember(answered("2", answer_of(), answer_of()) + answered("3", answer_of(), FAULT))
    with pytest.raises(UnknownRequestError):
        book.judge("1", "x", None, X)
    assert book.judge("2", "x", 1, X).is_new
    assert [v.feedback for v in book.figures().versions] == [2]
    assert book.figures().remembered_answers == 4


def test_a_request_larger_than_the_book_is_remembered_alone(book: FeedbackBook) -> None:
    book.remember(answered("1", *[answer_of()] * 9) + answered("2", *[answer_of()] * 9))
    assert book.judge("2", "x", 8, X).is_right
    with pytest.raises(UnknownRequestError):
        book.judge("1", "x", 8, X)


def test_a_long_id_is_kept_as_a_hash(book: FeedbackBook) -> None:
    """The book bounds answers; with ids of 60 KB those alone would fill the memory."""
    long = "1" * 60_000
    (request,) = answered(long)
    assert sum(map(len, map(str, request))) < 200
    book.remember([request])
    assert book.judge(long, "x", None, X).is_right
    with pytest.raises(UnknownRequestError, match=f"no request '{'1' * 40}' is remembered"):
        book.judge(long + "1", "x", None, X)


def test_a_request_that_is_sent_again_counts_once(book: FeedbackBook) -> None:
    book.remember(answered("1"))
    assert book.judge("1", "x", None, X).is_new
    book.remember(answered("1"))
    assert not book.judge("1", "x", None, X).is_new
    figures = book.figures()
    assert ([v.feedback for v in figures.versions], figures.remembered_answers) == ([1], 1)


def test_a_version_is_counted_by_plan(book: FeedbackBook) -> None:
    """A request that is sent again may get the other plan: the first answer counts."""
    fast = dataclasses.replace(answer_of(), plan="fast", asked=["a"])
    book.remember(answered("1", fast) + answered("2") + answered("1"))
    assert book.judge("1", "x", None, X).answer.plan == "fast"
    book.judge("2", "y", None, Y)
    versions = book.figures().versions
    assert [(v.plan, v.feedback, v.right) for v in versions] == [("fast", 1, 1), ("full", 1, 0)]


@pytest.mark.parametrize("again", [[of_version("b")], [of_version("a"), FAULT]])
def test_an_id_of_several_requests_is_refused(book, again):
    book.remember(answered("1", of_version("a")) + answered("1", *again))
    book.remember(answered("1", of_version("a")))  # it stays so
    message = "several requests had the id '1' and other answers.*X-Request-ID of its own"
    with pytest.raises(FeedbackExistsError, match=message):
        book.judge("1", "x", 0, X)
    figures = book.figures()
    assert (figures.versions, figures.remembered_answers) == ([], 1)


@cases(
    "image, label, message",
    (None, "x", "image is missing, and this request has 2: give image from 0 to 1"),
    (2, "x", "image is 2, and this request has 2"),
    (-1, "x", "image is -1, and this request has 2"),
    (1, "x", "image 1 of this request was answered with an error"),
    (0, "z", "'z' is no label of fake, and no id or number of its classes; GET /v1/models lists"),
)
def test_images_and_labels_that_are_none(book, image, label, message):
    book.remember(answered("1", answer_of(), FAULT))
    with pytest.raises(BadParameterError, match=message):
        book.judge("1", label, image, X if label == "x" else {"another set": "z"})
    assert book.figures().versions == []


def test_a_label_that_only_the_answering_version_has(book: FeedbackBook) -> None:
    """A version may have better labels for the same classes than the set's main version."""
    book.remember([*answered("1"), *answered("2")])
    version = "@".join(book.judge("1", "x", None, X).answer.version)
    assert book.judge("1", "x", None, {version: "x"}).is_right
    assert not book.judge("2", "7", None, {version: "new", "fake": "x"}).is_right


def test_of_a_multi_label_set_any_listed_label_is_right(book: FeedbackBook) -> None:
    listed = [Prediction(index=i, label=name, probability=0.9) for i, name in enumerate("xy")]
    book.remember(
        answered("1", dataclasses.replace(answer_of(), predictions=listed, threshold=0.5))
        + answered("2", dataclasses.replace(answer_of(), predictions=[], threshold=0.5))
        + answered("3", dataclasses.replace(answer_of(), predictions=listed))
    )
    assert book.judge("1", "y", None, Y).is_right
    assert not book.judge("2", "y", None, Y).is_right
    assert not book.judge("3", "y", None, Y).is_right  # one label: the first is the answer


def test_taught_photographs_have_one_label_each_and_a_bound(tmp_path: Path) -> None:
    folder = TaughtFolder(tmp_path / "taught", 10_000, 2)
    first = folder.keep(b"\x89PNG" + b"a" * 100, "x", "fake")
    assert (first.label, first.before) == ("x", None)
    again = folder.keep(b"\x89PNG" + b"a" * 100, "y", "fake")
    assert (again.id, again.before) == (first.id, "x")
    folder.keep(b"b" * 100, "x", "fake")
    (tmp_path / "taught" / "notes.json").write_text("{}")  # not ours
    with pytest.raises(TaughtFullError, match=r"2 photographs are kept, of at most 2 \(teach_ph"):
        folder.keep(b"c", "x", "fake")
    assert folder.correct("../1", 0, "x", "fake")
    figures = TaughtFolder(tmp_path / "taught", 10_000, 2).figures()  # of another process
    assert (figures.photographs, figures.corrections, figures.labels) == (2, 1, {"x": 1, "y": 1})
    names = {path.name for path in (tmp_path / "taught").iterdir()}
    assert {f"{first.id}.png", f"{first.id}.json"} < names
    assert stat.S_IMODE((tmp_path / "taught").stat().st_mode) == 0o700
    assert {
        stat.S_IMODE((tmp_path / "taught" / n).stat().st_mode) for n in names - {"notes.json"}
    } == {0o600}
    with pytest.raises(TaughtFullError, match="have 0 bytes, this one 1001, the limit is 1000"):
        TaughtFolder(tmp_path / "small", 1000, 2).keep(b"d" * 1001, "x", "fake")
    assert [folder.correct(str(n), 0, "x", "fake") for n in (2, 3)] == [True, False]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotReadyError, match=r"teach_dir .*file cannot be used"):
        TaughtFolder(tmp_path / "file", 1000, 2).keep(b"d", "x", "fake")
    with full_disk(20 * 1024), pytest.raises(NotReadyError, match="cannot be used"):
        TaughtFolder(tmp_path / "taught", 10**6, 2).keep(b"d" * 10**5, "x", "fake")
    assert TaughtFolder(tmp_path / "taught", 10**6, 2).figures().bytes == 0
