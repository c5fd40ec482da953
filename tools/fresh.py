"""Run both commands of README.md on a fresh system: a minimal Debian with only Python, in a chroot.

    nox -s fresh                                 # or: nox -s fresh -- tests/columns tests/viewer

The settings of pip and npm, certificates and proxies are copied from the host, so that the package indexes can be
reached. The chroot runs in its own mount namespace, so that nothing stays mounted. Prints the output of both commands
and a summary.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
PASSED_ON = re.compile(r"(?i)^(pip_|npm_config_|node_extra_|ssl_cert|curl_ca|requests_ca|https?_proxy|no_proxy|CI$)")
USER = 1000


def main() -> None:
    """Build the root, run the commands, and remove the root."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", default="bookworm", help="release of Debian; bookworm has Python 3.11")
    parser.add_argument("--root", type=Path, help="existing root folder, which is kept")
    options, arguments = parser.parse_known_args()
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        sys.exit("a chroot needs root and debootstrap: apt-get install debootstrap")
    folder = options.root or Path(tempfile.mkdtemp(prefix="quire-fresh-"))
    try:
        if not (folder / "etc").exists():
            packages = "--include=python3,python3-venv,ca-certificates"
            subprocess.run(["debootstrap", "--variant=minbase", packages, options.suite, str(folder)], check=True)
        prepare(folder)
        results = [run(folder, command) for command in readme_commands(arguments)]
        print_summary(folder, results)
    finally:
        if options.root is None:
            shutil.rmtree(folder)
    sys.exit(any(code for _, code, _, _ in results))


def readme_commands(arguments: list[str]) -> list[str]:
    """Return the commands of README.md for the demo and the tests, with arguments for the tests."""
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (python -m pip install nox && python -m nox -s \w+)", text, re.MULTILINE)
    assert [command.split()[-1] for command in commands] == ["demo", "tests"], commands
    return [
        commands[0],
        shlex.join([*commands[1].split(), "--", *arguments]).replace("'&&'", "&&") if arguments else commands[1],
    ]


def prepare(folder: Path) -> None:
    """Create a user with the sources and the settings for the package indexes."""
    for name in ("resolv.conf", "hosts", "pip.conf", "ssl/certs/ca-certificates.crt"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), folder / "etc" / name)
    home = folder / "home" / "user"
    home.mkdir(exist_ok=True)
    users = folder / "etc" / "passwd"
    if "/home/user" not in users.read_text():
        users.write_text(f"{users.read_text()}user:x:{USER}:{USER}::/home/user:/bin/sh\n")
    for name in (".npmrc", ".config/pip/pip.conf", ".pip/pip.conf"):
        if Path.home().joinpath(name).exists():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path.home() / name, home / name)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            target = home / "quire" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    subprocess.run(["chown", "-R", f"{USER}:{USER}", str(home)], check=True)


def local_folders() -> set[Path]:
    """Return the local folders in which pip looks for packages."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    values = [value for line in listed.stdout.splitlines() for value in line.partition("=")[2].strip("'\"").split()]
    paths = [Path(urlsplit(value).path) for value in values if value.startswith(("/", "file:"))]
    # The parent, because an index in a folder links to files next to it.
    return {path.parent for path in paths if path.is_dir() and path.parent != Path("/")}


def run(folder: Path, command: str) -> tuple[str, int, float, list[str]]:
    """Run a command in the root; return it with its exit code, its duration and its output."""
    mounts = ["mount -t proc proc proc", "mount --rbind /dev dev", "mount --bind /sys sys"]
    for path in sorted(local_folders()):
        inside = shlex.quote(str(path).lstrip("/"))
        mounts.append(f"mkdir -p {inside} && mount --bind -o ro {shlex.quote(str(path))} {inside}")
    environment = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
    as_root = bool(environment.get("CI"))
    home = "/root" if as_root else "/home/user"
    environment |= {"HOME": home, "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
    # README.md says to run the commands in a virtual environment.
    steps = "cd /home/user/quire && { [ -d .venv ] || python3 -m venv .venv; } && . .venv/bin/activate && " + command
    user = "" if as_root else f"--userspec={USER}:{USER}"
    script = " && ".join([*mounts, f"exec chroot {user} . /bin/sh -c {shlex.quote(steps)}"])
    print(f"\n$ {command}", flush=True)
    started = time.monotonic()
    lines = []
    with subprocess.Popen(
        ["unshare", "--mount", "--fork", "--kill-child", "/bin/sh", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return command, process.returncode, time.monotonic() - started, lines


def print_summary(folder: Path, results: list[tuple[str, int, float, list[str]]]) -> None:
    """Print the commands, their results, and the tests that were not run."""
    release = (folder / "etc" / "debian_version").read_text().strip()
    print(f"\nSummary: Debian {release}, with only Python installed")
    for command, code, seconds, lines in results:
        print(f"  {command}\n    {'passed' if code == 0 else f'FAILED with {code}'} in {seconds / 60:.1f} minutes")
        for line in lines:
            if re.search(r"^(NOT RUN|Done in|LEFT OUT)|\d+ passed|\d+ failed|without a wheel", line):
                print(f"    {line}")
    size = sum(path.lstat().st_size for path in folder.joinpath("home").rglob("*") if path.is_file())
    print(f"  {size / 1e9:.1f} GB installed and created")


if __name__ == "__main__":
    main()
