"""Pickles in other processes: forked, spawned, and ones that never saw the classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire

SCHOOL = '''
"""The schemas that processes send each other."""
from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Any, Generic, TypeVar

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.typing import NdArray, float32

T = TypeVar("T")

class Color(Enum):
    RED = 1

class Thesis(BaseDocument):
    title: str
    vector: NdArray[float32, 2] | None = None

class Student(BaseDocument):
    name: str
    number: int = 2**70
    color: Color = Color.RED
    when: datetime = datetime(2020, 1, 1)
    tags: dict[int, Any] = {1: "a"}
    thesis: Thesis | None = None
    papers: DocumentArray[Thesis] = []
    mates: DocumentArray[Student] = []

class Graduate(Student):
    year: int = 0

class Box(BaseDocument, Generic[T]):
    item: T

class Crate(BaseDocument, Generic[T]):
    items: DocumentArray[T]

class Cohort(DocumentArray):
    pass

class Team(DocumentArray[Student]):
    def __init__(self, documents=(), motto=""):
        super().__init__(documents)
        self.motto = motto

def students():
    ada = Graduate(id="ada", name="Ada", year=3, thesis={"id": "t", "title": "Notes", "vector": [1, 2]})
    return [ada, Student(id="bob", name="Bob", papers=[{"id": "p", "title": "P"}], mates=[ada])]

def things():
    """What is sent, by name."""
    docs = DocumentArray[Student](students())
    return {
        "class": DocumentArray[Student],
        "batch class": DocumentBatch[Student],
        "cohort class": Cohort[Student],
        "generic class": DocumentArray[Box[int]],
        "document": docs[0],
        "array": docs,
        "batch": docs.stack(),
        "empty": DocumentBatch[Student](),
        "cohort": Cohort[Student](students()),
        "team": Team(students(), motto="onward"),
        "boxes": DocumentArray[Box[int]]([{"id": "1", "item": 1}]),
        "crate": Crate[Student](id="c", items=students()),
        "untyped": DocumentArray([*students(), Thesis(id="x", title="X")]),
    }

def examine(name, thing):
    """Whether a thing is what its name says, where it has arrived."""
    expected = things()[name]
    if isinstance(thing, type):
        return thing is expected
    if type(thing) is not type(expected):
        return False
    if name == "team" and thing.motto != "onward":
        return False
    if name == "crate" and type(thing.items) is not DocumentArray[Student]:
        return False
    return thing.identical(expected)

def examine_all(things):
    """The names of the things that are not what they should be, and the things, to be sent back."""
    return [name for name, thing in things.items() if not examine(name, thing)], things
'''

EXCHANGE = """
import multiprocessing, sys
import school
from quire import BaseDocument, DocumentArray

class Own(BaseDocument):
    name: str = ""

def own(docs):
    return type(docs) is DocumentArray[Own] and docs.name == ["a"]

def main(method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        wrong, back = pool.apply(school.examine_all, (school.things(),))
        mine = pool.apply(own, (DocumentArray[Own]([Own(name="a")]),))
    print("there:", wrong, "back:", school.examine_all(back)[0], "own:", mine)

if __name__ == "__main__":
    main(sys.argv[1])
"""


def run(code: str, *arguments: str, folder: Path, options: tuple[str, ...] = ()) -> str:
    """What a fresh interpreter prints that runs the code in a folder."""
    script = folder / f"script_{abs(hash(code))}.py"
    script.write_text(code)
    root = Path(quire.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(root)])}
    command = [sys.executable, "-W", "error", *options, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module `school`."""
    path = tmp_path_factory.mktemp("school")
    (path / "school.py").write_text(SCHOOL)
    return path


# --- in other processes


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_exchange_everything(method: str, folder: Path) -> None:
    warned = ("-W", "ignore::DeprecationWarning")  # Python 3.12 warns of every fork beside a thread of numpy's
    output = run(EXCHANGE, method, folder=folder, options=warned)
    assert output == "there: [] back: [] own: True"


def test_process_without_the_class_reads_pickles(folder: Path) -> None:
    run(
        "import pickle, school\n"
        "for name, thing in school.things().items():\n"
        "    open(f'{school.__file__}.{name}', 'wb').write(pickle.dumps(thing))\n",
        folder=folder,
    )
    output = run(
        "import pickle, sys, glob\n"
        "wrong, names = [], []\n"
        "for path in sorted(glob.glob(sys.argv[1] + '/school.py.*')):\n"
        "    name = path.rpartition('.')[2]\n"
        "    names.append(name)\n"
        "    thing = pickle.load(open(path, 'rb'))\n"
        "    import school\n"
        "    wrong += [] if school.examine(name, thing) else [name]\n"
        "print(len(names), wrong)\n",
        str(folder),
        folder=folder,
        options=("-W", "ignore::ResourceWarning"),
    )
    assert output == "13 []"


def test_pickle_of_an_array_contains_its_class(folder: Path) -> None:
    """The very first thing that the process does with quire is to load a pickle."""
    first_output = run(
        "import pickle, school\nprint(pickle.dumps(school.DocumentArray[school.Student](school.students())).hex())",
        folder=folder,
    )
    output = run(
        f"import pickle\ndocs = pickle.loads(bytes.fromhex('{first_output}'))\n"
        "import quire, school\nprint(type(docs) is quire.DocumentArray[school.Student], docs.name, docs[0].year)",
        folder=folder,
    )
    assert output == "True ['Ada', 'Bob'] 3"


def test_classes_of_the_same_name_in_two_modules_are_distinguished(folder: Path) -> None:
    for number in (1, 2):
        code = f"from quire import BaseDocument\nclass Student(BaseDocument):\n    field_{number}: int = {number}\n"
        (folder / f"alike_{number}.py").write_text(code)
    first_output = run(
        "import pickle, alike_1, alike_2\nfrom quire import DocumentArray\n"
        "docs = [DocumentArray[m.Student]([m.Student()]) for m in (alike_1, alike_2)]\n"
        "print(pickle.dumps([*docs, *(d.stack() for d in docs)]).hex())",
        folder=folder,
    )
    output = run(
        f"import pickle\na, b, c, d = pickle.loads(bytes.fromhex('{first_output}'))\n"
        "import alike_1, alike_2\nfrom quire import DocumentArray, DocumentBatch\n"
        "print(type(a) is DocumentArray[alike_1.Student], type(d) is DocumentBatch[alike_2.Student])\n"
        "print(a.field_1, b.field_2)",
        folder=folder,
    )
    assert output == "True True\n[1] [2]"


def test_pickles_need_no_protobuf(folder: Path) -> None:
    code = (
        "import sys\nsys.modules['google.protobuf'] = sys.modules['google'] = None\n"
        "import pickle, copy, school\n"
        "things = school.things()\n"
        "print(school.examine_all(pickle.loads(pickle.dumps(things)))[0], copy.deepcopy(things['array']).name)"
    )
    assert run(code, folder=folder) == "[] ['Ada', 'Bob']"


# --- cloudpickle

CLOUD = """
import sys
import cloudpickle
from typing import Any, Generic, TypeVar
from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.typing import NdArray, float32

T = TypeVar("T")

class Main(BaseDocument, main="name"):
    name: str = "m"
    vector: NdArray[float32, "n"] = [0.0]
    mask: NdArray[float32, "n"] = [0.0]

def local():
    class Inner(BaseDocument):
        number: int = 0

    class Local(BaseDocument):
        name: str = "a"
        title: Text = Text(text="t")
        vector: NdArray[float32, 2] | None = None
        inner: DocumentArray[Inner] = []
        tags: dict[str, Any] = {}

    class Box(BaseDocument, Generic[T]):
        item: T

    docs = DocumentArray[Local]([Local(vector=[1, 2], inner=[{"number": 3}]), Local(name="b")])
    return Local, docs, DocumentArray[Box[int]]([{"item": 1}])

Local, docs, boxes = local()
mains = DocumentArray[Main]([Main(name="x")])
parts = [
    (Local, DocumentArray[Local], DocumentBatch[Local], docs, docs.stack(), docs[0]),
    (Main, DocumentArray[Main], DocumentBatch[Main], mains, mains.stack(), mains[0]),
    (boxes,),
    docs,  # once more, in a pickle of its own
]
for number, part in enumerate(parts):
    with open(f"{sys.argv[1]}/{number}.cloud", "wb") as file:
        cloudpickle.dump(part, file)
"""
LOAD = """
import pickle, sys

def load(number):
    with open(f"{sys.argv[1]}/{number}.cloud", "rb") as file:
        return pickle.load(file)

from quire import DocumentArray, DocumentBatch
for number in (0, 1):
    schema, array_type, batch_type, docs, batch, document = load(number)
    print(array_type is DocumentArray[schema], batch_type is DocumentBatch[schema], type(docs) is array_type,
          type(batch) is batch_type, type(document) is schema, type(docs[0]) is schema, batch.unstack().identical(docs))
    if number == 0:
        local = schema
        print(docs.name, docs[0].vector.tolist(), docs[0].inner.number, docs[0].title.text,
              type(docs[0].inner) is DocumentArray[type(docs[0].inner[0])])
    else:
        print(docs.name, DocumentArray[schema](["main value"]).name)
    docs[0].name = "changed"
    try:
        docs[0].name = 3
    except ValueError:
        print("validates")
    print(len(docs.stack()), DocumentArray[schema]([schema()]).stack().unstack().name)
[boxes] = load(2)
print(boxes.item, type(boxes) is DocumentArray[type(boxes[0])])
again = load(3)
print(type(again) is DocumentArray[local])
"""


def test_cloudpickle_carries_local_and_main_schemas(folder: Path) -> None:
    run(CLOUD, str(folder), folder=folder)
    assert run(LOAD, str(folder), folder=folder).splitlines() == [
        "True True True True True True True",
        "['a', 'b'] [1.0, 2.0] [3] t True",
        "validates",
        "2 ['a']",
        "True True True True True True True",
        "['x'] ['main value']",
        "validates",
        "1 ['m']",
        "[1] True",
        "True",
    ]


# --- torch

QUEUE = """
import sys
import torch
import torch.multiprocessing as multiprocessing
from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.typing import NdArray, TorchTensor

class Part(BaseDocument):
    vector: NdArray

class Item(BaseDocument):
    tensor: TorchTensor[2]
    label: int
    name: str
    parts: DocumentArray[Part] = []

def change(inbox, outbox):
    batch, part, row = inbox.get()
    batch.tensor.add_(1)
    part.tensor.mul_(10)
    row.tensor.sub_(5)
    batch.label.mul_(2)
    batch.parts.flat.vector.sub_(1)
    outbox.put((type(batch) is DocumentBatch[Item], batch.tensor.is_shared(), batch.name, batch[0].label))
    outbox.put(DocumentArray[Item]([batch[1]]).stack("torch"))
    inbox.get()  # the memory must live until the parent has seen it

def main(method):
    context = multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=change, args=(inbox, outbox))
    child.start()
    items = [Item(tensor=torch.tensor([i, i + 0.5]), label=i, name=str(i), parts=[{"vector": [i]}]) for i in range(3)]
    batch = DocumentArray[Item](items).stack("torch")
    inbox.put((batch, batch[2:], batch[0]))
    print(outbox.get(timeout=60))
    back = outbox.get(timeout=60)
    print(type(back) is DocumentBatch[Item], back.tensor.tolist(), back.name, back[0].parts[0].vector.tolist())
    print(batch.tensor.tolist(), batch.label.tolist(), batch.parts.flat.vector.tolist())
    inbox.put(None)
    child.join(60)
    print(child.exitcode)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.needs("torch")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_batches_go_through_queues_in_shared_memory(method: str, folder: Path) -> None:
    """What one process changes in place, the other sees: nothing was copied through the pipe."""
    output = run(QUEUE, method, folder=folder, options=("-W", "ignore"))
    assert output.splitlines() == [
        "(True, True, ['0', '1', '2'], 0)",
        "True [[2.0, 2.5]] ['1'] [0]",
        "[[-4.0, -3.5], [2.0, 2.5], [30.0, 35.0]] [0, 2, 4] [[-1], [0], [1]]",
        "0",
    ]
