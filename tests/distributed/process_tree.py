"""The processes that a process has started, and where they listen."""

from __future__ import annotations

import os
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
            parents.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def listening(pid: int) -> list[str]:
    """The addresses, as hexadecimal numbers, on which a process and its descendants take connections."""
    inodes = {inode for each in [pid, *descendants(pid)] for inode in _sockets(each)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.append(words[1].partition(":")[0])
    return found


def strangers(pid: int) -> list[str]:
    """Those of them that are not of loopback: 127.x.x.x, ::1, or 127.x.x.x as IPv6 writes it."""
    return [address for address in listening(pid) if not _is_loopback(address)]


def _is_loopback(address: str) -> bool:
    if address == "00000000000000000000000001000000":
        return True
    return address[-2:] == "7F" and address[:-8] in ("", "0000000000000000FFFF0000")


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)  # noqa: PTH115 - it is no path
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass  # it has ended
    return found
