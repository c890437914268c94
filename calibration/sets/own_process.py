"""Creates a set in a process of its own, since a damaged file can crash the library that reads it.

For example, OpenVINO 2026.4 crashes on a convolution without weights.
"""

from pathlib import Path

from pydantic import ValidationError

from calibration.sets.add_set import NewSet, Say, add_set
from models.child_process import OUT_OF_MEMORY, ChildDiedError, Send, run_apart
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import ModelSet

CLEAN_UP_S = 60.0  # after Ctrl-C: removing a staged set waits until a runtime's call returns


def add_set_apart(new: NewSet, into: Path, *, is_replaced: bool, say: Say) -> ModelSet:
    """Create the set like :func:`calibration.sets.add_set.add_set`, in another process.

    Raises:
        ModelSetError: what that function raises, or a file crashed the process.

    """
    try:
        made: Path = run_apart(
            _folder_of_added,
            *(new, into, is_replaced),
            heard=lambda said: say(*said),
            patience_s=CLEAN_UP_S,
        )
    except ChildDiedError as error:
        files = ", ".join(str(path) for _, path in new.members)
        what_died = f"{files}: the process that read this died ({error})"
        if str(error) == OUT_OF_MEMORY:
            raise ModelSetError(what_died) from None
        which = "" if len(new.members) == 1 else " Add them one by one to see which"
        raise ModelSetError(
            f"{what_died}: a file is damaged, or its runtime cannot take it. Export it again, or "
            f"try another --runtime.{which}"
        ) from None
    return ModelSet(made, read_manifest(made))


def _folder_of_added(new: NewSet, into: Path, is_replaced: bool, send: Send) -> Path:
    made = add_set_here(new, into, is_replaced=is_replaced, say=lambda *said: send(said))
    return made.folder


def add_set_here(new: NewSet, into: Path, *, is_replaced: bool, say: Say) -> ModelSet:
    """Create the set in this process, with the manifest's errors as one line.

    Raises:
        ModelSetError: as of :func:`add_set_apart`, except for a crash.

    """
    try:
        return add_set(new, into, is_replaced=is_replaced, say=say)
    except ValidationError as error:
        raise ModelSetError(_in_a_line(error)) from None


def _in_a_line(error: ValidationError) -> str:
    """Return the first invalid value of a manifest, and why it is invalid, as one line."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "set"
    value = first["input"]
    shown = f" (given: {value!r})" if isinstance(value, str | int | float) else ""
    return f"{where}: {first['msg']}{shown}"
