"""Files of one turn of the event loop are decoded together, in the next."""

import asyncio

import pytest

from app.queueing.decode_queue import LoopTurn


async def test_first_all_of_a_turn_are_asked_for_then_all_decoded_then_all_handed_on():
    happened: list[str] = []

    def decode(data: bytes) -> bytes:
        happened.append(f"decode {data!r}")
        return data.upper()

    turn = LoopTurn(decode, most=8)

    async def request(data: bytes) -> bytes:
        happened.append(f"ask {data!r}")
        answer = await turn.submit(data)
        happened.append(f"got {answer!r}")
        return answer

    assert await asyncio.gather(request(b"a"), request(b"b")) == [b"A", b"B"]
    asked, decoded = ["ask b'a'", "ask b'b'"], ["decode b'a'", "decode b'b'"]
    assert happened == [*asked, *decoded, "got b'A'", "got b'B'"]


async def test_a_turn_takes_so_many_and_the_next_one_as_many_again():
    turn: LoopTurn[bytes] = LoopTurn(bytes, most=2)
    for _ in range(2):
        assert turn.has_room
        futures = [turn.submit(b""), turn.submit(b"")]
        assert (turn.has_room, turn.num_waiting) == (False, 2)
        await asyncio.gather(*futures)
        assert turn.num_waiting == 0


async def test_an_error_is_its_own_files_and_who_went_away_is_not_decoded_for():
    decoded: list[bytes] = []

    def decode(data: bytes) -> bytes:
        decoded.append(data)
        if data == b"bad":
            raise MemoryError(data)
        return data

    turn = LoopTurn(decode, most=8)
    bad, gone, good = (turn.submit(data) for data in (b"bad", b"gone", b"good"))
    gone.cancel()
    assert await good == b"good"
    with pytest.raises(MemoryError):
        await bad
    assert decoded == [b"bad", b"good"]


async def test_who_waits_for_images_is_told_once_they_were_handed_on():
    turn: LoopTurn[bytes] = LoopTurn(bytes, most=8)
    happened: list[str] = []
    turn.on_end = lambda: happened.append("told")

    async def request() -> None:
        await turn.submit(b"")
        happened.append("handed on")

    await asyncio.gather(request(), request())
    await asyncio.sleep(0)
    assert happened == ["handed on", "handed on", "told"]
