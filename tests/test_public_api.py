"""The public names: exported by hand, found where they say, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import re
from importlib.util import find_spec

import pytest

import quire
import quire.errors
from quire.errors import MissingDependencyError


def test_every_exported_name_resolves() -> None:
    assert {name: getattr(quire, name) for name in quire.__all__}.keys() == set(quire.__all__)


def test_exports_are_sorted_and_are_the_lazy_names() -> None:
    assert quire.__all__ == sorted(quire.__all__)
    assert set(quire.__all__) - {"__version__"} == set(quire._HOMES)
    assert set(quire.__all__) <= set(dir(quire))


def test_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Documnet'"):
        quire.Documnet  # noqa: B018


@pytest.mark.parametrize("name", quire._MODULES)
def test_modules_are_attributes_of_the_package(name: str) -> None:
    try:
        module = getattr(quire, name)
    except MissingDependencyError as error:
        assert find_spec(str(error.name)) is None
        assert "pip install" in str(error)
    else:
        assert module is importlib.import_module(f"quire.{name}")


def test_every_package_exports_what_it_lists() -> None:
    for module in pkgutil.walk_packages(quire.__path__, "quire."):
        if module.ispkg and "._" not in module.name:
            try:
                package = importlib.import_module(module.name)
                assert all(hasattr(package, name) for name in package.__all__), module.name
            except MissingDependencyError as error:
                assert find_spec(str(error.name)) is None
                assert "pip install" in str(error)


def test_every_error_is_exported_and_in_the_tree() -> None:
    errors = {
        name
        for name, value in vars(quire.errors).items()
        if isinstance(value, type) and issubclass(value, quire.QuireError)
    }
    assert errors == set(quire.errors.__all__)
    drawn = set(re.findall(r"\b\w+Error\b(?=\(|\n| )", quire.errors.__doc__ or ""))
    assert errors <= drawn


def test_errors_are_subclasses_of_builtin_errors() -> None:
    assert issubclass(quire.errors.PathError, (KeyError, AttributeError))
    assert str(quire.errors.PathError("no field 'x'")) == "no field 'x'"
    assert issubclass(quire.errors.ImportOrderError, ImportError)
    assert issubclass(quire.errors.RowIndexError, IndexError)
