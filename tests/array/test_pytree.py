"""A batch is a pytree of torch: tree_map, vmap, per-sample gradients, torch.compile and torch.export."""

from __future__ import annotations

import io
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import LentColumn, TensorColumn
from quire.data import MultiModalDataset
from quire.errors import ColumnError, MissingValueError
from quire.typing import TorchTensor

pytestmark = pytest.mark.needs("torch")

import torch  # noqa: E402 - after the mark, by which this module is left out without torch
import torch._dynamo  # noqa: E402
import torch._dynamo.testing  # noqa: E402
import torch.utils._pytree as pytree  # noqa: E402


class Meta(BaseDocument):
    x: TorchTensor[4]
    source: str = "camera"


class Word(BaseDocument):
    vector: TorchTensor[2]


class Picture(BaseDocument):
    image: TorchTensor[3, 4, 4]
    label: int
    text: str
    meta: Meta
    weight: float | None = None


class Sentence(BaseDocument):
    words: DocumentArray[Word]
    tokens: TorchTensor["n"]


def make_pictures(count: int = 8, start: int = 0) -> DocumentArray[Picture]:
    return DocumentArray[Picture](
        Picture(
            image=torch.full((3, 4, 4), float(n)),
            label=n,
            text=f"text {n}",
            meta=Meta(x=torch.full((4,), float(n)), source=f"source {n}"),
            weight=1.0,
        )
        for n in range(start, start + count)
    )


def make_batch(count: int = 8, start: int = 0) -> DocumentBatch[Picture]:
    return make_pictures(count, start).stack(framework="torch")


def make_sentences() -> DocumentBatch[Sentence]:
    return DocumentArray[Sentence](
        Sentence(words=[Word(vector=torch.full((2,), float(k))) for k in range(n)], tokens=torch.arange(n))
        for n in (2, 0, 3)
    ).stack(shapes="ragged")


@pytest.fixture
def counter() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()


# --- trees


def test_leaves_are_the_tensor_columns_by_path() -> None:
    batch = make_batch()
    pairs, _ = pytree.tree_flatten_with_path(batch)
    paths = [path[0].key for path, _ in pairs]
    assert paths == ["image", "label", "meta.x", "weight"]
    assert all(leaf is path[0].get(batch) for path, leaf in pairs)


def test_tree_map_changes_tensors_and_keeps_texts_and_ids() -> None:
    batch = make_batch()
    doubled = pytree.tree_map(lambda tensor: tensor * 2, batch)
    assert type(doubled) is DocumentBatch[Picture]
    assert torch.equal(doubled.image, batch.image * 2)
    assert torch.equal(doubled.meta.x, batch.meta.x * 2)
    assert doubled.text == batch.text
    assert doubled.id == batch.id
    assert doubled.meta.source == batch.meta.source
    assert doubled[3].label == 6


def test_tree_map_combines_batches_with_different_texts() -> None:
    total = pytree.tree_map(torch.add, make_batch(), make_batch(start=10))
    assert total.label.tolist() == [10 + 2 * n for n in range(8)]


def test_structures_ignore_texts_and_rows_and_differ_by_missing_values() -> None:
    specs = [pytree.tree_flatten(batch)[1] for batch in (make_batch(), make_batch(start=5), make_batch(4))]
    assert specs[0] == specs[1] == specs[2]
    assert hash(specs[0]._context) == hash(specs[1]._context)
    pictures = make_pictures()
    pictures[0].weight = None
    other = pytree.tree_flatten(pictures.stack(framework="torch"))[1]
    assert other != specs[0]


def test_structure_does_not_keep_tensors_alive() -> None:
    structure = pytree.tree_flatten(make_batch())[1]._context
    assert structure.columns.columns["image"].data is None


def test_tree_of_other_objects_can_be_read() -> None:
    shapes = pytree.tree_map(lambda tensor: tensor.shape, make_batch())
    assert shapes.image == (8, 3, 4, 4)
    assert shapes.meta.x == (8, 4)
    with pytest.raises(ColumnError, match="were replaced, and do not have its 8 rows"):
        len(shapes)


def test_tree_map_that_drops_rows_raises_when_rows_are_read() -> None:
    shorter = pytree.tree_map(lambda tensor: tensor[:3], make_batch())
    assert len(shorter.image) == 3
    for use in (len, list, lambda batch: batch[0], lambda batch: batch.take([0]), lambda batch: batch.to("cpu")):
        with pytest.raises(ColumnError, match="do not have its 8 rows"):
            use(shorter)


def test_tree_map_changes_the_framework_of_columns() -> None:
    converted = pytree.tree_map(lambda tensor: tensor.numpy(), make_batch())
    assert type(converted.image) is np.ndarray
    assert converted.column("image").framework.name == "numpy"


def test_missing_values_stay_missing() -> None:
    pictures = make_pictures()
    pictures[2].weight = None
    batch = pytree.tree_map(lambda tensor: tensor + 1, pictures.stack(framework="torch"))
    assert batch.validity("weight").tolist() == [n != 2 for n in range(8)]
    assert batch[2].weight is None


def test_guarded_batches_stay_guarded_and_keep_their_state() -> None:
    pictures = make_pictures()
    pictures[2].weight = None
    batch = pictures.stack(framework="torch")._guard_missing()
    mapped = pytree.tree_map(lambda tensor: tensor, batch)
    with pytest.raises(MissingValueError, match="row 2"):
        mapped.weight  # noqa: B018


def test_ragged_columns_and_arrays_are_leaves_with_offsets_in_the_structure() -> None:
    batch = make_sentences()
    mapped = pytree.tree_map(lambda tensor: tensor + 1, batch)
    assert mapped.words.offsets.tolist() == [0, 2, 2, 5]
    assert mapped.tokens[2].tolist() == [1, 2, 3]
    assert mapped[0].words[1].vector.tolist() == [2.0, 2.0]


def test_batches_inside_of_other_trees_are_mapped() -> None:
    tree = {"batch": make_batch(), "other": [torch.ones(1)]}
    mapped = pytree.tree_map(lambda tensor: tensor + 1, tree)
    assert mapped["batch"].label[0] == 1


def test_nested_batches_are_trees_of_their_own() -> None:
    meta = pytree.tree_map(lambda tensor: tensor + 1, make_batch().meta)
    assert type(meta) is DocumentBatch[Meta]
    assert meta.x[0].tolist() == [1.0] * 4


class Album(DocumentBatch[Picture]):
    """A subclass of a batch."""


def test_subclass_of_a_batch_is_a_tree_of_its_own_class() -> None:
    make_batch()
    mapped = pytree.tree_map(lambda tensor: tensor + 1, Album(make_pictures()))
    assert type(mapped) is Album
    assert mapped.image[0, 0, 0, 0] == 1


def test_lazily_gathered_documents_are_not_gathered_by_flattening() -> None:
    class Label(BaseDocument):
        name: str

    class Item(BaseDocument):
        vector: TorchTensor[2]
        label: Label

    items = DocumentArray[Item](Item(vector=torch.ones(2), label=Label(name=f"{n}")) for n in range(4))
    batch = MultiModalDataset[Item](items).__getitems__([2, 1])
    mapped = pytree.tree_map(lambda tensor: tensor * 2, batch)
    assert mapped.label.name == ["2", "1"]
    assert mapped.vector.tolist() == [[2.0, 2.0]] * 2


# --- functional transforms


def test_vmap_maps_over_the_rows_of_all_columns() -> None:
    batch = make_batch()
    sums = torch.func.vmap(lambda row: row.image.sum() + row.label + row.meta.x.sum())(batch)
    assert sums.tolist() == [(48 + 1 + 4) * n for n in range(8)]


def test_vmap_returns_batches_with_rows() -> None:
    batch = make_batch()
    mapped = torch.func.vmap(lambda row: pytree.tree_map(lambda tensor: tensor + 1, row))(batch)
    assert len(mapped) == 8
    assert mapped.text == batch.text
    assert mapped.label.tolist() == list(range(1, 9))


def test_vmap_has_no_rows_inside() -> None:
    with pytest.raises(ColumnError, match="do not have its 8 rows"):
        torch.func.vmap(lambda row: row.image.sum() / len(row))(make_batch())


def test_per_sample_gradients_equal_those_of_a_loop() -> None:
    # In double precision: in single precision, both ways round differently if the error of a row is near zero.
    model, batch = torch.nn.Linear(48, 1).double(), make_batch()
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, row: Any) -> torch.Tensor:
        output = torch.func.functional_call(model, parameters, (row.image.double().flatten(),))
        return (output - row.label).pow(2).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
    for row in range(len(batch)):
        model.zero_grad()
        (model(batch.image[row].double().flatten()) - batch.label[row]).pow(2).sum().backward()
        assert torch.allclose(gradients["weight"][row], model.weight.grad)


# --- torch.compile


def read_columns(batch: Any) -> torch.Tensor:
    return batch.image.mean() + batch.label.sum() + batch.meta.x.sum()


def test_compiled_step_has_one_graph_for_batches_with_different_texts(counter: Any) -> None:
    step = torch.compile(read_columns, fullgraph=True, backend=counter)
    dataset = MultiModalDataset[Picture](make_pictures(80))
    for seed in range(10):
        batch = next(dataset.iter_batches(8, shuffle=True, seed=seed))
        assert torch.equal(step(batch), read_columns(batch))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda batch: batch["meta.x"].sum(),
        lambda batch: batch.tensors("image", "meta.x")["meta.x"].sum(),
        lambda batch: batch.apply(lambda tensor: tensor * 2).image.sum(),
        lambda batch: (batch.weight * batch.validity("weight")).sum(),
        lambda batch: batch.mask().sum(),
        lambda batch: batch.image.sum() / len(batch),
        lambda batch: pytree.tree_map(lambda tensor: tensor * 2, batch).meta.x.sum(),
    ],
)
def test_methods_of_batches_compile_without_graph_breaks(counter: Any, function: Any) -> None:
    pictures = make_pictures()
    pictures[1].weight = None
    batch = pictures.stack(framework="torch")
    assert torch.equal(torch.compile(function, fullgraph=True, backend=counter)(batch), function(batch))


def test_compiled_function_returns_a_batch_with_the_texts_of_its_argument(counter: Any) -> None:
    function = torch.compile(
        lambda batch: pytree.tree_map(lambda tensor: tensor * 2, batch), fullgraph=True, backend=counter
    )
    for start in (0, 20):
        batch = make_batch(start=start)
        result = function(batch)
        assert result.text == batch.text
        assert torch.equal(result.label, batch.label * 2)
    assert counter.frame_count == 1


def test_compiled_function_reads_batches_of_a_worker_process(counter: Any) -> None:
    step = torch.compile(read_columns, fullgraph=True, backend=counter)
    batch = pickle.loads(pickle.dumps(make_batch()))
    assert torch.equal(step(batch), read_columns(batch))


def test_borrowed_column_is_read_before_a_compiled_function(counter: Any) -> None:
    batch = make_batch()
    expected = read_columns(batch)
    column: Any = batch._columns.columns["image"]
    array = column.data.numpy()
    array.flags.writeable = False
    batch._columns.columns["image"] = LentColumn.lend(TensorColumn(column.field, array, column.framework))
    step = torch.compile(read_columns, fullgraph=True, backend=counter)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="'image' is borrowed from a message"):
        step(batch)
    batch.tensors()
    assert torch.equal(step(batch), expected)


# --- torch.export


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(48, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.linear(batch.image.flatten(1)) + batch.meta.x.sum(1, keepdim=True)
        return output


class Double(torch.nn.Module):
    def forward(self, batch: Any) -> Any:
        return pytree.tree_map(lambda tensor: tensor * 2, batch)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_takes_other_batches(strict: bool) -> None:
    model = Model()
    program = torch.export.export(model, (make_batch(),), strict=strict)
    other = make_batch(start=20)
    assert torch.allclose(program.module()(other), model(other))


def test_exported_program_takes_any_number_of_rows() -> None:
    model, rows = Model(), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (make_batch(),), dynamic_shapes=([{0: rows}] * 4,))
    assert program.module()(make_batch(5)).shape == (5, 2)


def test_exported_program_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch loads the example, which is a pickle, and reports that in a message that it formats wrongly.
    monkeypatch.setattr(logging.getLogger("torch._export.serde.serialize"), "disabled", True)
    model, file = Model(), io.BytesIO()
    torch.export.save(torch.export.export(model, (make_batch(),)), file)
    file.seek(0)
    other = make_batch(start=20)
    assert torch.allclose(torch.export.load(file).module()(other), model(other))


def test_batches_of_an_exported_program_have_no_texts_of_the_example() -> None:
    program = torch.export.export(Double(), (make_batch(),))
    result = program.module()(make_batch(start=20))
    assert result.label.tolist() == [2 * n for n in range(20, 28)]
    assert len(result) == 8
    with pytest.raises(ColumnError, match=r"Picture.text: not available in a function that jax.jit or torch.export"):
        result.text  # noqa: B018
    with pytest.raises(ColumnError, match=r"Picture.id: not available"):
        result[0]


def test_missing_values_of_a_guarded_batch_raise_while_it_is_exported() -> None:
    class Weighted(torch.nn.Module):
        def forward(self, batch: Any) -> torch.Tensor:
            total: torch.Tensor = batch.weight.sum()
            return total

    pictures = make_pictures()
    pictures[2].weight = None
    batch = pictures.stack(framework="torch")._guard_missing()
    with pytest.raises(Exception, match=r"Picture.weight: missing values: not available"):
        torch.export.export(Weighted(), (batch,))


def test_structure_is_serialized_without_texts() -> None:
    spec = pytree.tree_flatten({"sentences": make_sentences(), "batch": make_batch()})[1]
    dumped = pytree.treespec_dumps(spec)
    assert "text 1" not in dumped
    assert pytree.treespec_loads(dumped) == spec


# --- other libraries


@pytest.mark.needs("optree")
def test_batch_is_a_tree_of_optree() -> None:
    import optree
    import torch.utils._cxx_pytree as cxx

    batch = make_batch()
    mapped = optree.tree_map(lambda tensor: tensor * 2, batch)
    assert mapped.text == batch.text
    assert mapped.label.tolist() == [2 * n for n in range(8)]
    assert optree.tree_paths(batch) == [("image",), ("label",), ("meta.x",), ("weight",)]
    assert optree.tree_structure(batch) == optree.tree_structure(make_batch(start=9))
    assert cxx.tree_map(lambda tensor: tensor * 2, batch).label.tolist() == mapped.label.tolist()


IMPORT_ORDERS = {
    "torch first": "import torch; import quire; {define}; batch = make('torch'); {use}",
    "torch after quire": "import quire; {define}; import torch; batch = make('torch'); {use}",
    "torch after a numpy batch": "import quire; {define}; make(None); import torch; batch = make('torch'); {use}",
    "unpickled": "import pickle; import quire; {define}; data = pickle.dumps(make('torch')); "
    "batch = pickle.loads(data); {use}",
}


@pytest.mark.parametrize("order", IMPORT_ORDERS)
def test_classes_are_registered_in_every_order_of_imports(order: str) -> None:
    define = """
import numpy as np
from quire import BaseDocument, DocumentArray
from quire.typing import NdArray
class Point(BaseDocument):
    at: NdArray[3]
    name: str = 'a'
def make(framework):
    return DocumentArray[Point](Point(at=np.full(3, float(n))) for n in range(4)).stack(framework=framework)
"""
    use = """
import torch.utils._pytree as pytree
mapped = pytree.tree_map(lambda tensor: tensor + 1, batch)
assert mapped.at[0].tolist() == [1.0] * 3, mapped.at
assert mapped.name == ['a'] * 4
"""
    code = IMPORT_ORDERS[order].replace("; ", "\n").format(define=define, use=use)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_numpy_batches_import_neither_torch_nor_jax() -> None:
    code = """
import sys
import numpy as np
from quire import BaseDocument, DocumentArray
from quire.typing import NdArray
class Point(BaseDocument):
    at: NdArray[3]
batch = DocumentArray[Point](Point(at=np.zeros(3)) for _ in range(4)).stack()
batch.take([0]), batch.apply(lambda array: array + 1), batch.tensors()
assert not {'torch', 'jax', 'optree'} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
