"""The folder that a run writes to, held open: the folder itself is the run's, and not what lies at its path."""

import os
from pathlib import Path

from lightning_llm.base.errors import StorageError

DELETED = " (deleted)"
"""What Linux adds to the path of an open folder that was deleted."""


class FolderGoneError(StorageError, OSError):
    """The folder of a run was renamed, replaced or deleted while it trained. `now`: its path, None if deleted."""

    def __init__(self, path: Path, now: Path | None):
        self.path, self.now = path, now
        what = "was deleted" if now is None else f"was moved to {now}"
        found = "and another folder lies there" if path.exists() else "and nothing lies there"
        super().__init__(f"{path} {what} during the run, {found}. Leave the folder of a run in place until it ends.")

    def __reduce__(self) -> tuple[type["FolderGoneError"], tuple[Path, Path | None]]:
        return type(self), (self.path, self.now)


class HeldFolder:
    """One folder, known by its inode from `open` to `close`; before and after, by its path."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._file: int | None = None

    def open(self) -> None:
        """Hold the folder that lies at the path now."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Let go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def now(self) -> Path | None:
        """Return where the folder is now, None if it was deleted."""
        if self._file is None:
            return self.path
        try:
            held = os.fstat(self._file)
        except OSError:  # a stale handle of network storage: another machine deleted it
            return None
        try:
            if os.path.samestat(held, os.stat(self.path)):
                return self.path
        except FileNotFoundError:
            pass
        except OSError:  # storage that is away for a while has moved nothing
            return self.path
        return self._found_elsewhere(held)

    def check(self) -> None:
        """Return if the folder still lies at its path.

        Raises:
            FolderGoneError: it does not.
        """
        now = self.now()
        if now != self.path:
            raise FolderGoneError(self.path, now)

    def _found_elsewhere(self, held: os.stat_result) -> Path | None:
        try:
            path = os.readlink(f"/proc/self/fd/{self._file}")
            return Path(path) if os.path.samestat(held, os.stat(path)) else None
        except OSError:
            return None
