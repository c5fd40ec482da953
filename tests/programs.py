"""Programs that some tests need and that pip cannot install: Java for Spark, and Chromium for the viewer.

Used by tests/conftest.py and by noxfile.py, so it imports only the standard library.
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
"""The minimum Java version of Spark 4."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""The commands of installed browsers."""


@cache
def java_version() -> int | None:
    """Return the major version of the Java that Spark would start, or None."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else "java"
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(match[1]) if match else None


def has_java() -> bool:
    """Return whether Java is new enough for Spark."""
    return (java_version() or 0) >= JAVA


@cache
def java_package() -> str:
    """Return the oldest apt package with a Java that is new enough; it depends on the release of Debian or Ubuntu."""
    command = ["apt-cache", "search", "--names-only", "^openjdk-[0-9]+-jre-headless$"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        listed = ""
    versions = [int(number) for number in re.findall(r"^openjdk-(\d+)-", listed, re.MULTILINE)]
    return f"openjdk-{min((v for v in versions if v >= JAVA), default=JAVA)}-jre-headless"


def java_command() -> str:
    """Return the command that installs Java."""
    if sys.platform == "darwin":
        return f"brew install openjdk@{JAVA}"
    return f"apt-get install {java_package()}" if shutil.which("apt-get") else f"install Java {JAVA} or newer"


def find_chromium() -> str | None:
    """Return the path of a browser: an installed one, or the one that nox has added at the end of PATH."""
    return next((path for name in CHROMIUM if (path := shutil.which(name))), None)


def chromium_command() -> str:
    """Return the command that installs a browser."""
    return "brew install --cask chromium" if sys.platform == "darwin" else "apt-get install chromium"
