"""Batches as pytrees: of torch (`torch.utils._pytree`, also its C++ version), of optree and of JAX.

The leaves are the tensors of a batch, including those of nested documents. Texts, ids, missing values and offsets are
in the structure. Two structures are equal if their columns are, whatever the texts, so that a function that was
compiled for one batch is used for the next.

Libraries look up the exact class of a node in a registry. A class is registered when its first batch with tensors of
the library is made, or its first batch of a dataset, and never before the library is imported. A registry refers to its
classes for ever, so classes whose batches have other tensors are not registered, and can be collected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from quire._lowlevel.forks import ForkSafeLock
from quire.columns import (
    Columns,
    columns_from_key,
    join_tensors,
    mark_lost,
    split_tensors,
    structure_key,
    tensor_paths,
)
from quire.schema import FieldKind

TORCH, JAX, OPTREE = 1, 2, 4
ALL = TORCH | JAX | OPTREE
"""The flags of `DocumentBatch._pytrees`: the libraries that a class is registered with."""

_registering = ForkSafeLock()
_traced_types: dict[type[Any], bool] = {}


class BatchStructure:
    """A batch without its tensors, as the structure of a pytree.

    Equality and hash ignore texts, ids and the number of rows; see `structure_key`.
    """

    __slots__ = ("_key", "columns", "guard", "state")

    def __init__(self, columns: Columns, guard: Any, state: Any) -> None:
        self.columns, self.guard, self.state = columns, guard, state
        self._key: tuple[Any, ...] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The part that is compared."""
        if self._key is None:
            self._key = (self.guard is not None, structure_key(self.columns))
        return self._key

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, BatchStructure) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<structure of {self.columns.schema.name}>"


def flatten_batch(batch: Any) -> tuple[list[Any], BatchStructure]:
    """Return the tensors of a batch, and its structure."""
    leaves: list[Any] = []
    columns = split_tensors(batch._columns, leaves)
    return leaves, BatchStructure(columns, batch._guard, getattr(batch, "_state", None))


def unflatten_batch(batch_type: type[Any], structure: BatchStructure, leaves: Iterable[Any]) -> Any:
    """Return a batch with other tensors; with placeholders of a compiler, without texts and ids."""
    leaves, columns = list(leaves), structure.columns
    traced = any(map(_is_traced, set(map(type, leaves))))
    if traced:
        columns = mark_lost(columns)
    batch = object.__new__(batch_type)
    object.__setattr__(batch, "_columns", join_tensors(columns, iter(leaves), traced=traced))
    object.__setattr__(batch, "_guard", structure.guard)
    object.__setattr__(batch, "_state", None if traced else structure.state)
    return batch


def _is_traced(tp: type[Any]) -> bool:
    """Return whether values of a type are placeholders of `torch.export` or JAX, which are found by their names."""
    traced = _traced_types.get(tp)
    if traced is None:
        traced = any(
            base.__module__.startswith("torch._subclasses.")
            or (base.__name__ == "Tracer" and base.__module__.startswith("jax"))
            for base in tp.__mro__
        )
        _traced_types[tp] = traced
    return traced


# --- registration


def register_pytree(batch_type: type[Any], columns: Columns | None = None) -> None:
    """Register a class with the libraries that are loaded; with `columns`, only with those whose tensors they hold."""
    modules = sys.modules  # this runs for every batch
    loaded = TORCH * ("torch" in modules) | JAX * ("jax" in modules) | OPTREE * ("optree" in modules)
    due = loaded & ~batch_type._pytrees
    if due and columns is not None:
        due &= _libraries_of(columns)
    if not due:
        return
    with _registering:
        for flag, register in _REGISTER.items():
            if due & flag & ~batch_type._pytrees and register(batch_type):
                batch_type._pytrees |= flag
    # Batches of nested documents are made when they are read, which may be inside of a compiled function.
    for field in batch_type.document_type.document_schema().fields:
        if field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and not field.recursive:
            nested = batch_type._of(field.document_type)
            if batch_type._pytrees & ~nested._pytrees:
                register_pytree(nested)


def _libraries_of(columns: Columns) -> int:
    """Return the libraries that have pytrees of the tensors of columns, including those of nested documents."""
    libraries = 0
    if not columns.is_deferred:  # they are gathered when they are read, and have no tensors
        for column in columns.columns.values():
            for child in column.children:
                libraries |= _libraries_of(child)
            if not column.children:
                for framework in column.frameworks:
                    libraries |= _OF_FRAMEWORK.get(framework.name, 0)
    return libraries


def _functions(batch_type: type[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def unflatten(structure: BatchStructure, leaves: Iterable[Any]) -> Any:
        return unflatten_batch(batch_type, structure, leaves)

    def flatten_with_paths(batch: Any) -> tuple[list[tuple[str, Any]], BatchStructure]:
        leaves, structure = flatten_batch(batch)
        return list(zip(tensor_paths(structure.columns), leaves, strict=True)), structure

    return unflatten, flatten_with_paths


def _register_with_torch(batch_type: type[Any]) -> bool:
    if not hasattr(sys.modules["torch"], "Tensor"):
        return False  # its import has not finished
    import torch.utils._pytree as pytree  # noqa: PLC0415 - only where torch is loaded

    unflatten, flatten_with_paths = _functions(batch_type)

    def unflatten_leaves(leaves: Iterable[Any], structure: BatchStructure) -> Any:
        return unflatten(structure, leaves)

    def flatten_with_keys(batch: Any) -> tuple[list[tuple[Any, Any]], BatchStructure]:
        pairs, structure = flatten_with_paths(batch)
        return [(pytree.MappingKey(path), leaf) for path, leaf in pairs], structure

    # `torch.export.save` writes structures as JSON: the key, from which columns without texts and ids are made.
    def load(dumped: Any) -> BatchStructure:
        guard, key = dumped
        columns = columns_from_key(batch_type.document_type.document_schema(), key)
        return BatchStructure(columns, batch_type._make_guard(columns) if guard else None, None)

    options: dict[str, Any] = {"flatten_with_keys_fn": flatten_with_keys}
    pytree.register_pytree_node(
        batch_type,
        flatten_batch,
        unflatten_leaves,
        serialized_type_name=f"{batch_type.__module__}.{batch_type.__qualname__}",
        to_dumpable_context=lambda structure: structure.key,
        from_dumpable_context=load,
        **options,
    )
    return True


def _register_with_jax(batch_type: type[Any]) -> bool:
    if not hasattr(sys.modules["jax"], "Array"):
        return False  # its import has not finished
    from jax import tree_util  # noqa: PLC0415 - only where jax is loaded

    unflatten, flatten_with_paths = _functions(batch_type)

    def flatten_with_keys(batch: Any) -> tuple[list[tuple[Any, Any]], BatchStructure]:
        pairs, structure = flatten_with_paths(batch)
        return [(tree_util.DictKey(path), leaf) for path, leaf in pairs], structure

    tree_util.register_pytree_with_keys(batch_type, flatten_with_keys, unflatten, flatten_batch)
    return True


def _register_with_optree(batch_type: type[Any]) -> bool:
    optree: Any = sys.modules["optree"]
    if not hasattr(optree, "register_pytree_node"):
        return False
    unflatten, _ = _functions(batch_type)

    def flatten(batch: Any) -> tuple[list[Any], BatchStructure, list[str]]:
        leaves, structure = flatten_batch(batch)
        return leaves, structure, list(tensor_paths(structure.columns))

    optree.register_pytree_node(batch_type, flatten, unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)
    return True


# Registered functions refer to no batch, so that registries keep classes alive, but no data.
_OF_FRAMEWORK = {"torch": TORCH | OPTREE, "jax": JAX | OPTREE}
_REGISTER = {TORCH: _register_with_torch, JAX: _register_with_jax, OPTREE: _register_with_optree}
