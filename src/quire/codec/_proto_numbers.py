"""Which number a field has: its own, the one it always had, or the next that is free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from quire.codec._proto_parse import Declared, DeclaredType
from quire.codec._proto_plan import Reserved
from quire.errors import SchemaError

_WIDENED = {("int32", "int64"), ("uint32", "int64")}  # what a file not written by quire may say of an int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A field that needs a number, as messages about it name it; `given` is its ProtoNumber."""

    name: str
    label: str
    given: int | None = None
    type: str = ""
    repeated: bool = False


def assign_numbers(wanted: list[Wanted], old: DeclaredType) -> tuple[list[int], Reserved]:
    """The numbers of the fields in order, and what stays reserved."""
    for field in wanted:
        _check_given(field, old)
        _check_previous(field, old)
    known = {f.name: f.given for f in wanted if f.given is not None}
    known |= {f.name: old.fields[f.name].number for f in wanted if f.name in old.fields}
    _check_twice(wanted, known)
    free = _free_numbers(set(known.values()), {f.given for f in wanted}, old)
    for field in wanted:
        if field.name not in known:
            known[field.name] = next(free)
    return [known[field.name] for field in wanted], _reserved(wanted, old)


def _check_given(field: Wanted, old: DeclaredType) -> None:
    """A number that was asked for must be one that a field can have, and that no other field had."""
    number = field.given
    if number is None or old.is_enum:
        return
    if type(number) is not int or not 1 <= number <= old.top:
        raise SchemaError(f"{field.label}: ProtoNumber({number!r}) must be a whole number from 1 to {old.top}.")
    if 19000 <= number <= 19999:
        raise SchemaError(f"{field.label}: protobuf keeps the numbers 19000 to 19999 for itself; got {number}.")
    owner = next((known.name for known in old.fields.values() if known.number == number), field.name)
    if owner != field.name:
        raise SchemaError(
            f"{field.label}: ProtoNumber({number}) belongs to {owner!r} in the previous .proto. Take another number; "
            f"or, if this is the same field under a new name, rename it in the previous .proto as well."
        )
    if any(start <= number <= end for start, end in old.reserved_numbers):
        raise SchemaError(
            f"{field.label}: number {number} is reserved in the previous .proto, by a field that was removed. "
            "Take another number."
        )


def _check_previous(field: Wanted, old: DeclaredType) -> None:
    """A field that was there must keep its number and its type; one that was removed must not come back unseen."""
    if field.name in old.reserved_names:
        raise SchemaError(
            f"{field.label}: the name {field.name!r} is reserved in the previous .proto: the field was removed. "
            "Take another name, or, if it is the same field again, put its line back into the previous .proto."
        )
    known = old.fields.get(field.name)
    if known is None:
        return
    if field.given not in (None, known.number):
        raise SchemaError(
            f"{field.label}: ProtoNumber({field.given}) contradicts the previous .proto, where the number is "
            f"{known.number}. Messages that were written with it would be misread; keep {known.number}."
        )
    if not _same_wire(field, known):
        was, now = _type_text(known.type, known.repeated), _type_text(field.type, field.repeated)
        raise SchemaError(
            f"{field.label}: number {known.number} is {was} in the previous .proto and would now be {now}, which "
            "misreads what was written. Give the changed field another name. (Where only a name has changed, change "
            "it in the previous .proto as well: names are not on the wire.)"
        )


def _same_wire(field: Wanted, known: Declared) -> bool:
    if field.repeated != known.repeated:
        return False
    return field.type == known.type or (known.type, field.type) in _WIDENED


def _type_text(name: str, repeated: bool) -> str:  # noqa: FBT001
    return f"repeated {name}" if repeated else name


def _check_twice(wanted: list[Wanted], known: Mapping[str, int]) -> None:
    owners: dict[int, str] = {}
    for field in wanted:
        number = known.get(field.name)
        if number in owners:
            raise SchemaError(f"{field.label}: the number {number} is taken by {owners[number]} already.")
        if number is not None:
            owners[number] = field.label


def _free_numbers(taken: set[int], given: set[int | None], old: DeclaredType) -> Iterator[int]:
    """Free numbers: behind all that were ever in use, and from the start when there are no more."""
    before = [known.number for known in old.fields.values() if known.number not in given]
    before += [end for _, end in old.reserved_numbers if end < old.top]
    floor = max(before, default=0)
    ranges = [*old.reserved_numbers, *((known.number, known.number) for known in old.fields.values())]
    if not old.is_enum:
        ranges.append((19000, 19999))
    for start in (floor + 1, 1):
        number = start
        while number <= old.top:
            inside = next((end for low, end in ranges if low <= number <= end), None)
            if inside is None and number not in taken:
                taken.add(number)
                yield number
            number = (inside or number) + 1
    raise SchemaError(f"{old.name}: there is no free number left; every one is in use or reserved.")


def _reserved(wanted: list[Wanted], old: DeclaredType) -> Reserved:
    """What was reserved, and what was there and is no more."""
    names = {field.name for field in wanted}
    gone = [known for known in old.fields.values() if known.name not in names]
    numbers = [*old.reserved_numbers, *((known.number, known.number) for known in gone)]
    return Reserved(tuple(_merged(numbers)), tuple(dict.fromkeys([*old.reserved_names, *(k.name for k in gone)])))


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
