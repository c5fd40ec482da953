"""Near duplicates: texts with almost the same words, and embeddings with almost the same direction.

Comparing all pairs is impossible for many documents, so each one gets a few *buckets* such that similar documents share
one with a high probability (locality-sensitive hashing), and only documents of one bucket are compared. Pairs that are
similar are edges of a graph; its connected components are the groups of which one document is kept.

Documents travel as their *sketch*: the hashes of a text, or the unit vector of an embedding. They are identified by the
digest of their value, and not by their position, so that the result is one document of each group even if functions
before it return documents in another order when they run again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire._optional import require
from quire.array import find_column
from quire.distributed._encoding import DocumentLayout
from quire.distributed._engine import Engine, Frame
from quire.distributed._exchange import Deferred, GatherStage, HeldRows, exchange_rows, take_chunks
from quire.distributed._keys import Keys, hash_keys, mix_bits, number_groups, partition_of_hash
from quire.distributed._stages import ConformRows
from quire.errors import OptionError
from quire.schema import FieldKind, parse_path
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Near = Literal["minhash", "embedding"]
_RECALL = 0.99
"""How likely two documents that are just similar enough share a bucket. For more similar ones it is more likely."""


class Sketcher(ABC):
    """How similar values of one field are found: their sketches, the buckets, and the similarity of two sketches."""

    @abstractmethod
    def sketch(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return one row for each value."""

    @abstractmethod
    def buckets(self, sketches: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the buckets of each sketch, as a matrix."""

    @abstractmethod
    def similarities(self, sketch: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
        """Return the similarity of one sketch to each of the others."""

    @abstractmethod
    def restore(self, data: bytes, rows: int) -> NDArray[Any]:
        """Return sketches from their bytes."""


@dataclass(frozen=True)
class MinHash(Sketcher):
    """Texts, by the share of the sequences of 5 characters that both have (their Jaccard similarity).

    Letters count without their case, and runs of spaces as one. The similarity of two texts is the share of equal
    values among the lowest 128 hashes of each: an estimate with a standard error of at most 0.045.
    """

    threshold: float

    HASHES = 128
    WIDTH = 5

    def sketch(self, values: Sequence[Any]) -> NDArray[np.uint32]:
        sketches = np.full((len(values), self.HASHES), np.iinfo(np.uint32).max, np.uint32)
        with np.errstate(over="ignore"):
            for row, text in enumerate(values):
                shingles = self._shingles(text)
                for start in range(0, len(shingles), 4096):  # a matrix of at most 4 MiB
                    products = shingles[start : start + 4096, None] * _FACTORS + _SUMMANDS
                    np.minimum(sketches[row], (products >> np.uint64(32)).min(0), out=sketches[row], casting="unsafe")
        return sketches

    def _shingles(self, text: str) -> NDArray[np.uint64]:
        """Return a hash for each sequence of characters; of a shorter text, for all of it."""
        codes = np.frombuffer(" ".join(text.casefold().split()).encode("utf-32-le"), np.uint32).astype(np.uint64)
        width = min(self.WIDTH, len(codes))
        hashes = np.zeros(len(codes) - width + 1, np.uint64)
        with np.errstate(over="ignore"):
            for place in range(width):
                hashes = mix_bits(hashes + codes[place : len(codes) - width + 1 + place])
        return np.unique(hashes)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of buckets of a text, and of the hashes that decide each one."""
        # The more hashes, the fewer texts that are not similar share a bucket.
        shapes = [(self.HASHES // rows, rows) for rows in range(1, 33)]
        sufficient = [(bands, rows) for bands, rows in shapes if 1 - (1 - self.threshold**rows) ** bands >= _RECALL]
        return sufficient[-1] if sufficient else shapes[0]

    def buckets(self, sketches: NDArray[Any]) -> NDArray[np.uint64]:
        bands, rows = self.shape
        parts = sketches[:, : bands * rows].reshape(len(sketches), bands, rows)
        buckets = np.broadcast_to(np.arange(bands, dtype=np.uint64), (len(sketches), bands))
        for place in range(rows):
            buckets = mix_bits(buckets + parts[:, :, place])
        return buckets

    def similarities(self, sketch: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = (others == sketch).mean(1)
        return shares

    def restore(self, data: bytes, rows: int) -> NDArray[Any]:
        return np.frombuffer(data, np.uint32).reshape(rows, self.HASHES)


_FACTORS = mix_bits(np.arange(MinHash.HASHES, dtype=np.uint64)) | np.uint64(1)
_SUMMANDS = mix_bits(np.arange(1000, 1000 + MinHash.HASHES, dtype=np.uint64))


@dataclass(frozen=True)
class UnitVectors(Sketcher):
    """Embeddings, by the cosine of the angle between them.

    A bucket is the sides of `bits` random planes that a vector is on.
    """

    threshold: float
    bits: int

    def sketch(self, values: Sequence[Any]) -> NDArray[np.float32]:
        vectors = [_floats(value).ravel() for value in values]
        sizes = {len(vector) for vector in vectors}
        if len(sizes) > 1:
            raise OptionError(f"dedupe(near='embedding') needs vectors of one length, and these have {sorted(sizes)}.")
        matrix = np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)
        norms = np.linalg.norm(matrix, axis=1, keepdims=True)
        # A vector of zeros, or with a NaN, has no direction: it is similar to no other.
        usable = np.isfinite(norms) & (norms > 0)
        return np.where(usable, matrix / np.where(usable, norms, 1), 0).astype(np.float32)

    @property
    def bands(self) -> int:
        """How many buckets a vector has."""
        same = (1 - math.acos(min(1.0, self.threshold)) / math.pi) ** self.bits
        return 1 if same > _RECALL else math.ceil(math.log(1 - _RECALL) / math.log(1 - same))

    def buckets(self, sketches: NDArray[Any]) -> NDArray[np.uint64]:
        bands = self.bands
        buckets = np.broadcast_to(mix_bits(np.arange(bands, dtype=np.uint64)), (len(sketches), bands))
        if not self.bits:
            return buckets
        planes = np.random.default_rng(0).standard_normal((sketches.shape[1], bands * self.bits)).astype(np.float32)
        sides = (sketches @ planes > 0).reshape(len(sketches), bands, self.bits)
        codes = (sides * (np.uint64(1) << np.arange(self.bits, dtype=np.uint64))).sum(2, dtype=np.uint64)
        return mix_bits(buckets + codes)

    def similarities(self, sketch: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
        similarities: NDArray[np.float64] = others @ sketch
        return similarities

    def restore(self, data: bytes, rows: int) -> NDArray[Any]:
        return np.frombuffer(data, np.float32).reshape(rows, -1)


def _floats(tensor: Any) -> NDArray[np.float32]:
    framework = framework_of(tensor)
    return np.asarray(tensor if framework is None else framework.to_numpy(tensor), np.float32)


@dataclass(frozen=True)
class FieldValues:
    """The values of one field, and their digests."""

    source: DocumentLayout
    path: str

    def read(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the value of each row; None where it, or the document that has it, is None."""
        narrow = self.source.select([self.path])
        return find_column(narrow.decode(batch.select(narrow.fields.names)), self.path).values()

    def digests(self, batch: pa.RecordBatch) -> pa.Array:
        """Return 128 bits for the value of each row, null for None."""
        xxhash: Any = require("xxhash", extra="parquet", needed_for="dedupe()")
        digests: list[bytes | None] = []
        for value in self.read(batch):
            if value is None:
                digests.append(None)
                continue
            is_text = isinstance(value, str)
            # -0.0 + 0.0 is 0.0, so that both are equal.
            data = value.encode("utf-8", "surrogatepass") if is_text else (_floats(value) + np.float32(0)).tobytes()
            digests.append(xxhash.xxh3_128_digest(data))
        return pa.array(digests, pa.binary(16))


@dataclass(frozen=True)
class ValueRouter:
    """Routes rows with equal values to one partition; those without a value by their id, or else by their position."""

    values: FieldValues
    partitions: int

    def route(
        self, batch: pa.RecordBatch, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        digests = self.values.digests(batch)
        is_null = digests.is_null().to_numpy(zero_copy_only=False)
        data = b"".join(digests.fill_null(bytes(16)).to_pylist())
        halves = np.frombuffer(data, np.uint64).reshape(-1, 2)[:, 0]
        if not is_null.any():
            return partition_of_hash(halves, self.partitions), halves
        source = self.values.source
        by_id = hash_keys(Keys(source, (("id",),)).canonical(batch)) if source.has_text_id else None
        hashes = np.where(is_null, mix_bits(positions.view(np.uint64)) if by_id is None else by_id, halves)
        return partition_of_hash(hashes, self.partitions), hashes


@dataclass(frozen=True)
class BucketRouter:
    """Routes sketches by their bucket."""

    partitions: int

    def route(
        self,
        batch: pa.RecordBatch,
        positions: NDArray[np.int64],  # noqa: ARG002
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        hashes = batch.column("bucket").to_numpy()
        return partition_of_hash(hashes, self.partitions), hashes


_SKETCHES = pa.schema(
    [
        pa.field("bucket", pa.uint64(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(16), nullable=False),
        pa.field("sketch", pa.binary(), nullable=False),
    ]
)
_EDGES = pa.schema(
    [
        pa.field("one", pa.int64(), nullable=False),
        pa.field("other", pa.int64(), nullable=False),
        pa.field("digest of one", pa.binary(16), nullable=False),
        pa.field("digest of other", pa.binary(16), nullable=False),
    ]
)
_SKETCHED_ROWS = 1024
"""How many values are sketched at a time."""


@dataclass(frozen=True)
class SketchRows(GatherStage):
    """Yields the sketch of each different value, once for each of its buckets."""

    values: FieldValues
    sketcher: Sketcher

    @property
    def schema(self) -> pa.Schema:
        return _SKETCHES

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return (self.values.source.fields,)

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        rows = sides[0]
        digests = _digests_of(rows, self.values)
        firsts, has_value = _first_rows(rows, digests)
        chosen = firsts[has_value]
        for start in range(0, len(chosen), _SKETCHED_ROWS):
            numbers = chosen[start : start + _SKETCHED_ROWS]
            sketches = self.sketcher.sketch(self.values.read(rows.take(numbers)))
            buckets = self.sketcher.buckets(sketches)
            row_of_bucket = np.repeat(np.arange(len(numbers)), buckets.shape[1])
            data = pa.array([sketch.tobytes() for sketch in sketches], pa.binary())
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(buckets.ravel()),
                    pa.array(rows.positions[numbers][row_of_bucket]),
                    digests.take(pa.array(numbers[row_of_bucket])),
                    data.take(pa.array(row_of_bucket)),
                ],
                schema=_SKETCHES,
            )


@dataclass(frozen=True)
class LinkRows(GatherStage):
    """Yields pairs of the values in one bucket that are similar: as few as connect them."""

    sketcher: Any

    @property
    def schema(self) -> pa.Schema:
        return _EDGES

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return (_SKETCHES,)

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        rows = sides[0]
        firsts = np.concatenate([np.zeros(0, np.int64), *(batch.column("first").to_numpy() for batch in rows.batches)])
        order = np.lexsort((firsts, rows.hashes))
        pairs: set[tuple[int, int, bytes, bytes]] = set()
        for bucket in np.split(order, np.flatnonzero(np.diff(rows.hashes[order])) + 1):
            if len(bucket) > 1:
                pairs.update(self._link(rows.take(bucket)))
        if pairs:
            columns = [
                pa.array(column, field.type) for column, field in zip(zip(*pairs, strict=True), _EDGES, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=_EDGES)

    def _link(self, bucket: pa.RecordBatch) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Yield the first row of each group of similar rows with every other row of it."""
        rows = len(bucket)
        sketches = self.sketcher.restore(b"".join(bucket.column("sketch").to_pylist()), rows)
        group = np.arange(rows)
        for row in range(rows - 1):
            # Rows that are connected already are not compared again, so that a bucket of equal rows takes linear time.
            others = row + 1 + np.flatnonzero(group[row + 1 :] != group[row])
            similar = others[self.sketcher.similarities(sketches[row], sketches[others]) >= self.sketcher.threshold]
            if len(similar):
                joined = np.isin(group, group[similar]) | (group == group[row])
                group[joined] = group[joined].min()
        firsts, digests = bucket.column("first").to_pylist(), bucket.column("digest").to_pylist()
        for row in np.flatnonzero(group != np.arange(rows)).tolist():
            yield firsts[group[row]], firsts[row], digests[group[row]], digests[row]


@dataclass(frozen=True)
class KeepRows(GatherStage):
    """Yields the first row of each value, without the values that were found to be near duplicates."""

    values: FieldValues
    dropped: Deferred[pa.Array]

    @property
    def schema(self) -> pa.Schema:
        return self.values.source.fields

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return (self.schema,)

    def prepare(self) -> None:
        self.dropped.value()

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        rows = sides[0]
        digests = _digests_of(rows, self.values)
        firsts, _ = _first_rows(rows, digests)
        is_dropped = pc.is_in(digests.take(pa.array(firsts)), self.dropped.value())
        kept = firsts[~is_dropped.to_numpy(zero_copy_only=False)]
        order = np.lexsort((rows.positions[kept], rows.hashes[kept]))
        yield from take_chunks(rows, kept[order], self.schema.names)


def _digests_of(rows: HeldRows, values: FieldValues) -> pa.Array:
    return rows.arrays(lambda batch: [values.digests(batch)])[0]


def _first_rows(rows: HeldRows, digests: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the first row of each value, and all rows without one; and which of them have a value."""
    by_position = np.argsort(rows.positions)
    ordered = digests.take(pa.array(by_position))
    has_value = ordered.is_valid().to_numpy(zero_copy_only=False)
    is_kept = (number_groups([ordered]) == np.arange(len(ordered))) | ~has_value
    return by_position[is_kept], has_value[is_kept]


def plan_duplicates(layout: DocumentLayout, path: str, near: Near, threshold: float | None) -> float:
    """Check the arguments of `dedupe(near=...)`, and return the threshold."""
    if near not in ("minhash", "embedding"):
        raise OptionError(f"dedupe(near={near!r}): use 'minhash' for texts or 'embedding' for vectors.")
    fields = layout.layout.schema.resolve(parse_path(path))
    inside = any(field.kind is not FieldKind.DOCUMENT or field.recursive for field in fields[:-1])
    kind, needed = (FieldKind.TEXT, "a text") if near == "minhash" else (FieldKind.TENSOR, "a vector")
    if inside or fields[-1].kind is not kind:
        actual = "inside of a list or a union" if inside else str(fields[-1])
        raise OptionError(
            f"dedupe({path!r}, near={near!r}): a field with {needed} a row is needed, and it is {actual}."
        )
    if threshold is None:
        return 0.8 if near == "minhash" else 0.95
    if not 0 < threshold <= 1:
        raise OptionError(f"dedupe(threshold={threshold!r}): a number above 0 and at most 1 is needed.")
    return float(threshold)


def find_duplicates(
    engine: Engine,
    frame: Frame[Any],
    values: FieldValues,
    near: Near,
    threshold: float,
    partitions: int,
    total: int | None,
) -> pa.Array:
    """Return the digests of the values that are similar to an earlier one. All rows are computed once, or twice."""
    narrow = values.source.select([values.path])
    narrow_frame = engine.run(frame, ConformRows(narrow))
    values = FieldValues(narrow, values.path)
    sketcher: Sketcher = MinHash(threshold)
    if near == "embedding":
        rows = engine.count(narrow_frame) if total is None else total
        # About 1,000 vectors in a bucket are compared with each other; up to 2,000 are compared without buckets.
        sketcher = UnitVectors(threshold, max(0, math.ceil(math.log2(max(rows, 1) / 2000))))
    sketches = exchange_rows(
        engine, [(narrow_frame, narrow.fields, ValueRouter(values, partitions))], SketchRows(values, sketcher)
    )
    links = exchange_rows(engine, [(sketches, _SKETCHES, BucketRouter(partitions))], LinkRows(sketcher))
    return find_redundant(pa.Table.from_batches(engine.collect(links), _EDGES))


def find_redundant(edges: pa.Table) -> pa.Array:
    """Return the digests of all values but the first of each connected component."""
    positions = np.concatenate([edges.column("one").to_numpy(), edges.column("other").to_numpy()])
    digests = pa.concat_arrays(
        [chunk for name in ("digest of one", "digest of other") for chunk in edges.column(name).chunks]
        or [pa.array([], pa.binary(16))]
    )
    _, nodes, places = np.unique(positions, return_index=True, return_inverse=True)
    ones, others = np.split(places.reshape(-1), 2)
    # Each value takes the lowest number that one of its neighbours has, until nothing changes.
    label = np.arange(len(nodes))
    while True:
        low, after = np.minimum(label[ones], label[others]), label.copy()
        for numbers in (ones, others, label[ones], label[others]):
            np.minimum.at(after, numbers, low)
        after = after[after]
        if np.array_equal(after, label):
            return digests.take(pa.array(nodes[label != np.arange(len(nodes))]))
        label = after
