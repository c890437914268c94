"""Result files, the user's folders, and names in folders that other users can write to.

Results are checked before hours of work, and written after them in one step: readers never see a
part of a file, and a full disk leaves the old one. Folders of the user follow the platform's rules;
an account may have no home.

In /tmp another user may have made a name first: as a link to a file of the victim's, as a pipe, or
as a folder whose contents they can replace. So names that others can know are opened or made by
:func:`open_ours`, :func:`locked` and :func:`make_folder` alone.
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models.errors import TandemError

APPLICATION = "tandem"
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
OF_ALL = stat.S_ISVTX | stat.S_IWOTH  # the mode of /tmp


class ResultFileError(TandemError):
    """A result cannot be written."""


class ForeignError(PermissionError):
    """A name is another user's, or neither file nor folder; its contents are left alone."""


def open_ours(path: str | Path, flags: int, mode: int = 0o600, folder: int | None = None) -> int:
    """Return the descriptor of a file or folder of this user's, or root's.

    No link is followed and no pipe waited for. ``flags`` must not have ``O_TRUNC``: owner and kind
    are known afterwards only. What ``O_EXCL`` made is ours, whoever owns it on a share.
    ``folder`` is the descriptor that a relative path starts from.

    Raises:
        ForeignError: it is another user's, a link, a pipe or device, or a file of two names.
        OSError: it cannot be opened.
    """
    # O_NONBLOCK: the opening of a pipe would wait for its other end.
    safe = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, safe, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise ForeignError(error.errno, "it is a link or a pipe", str(path)) from error
        raise
    if flags & os.O_EXCL or (problem := _problem_with(os.fstat(descriptor))) is None:
        return descriptor
    os.close(descriptor)
    raise ForeignError(errno.EPERM, problem, str(path))


def _problem_with(status: os.stat_result) -> str | None:
    if not _is_trusted(status):
        return f"it is another user's (uid {status.st_uid})"
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        return "it is neither file nor folder"
    # The other name, elsewhere, may be a victim's.
    return None if status.st_nlink == 1 else "it is a file with a second name"


@contextlib.contextmanager
def locked(
    path: str | Path,
    flags: int = os.O_RDWR,
    operation: int = fcntl.LOCK_EX,
    folder: int | None = None,
) -> Iterator[None]:
    """Hold the lock of a file, which the kernel releases however the process ends.

    ``flags`` must let it be written to, which a lock on NFS needs.

    Raises what :func:`open_ours` raises; BlockingIOError: ``LOCK_NB``, and another holds it.
    """
    descriptor = open_ours(path, flags, folder=folder)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def make_folder(path: str | Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, unless it is there.

    Raises:
        ForeignError: it, or a folder above it, was made by another user in a folder of all users.
        OSError: it cannot be made.
    """
    check_place(path)  # or folders would be made where a link of another user's leads
    Path(path).mkdir(mode, parents=True, exist_ok=True)
    check_place(path)


def check_place(path: str | Path) -> None:
    """Raise :class:`ForeignError` if another user made the path, or what it leads through.

    Another user's folder in one that not everybody can write to is a volume, as of a container.
    """
    for whole in {os.path.abspath(path), os.path.realpath(path)}:  # noqa: PTH100
        for place in (Path(whole), *Path(whole).parents):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status, above = place.lstat(), place.parent.stat()
                if above.st_mode & stat.S_IWOTH and not _is_trusted(status):
                    text = f"{place} is another user's (uid {status.st_uid})"
                    raise ForeignError(errno.EPERM, text, str(path))


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def why_not_written(folder: str | Path | None) -> str | None:
    """Make a folder of this user's alone; return why it cannot be written to, None if it can."""
    if folder is None:
        return "this account has no home folder"
    try:
        make_folder(folder)
        is_of_all = Path(folder).stat().st_mode & OF_ALL == OF_ALL
        reason = "all users write there: name a folder in it" if is_of_all else None
    except OSError as error:
        reason = error.strerror
    is_usable = reason is None and os.access(folder, os.W_OK | os.X_OK)
    return None if is_usable else f"cannot write to {folder} ({reason or 'it is read-only'})"


def check_can_write(path: Path | None) -> None:
    """Raise :class:`ResultFileError` if the result would have nowhere to go; - is stdout."""
    if path is None or str(path) == "-":
        return
    try:
        check_place(path)
        if _is_special(path):
            return
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it")
        partial = _partial(path.resolve())
        os.close(open_ours(partial, NEW))
        partial.unlink()
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
    except (OSError, RuntimeError) as error:
        problem = getattr(error, "strerror", "its links lead in a circle")
        raise ResultFileError(
            f"cannot write {path}: {problem}; name a file in a folder that can be written"
        ) from error


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write the file of ``--json``; - is stdout, None nothing."""
    text = json.dumps(content, indent=2)
    if str(path) == "-":
        print(text, flush=True)
    elif path is not None:
        write_result(path, text + "\n")


def write_result(
    path: Path, content: str | bytes, check: Callable[[Path], object] = lambda _: None
) -> None:
    """Write a file as :func:`write_whole` does; raise :class:`ResultFileError` on a full disk."""
    try:
        write_whole(path, content, check)
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror}; make room, or name another file"
        raise ResultFileError(problem) from error


def write_whole(
    path: Path,
    content: str | bytes,
    check: Callable[[Path], object] = lambda _: None,
    mode: int = 0o666,
) -> None:
    """Write bytes, or a text as UTF-8, unless ``check`` raises for the new file; follows a link.

    ``mode`` are the new file's permissions, less the umask. Raises :class:`OSError` if there is no
    room, or the folder cannot be written; :class:`ForeignError` if another user made the name, as
    a link to a victim's file, in a folder of all users.
    """
    check_place(path)
    data = content.encode() if isinstance(content, str) else content
    if _is_special(path):
        path.write_bytes(data)
        return
    path = path.resolve()
    partial = _partial(path)
    try:
        os.close(open_ours(partial, NEW, mode))  # before it has content
        partial.write_bytes(data)
        check(partial)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether the path is a device or a pipe, as /dev/stdout."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")


def with_home(path: str | Path) -> Path:
    """Return the path with ``~`` as the home folder, or as it is if there is none."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # Path's raises


def user_folder(kind: Callable[[str], Path], *below: str) -> Path | None:
    """Return a folder of the user's; None if neither HOME, XDG nor passwd names a home.

    ``kind`` is a function of platformdirs, as ``user_cache_path``.
    """
    try:
        folder = kind(APPLICATION).joinpath(*below)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older releases return "~/.cache" literally


def needed_folder(kind: Callable[[str], Path], *below: str) -> Path:
    """Return a folder of the user's.

    Raises:
        TandemError: there is no home, or another user made the folder.
    """
    if (folder := user_folder(kind, *below)) is None:
        raise TandemError("this account has no home folder; set HOME to one that can be written to")
    try:
        check_place(folder)
    except OSError as error:
        text = f"cannot use {folder}: {error.strerror}; set HOME to a folder of your own"
        raise TandemError(text) from error
    return folder
