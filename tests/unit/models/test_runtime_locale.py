"""The locale of the process outlives whoever changes it meanwhile."""

import locale
import threading
from collections.abc import Iterator

import pytest

from models.openvino_network import CompiledNetwork, RuntimeOptions, kept_locale
from tests.support.tiny_networks import save_model, tiny_model


@pytest.fixture(autouse=True)
def utf8() -> Iterator[None]:
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    yield
    locale.setlocale(locale.LC_ALL, before)


def set_to_c() -> None:
    locale.setlocale(locale.LC_ALL, "C")


def test_a_block_puts_back_what_was_there():
    with kept_locale:
        set_to_c()
    assert locale.setlocale(locale.LC_CTYPE) == "C.UTF-8"


def test_of_blocks_that_overlap_the_last_one_puts_back_what_the_first_found():
    is_within, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with kept_locale:
            is_within.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with kept_locale:
        set_to_c()
        thread.start()
        assert is_within.wait(10)
    assert locale.setlocale(locale.LC_CTYPE) == "C"  # not while another may compile
    may_end.set()
    thread.join()
    assert locale.setlocale(locale.LC_CTYPE) == "C.UTF-8"


def test_networks_that_are_read_from_the_cache_on_several_threads_leave_the_locale(tmp_path):
    save_model(tiny_model(), tmp_path, "tiny")
    options = RuntimeOptions(num_threads=4, batch_sizes=(1, 2, 3, 4), cache_dir=tmp_path / "cache")
    for _ in range(20):  # it was lost in one of a few
        CompiledNetwork(tmp_path / "tiny.xml", options)
        assert locale.setlocale(locale.LC_CTYPE) == "C.UTF-8"
