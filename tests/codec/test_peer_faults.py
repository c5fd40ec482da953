"""What DocArray 0.41 was seen to get wrong about bytes, protobuf, files and compression: each is right here.

The comments name the fault as shared/facts/docarray.md tells it; the numbers are of its issues.
"""

# ruff: noqa: DTZ001 - datetimes without a zone are values too

from __future__ import annotations

import bz2
import copy
import gzip
import io
import lzma
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, QuireError
from quire.typing import AnyTensor, NdArray, float32
from tests.codec.round_trips import exact
from tests.strategies import Leaf, Seed, Twig


class Kind(Enum):
    A = 1


class Photo(BaseDocument):
    title: str = "x"
    number: int = 0
    tensor: NdArray | None = None
    tags: dict[Any, Any] = {}
    when: datetime | None = None
    kind: Kind = Kind.A
    either: Leaf | Seed | None = None


class Vectors(BaseDocument):
    vector: NdArray[float32, 64]


def photos(count: int = 3) -> DocumentArray[Photo]:
    return DocumentArray[Photo]([Photo(title=str(i), number=i, tensor=np.arange(4.0)) for i in range(count)])


# --- values


@pytest.mark.parametrize("number", [0, 2**31, 2**40, 1_700_000_000_000, -(2**63), 2**64])
def test_integers_beyond_32_bits_round_trip(number: int) -> None:  # int32 on the wire, #1890; 0 failed in #1070
    photo = Photo(number=number)
    assert Photo.from_protobuf(photo.to_protobuf()).number == number


def test_integers_in_dicts_stay_integers() -> None:  # tags as a Struct: ints became floats, #1047
    got = Photo.from_bytes(Photo(tags={"a": 1, "b": [2, {"c": 3}]}).to_bytes()).tags
    assert exact(got, {"a": 1, "b": [2, {"c": 3}]})


def test_dicts_with_other_keys_than_texts_round_trip() -> None:
    photo = Photo(tags={1: "a", (1, 2): "b", None: "c"})
    assert exact(Photo.from_bytes(photo.to_bytes()), photo)


def test_unions_of_documents_are_read_back() -> None:  # written, and not readable: #1655
    for either in (Leaf(text="a"), Seed(x=1)):
        photo = Photo(either=either)
        assert type(Photo.from_protobuf(photo.to_protobuf()).either) is type(either)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "bool", "complex64"])
def test_empty_arrays_keep_their_dtype(dtype: str) -> None:  # came back as float64
    got = Photo.from_protobuf(Photo(tensor=np.zeros((0, 3), dtype)).to_protobuf()).tensor
    assert (got.dtype, got.shape) == (np.dtype(dtype), (0, 3))


def test_none_is_distinguished_from_empty_values() -> None:  # None was an empty message
    class Maybe(BaseDocument):
        text: str | None = "default"
        items: list[int] | None = [1]
        docs: DocumentArray[Leaf] | None = None
        tensor: NdArray | None = None

    for document in (Maybe(text=None, items=None), Maybe(text="", items=[], docs=[], tensor=np.zeros(0))):
        assert exact(Maybe.from_bytes(document.to_bytes()), document)
        docs = DocumentArray[Maybe]([document])
        assert exact(DocumentBatch[Maybe].from_bytes(docs.stack().to_bytes()).unstack(), docs)


def test_subclass_documents_keep_their_fields() -> None:  # downcast to the schema's class
    docs = DocumentArray[Leaf]([Leaf(text="a"), Twig(text="b", bark={"x": 1})])
    for got in (
        DocumentArray[Leaf].from_bytes(docs.to_bytes()),
        pickle.loads(pickle.dumps(docs)),
        DocumentArray[Leaf].from_protobuf(docs.to_protobuf()),
        copy.deepcopy(docs),
    ):
        assert exact(got, docs)


def test_pickles_and_copies_do_not_depend_on_protobuf() -> None:
    photo = Photo(number=2**40, when=datetime(2024, 1, 1), tags={1: 2})
    assert exact(pickle.loads(pickle.dumps(photo)), photo)
    assert exact(copy.deepcopy(photo), photo)


def test_documents_with_columns_inside_are_written() -> None:  # a document with a DocVec field was a TypeError
    batch = DocumentArray[Leaf]([Leaf(text="a")]).stack()

    class Around(BaseDocument):
        value: Any

    around = Around.from_bytes(Around(value=batch).to_bytes())
    assert type(around.value) is DocumentBatch[Leaf]
    assert around.value.text == ["a"]


def test_a_row_of_a_batch_is_a_document_with_all_its_fields() -> None:  # views gave '{}' as JSON
    row = photos().stack()[1]
    assert Photo.from_bytes(row.to_bytes()).title == "1"


def test_stacking_and_writing_do_not_destroy_the_batch() -> None:  # to_doc_list emptied the DocVec
    batch = photos().stack()
    batch.to_bytes()
    batch.unstack()
    assert len(DocumentBatch[Photo].from_bytes(batch.to_bytes())) == 3


def test_any_tensor_keeps_the_framework() -> None:
    class Loose(BaseDocument):
        tensor: AnyTensor

    docs = DocumentArray[Loose]([Loose(tensor=np.ones(2))])
    assert exact(DocumentArray[Loose].from_bytes(docs.to_bytes()), docs)


def test_document_without_an_id_in_a_batch_round_trips() -> None:  # len() was a KeyError: 'id'
    from typing import ClassVar

    class Anonymous(BaseDocument):
        id: ClassVar[None] = None  # type: ignore[assignment,misc]
        x: int = 1

    batch = DocumentArray[Anonymous]([Anonymous(), Anonymous(x=2)]).stack()
    got = DocumentBatch[Anonymous].from_bytes(batch.to_bytes())
    assert len(got) == 2
    assert got.x.tolist() == [1, 2]


# --- bytes


def test_base64_reads_what_it_writes() -> None:  # one half defaulted to protobuf, the other to pickle
    photo = photos(1)[0]
    assert exact(Photo.from_base64(photo.to_base64()), photo)
    assert exact(DocumentArray[Photo].from_base64(photos(0).to_base64()), photos(0))


@pytest.mark.parametrize("compress", ["gzip", "bz2", "xz", "zlib"])
def test_compression_compresses(compress: str) -> None:  # zlib did nothing with the default protocol
    docs = DocumentArray[Photo]([Photo(title="a" * 1000) for _ in range(100)])
    try:
        packed = docs.to_bytes(compress=compress)
    except QuireError as error:
        assert "zlib" in str(error)
        return
    assert len(packed) < len(docs.to_bytes()) / 5
    assert exact(DocumentArray[Photo].from_bytes(packed), docs)


def test_listed_protocols_work_and_others_are_rejected() -> None:  # 'json' was listed and raised
    docs = photos()
    for protocol in ("protobuf", "pickle"):
        data = docs.to_bytes(protocol=protocol)
        assert exact(DocumentArray[Photo].from_bytes(data, allow_pickle=True), docs)
    with pytest.raises(QuireError, match="'jsn' is not a protocol"):
        docs.to_bytes(protocol="jsn")


def test_pickles_are_not_loaded_unless_allowed() -> None:
    data = photos().to_bytes(protocol="pickle")
    with pytest.raises(DecodeError, match="allow_pickle=True"):
        DocumentArray[Photo].from_bytes(data)


def test_names_and_types_are_written_once() -> None:  # in every document: 87 bytes for three tiny fields, #1116
    small, large = (len(photos(count).to_bytes()) for count in (1000, 2000))
    assert (large - small) / 1000 < 200
    assert photos(1000).to_bytes().count(b"number") == 1


def test_bytes_are_about_as_large_as_their_numbers() -> None:
    docs = DocumentArray[Vectors]([Vectors(vector=np.ones(64, np.float32)) for _ in range(500)])
    assert len(docs.to_bytes()) < 500 * (64 * 4 + 60)


# --- files

UNPACK = {".gz": gzip.decompress, ".gzip": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}


@pytest.mark.parametrize("suffix", list(UNPACK))
def test_suffixes_of_compression_are_known(tmp_path: Path, suffix: str) -> None:  # .gz was written uncompressed
    path = tmp_path / f"da.protobuf{suffix}"
    docs = photos(200)
    docs.save_binary(path)
    assert UNPACK[suffix](path.read_bytes()).startswith(b"\x93QUIRE")
    assert exact(DocumentArray[Photo].load_binary(path), docs)
    moved = path.rename(tmp_path / "anything")
    assert exact(DocumentArray[Photo].load_binary(moved), docs)


def test_file_objects_are_accepted_and_left_open() -> None:  # BytesIO was a TypeError, or was closed
    file = io.BytesIO()
    photos().save_binary(file)
    assert not file.closed
    file.seek(0)
    assert exact(list(DocumentArray[Photo].load_binary(file).title), ["0", "1", "2"])
    assert not file.closed


def test_documents_are_written_from_a_generator_and_read_one_by_one(tmp_path: Path) -> None:
    def make() -> Iterator[Photo]:  # the count was needed up front
        yield from photos(5)

    path = tmp_path / "x.protobuf"
    DocumentArray[Photo].save_binary_stream(make(), path)
    assert [doc.title for doc in DocumentArray[Photo].load_binary(path, streaming=True)] == list("01234")


def test_truncated_file_raises_an_error_with_the_position(tmp_path: Path) -> None:
    path = tmp_path / "x.protobuf"
    photos(50).save_binary(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DecodeError, match="byte"):
        DocumentArray[Photo].load_binary(path)


def test_untyped_array_is_read_with_all_fields(tmp_path: Path) -> None:  # all but the id were lost
    path = tmp_path / "x.protobuf.gz"
    photos().save_binary(path)
    assert exact(DocumentArray.load_binary(path), photos_like(path))


def photos_like(path: Path) -> Any:
    return DocumentArray[Photo].load_binary(path)


# --- frameworks


@pytest.mark.needs("torch")
def test_sparse_tensors_are_written() -> None:  # NotImplementedError
    import torch

    class Sparse(BaseDocument):
        tensor: Any

    tensor = torch.eye(3).to_sparse()
    assert Sparse.from_bytes(Sparse(tensor=tensor).to_bytes()).tensor.to_dense().tolist() == torch.eye(3).tolist()


@pytest.mark.needs("torch", "ml_dtypes")
def test_tensor_of_the_caller_is_not_changed_and_bfloat16_round_trips() -> None:
    import torch

    class Half(BaseDocument):
        tensor: Any

    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    got = Half.from_bytes(Half(tensor=parameter).to_bytes()).tensor
    assert got.dtype == torch.bfloat16
    assert type(parameter) is torch.nn.Parameter


# --- a framework that is missing

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Blocker())
from typing import Any
from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import MissingDependencyError
import numpy as np
class Sent(BaseDocument):
    tensor: Any = None
    number: int = 1
data = open(sys.argv[1], 'rb').read()
target = {{'document': BaseDocument, 'rows': DocumentArray, 'message': DocumentArray}}[sys.argv[2]]
try:
    target.from_bytes(data)
except MissingDependencyError as error:
    assert isinstance(error, ImportError)
    print(error)
else:
    raise SystemExit('no error')
got = target.from_bytes(data, missing='numpy')
one = got if sys.argv[2] == 'document' else got[1]
assert type(one.tensor) is np.ndarray, type(one.tensor)
assert one.tensor.tolist() == [1.0, 2.0]
assert one.tensor.dtype == np.float32
"""


@pytest.mark.needs("torch", "tensorflow", "jax", "paddle")
@pytest.mark.parametrize("name", ["torch", "tensorflow", "jax", "paddle"])
@pytest.mark.parametrize("way", ["document", "rows", "message"])
def test_missing_framework_raises_an_error_or_gives_numpy(tmp_path: Path, name: str, way: str) -> None:
    from quire.tensors import get_framework

    class Sent(BaseDocument):
        tensor: AnyTensor
        number: int = 1

    document = Sent(tensor=get_framework(name).from_numpy(np.array([1, 2], np.float32)))
    docs = DocumentArray[Sent]([document, document])
    data = {
        "document": document.to_bytes,
        "rows": docs.to_bytes,
        "message": lambda: docs.to_protobuf().SerializeToString(),
    }
    (tmp_path / "sent.bin").write_bytes(data[way]())
    code = BLOCKED.format(blocked={name, "ml_dtypes"} if name == "paddle" else {name})
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "sent.bin"), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"pip install 'quire-ml[{name}]'" in done.stdout
    assert "missing='numpy'" in done.stdout


@pytest.mark.needs("torch")
def test_reading_does_not_import_what_the_bytes_do_not_need(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(photos().to_bytes())
    code = (
        "import sys; from quire import DocumentArray; "
        f"docs = DocumentArray.from_bytes(open({str(tmp_path / 'a.bin')!r}, 'rb').read()); "
        "assert len(docs) == 3; docs.to_bytes(); "
        "assert not {'torch', 'tensorflow', 'jax', 'paddle', 'google.protobuf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
