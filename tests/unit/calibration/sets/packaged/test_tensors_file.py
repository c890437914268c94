"""PyTorch's files read without PyTorch: tensors come out, nothing else is run."""

from pathlib import Path

import numpy as np
import pytest

from calibration.sets.packaged.tensors_file import read_tensors
from models.errors import ModelSetError
from tests.support.calibration.lite_weights import lite_tensors, old_file

TENSORS = lite_tensors(5)


def test_the_tensors_of_a_file() -> None:
    found = read_tensors(old_file(TENSORS), "net.pth")
    assert list(found) == list(TENSORS)
    for name, values in TENSORS.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def test_a_transposed_tensor_keeps_its_order() -> None:
    """As the published files store convolutions."""
    content = old_file({"a": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))})
    found = read_tensors(content, "net.pth")["a"]
    assert found.shape == (2, 3)
    assert found.flags.c_contiguous
    # old_file writes the values in the order of rows, the strides are of columns
    np.testing.assert_array_equal(found, np.arange(6, dtype=np.float32).reshape(3, 2).T)


def test_a_foreign_name_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    written = tmp_path / "written"
    command = f"touch {written}".encode()
    run = b"cposix\nsystem\n(X" + len(command).to_bytes(4, "little") + command + b"tR0"
    with pytest.raises(ModelSetError, match=r"net\.pth names posix\.system in its pickle"):
        read_tensors(old_file(TENSORS, run), "net.pth")
    assert not written.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cbuiltins\neval\n0",
        b"cbuiltins\ngetattr\n0",
        b"ctorch\nload\n0",
        b"ccollections\nOrderedDict.__init__\n0",
        b"cnumpy\nload\n0",
        b"\x80\x04\x8c\x02os\x8c\x06system\x930",  # STACK_GLOBAL
    ],
)
def test_no_other_name_passes(opcodes: bytes) -> None:
    with pytest.raises(ModelSetError, match="tensors alone are read"):
        read_tensors(old_file(TENSORS, opcodes), "net.pth")


@pytest.mark.parametrize("named", [b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n"])
@pytest.mark.parametrize("state", [b"}%sNs", b"N}%sNs\x86"])  # as __dict__, as attributes
def test_a_pickle_cannot_change_the_reader(named: bytes, state: bytes) -> None:
    changed = named + state % b"X\x04\x00\x00\x00make" + b"b0"  # BUILD
    with pytest.raises(ModelSetError, match="damaged"):
        read_tensors(old_file(TENSORS, changed), "net.pth")
    assert len(read_tensors(old_file(TENSORS), "net.pth")) == len(TENSORS)


def test_tensors_that_reach_out_of_their_storage_are_refused() -> None:
    name = "_conv_stem.weight"
    wide = np.lib.stride_tricks.as_strided(TENSORS[name], (4, 3, 3, 4), TENSORS[name].strides)
    whole = old_file({name: TENSORS[name]})
    right, wrong = [
        b"(" + b"".join(b"J" + n.to_bytes(4, "little") for n in s.shape) + b"t"
        for s in (TENSORS[name], wide)
    ]
    with pytest.raises(ModelSetError, match=r"_conv_stem\.weight of net\.pth reaches out"):
        read_tensors(whole.replace(right, wrong), "net.pth")


def test_a_function_that_a_pickle_changes_is_its_own() -> None:
    state = b"N}X\x0c\x00\x00\x00__defaults__)s\x86b0"
    changed = b"ctorch._utils\n_rebuild_tensor_v2\n" + state
    for extra in (changed, b""):
        found = read_tensors(old_file(TENSORS, extra), "net.pth")
        np.testing.assert_array_equal(found["_fc.bias"], TENSORS["_fc.bias"])


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 0.9, 0.9999])
def test_a_file_that_was_cut_short_is_one_line(share: float) -> None:
    content = old_file(TENSORS)
    with pytest.raises(ModelSetError, match=r"net\.pth") as raised:
        read_tensors(content[: int(len(content) * share)], "net.pth")
    assert "\n" not in raised.value.message


def test_no_bytes_of_a_file_do_more_than_fail() -> None:
    content, generator = old_file(TENSORS), np.random.default_rng(3)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for place in generator.integers(0, 6000, 3):
            damaged[place] = generator.integers(256)
        try:
            read_tensors(bytes(damaged), "net.pth")
        except ModelSetError:
            num_refused += 1
    assert num_refused > 200


def test_what_is_no_state_dict_is_refused() -> None:
    text = old_file({})
    with pytest.raises(ModelSetError, match="a state dict is needed"):
        read_tensors(text, "net.pth")
    with pytest.raises(ModelSetError, match="no PyTorch file of tensors"):
        read_tensors(b"<html>not found</html>", "net.pth")
