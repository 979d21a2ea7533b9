"""Whether what is in a folder can be run as code: only where nobody but this user and root could have put it there."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def writers(path: Path) -> str | None:
    """Who but this user and root could put a file into a folder, or another folder in its place, in words; None where nobody could.

    What is not there yet will be made by this user. A folder in which nobody may remove what is another's (``/tmp``) is no danger to what
    is inside of it.
    """
    if os.name != "posix":
        return None
    place = path.absolute()
    held = place.resolve()
    for one in dict.fromkeys((held, *held.parents, place, *place.parents)):
        try:
            found = one.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if found.st_uid not in (0, os.getuid()):
            return f"{one} belongs to another user"
        if stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_ISVTX and one not in (held, place)):
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"anybody may write to {one}"
        if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
            return f"a group may write to {one}"
    return None


def _is_own_group(group: int) -> bool:
    """Whether it has no member but this user, as some systems give one to everybody, or is root's."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == 0 or (
        group == user.pw_gid and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}
    )
