"""Real samples for a benchmark, from a folder of images or a text file. Images are read when a sample is drawn, as in a
normal training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset

from dadt.errors import ConfigError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset of a folder with a subfolder of images for each class; each image is scaled to 3 x side x side.

    Raises ConfigError if there are no images or too many classes, or Pillow, which reads images, is not installed.
    """

    def __init__(self, folder: Path, side: int, classes: int) -> None:
        try:
            import PIL.Image
        except ImportError:
            raise ConfigError(f"--data {folder}: images are read by Pillow -> pip install 'dadt[bench]'") from None
        if not folder.is_dir():
            raise ConfigError(f"--data {folder}: give a folder that has a subfolder of images for each class")
        kinds = sorted(kind for kind in folder.iterdir() if kind.is_dir())
        self._files = [
            (file, label)
            for label, kind in enumerate(kinds)
            for file in sorted(kind.iterdir())
            if file.suffix.lower() in SUFFIXES
        ]
        if not self._files:
            raise ConfigError(f"--data {folder}: no image in its subfolders; they hold one class each, as .jpg or .png")
        if len(kinds) > classes:
            raise ConfigError(f"--data {folder}: {len(kinds)} subfolders, and the model knows {classes} classes")
        self._open, self._side = PIL.Image.open, side

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        file, label = self._files[index]
        with self._open(file) as image:
            small = image.convert("RGB").resize((self._side, self._side))
        pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
        chosen = pixels.view(self._side, self._side, 3).permute(2, 0, 1)
        return chosen.float().div(127.5).sub(1.0), torch.tensor(label)


class Text(Dataset[tuple[torch.Tensor]]):
    """Dataset of a text file, divided into pieces of `length` bytes; each byte is a token. Raises ConfigError if the
    file cannot be read or is shorter than one piece."""

    def __init__(self, file: Path, length: int) -> None:
        try:
            data = bytearray(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"--data {file}: give a file of text ({error.strerror})") from error
        if len(data) < length:
            raise ConfigError(f"--data {file}: {len(data)} bytes of text, and a sample has {length}")
        whole = torch.frombuffer(data, dtype=torch.uint8)
        self._pieces = whole[: len(data) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (self._pieces[index].long(),)
