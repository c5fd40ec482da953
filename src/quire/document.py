"""BaseDocument: a pydantic model that knows its own plan, its tensors and how it looks."""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PrivateAttr
from pydantic import Field as PydanticField
from pydantic_core import CoreSchema
from typing_extensions import Self, dataclass_transform

from quire import _parametrize
from quire._changes import copy_document, packed_state, set_or_restore, update_document
from quire._equality import equal_values
from quire._plan import complete_core_schema
from quire.display import document_tree, nested_rows, print_document, print_schema, render_html, short_value
from quire.schema import Schema, build_schema
from quire.typing import ID, new_id

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Cell:
    """Holds a class's compiled schema. Pickled empty: a class that travels by value compiles its schema anew."""

    __slots__ = ("schema",)

    def __init__(self) -> None:
        self.schema: Schema | None = None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _Cell, ()


@dataclass_transform(kw_only_default=True, field_specifiers=(PydanticField, PrivateAttr))
class DocumentMeta(ModelMetaclass):
    """Lets fields be called like methods, and pickles parametrised generic documents by recipe."""

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        main: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> type:
        """Make a document class; see `BaseDocument` for `main`."""
        shadowing = _shadowing(bases, namespace)
        for field in shadowing:
            namespace.setdefault(field, PydanticField())  # or the method would be taken for its default
        namespace["__quire_cell__"] = _Cell()
        if main is not None:
            namespace["__quire_main__"] = (main,) if isinstance(main, str) else tuple(main)
        if not shadowing:
            cls: Any = super().__new__(mcls, name, bases, namespace, **kwargs)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Field name .* shadows an attribute", UserWarning)
                cls = super().__new__(mcls, name, bases, namespace, **kwargs)
        if _validates_the_whole(cls) and cls.__setattr__ is BaseModel.__setattr__:
            cls.__setattr__ = set_or_restore
        if cls.__pydantic_generic_metadata__["origin"] is not None and cls.__pydantic_complete__:
            cls.__qualname__ = _parametrize.publish(f"{cls.__module__}:{cls.__qualname__}")
            cls.__module__ = _parametrize.__name__
            _parametrize.register(cls)
        return cls  # type: ignore[no-any-return]


def _validates_the_whole(cls: Any) -> bool:
    validators = cls.__pydantic_decorators__.model_validators.values()
    return any(validator.info.mode == "after" for validator in validators)


def _shadowing(bases: tuple[type, ...], namespace: dict[str, Any]) -> list[str]:
    """The annotated names that mean a method or another attribute of a base class."""
    return [
        name
        for name in namespace.get("__annotations__", {})
        if not name.startswith("_")
        and any(hasattr(base, name) and name not in getattr(base, "model_fields", ()) for base in bases)
    ]


class BaseDocument(BaseModel, metaclass=DocumentMeta):
    """A typed record: subclass it and annotate fields.

    Every document has an `id`. A class may type it anew, or drop it by `id: ClassVar[None] = None`. A class made with
    `main='text'` accepts the value of that field wherever a document of the class is expected.

    Equality compares class and fields and leaves ids aside; `identical()` compares ids too.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, validate_assignment=True, protected_namespaces=())

    __quire_cell__: ClassVar[_Cell]
    __quire_main__: ClassVar[tuple[str, ...]] = ()

    __hash__ = None  # type: ignore[assignment]  # documents change

    id: ID = PydanticField(default_factory=new_id)

    if TYPE_CHECKING:

        def __init_subclass__(cls, *, main: str | Iterable[str] | None = None, **kwargs: Any) -> None: ...

    @classmethod
    def document_schema(cls) -> Schema:
        """The compiled plan of this class: its fields and their kinds."""
        cell = cls.__quire_cell__
        if cell.schema is None:
            cell.schema = build_schema(cls)
        return cell.schema

    @classmethod
    def schema_summary(cls) -> None:
        """Print the fields of this class as a tree."""
        print_schema(cls.document_schema())

    def summary(self) -> None:
        """Print the fields and values of this document as a tree."""
        print_document(self)

    def update(self, other: Self | Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Take over fields from another document of this class, a mapping, or keywords; the id stays.

        Nested documents are updated in turn, arrays of documents are merged by id, dicts are merged, and everything
        else is replaced. From a document only the fields that were set are taken. Bad values change nothing.
        """
        update_document(self, other, fields)

    def identical(self, other: object) -> bool:
        """Whether the other document is equal and has the same id, and so have the documents inside."""
        return equal_values(self, other, ids=True)

    def __eq__(self, other: object) -> bool:
        return equal_values(self, other) if isinstance(other, BaseDocument) else NotImplemented

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return copy_document(self, {} if memo is None else memo)

    def __getstate__(self) -> dict[Any, Any]:
        return packed_state(super().__getstate__())

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [(name, short_value(value)) for name, value in nested_rows(self) or ()]

    def _repr_html_(self) -> str:
        return render_html(self)

    def __rich__(self) -> Any:
        return document_tree(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        return complete_core_schema(cls, schema, handler.resolve_ref_schema)


def _reduce(cls: type[BaseDocument]) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
    generic = cls.__pydantic_generic_metadata__
    if generic["origin"] is None:
        return _parametrize.global_name(cls)
    arguments = generic["args"]
    return _parametrize.subscript, (generic["origin"], arguments[0] if len(arguments) == 1 else arguments)


copyreg.pickle(DocumentMeta, _reduce)  # type: ignore[arg-type]
