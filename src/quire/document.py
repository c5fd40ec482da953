"""BaseDocument: a pydantic model with a compiled schema, tensors in fields, and conversions to bytes, JSON and more."""

from __future__ import annotations

import copyreg
import keyword
import operator
import re
import warnings
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PrivateAttr, ValidationError
from pydantic import Field as PydanticField
from pydantic_core import CoreSchema
from typing_extensions import Self, Unpack, dataclass_transform

from quire import _class_registry, _parametrize, codec
from quire._changes import check_names, copy_document, set_or_restore, shrink_state, update_document
from quire._core_schema import complete_core_schema, find_main_field
from quire._equality import equal_values
from quire._extra_fields import Extra, explain_unknown_fields
from quire.codec import Reading, TensorForm
from quire.display import document_tree, nested_rows, print_document, print_schema, render_html, short_value
from quire.errors import DocumentTypeError
from quire.schema import Schema, build_schema, find_main_text
from quire.typing import ID, new_id

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
    from rich.tree import Tree
else:
    ModelMetaclass = type(BaseModel)


class _Cell:
    """The compiled schema of a class, pickled empty: a class that is pickled by value compiles its schema again."""

    __slots__ = ("schema",)

    def __init__(self) -> None:
        self.schema: Schema | None = None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _Cell, ()


@dataclass_transform(kw_only_default=True, field_specifiers=(PydanticField, PrivateAttr))
class DocumentMeta(ModelMetaclass):
    """Allows fields with the names of methods, and pickles parametrized generic documents by recipe."""

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        main: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> type:
        """Create a document class; see `BaseDocument` for `main`."""
        shadowing = mcls._find_shadowing_fields(bases, namespace)
        for field in shadowing:
            namespace.setdefault(field, PydanticField())  # otherwise the method would be its default
        namespace["__quire_cell__"] = _Cell()
        extra = mcls._find_extra(bases, namespace, kwargs)
        if extra is not None and "__quire_extra__" not in namespace:
            namespace["__quire_extra__"] = kwargs["extra"] = extra
        if main is not None:
            namespace["__quire_main__"] = (main,) if isinstance(main, str) else tuple(main)
        if not shadowing:
            cls: Any = super().__new__(mcls, name, bases, namespace, **kwargs)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Field name .* shadows an attribute", UserWarning)
                cls = super().__new__(mcls, name, bases, namespace, **kwargs)
        validators = cls.__pydantic_decorators__.model_validators.values()
        has_after_validators = any(validator.info.mode == "after" for validator in validators)
        # pydantic sets a field before it runs `after` validators: a rejected value would stay.
        if has_after_validators and cls.__setattr__ is BaseModel.__setattr__:
            cls.__setattr__ = set_or_restore
        # `Box[int]` is no attribute of a module, so it is published as one of `_parametrize`, where pickle finds it.
        if cls.__pydantic_generic_metadata__["origin"] is not None and cls.__pydantic_complete__:
            cls.__qualname__ = _parametrize.publish(f"{cls.__module__}:{cls.__qualname__}")
            cls.__module__ = _parametrize.__name__
            _parametrize.register(cls)
            _parametrize.register_parameters(cls)
        _class_registry.register(cls)
        return cls  # type: ignore[no-any-return]

    @staticmethod
    def _find_extra(bases: tuple[type, ...], namespace: dict[str, Any], kwargs: dict[str, Any]) -> str | None:
        """Return the `extra` that a class or one of its bases has set; None for the default.

        pydantic merges the configs of several bases, and the default of one would replace the choice of another.
        """
        config = namespace.get("model_config", {})
        chosen = [getattr(base, "__quire_extra__", getattr(base, "model_config", {}).get("extra")) for base in bases]
        choices = [kwargs.get("extra"), config.get("extra"), *reversed(chosen)]
        return next((extra for extra in choices if extra is not None), None)

    @staticmethod
    def _find_shadowing_fields(bases: tuple[type, ...], namespace: dict[str, Any]) -> list[str]:
        """Return the annotated names that are also methods or other attributes of a base class."""
        return [
            name
            for name in namespace.get("__annotations__", {})
            if not name.startswith("_")
            and any(hasattr(base, name) and name not in getattr(base, "model_fields", ()) for base in bases)
        ]

    def __setattr__(cls, name: str, value: Any) -> None:  # noqa: N805 - of a metaclass
        """Set an attribute of the class.

        cloudpickle fills a class by setting its attributes. In the process that a class came from, it first creates an
        empty class of the same name, and then discards it for the class itself, which must be found by its name again.
        """
        super().__setattr__(name, value)
        if name in ("__quire_cell__", "__qualname__"):
            _class_registry.register(cls)


def _with_main_value(document_type: Any, values: tuple[Any, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the value that was passed without a name."""
    class_name, names = document_type.__name__, document_type.__quire_main__
    if len(values) > 1 or not names:
        positions = "one value, that of a main field," if names else "no values"
        raise DocumentTypeError(f"{class_name} takes {positions} without a name, got {len(values)}.")
    field = find_main_field(document_type, values[0])
    if field is None:
        raise DocumentTypeError(
            f"{class_name} takes the value of {' or '.join(names)} without a name; {type(values[0]).__name__} fits "
            f"none of them. Name the field, or use {class_name}.model_validate()."
        )
    if field in fields:
        raise DocumentTypeError(f"{class_name} got {field!r} twice: without a name, and by its name.")
    return {field: values[0], **fields}


class BaseDocument(BaseModel, metaclass=DocumentMeta):
    """A typed record: subclass it and annotate fields.

    Every document has an `id`. A class may annotate it with another type, or remove it by `id: ClassVar[None] = None`.
    A class defined with `main='text'` accepts the value of that field wherever a document of the class is expected. If
    that value is text, as of `Text` or the url of an `Image`, its documents compare with texts, and sort, by it:
    `Text('hi') == 'hi'`, `'h' in Text('hi')`.

    Equality compares the class and the fields except for ids; `identical()` compares ids, too. Documents are mutable,
    so they have no hash: use `doc.text` as the key of a dict or in a set.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True,
        validate_assignment=True,
        protected_namespaces=(),
        populate_by_name=True,  # columns, paths and JSON use the names of fields; aliases are read as well
        ser_json_inf_nan="strings",  # null would be read as None
        extra="forbid",  # a misspelt field is an error; bytes and datasets follow the rules of schema evolution
    )

    __quire_cell__: ClassVar[_Cell]
    __quire_main__: ClassVar[tuple[str, ...]] = ()
    __quire_open__: ClassVar[bool] = True
    __quire_extra__: ClassVar[str | None] = None
    __quire_name__: ClassVar[str | None] = None
    __quire_collects__: ClassVar[bool] = False  # whether a field keeps input for which there is no field, as `tags`
    __quire_array__: ClassVar[Any] = None  # a subclass of DocumentArray that arrays of this class derive from

    __hash__ = None  # type: ignore[assignment]  # documents are mutable

    id: ID = PydanticField(default_factory=new_id)

    if TYPE_CHECKING:

        def __init_subclass__(cls, *, main: str | Iterable[str] | None = None, **kwargs: Any) -> None: ...

    else:

        def __class_getitem__(cls, parameters: Any) -> Any:
            """Return a generic document class with its type variables substituted, also inside of arrays."""
            if not cls.__pydantic_complete__:
                cls.model_rebuild(raise_errors=False)
            for info in cls.model_fields.values():
                for name in ("annotation", "_original_annotation"):  # since 2.12, pydantic substitutes in the latter
                    if hasattr(info, name):
                        setattr(info, name, _parametrize.with_open_aliases(getattr(info, name)))
            return super().__class_getitem__(_parametrize.canonical_parameters(parameters))

        def __init__(self, /, *main: Any, **data: Any) -> None:
            """Make a document of values by the names of fields; an unknown name is an error.

            The value of a main field may come first, without its name: `Text('hello')`.
            """
            __tracebackhide__ = True
            if main:
                data = _with_main_value(type(self), main, data)
            try:
                instance = self.__pydantic_validator__.validate_python(data, self_instance=self)
            except ValidationError as error:
                raise explain_unknown_fields(type(self), error) from None
            if instance is not self:
                warnings.warn(_OTHER_SELF, stacklevel=2)

        __init__.__pydantic_base_init__ = True  # pydantic then validates nested documents without calling it

        def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
            """Return a copy with other values, which are not validated; an unknown name is an error."""
            check_names(type(self), update or {})
            return super().model_copy(update=update, deep=deep)

        @classmethod
        def model_validate(cls, obj: Any, **options: Any) -> Self:
            """Return the document of a mapping or an object; see pydantic's `BaseModel.model_validate`."""
            __tracebackhide__ = True
            try:
                if not options:  # the usual call: pydantic's method would only pass its defaults, which takes 0.3 us
                    return cls.__pydantic_validator__.validate_python(obj)
                return super().model_validate(obj, **options)
            except ValidationError as error:
                raise explain_unknown_fields(cls, error) from None

        @classmethod
        def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
            """Return the document of JSON; see pydantic's `BaseModel.model_validate_json`."""
            __tracebackhide__ = True
            try:
                return super().model_validate_json(json_data, **options)
            except ValidationError as error:
                raise explain_unknown_fields(cls, error) from None

    @classmethod
    def document_schema(cls) -> Schema:
        """Return the compiled schema of this class: its fields and their kinds."""
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
        """Update fields from another document of this class, a mapping, or keywords; the id is kept.

        Nested documents are updated recursively, arrays of documents are merged by id, dicts are merged, and other
        values are replaced. From a document only the fields that were set are used. If a value is invalid, nothing
        changes.
        """
        update_document(self, other, fields)

    @classmethod
    def to_proto_schema(cls, previous: str | None = None, package: str | None = None) -> str:
        """Return a `.proto` of this class for other languages; with the previous one, field numbers are kept."""
        return codec.proto_schema(cls, previous, package)

    def to_typed_protobuf(self, previous: str | None = None) -> Any:
        """Return the document as a protobuf message of its own class, as `to_proto_schema(previous)` describes it."""
        return codec.to_typed(self, previous)

    @classmethod
    def from_typed_protobuf(cls, source: Any, previous: str | None = None) -> Self:
        """Return the document of a message of its own class, also from code that protoc generated, or of its bytes."""
        return codec.from_typed(cls, source, previous)

    def identical(self, other: object) -> bool:
        """Return whether the other document is equal and has the same id, and so have nested documents."""
        return equal_values(self, other, ids=True)

    def to_protobuf(self) -> Any:
        """Return a protobuf message, `quire.v1.Document`."""
        return codec.to_message("Document", codec.encode_document_message(self))

    @classmethod
    def from_protobuf(cls, message: Any, **reading: Unpack[Reading]) -> Self:
        """Return the document of a protobuf message."""
        data = codec.from_message(message, "Document")
        return codec.decode_document_message(data, _expected_type(cls), codec.read_options(reading))  # type: ignore[no-any-return]

    def to_bytes(
        self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False
    ) -> bytes:
        """Return the document as bytes: a protobuf message (`protocol='protobuf'`) or a pickle, optionally compressed.

        Values of types that have no encoding raise an error, or are pickled with `allow_pickle`.
        """
        return codec.dump(
            self, lambda: codec.encode_document_message(self, allow_pickle=allow_pickle), protocol, compress
        )

    @classmethod
    def from_bytes(
        cls, data: Any, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """Return the document of bytes; a `protocol` or `compress` that is not that of the bytes is an error."""
        return codec.load_document(cls, _expected_type(cls), data, protocol, compress, codec.read_options(reading))  # type: ignore[no-any-return]

    def to_base64(self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False) -> str:
        """Return the bytes of `to_bytes` as base64."""
        return b64encode(self.to_bytes(protocol, compress, allow_pickle=allow_pickle)).decode()

    @classmethod
    def from_base64(
        cls, data: str | bytes, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """Return the document of `to_base64`."""
        return cls.from_bytes(codec.from_base64(data), protocol, compress, **reading)

    def to_json(self, *, indent: int | None = None, tensors: TensorForm = "lists") -> str:
        """Return the document as JSON, with tensors as nested lists, or as 'base64' of their bytes."""
        return codec.to_json(self, indent, tensors)

    @classmethod
    def from_json(cls, text: str | bytes, *, extra: Extra = "forbid") -> Self:
        """Return the document of JSON, which is passed as text and not as the path of a file.

        Unknown fields are errors, or ignored with `extra='ignore'`, unless the class sets `extra` in its
        `model_config`.
        """
        codec.check_json(cls, text)
        return codec.from_json(cls, text, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict; nested documents are dicts, arrays lists of dicts, and tensors stay tensors."""
        return codec.to_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, extra: Extra = "forbid") -> Self:
        """Return the document with the fields of a mapping; `extra` as in `from_json`."""
        return codec.from_dict(cls, values, extra=extra)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BaseDocument):
            return equal_values(self, other)
        return self._compare_text(operator.eq, other) if isinstance(other, str) else NotImplemented

    def __lt__(self, other: object) -> bool:
        return self._compare_text(operator.lt, other)

    def __le__(self, other: object) -> bool:
        return self._compare_text(operator.le, other)

    def __gt__(self, other: object) -> bool:
        return self._compare_text(operator.gt, other)

    def __ge__(self, other: object) -> bool:
        return self._compare_text(operator.ge, other)

    def __contains__(self, item: object) -> bool:
        """Return whether a text is part of the main text; for other classes, as pydantic, a pair of name and value."""
        name = find_main_text(type(self))
        if name is None:
            return any(item == pair for pair in self)
        if not isinstance(item, str):
            raise DocumentTypeError(f"`in` searches the {name} of a {type(self).__name__} for text, got {item!r}.")
        return item in str(self.__dict__[name] or "")

    def _compare_text(self, compare: Callable[[Any, Any], bool], other: object) -> bool:
        """Compare the main text with a text, or with that of another document; documents without one do not compare."""
        name = find_main_text(type(self))
        if name is None:
            return NotImplemented  # type: ignore[no-any-return]
        if isinstance(other, BaseDocument):
            other_name = find_main_text(type(other))
            other = None if other_name is None else other.__dict__[other_name]
        text = self.__dict__[name]
        if not isinstance(text, str) or not isinstance(other, str):
            return False if compare is operator.eq else NotImplemented
        return compare(text, other)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return copy_document(self, {} if memo is None else memo)

    def __getstate__(self) -> dict[Any, Any]:
        return shrink_state(type(self).document_schema(), super().__getstate__())

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [(name, short_value(value)) for name, value in nested_rows(self) or ()]

    def _repr_html_(self) -> str:
        return render_html(self)

    def __rich__(self) -> Tree:
        return document_tree(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        return complete_core_schema(cls, schema, handler.resolve_ref_schema)


_OTHER_SELF = (
    "A custom validator is returning a value other than `self`. "
    "Returning anything other than `self` from a top level model validator isn't supported when validating via "
    "`__init__`."
)


def _expected_type(cls: type[BaseDocument]) -> type[BaseDocument] | None:
    """Return the class if it determines the fields of its documents; None if it stands for any class."""
    return None if "__quire_open__" in vars(cls) else cls


class DynamicDocument(BaseDocument):
    """A document of a class that is not loaded; it has all fields that were read, and the name of its class."""

    model_config = ConfigDict(extra="allow")
    __quire_open__: ClassVar[bool] = True

    # The id is one of the fields that were read, if there was one, and not a field that every document has.
    id: ClassVar[Any] = property(lambda self: (self.__pydantic_extra__ or {}).get("id"))  # type: ignore[misc]
    _declared: str = PrivateAttr("")

    @classmethod
    def _from_content(cls, name: str, content: dict[str, Any]) -> DynamicDocument:
        """Make a document of a class of this name; its fields are not validated."""
        document = cls.model_construct()
        document.__pydantic_extra__ = content
        document.__pydantic_fields_set__ = set(content)
        document._declared = name
        return document

    @property
    def __quire_name__(self) -> str:  # type: ignore[override]
        return self._declared

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "id":
            return super().__setattr__(name, value)
        self.__pydantic_extra__ = {**(self.__pydantic_extra__ or {}), "id": value}
        return None


_class_registry.provide("dynamic", DynamicDocument._from_content)


def _reduce(cls: type[BaseDocument]) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
    generic = cls.__pydantic_generic_metadata__
    if generic["origin"] is None:
        return _parametrize.global_name(cls)
    arguments, token = _parametrize.picklable_parameters(generic["args"]), _parametrize.token_of(cls)
    if token is not None:
        return _parametrize.subscript_by_token, (token, generic["origin"], arguments)
    return _parametrize.subscript, (generic["origin"], arguments[0] if len(arguments) == 1 else arguments)


copyreg.pickle(DocumentMeta, _reduce)  # type: ignore[arg-type]


def field_name(name: str, taken: Container[str]) -> str:
    """Return the name, or a similar one that a field can have and that is no method of documents."""
    field = re.sub(r"\W", "_", name).lstrip("_") or "column"
    if keyword.iskeyword(field) or field[0].isdigit() or (hasattr(BaseDocument, field) and field != "id"):
        field = f"column_{field}"
    while field in taken:
        field += "_"
    return field
