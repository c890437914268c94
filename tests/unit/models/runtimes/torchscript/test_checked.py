"""TorchScript files checked as data, without PyTorch: archives, pickles and code by hand."""

import io
import zipfile
from pathlib import Path

import pytest

from models.runtimes.torchscript import archive
from models.runtimes.torchscript.checked import checked_script
from models.runtimes.torchscript.errors import ScriptError
from tests.support.script_files import (
    CODE,
    DATA,
    NET,
    TENSOR,
    pickled_attack,
    with_line,
    write_by_hand,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.pt"


def entries(content: io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(content) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def refused(path: Path, says: str) -> None:
    with pytest.raises(ScriptError, match=says) as caught:
        checked_script(path)
    assert str(path) in caught.value.message


def test_what_is_harmless_is_written_anew(path):
    write_by_hand(path, weights=b"abcdefghijkl", more={"net/extra/note": b"of the user's"})
    found = entries(checked_script(path, b"{}").content)
    assert set(found) == {
        *("archive/data.pkl", "archive/constants.pkl", "archive/data/0", "archive/version"),
        *("archive/code/__torch__.py", "archive/byteorder", "archive/extra/tandem.json"),
    }
    assert found["archive/data/0"] == b"abcdefghijkl"
    assert found["archive/extra/tandem.json"] == b"{}"


def test_what_torch_would_read_otherwise_is_not_in_what_it_reads(path):
    """Comments that are types, and what follows a pickle's end."""
    code = CODE.replace("    weight = ", "    # type: (Evil) -> Evil\n    weight = ")
    write_by_hand(path, code, DATA + pickled_attack(path.with_name("it-ran")))
    found = entries(checked_script(path).content)
    assert b"Evil" not in found["archive/code/__torch__.py"]
    assert b"it-ran" not in found["archive/data.pkl"]
    assert not path.with_name("it-ran").exists()


def test_what_was_written_is_read_again_alike(path):
    once = checked_script(write_by_hand(path)).content.getvalue()
    path.write_bytes(once)
    assert checked_script(path).content.getvalue() == once


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('torch.save(image, "/tmp/x")', r"forward calls torch\.save, which is not among"),
        ('x = torch.from_file("/etc/passwd", False, 9)', r"calls torch\.from_file"),
        ("x = torch.load(image)", r"calls torch\.load"),
        ("x = ops.evil.run(image)", r"calls ops\.evil\.run"),
        ("x = ops.aten.from_file(image)", r"calls ops\.aten\.from_file"),
        ("x = ops.prim.Print(image)", r"calls ops\.prim\.Print"),
        ('x = image.save("/tmp/x")', r"calls image\.save, which is no method of a module"),
        ('x = "/etc/passwd".from_file()', "from_file, which is no method"),
        ('x = torch.mean(image, [2]).save("x")', "save, which is no method"),
        ("torch = image", "gives 'torch' another meaning"),
        ("weight = self", "uses 'weight' for a module and for data"),
        ("x = open(image)", "calls open, which is no function|reads 'open'"),
        ("x = torch", "reads 'torch'"),
        ("x = torch.save", r"reads torch\.save"),
        ("x = getattr(image, 'save')", "which no module has"),
        ("x = getattr(self, image)", "a name that it computes"),
        ("x = image.grad_fn", r"reads image\.grad_fn, which no module has"),
        ("x = __torch__.torch.classes.quantized.Make()", "no method of a module in the file"),
        ("import os", "has a Import"),
        ("x = [y for y in image]", "has a ListComp"),
        ("x = lambda: 1", "has a Lambda"),
        ("x = torch.add(*image)", "has a Starred"),
        ("x = torch.add(**image)", r"calls torch\.add with \*\*"),
        ("exec('1')", "calls exec|reads 'exec'"),
        ("x = 'caf\\x07e'", "has a Constant"),
        ("x = annotate(Future[Tensor], image)", r"the type Future\[Tensor\]"),
        ("x = self.forward(image)", "calls itself"),
        ("x = " + "-" * 120 + "1", "nested more than 100 deep|damaged"),
        ("x = (", "is damaged: code/__torch__.py|is damaged"),
    ],
)
def test_code_that_does_more_than_compute(path, line, says):
    refused(write_by_hand(path, with_line("forward", line)(CODE.encode()).decode()), says)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ("  def __setstate__(self, state: Tensor) -> None:\n    pass\n", "__setstate__ runs code"),
        ("  def __getstate__(self) -> Tensor:\n    pass\n", "__getstate__ runs code at load"),
        ("  def __del__(self) -> None:\n    pass\n", "has the method __del__"),
        ("  __forward_hooks__ = [hook]\n", "declares __forward_hooks__"),
        ("  packed : __torch__.torch.classes.quantized.Conv2dPackedParamsBase\n", "has the type"),
        ("  other : List[__torch__.Net]\n", "has modules in a List"),
        ("  other : Tensor = exec\n", "has the constant 'exec'"),
        ("  @hook\n  def other(self) -> Tensor:\n    pass\n", "is no plain function"),
    ],
)
def test_a_class_that_does_more_than_hold_weights(path, declared, says):
    refused(write_by_hand(path, CODE + declared), says)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (CODE.replace("(Module)", "(NamedTuple)"), "is a NamedTuple, and only modules"),
        (CODE + "torch.save(1)\n", "has a Expr outside of functions"),
        (CODE.replace(") -> Tensor", ") -> Tuple[Tensor, Tensor]"), "a member has one output"),
        (CODE.replace("image: Tensor", "a: Tensor, b: Tensor"), r"has 2 inputs \(a, b\)|reads"),
        (CODE.replace("forward", "infer"), "has no method forward"),
        (CODE.replace("class Net", "class Other"), "__torch__.Net, which"),
        (CODE.replace("weight : Tensor", "weight : int"), r"Net\.weight is no int"),
        (CODE.replace("weight : Tensor", "weight : Tensor\n  bias : Tensor"), "lacks 'bias'"),
        (CODE + CODE, r"has __torch__\.Net twice"),
        (CODE.replace("weight)", "wéight)"), "is not plain ASCII"),
    ],
)
def test_code_of_another_kind(path, code, says):
    refused(write_by_hand(path, code), says)


def test_functions_that_multiply_when_they_are_inlined(path):
    """Thirty functions that each call the next one twice are 2^30 steps."""
    parts = [f"def f{n}(x: Tensor) -> Tensor:\n  y = f(x)\n  return f(y)\n" for n in range(30)]
    parts = [
        part.replace("y = f(", f"g = __torch__.f{n + 1}\n  y = g(").replace(
            "return f(", "return g("
        )
        for n, part in enumerate(parts)
    ]
    parts.append("def f30(x: Tensor) -> Tensor:\n  return torch.relu(x)\n")
    refused(write_by_hand(path, CODE + "".join(parts)), "has more than 1048576 steps")


def test_modules_and_functions_of_the_file_may_be_called(path):
    code = CODE.replace("return ", "double = __torch__.double\n    return double(") + (
        "def double(x: Tensor, by: float=2.) -> Tensor:\n  if torch.gt(by, 0.):\n    y = x\n"
        "  else:\n    ops.prim.RaiseException('no')\n    y = uninitialized(Tensor)\n"
        "  for i in range(2):\n    y = torch.add_(y, 1)\n  return torch.mul(y, by)\n"
    )
    code = code.replace("[2, 3]), weight)", "[2, 3]), weight))")
    checked_script(write_by_hand(path, code))


def data(weight: bytes) -> bytes:
    return DATA.replace(TENSOR, weight)


@pytest.mark.parametrize(
    ("pickled", "says"),
    [
        (b"\x80\x02cposix\nsystem\n.", r"data\.pkl has the global 'posix\.system'"),
        (data(b"cbuiltins\neval\nX\x01\0\0\x001\x85R"), r"the global 'builtins\.eval'"),
        (data(b"ctorch\nload\n)R"), r"the global 'torch\.load'"),
        (b"\x80\x02c__torch__.torch.classes\nEvil\n)\x81}b.", "which its code does not define"),
        (data(b"c__torch__\nNet\n)R"), r"a call of '__torch__\.Net'"),
        (data(TENSOR[:-2] + b"K\x01tR"), "a tensor with hooks"),
        (DATA.replace(b"ub", b"uX\x01\0\0\0aab"), "damaged|is set on"),
        (b"\x80\x02c__torch__\nNet\n)\x81X\x01\0\0\0ab.", "a state of its own"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "has the opcode SHORT_BINUNICODE"),
        (b"\x80\x02(cos\nsystem\nio.", "has the opcode|the global"),
        (b"\x80\x02]q\x00h\x00a.", "nested more than 64 deep"),
        (b"\x80\x02}.", "data.pkl holds a dict"),
        (b"", "is damaged: data.pkl"),
        (DATA[:-1], "is damaged: data.pkl"),
        (b"\x80\x02h\x07.", "is damaged: data.pkl: KeyError"),
        (data(TENSOR.replace(b"(K\x03t", b"(K\x04t")), "outside its 3 elements"),
        (data(TENSOR.replace(b"K\0(K", b"K\x01(K")), "outside its 3 elements"),
        (data(TENSOR.replace(b"(K\x01t", b"(J\xff\xff\xff\xfft")), "with strides"),
        (data(TENSOR.replace(b"K\x03tQ", b"K\x04tQ")), "4 elements of torch.FloatStorage in"),
        (data(b"\x8a\x09" + b"\x01" * 9), "a number of 65 bits"),
        (data(b"X\x03\0\0\0\xed\xa0\x80"), "is damaged: data.pkl: UnicodeEncodeError"),
        (data(TENSOR.replace(b"FloatS", b"UntypedS")), r"'torch\.UntypedStorage'"),
    ],
)
def test_pickles_that_are_more_than_weights(path, pickled, says):
    refused(write_by_hand(path, data=pickled), says)


def test_classes_of_torchs_own_in_cpp_are_not_defined_anew(path):
    entry = "net/code/__torch__/torch/classes/quantized.py"
    code = CODE.replace("__torch__.Net", "__torch__.torch.classes.quantized.Net").encode()
    refused(write_by_hand(path, more={entry: code}), "stands for classes of PyTorch's own")


LIST = b"ctorch.jit._pickle\nrestore_type_tag\n(%sX%s%stR"


def test_lists_in_lists_are_looked_at_once(path):
    """Thirty levels, each of which has the one below twice: 2^30 values if they were walked."""
    kind, value = "int", b"K\x01"
    for level in range(30):
        kind = f"List[{kind}]"
        size = len(kind).to_bytes(4, "little")
        value = LIST % (b"](%sq%ch%ce" % (value, level, level), size, kind.encode())
    pickled = DATA.replace(TENSOR, TENSOR + b"X\x04\0\0\0more" + value)
    code = CODE.replace("weight : Tensor", f"weight : Tensor\n  more : {kind}")
    checked_script(write_by_hand(path, code, pickled))
    refused(write_by_hand(path, code.replace("[int]", "[str]"), pickled), "more is no List")


def test_constants_are_tensors(path):
    refused(write_by_hand(path, more={"net/constants.pkl": b"\x80\x02" + NET + b"."}), "constants")
    refused(
        write_by_hand(path, more={"net/constants.pkl": b"\x80\x02cos\nsystem\n."}),
        r"constants\.pkl has the global 'os\.system'",
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"net/../evil": b""}, r"'net/\.\./evil'; torch.jit.save writes one folder"),
        ({"net/data/../../evil": b""}, "stays in it"),
        ({"/net/x": b""}, "stays in it"),
        ({"other/x": b""}, r"folders \['net', 'other'\]"),
        ({"net/code/__torch__/a\\b.py": b""}, "stays in it"),
        ({"net/bytecode.pkl": b""}, "the entry 'bytecode.pkl', which torch.jit.save does not"),
        ({"net/DATA.PKL": b""}, "the entry 'DATA.PKL'"),
        ({"net/model.json": b""}, "the entry 'model.json'"),
        ({"net/version": b"2\n"}, "format version '2'; 3 to 10 are read"),
        ({"net/version": b"99999999999999999999"}, "format version"),
        ({"net/.data/version": b"11"}, "format version '11'"),
        ({"net/byteorder": b"big"}, "big-endian"),
    ],
)
def test_archives_that_torch_does_not_write(path, more, says):
    refused(write_by_hand(path, more=more), says)


def test_other_files_by_the_same_name(path, tmp_path):
    path.write_bytes(pickled_attack(tmp_path / "it-ran"))
    refused(path, "is no TorchScript file .*no pickle is loaded here. Save the network with")
    with zipfile.ZipFile(path, "w") as out:  # a checkpoint of torch.save, since 1.6
        out.writestr("net/data.pkl", pickled_attack(tmp_path / "it-ran"))
        out.writestr("net/version", "3")
    refused(path, "is a checkpoint of torch.save, a pickle: .* not opened.*torch.export.save")
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("net/archive_format", "pt2")
    refused(path, "is of torch.export: call it net.pt2")
    path.unlink()
    refused(path, "cannot read")
    assert not (tmp_path / "it-ran").exists()


def test_entries_twice(path):
    write_by_hand(path)
    with zipfile.ZipFile(path, "a") as out, pytest.warns(UserWarning, match="Duplicate"):
        out.writestr("net/data.pkl", DATA)
    refused(path, "has the entry 'net/data.pkl' twice")


def test_code_that_unpacks_to_more_than_the_limit(path):
    """A bomb: 64 MiB of spaces are some kilobytes; they are told before they are unpacked."""
    write_by_hand(path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as out:
        out.writestr("net/code/__torch__/more.py", b" " * 2**26)
    assert path.stat().st_size < 2**18
    refused(path, "code has 671.* bytes; 33554432 is the limit")


def test_weights_are_not_compressed(path):
    write_by_hand(path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as out:
        out.writestr("net/data/1", bytes(2**20))
    refused(path, "'data/1' is compressed or encrypted")


def test_entries_that_lie_about_their_size(path):
    write_by_hand(path)
    content = bytearray(path.read_bytes())
    start = content.rindex(b"net/data/0")  # in the directory: its size is 22 bytes before
    content[start - 22 : start - 18] = (2**31).to_bytes(4, "little")
    path.write_bytes(content)
    refused(path, r"its entries have 214\d+ bytes, the file")


def test_limits_of_the_file(path, monkeypatch):
    write_by_hand(path)
    monkeypatch.setattr(archive, "MAX_ENTRIES", 5)
    refused(path, "has 6 entries; 5 are the limit")
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 99)
    refused(path, r"has \d+ bytes; TorchScript of 99 is read")


def test_damaged_weights(path):
    write_by_hand(path, weights=b"abcdefghijkl")
    path.write_bytes(path.read_bytes().replace(b"abcdefghijkl", b"abcdefghijkL"))
    refused(path, "is damaged: data/0: Bad CRC")


def test_nan_and_examples_are_found_for_an_import(path):
    write_by_hand(path, weights=b"\0\0\xc0\x7f" * 3)
    assert checked_script(path).nan is None
    found = checked_script(path, is_for_import=True)
    assert (found.nan, found.example_sides) == ("weight", None)
