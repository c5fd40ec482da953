"""The name of quire's distribution, and checks for another distribution that claims the package `quire`.

The distribution is called quire-ml. PyPI has another project called quire, whose package has the same import name: if
both are installed in one environment, their files overwrite each other. What can be detected depends on which
`quire/__init__.py` remains:

- ours, next to the metadata of the other distribution: `import quire` warns, since updating or removing either one
  will delete files of the other;
- the other one's, or none because the other one was removed and took the file along: our own modules refuse to be
  imported under it, with an error that names the file and the commands that repair it.
"""

from __future__ import annotations

import os
import sys
import warnings

DISTRIBUTION = "quire-ml"
_REPAIR = f"pip uninstall quire; pip install --force-reinstall --no-deps {DISTRIBUTION}"


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def check_package() -> None:
    """Raise ImportError if the package that is being imported as `quire` is not the one that this module belongs to."""
    package = sys.modules.get("quire")
    if package is None or getattr(package, "__distribution__", None) == DISTRIBUTION:
        return
    file = getattr(package, "__file__", None)
    state = f"{file} belongs to another distribution" if file else "its __init__.py is missing"
    raise ImportError(
        f"the package 'quire' is not the one of {DISTRIBUTION}: {state}. PyPI's 'quire' is another project with the "
        f"same import name, and installing or removing it changes the files of {DISTRIBUTION}. Run: {_REPAIR}",
        name="quire",
        path=file,
    )


def warn_about_other_distribution(file: str) -> None:
    """Warn if a distribution called `quire` is installed in the folder that holds this package.

    Lists that folder once: below a millisecond, where importing `importlib.metadata` takes tens of them.
    """
    folder = os.path.dirname(os.path.dirname(file))  # noqa: PTH120 - pathlib takes longer to import than quire
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:  # a zip file, or a frozen program
        return
    others = [name for name in names if name.startswith("quire-") and name.endswith((".dist-info", ".egg-info"))]
    if others:
        message = (
            f"{others[0]} is installed in {folder}: the distribution 'quire' is another project with the same import "
            f"name as {DISTRIBUTION}, and their files overwrite each other. Run: {_REPAIR}"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=3)


check_package()
