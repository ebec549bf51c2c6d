"""Real data and a judge: scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = "8x8"


def caption(digit: int) -> str:
    return f"a handwritten {NAMES[digit]}"


def write_images(folder: Path) -> int:
    """Write each digit as a grey PNG with its caption in `metadata.jsonl`; returns how many."""
    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        name = f"{index:04d}.png"
        # 17 grey levels, 0 to 16, spread over a byte.
        Image.fromarray(np.round(pixels * 255 / 16).astype(np.uint8), mode="L").save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": caption(int(label))}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


class Judge:
    """Says which digit a picture shows: a logistic regression fitted on the real ones."""

    def __init__(self) -> None:
        digits = load_digits()
        self._model: Any = LogisticRegression(max_iter=2000).fit(digits.images.reshape(-1, 64) / 8 - 1, digits.target)

    def accuracy(self, pictures: NDArray[np.uint8], wanted: NDArray[np.int64]) -> float:
        """Share of `pictures` (N, 8, 8) that show the digit that was asked for, `wanted` (N,)."""
        seen = self._model.predict(pictures.reshape(-1, 64).astype(np.float64) / 127.5 - 1)
        return float((seen == wanted).mean())
