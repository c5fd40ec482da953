"""Values of Parquet pages in place: the same as pyarrow decodes, or None; damage is an error."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import DecodeError

pytestmark = pytest.mark.needs("pyarrow")


def write_column(values: list[bytes], width: int, **options: Any) -> tuple[Any, list[bytes]]:
    """Return the bytes of a column chunk of a Parquet file, and what pyarrow reads of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    field = pa.field("data", pa.binary(width), nullable=False)
    table = pa.table([pa.array(values, pa.binary(width))], pa.schema([field]))
    sink = io.BytesIO()
    options = {"compression": "none", "use_dictionary": False, **options}
    pq.write_table(table, sink, **options)
    chunk = pq.read_metadata(io.BytesIO(sink.getvalue())).row_group(0).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = pa.py_buffer(sink.getvalue()[start : start + chunk.total_compressed_size])
    return content, pq.read_table(io.BytesIO(sink.getvalue())).column(0).to_pylist()


@given(
    st.integers(1, 40).flatmap(
        lambda width: st.tuples(st.just(width), st.lists(st.binary(min_size=width, max_size=width), min_size=1))
    ),
    st.sampled_from([1, 64, 1 << 20]),
    st.booleans(),
    st.booleans(),
)
def test_values_are_those_that_pyarrow_decodes(
    sample: tuple[int, list[bytes]], page_bytes: int, checksums: bool, statistics: bool
) -> None:
    from quire.storage._parquet_pages import plain_values

    width, values = sample
    content, decoded = write_column(
        values,
        width,
        data_page_size=page_bytes,
        write_batch_size=1,
        write_page_checksum=checksums,
        write_statistics=statistics,
    )
    pages = plain_values(content, width, len(values))
    assert pages is not None
    read = b"".join(page.to_pybytes() for page in pages)
    assert [read[place : place + width] for place in range(0, len(read), width)] == decoded == values
    assert all(content.address <= page.address < content.address + content.size for page in pages), "no copy"


@pytest.mark.parametrize("options", [{"use_dictionary": True}, {"data_page_version": "2.0"}])
def test_other_pages_have_to_be_decoded(options: dict[str, Any]) -> None:
    from quire.storage._parquet_pages import plain_values

    content, _ = write_column([b"abcd"] * 10, 4, **options)
    assert plain_values(content, 4, 10) is None


def test_wrong_numbers_are_errors() -> None:
    from quire.storage._parquet_pages import plain_values

    content, _ = write_column([b"abcd"] * 10, 4)
    with pytest.raises(DecodeError, match="10 values, and its row group has 11"):
        plain_values(content, 4, 11)
    with pytest.raises(DecodeError, match="10 values of 5 bytes"):
        plain_values(content, 5, 10)
    with pytest.raises(DecodeError):
        plain_values(content.slice(0, content.size - 1), 4, 10)
    with pytest.raises(DecodeError):
        plain_values(content.slice(0, 3), 4, 10)


@given(st.data())
def test_damaged_headers_are_errors_or_none_and_never_other_errors(data: st.DataObject) -> None:
    import pyarrow as pa

    from quire.storage._parquet_pages import plain_values

    content, values = write_column([b"abcd", b"efgh"], 4)
    damaged = bytearray(content.to_pybytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 9))] = data.draw(st.integers(0, 255))
    try:
        pages = plain_values(pa.py_buffer(bytes(damaged)), 4, 2)
    except DecodeError:
        return
    assert pages is None or sum(page.size for page in pages) == 4 * len(values)
