"""Answers a call of many requests: each part by itself, as if it had come in a call of its own."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.calls.messages import (
    MessageError,
    Question,
    SharedCall,
    pack_classified,
    pack_decoded,
    read_call,
)
from app.deployments.classifier import Classifier
from app.deployments.decoder import Decoder
from app.errors import UPDATING, OtherSetError
from app.messages import Decoded, MemberAnswer
from app.tracing.parents import continue_below
from models.errors import TandemError

A = TypeVar("A")
logger = logging.getLogger("ray.serve")


async def decode_many(decoder: Decoder, message: bytes) -> bytes:
    """Decode the files of many requests; a large picture among those of others is sent back."""
    call = _call_of(message)

    async def one(question: Question) -> Decoded:
        files = list(question.files)
        return await decoder.decode(files, question.left_s, call.lane, takes_heavy=call.is_alone)

    return pack_decoded(await _each(call, one), decoder.calls_at_once)


async def classify_many(member: Classifier, message: bytes) -> bytes:
    """Run a member on the images of many requests."""
    call = _call_of(message)

    async def one(question: Question) -> MemberAnswer:
        if question.images is None:
            raise OtherSetError(f"a member was sent files; {UPDATING}")
        return await member.classify(question.images, question.left_s, call.lane)

    return pack_classified(await _each(call, one), member.calls_at_once)


def _call_of(message: bytes) -> SharedCall:
    try:
        return read_call(message)
    except MessageError as error:
        raise OtherSetError(f"{error}; {UPDATING}") from error


async def _each(
    call: SharedCall, answer: Callable[[Question], Awaitable[A]]
) -> list[A | BaseException]:
    """Return what became of each part; an error is its own. If the call is ended, all end."""

    async def one(question: Question) -> A:
        continue_below(question.span)  # each part runs in a context of its own
        return await answer(question)

    answers = await asyncio.gather(*map(one, call.questions), return_exceptions=True)
    for error in answers:
        if isinstance(error, Exception) and not isinstance(error, TandemError):
            logger.error("a part of a call failed: %r", error, exc_info=error)
    return answers
