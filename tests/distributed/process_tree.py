"""The child processes of a process, and the addresses they listen on."""

from __future__ import annotations

import os
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the children, their children, and so on."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
            parents.setdefault(parent, []).append(int(entry.name))
    actual, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        actual += children
        waiting += children
    return actual


def listening(pid: int) -> list[str]:
    """Return the addresses, in hexadecimal, on which a process and its descendants accept connections."""
    inodes = {inode for each in [pid, *descendants(pid)] for inode in _sockets(each)}
    actual = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                actual.append(words[1].partition(":")[0])
    return actual


def strangers(pid: int) -> list[str]:
    """Return the addresses that are not loopback: 127.x.x.x, ::1, or 127.x.x.x as an IPv6 address."""
    return [address for address in listening(pid) if not _is_loopback(address)]


def _is_loopback(address: str) -> bool:
    if address == "00000000000000000000000001000000":
        return True
    return address[-2:] == "7F" and address[:-8] in ("", "0000000000000000FFFF0000")


def _sockets(pid: int) -> set[str]:
    actual = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)  # noqa: PTH115 - it is no path
            if target.startswith("socket:["):
                actual.add(target[8:-1])
    except OSError:
        pass  # it has ended
    return actual
