"""The loader of CIFAR-10, on a tiny data set in CIFAR-10's own file format that the test writes itself."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
EACH = 6  # images in a file; CIFAR-10 has 10000


class OldPickler(pickle.Pickler):
    """Writes arrays as the files of 2009 have them: their dtype says 0 where numpy says False today."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.dtype):
            return np.dtype, ("u1", 0, 1), value.__reduce__()[2]
        return NotImplemented


def write(file: Path, content: dict[str, Any]) -> list[str]:
    """Pickle with the protocol of Python 2 and return what torchvision's lists say: name and MD5 sum."""
    with file.open("wb") as opened:
        OldPickler(opened, protocol=2).dump(content)
    return [file.name, hashlib.md5(file.read_bytes()).hexdigest()]  # noqa: S324  (what the format uses)


def pixels(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Make the rows of a file: 1024 red, 1024 green, 1024 blue values of each image, row by row."""
    generator = np.random.default_rng(number)
    return generator.integers(0, 256, (EACH, 3072), dtype=np.uint8)


@pytest.fixture(name="program")
def fixture_program(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torchvision")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_resnet")


@pytest.fixture(name="root")
def fixture_root(tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the data set, and have torchvision expect the MD5 sums of these files in place of the real ones."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    listed = [
        write(folder / name, {"data": pixels(number), "labels": [(number + place) % 10 for place in range(EACH)]})
        for number, name in enumerate(names)
    ]
    meta = write(folder / "batches.meta", {"label_names": [f"class {number}" for number in range(10)]})
    dataset = program.torchvision.datasets.CIFAR10
    monkeypatch.setattr(dataset, "train_list", listed[:5])
    monkeypatch.setattr(dataset, "test_list", listed[5:])
    monkeypatch.setattr(dataset, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    monkeypatch.setattr(dataset, "url", (tmp_path / "nowhere.tar.gz").as_uri())  # the network of this test
    return tmp_path


def test_images_and_classes_are_those_of_the_files(root: Path, program: Any) -> None:
    data = program.cifar10(root)
    wanted = np.concatenate([pixels(number) for number in range(6)]).reshape(-1, 3, 32, 32)
    assert np.array_equal(torch.cat([data.training.pixels, data.held_out.pixels]).numpy(), wanted)
    classes = [(number + place) % 10 for number in range(6) for place in range(EACH)]
    assert torch.cat([data.training.targets, data.held_out.targets]).tolist() == classes
    assert (len(data.training.targets), len(data.held_out.targets)) == (5 * EACH, EACH)
    assert data.flip


def test_training_images_have_mean_0_and_deviation_1(root: Path, program: Any) -> None:
    data = program.cifar10(root)
    inputs = data.normalized(data.training.pixels)
    assert inputs.dtype == torch.float32
    assert torch.allclose(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(inputs.std((0, 2, 3)), torch.ones(3), atol=1e-5)


def test_augmented_images_are_windows_of_the_padded_ones_some_mirrored(program: Any) -> None:
    torch.manual_seed(0)
    inputs = 1 + torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4).float()
    padded = torch.nn.functional.pad(inputs, [1] * 4)
    seen = set()
    for _ in range(60):
        for picture, found in enumerate(program.augmented(inputs, 1, flip=True)):
            matches = [
                (row, column, mirrored)
                for row in range(3)
                for column in range(3)
                for mirrored in (False, True)
                if torch.equal(
                    found.flip(2) if mirrored else found,
                    padded[picture, :, row : row + 4, column : column + 4],
                )
            ]
            assert len(matches) == 1
            seen.update(matches)
    assert len(seen) == 18


def test_a_broken_file_is_refused(root: Path, program: Any) -> None:
    file = root / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(RuntimeError, match="not found or corrupted"):
        program.cifar10(root)


def test_the_program_takes_it_where_it_is(root: Path, program: Any) -> None:
    options = program.parse(["--root", str(root), "--device", "cpu"])
    assert (options.data, options.batch, options.epochs) == ("cifar10", 128, 30)


def test_the_program_takes_the_digits_where_it_is_not(
    tmp_path: Path, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = program.parse(["--root", str(tmp_path / "empty"), "--device", "cpu"])
    assert (options.data, options.batch, options.epochs) == ("digits", 32, 6)
    assert "CIFAR-10 is not in" in capsys.readouterr().out


def test_the_program_says_what_to_do_without_files_and_network(
    root: Path, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(SystemExit) as ended:
        program.parse(["--data", "cifar10", "--root", str(root), "--device", "cpu"])
    assert ended.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(r"--data cifar10: it is not in --root .* and cannot be downloaded \(.*nowhere", message)
    assert "use --data digits" in message


@pytest.mark.parametrize("engine", ["hooked", "functional"])
def test_the_program_trains_on_it(engine: str, root: Path, program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engine", engine, "--width", "8", "--batch", "10", "--epochs", "2", "--device", "cpu"]
    options = program.parse(["--root", str(root), *arguments])
    program.train(options, 0, 1, torch.device("cpu"))
    output = capsys.readouterr().out
    assert "cifar10: 30 training and 6 held-out images" in output
    assert re.search(r"^top-1: [01]\.\d{3}$", output, re.MULTILINE)
