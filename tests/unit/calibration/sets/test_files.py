"""The process that loads a PyTorch file: which files get one, and how its end is said.

None of these tests needs torch: the processes are stand-ins. Real files are in
test_pytorch_child.py.
"""

import tempfile
import zipfile
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from calibration.sets import files
from calibration.sets.files import converted, kind_of
from models import machine
from models.errors import ModelSetError
from models.machine import MissingExtraError
from tests.support import children
from tests.support.cases import cases
from tests.support.script_files import pickled_attack

SCRIPT = ("net/data.pkl", "net/constants.pkl", "net/code/__torch__.py", "net/version")
PROGRAM = ("net/archive_format", "net/models/model.json", "net/data/sample_inputs/model.pt")
CHECKPOINT = ("net/data.pkl", "net/data/0", "net/version")
Ends = Callable[[str], None]


def archive(path, names=SCRIPT, content=b""):
    with zipfile.ZipFile(path, "w") as out:
        for name in names:
            out.writestr(name, content)
    return path


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Let the child run other code; its argument is the task."""
    monkeypatch.setattr(machine, "find_spec", lambda name: name)

    def with_code(code: str) -> None:
        monkeypatch.setattr(files, "convert_here", partial(children.runs, code))

    return with_code


def convert(path, limit_s=60.0):
    with converted(path, "openvino", None, None, is_trusted=True, limit_s=limit_s) as made:
        return made.read_bytes()


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, in which nothing may stay."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_kinds_are_told_by_what_is_inside(tmp_path):
    assert kind_of(archive(tmp_path / "a.pt")) == "script"
    assert kind_of(archive(tmp_path / "b.pt", PROGRAM)) == "program"
    assert kind_of(archive(tmp_path / "c.pt2", PROGRAM)) == "program"


@cases(
    "names, says",
    (CHECKPOINT, "is a checkpoint of torch.save: weights.*torch.export.save"),
    (("readme.txt",), "is a ZIP archive, and no network of PyTorch"),
)
def test_archives_that_are_no_network(tmp_path, names, says):
    with pytest.raises(ModelSetError, match=says):
        convert(archive(tmp_path / "net.pt", names))


def test_a_pickle_is_never_loaded(tmp_path):
    (tmp_path / "net.pt").write_bytes(pickled_attack(tmp_path / "it-ran"))
    with pytest.raises(ModelSetError, match=r"is a pickle of torch\.save.*torch\.export\.save"):
        convert(tmp_path / "net.pt")
    with pytest.raises(ModelSetError, match=r"cannot read .*: No such file"):
        convert(tmp_path / "nothing.pt")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("names", [SCRIPT, PROGRAM])
def test_without_trust_no_process_starts(tmp_path, names, monkeypatch):
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(files, "run_apart", started)
    path = archive(tmp_path / "net.pt2", names)
    says = r"net\.pt2 is a PyTorch file, and to load it is to run code that it holds.*--trust"
    with (
        pytest.raises(ModelSetError, match=says),
        converted(path, "openvino", None, None, is_trusted=False),
    ):
        pass


def test_torch_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"net\.pt needs torch.*'tandem-serve\[torch\]'"):
        convert(archive(tmp_path / "net.pt"))


def test_what_the_process_made_is_there_while_the_block_lasts(tmp_path, ends, temporary):
    ends("arguments[0].made.write_text('made')")
    assert convert(archive(tmp_path / "net.pt")) == b"made"
    assert list(temporary.iterdir()) == []


@cases(
    "code, says",
    ("import os; os.kill(os.getpid(), 11)", r"died \(SIGSEGV; it said nothing\)"),
    ("import os; os.kill(os.getpid(), 9)", r"died \(SIGKILL: memory ran out"),
    ("raise ValueError('of the file')", r"died \(exit code 1; ValueError: of the file\)"),
    ("import os; os._exit(0)", r"died \(exit code 0; it said nothing\)"),
    (
        "print('\\x1b[2J all is well', flush=True); import os; os.abort()",
        r"SIGABRT; \[2J all is well\)",
    ),
    ("from models.errors import ModelSetError as No; raise No('no classifier')", "^no class"),
    ids=["segfault", "killed", "raises", "ends", "aborts", "says"],
)
def test_a_process_that_dies_is_an_error_of_one_line(tmp_path, ends, temporary, code, says):
    ends(code)
    with pytest.raises(ModelSetError, match=says) as failed:
        convert(archive(tmp_path / "net.pt"))
    assert "\n" not in failed.value.message
    assert list(temporary.iterdir()) == []


def test_a_process_that_does_not_end_is_given_up(tmp_path, ends, temporary):
    ends(children.SLEEPS)
    of_other_tests = psutil.Process().children()
    with pytest.raises(ModelSetError, match=r"was not converted within 0\.5 s, and was given up"):
        convert(archive(tmp_path / "net.pt"), limit_s=0.5)
    assert set(psutil.Process().children()) <= set(of_other_tests)
    assert list(temporary.iterdir()) == []
