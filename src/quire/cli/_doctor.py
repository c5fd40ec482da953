"""`quire doctor`: what is installed, which extras work, what they need from the system, and how fast the cache is."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire._installation import DISTRIBUTION, install_command
from quire._lowlevel.shared import measure_shared_memory
from quire.cli._command import add_command, add_json_argument, parse_names, write_json
from quire.display import format_bytes
from quire.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from quire.cli._command import Subparsers

FAULTY = 1
"""The exit code if something that is installed does not work, or if an extra that was asked for is missing."""
_EXAMPLES = """
quire doctor
quire doctor --quick
quire doctor --extras torch,parquet
quire doctor --json
"""
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<bounds>[^;]*)(?:;(?P<marker>.*))?")
_LOWEST = re.compile(r">=\s*([\d.]+)")
_PYTHON = re.compile(r"python_version\s*(>=|<)\s*['\"](\d+)\.(\d+)['\"]")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_MODULES = {
    "google-re2": "re2",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health.v1.health_pb2",
    "grpcio-reflection": "grpc_reflection.v1alpha.reflection",
    "huggingface-hub": "huggingface_hub",
    "opentelemetry-api": "opentelemetry.trace",
    "paddlepaddle": "paddle",
    "pillow": "PIL.Image",
    "protobuf": "google.protobuf",
    "pylance": "lance",
}
"""The modules of packages that are not called like their package."""
_VARIANTS = {
    "tensorflow": ("tensorflow-cpu", "tensorflow-macos"),
    "paddlepaddle": ("paddlepaddle-gpu",),
    "pillow": ("pillow-simd",),
}
"""Packages that provide the module of another one."""
_IMPORT_SECONDS = 120
_JAVA = 17
"""The oldest Java that Spark 4 runs on."""
_CACHE_PROBE_BYTES = 64 << 20
_TORCH_PROBE = """
import json, torch
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"cuda": torch.version.cuda, "devices": devices, "threads": torch.get_num_threads()}))
"""


@dataclass(frozen=True)
class Package:
    """A package that quire or one of its extras requires, and what is installed of it."""

    name: str
    lowest: str | None
    version: str | None
    fault: str | None = None
    """Why the installed package cannot be used."""

    @property
    def module(self) -> str:
        """The module that is imported to check that the package works."""
        return _MODULES.get(self.name, self.name.replace("-", "_"))

    @property
    def state(self) -> str:
        """The package in a few words."""
        return f"{self.name} {self.version or 'missing'}" + (f" ({self.fault})" if self.fault else "")


def add_doctor(commands: Subparsers) -> None:
    """Add `quire doctor`."""
    summary = "check the installation: packages, extras, torch, Java, Ray, Spark, and the speed of the cache"
    parser = add_command(commands, "doctor", summary, _EXAMPLES, run)
    parser.add_argument("--extras", help="comma-separated extras to check; a missing one is an error (default: all)")
    parser.add_argument("--quick", action="store_true", help="import no package, and leave the cache unmeasured")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report; return `FAULTY` if something does not work."""
    selected = parse_names(options.extras)
    core, extras = read_requirements(importlib.metadata.requires(DISTRIBUTION) or [])
    if unknown := [name for name in selected or () if name not in extras]:
        raise OptionError(f"there is no extra {unknown[0]!r}. {did_you_mean(unknown[0], extras)}")
    extras = {name: extras[name] for name in selected or extras if name != "all"}
    packages = find_packages([core, *extras.values()])
    if not options.quick:
        packages = import_packages(packages)
    states = {name: describe_extra(name, [packages[package] for package in lows]) for name, lows in extras.items()}
    cache = probe_cache(measure=not options.quick)
    report: dict[str, Any] = {
        "quire": {"version": importlib.import_module("quire").__version__, "folder": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": describe_system(),
        "packages": [asdict(packages[name]) for name in core],
        "extras": states,
        "torch": probe_torch(packages.get("torch"), quick=options.quick),
        "java": probe_java(),
        "ray": probe_ray(packages.get("ray")),
        "spark": probe_spark(packages.get("pyspark")),
        "cache": cache,
    }
    faults = [
        f"{package.name} {package.version or ''}: {package.fault}" for package in packages.values() if package.fault
    ]
    faults += [f"{name} is missing: reinstall {DISTRIBUTION}" for name in core if packages[name].version is None]
    faults += [
        f"the extra {name} is not complete: {states[name]['install']}"
        for name in selected or ()
        if states[name]["install"]
    ]
    faults += [f"the cache: {cache['fault']}"] if cache["fault"] else []
    report["faults"] = faults
    if options.json:
        write_json(report)
    else:
        _print_report(report)
    return FAULTY if faults else 0


# --- packages and extras


def read_requirements(lines: Iterable[str]) -> tuple[dict[str, str | None], dict[str, dict[str, str | None]]]:
    """Return the packages that quire requires, and those of every extra, each with its lowest version.

    The lines are those of the metadata, such as `obstore>=0.12; python_version >= '3.11' and extra == 'remote'`; only
    the markers that quire itself uses are understood.
    """
    core: dict[str, str | None] = {}
    extras: dict[str, dict[str, str | None]] = {}
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is None or not all(_holds(*condition) for condition in _PYTHON.findall(match["marker"] or "")):
            continue
        name, bound = match["name"].lower().replace("_", "-"), _LOWEST.search(match["bounds"])
        extra = _EXTRA.search(match["marker"] or "")
        target = core if extra is None else extras.setdefault(extra[1], {})
        target[name] = bound[1] if bound else None
    return core, extras


def _holds(operator: str, major: str, minor: str) -> bool:
    is_newer = sys.version_info[:2] >= (int(major), int(minor))
    return is_newer if operator == ">=" else not is_newer


def find_packages(groups: Iterable[Mapping[str, str | None]]) -> dict[str, Package]:
    """Return the packages of all groups by name, with their installed versions."""
    packages: dict[str, Package] = {}
    for name, lowest in [item for group in groups for item in group.items()]:
        package = Package(name, lowest, _installed_version(name))
        if package.version is not None and lowest is not None and _release(package.version) < _release(lowest):
            package = Package(name, lowest, package.version, f"too old: quire needs {lowest} or newer")
        packages[name] = package
    return packages


def _installed_version(name: str) -> str | None:
    for candidate in (name, *_VARIANTS.get(name, ())):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(candidate)
    return None


def _release(version: str) -> list[int]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    release = [int(number) for number in numbers[0].split(".")] if numbers else []
    while release and not release[-1]:  # 3.0 is 3
        release.pop()
    return release


def import_packages(packages: Mapping[str, Package]) -> dict[str, Package]:
    """Import every installed package in a process of its own, because some cannot be loaded next to each other."""

    def check(package: Package) -> Package:
        if package.version is None or package.fault:
            return package
        output = run_python(f"import {package.module}", _IMPORT_SECONDS)
        if output.returncode == 0:
            return package
        last = (output.stderr.strip().splitlines() or [f"exit code {output.returncode}"])[-1]
        return Package(package.name, package.lowest, package.version, f"cannot be imported: {last[:200]}")

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(packages, pool.map(check, packages.values()), strict=True))


def run_python(code: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, which finds the same packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        return subprocess.run(  # noqa: S603 - this interpreter, and code of this module
            command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {seconds:g} s")


def describe_extra(name: str, packages: list[Package]) -> dict[str, Any]:
    """Return whether an extra works, its packages, and the command that installs what is missing."""
    missing = [package.name for package in packages if package.version is None]
    faulty = [package for package in packages if package.fault]
    state = "missing" if missing else "faulty" if faulty else "works"
    return {
        "state": state,
        "packages": [asdict(package) for package in packages],
        "install": None if state == "works" else install_command(name),
    }


# --- what is outside of Python packages


def describe_system() -> dict[str, Any]:
    """Return the system, the processors that this process may use, and the size of the shared memory."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": len(affinity(0)) if affinity else os.cpu_count(),
        "shared_memory_bytes": measure_shared_memory(),  # workers of a DataLoader pass batches through it
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("QUIRE_")},
    }


def probe_torch(package: Package | None, *, quick: bool) -> dict[str, Any] | None:
    """Return the version of torch, and the GPUs that it finds; None if it is missing or was not asked for."""
    if package is None or package.version is None:
        return None
    probe: dict[str, Any] = {"version": package.version, "cuda": None, "devices": None, "threads": None}
    if not quick and package.fault is None:
        output = run_python(_TORCH_PROBE, _IMPORT_SECONDS)
        if output.returncode == 0:
            probe |= importlib.import_module("json").loads(output.stdout)
    return probe


def probe_java() -> dict[str, Any]:
    """Return the Java that Spark would start, and whether it is new enough."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    java: dict[str, Any] = {"program": program, "version": None, "is_new_enough": False}
    if program is not None:
        with suppress(OSError, subprocess.TimeoutExpired):
            command = [program, "-version"]
            done = subprocess.run(  # noqa: S603 - the Java of the user's own environment
                command, capture_output=True, text=True, check=False, timeout=30
            )
            if match := re.search(r'version "(?:1\.)?(\d+)([\w.+-]*)', done.stderr):
                java |= {"version": f"{match[1]}{match[2]}", "is_new_enough": int(match[1]) >= _JAVA}
    return java


def probe_ray(package: Package | None) -> dict[str, Any] | None:
    """Return the version of Ray, and the cluster that it would use."""
    if package is None or package.version is None:
        return None
    return {"version": package.version, "address": os.environ.get("RAY_ADDRESS")}


def probe_spark(package: Package | None) -> dict[str, Any] | None:
    """Return the version of PySpark, and the installation of Spark that it would use."""
    if package is None or package.version is None:
        return None
    return {"version": package.version, "home": os.environ.get("SPARK_HOME"), "master": os.environ.get("MASTER")}


def probe_cache(*, measure: bool) -> dict[str, Any]:
    """Return the folder of the cache, its free space, and the speed at which a file there is written and read."""
    cache: dict[str, Any] = {"folder": None, "free_bytes": None, "write_bytes_per_second": None}
    cache |= {"read_bytes_per_second": None, "fault": None}
    if find_spec("pyarrow") is None or find_spec("fsspec") is None:  # the cache is one of datasets
        return cache
    folder = importlib.import_module("quire.storage").default_folder()
    cache["folder"] = str(folder)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        cache["free_bytes"] = shutil.disk_usage(existing).free
        if measure:
            with tempfile.TemporaryDirectory(prefix="quire-doctor-", dir=existing) as place:
                size = min(_CACHE_PROBE_BYTES, cache["free_bytes"] // 4)
                cache |= _measure_disk(Path(place, "probe"), size)
    except OSError as error:
        cache["fault"] = f"{error.strerror or error}: {existing}. Set QUIRE_CACHE to a folder that can be written to"
    return cache


def _measure_disk(path: Path, size: int) -> dict[str, Any]:
    block, count = os.urandom(1 << 20), max(size >> 20, 1)

    def write() -> None:
        with path.open("wb") as file:
            for _ in range(count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # otherwise the file comes from memory, where it has just been written
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass

    speeds = {}
    steps: list[tuple[str, Callable[[], None]]] = [("write", write), ("read", read)]
    for name, step in steps:
        started = time.perf_counter()
        step()
        speeds[f"{name}_bytes_per_second"] = round(count * len(block) / (time.perf_counter() - started))
    return speeds


# --- the report as text


def _print_report(report: dict[str, Any]) -> None:
    system, cache, java, torch = report["system"], report["cache"], report["java"], report["torch"]
    shared = system["shared_memory_bytes"]
    lines = [
        ("quire", f"{report['quire']['version']} in {report['quire']['folder']}"),
        ("Python", f"{report['python']['version']} at {report['python']['executable']}"),
        ("system", f"{system['platform']}, {system['cpus']} CPUs"),
        ("shared memory", "unknown" if shared is None else format_bytes(shared)),
        ("packages", ", ".join(Package(**package).state for package in report["packages"])),
        ("torch", _describe_torch(torch)),
        ("Java", _describe_java(java)),
        ("Ray", _describe_engine(report["ray"], "address", "no cluster in RAY_ADDRESS: starts on this machine")),
        ("Spark", _describe_engine(report["spark"], "home", "the Spark in PySpark")),
        ("cache", _describe_cache(cache)),
        *((name, value) for name, value in system["environment"].items()),
    ]
    for name, value in lines:
        sys.stdout.write(f"{name:<15}{value}\n")
    sys.stdout.write("\nextras\n")
    for name, extra in report["extras"].items():
        words = ", ".join(Package(**package).state for package in extra["packages"])
        install = f": {extra['install']}" if extra["install"] else ""
        sys.stdout.write(f"  {name:<13}{extra['state']:<9}{words}{install}\n")
    sys.stdout.write("\n")
    for fault in report["faults"]:
        sys.stdout.write(f"problem: {fault}\n")
    if not report["faults"]:
        sys.stdout.write("no problems: everything that is installed can be used\n")


def _describe_torch(torch: dict[str, Any] | None) -> str:
    if torch is None:
        return "not installed"
    if torch["devices"] is None:
        return f"{torch['version']}"
    devices = ", ".join(torch["devices"]) or "no GPU"
    return f"{torch['version']}, {devices}, {torch['threads']} threads"


def _describe_java(java: dict[str, Any]) -> str:
    if java["version"] is None:
        return f"not found; Spark needs Java {_JAVA} or newer"
    return f"{java['version']} at {java['program']}" + (
        "" if java["is_new_enough"] else f"; Spark needs {_JAVA} or newer"
    )


def _describe_engine(engine: dict[str, Any] | None, place: str, otherwise: str) -> str:
    return "not installed" if engine is None else f"{engine['version']}, {engine[place] or otherwise}"


def _describe_cache(cache: dict[str, Any]) -> str:
    if cache["folder"] is None:
        return "needs the extra parquet"
    if cache["fault"]:
        return f"{cache['folder']}: {cache['fault']}"
    speeds = [
        f"{name}s {format_bytes(speed)}/s"
        for name in ("read", "write")
        if (speed := cache[f"{name}_bytes_per_second"]) is not None
    ]
    return ", ".join([cache["folder"], f"{format_bytes(cache['free_bytes'])} free", *speeds])
