"""Programs that some tests need and that pip cannot install: Java for Spark, and Chromium for the viewer.

Used by tests/conftest.py and by noxfile.py, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

JAVA = 17
"""The oldest Java that Spark 4 runs on."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""The names under which an installed browser is looked for."""


@cache
def java_version() -> int | None:
    """The major version of the Java that Spark would start, or None if there is none."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else "java"
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(found[1]) if found else None


def has_java() -> bool:
    """Whether Spark can run here."""
    return (java_version() or 0) >= JAVA


@cache
def java_package() -> str:
    """The oldest package of apt with a Java that is new enough: releases of Debian and Ubuntu have different ones."""
    command = ["apt-cache", "search", "--names-only", "^openjdk-[0-9]+-jre-headless$"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        listed = ""
    versions = [int(number) for number in re.findall(r"^openjdk-(\d+)-", listed, re.MULTILINE)]
    return f"openjdk-{min((v for v in versions if v >= JAVA), default=JAVA)}-jre-headless"


def java_command() -> str:
    """The command that installs Java on this machine."""
    if sys.platform == "darwin":
        return f"brew install openjdk@{JAVA}"
    return f"apt-get install {java_package()}" if shutil.which("apt-get") else f"install Java {JAVA} or newer"


def find_chromium() -> str | None:
    """The path of a browser: one that is installed, or the one that nox has added at the end of the path."""
    return next((path for name in CHROMIUM if (path := shutil.which(name))), None)


def chromium_command() -> str:
    """The command that installs a browser on this machine."""
    return "brew install --cask chromium" if sys.platform == "darwin" else "apt-get install chromium"
