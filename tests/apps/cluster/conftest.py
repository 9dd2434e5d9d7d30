"""Questions about documents, for a tiny model."""

import json
import random
from pathlib import Path

from tests.conftest import SENTENCES

WORDS = " ".join(SENTENCES).split()


def write_questions(file: Path, num: int, num_documents: int) -> None:
    """Writes questions about documents of 70 words, in a random order."""
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=70)) for _ in range(num_documents)]
    lines = [{"id": f"q{i}", "prompt": f"{texts[i % num_documents]} {i}?"} for i in range(num)]
    rng.shuffle(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
