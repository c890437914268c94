"""A made /proc/self and the control groups that it names, as version 1 or 2 has them."""

from pathlib import Path


class CgroupFiles:
    """Writes the files of groups below ``folder``; ``proc`` is the process's."""

    def __init__(self, folder: Path) -> None:
        self.proc, self._mounts = folder / "proc", folder / "sys fs"
        self.proc.mkdir(parents=True)
        self._lines: list[str] = []
        self._mountinfo = ["23 1 0:21 / /proc rw - proc proc rw"]
        self._write()

    def mount_v1(self, controllers: str, own: str, root: str = "/") -> None:
        """Mount a hierarchy of version 1; the process is in its group ``own``."""
        number = len(self._lines) + 2
        self._lines.append(f"{number}:{controllers}:{own}")
        self._mount(
            f"{number} 31 0:{number} {root}", controllers, f"cgroup cgroup rw,{controllers}"
        )

    def mount_v2(self, own: str, root: str = "/") -> None:
        """Mount the hierarchy of version 2; the process is in its group ``own``."""
        self._lines.append(f"0::{own}")
        self._mount(f"41 31 0:38 {root}", "v2", "cgroup2 cgroup2 rw,nsdelegate")

    def set(self, hierarchy: str, group: str, **files: object) -> None:
        """Write a group's files; in their names ``__`` is the dot."""
        folder = self._mounts / hierarchy / group.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n", "ascii")

    def _mount(self, what: str, hierarchy: str, kind: str) -> None:
        (self._mounts / hierarchy).mkdir(parents=True)
        where = str(self._mounts / hierarchy).replace(" ", "\\040")
        self._mountinfo.append(f"{what} {where} rw,relatime shared:9 - {kind}")
        self._write()

    def _write(self) -> None:
        (self.proc / "cgroup").write_text("".join(f"{line}\n" for line in self._lines))
        (self.proc / "mountinfo").write_text("".join(f"{line}\n" for line in self._mountinfo))
