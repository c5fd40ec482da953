"""What a service decodes is what evaluation decodes; decoding keeps no memory; mutated files raise DecodeError only."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, decode_image
from quire.typing import NdArray, uint8
from tests.data.sample_pictures import Photo, photos

ROOT = Path(__file__).parents[2]


class Seen(BaseDocument):
    """What a model would get for a photo."""

    number: int
    image: NdArray[uint8, 3, 24, 32]


@pytest.mark.needs("PIL", "grpc", "grpc_health", "grpc_reflection")
def test_a_service_decodes_as_evaluation_does() -> None:
    from quire.services import Client, serve

    step, documents = decode_image((24, 32), crop="random", flip=True), photos(9)
    training = MultiModalDataset[Photo](documents, {"image": step}, output=Seen, framework="numpy")
    evaluation = MultiModalDataset[Photo](documents, {"image": step.evaluation()}, output=Seen, framework="numpy")

    def look(docs: DocumentArray[Photo]) -> DocumentBatch[Seen]:
        return training.preprocess(docs)  # type: ignore[return-value]

    with serve(look) as server, Client(f"localhost:{server.port}") as client:
        response: Any = client.look(documents)
    expected = evaluation.__getitems__(range(9))
    assert response.number.tolist() == expected.number.tolist()
    assert np.array_equal(response.image, expected.image)


MEMORY = """
import resource
from pathlib import Path
from tests.data.sample_pictures import Photo, photos
from quire.data import MultiModalDataset, decode_image

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

dataset = MultiModalDataset[Photo](photos(16), {"image": decode_image(224, crop="random")}, framework="numpy")
for count in (40, 200):
    for _ in range(count):
        dataset.__getitems__(range(16))
    print(resident())
"""


@pytest.mark.needs("PIL")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat_over_many_batches() -> None:
    ended = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    before, after = map(int, ended.stdout.split())
    assert after - before < 10 * 16 * 3 * 224 * 224, "200 batches leave less than the memory of ten behind"


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.needs("PIL", "av")
def test_mutated_files_raise_decode_errors_only(kind: str) -> None:
    command = [sys.executable, str(ROOT / "fuzz" / "media.py"), "--runs=150", "--seed=0", kind]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"SUMMARY {kind}: 150 inputs" in ended.stdout
    assert "0 crashes" in ended.stdout


@pytest.mark.needs("PIL", "av")
def test_inputs_can_be_made_again() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_media", ROOT / "fuzz" / "media.py")
    assert spec is not None
    assert spec.loader is not None
    media = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(media)
    inputs = [media.mutate("image", 1, number) for number in range(20)]
    assert inputs == [media.mutate("image", 1, number) for number in range(20)]
    assert len(set(inputs)) == 20
