"""The tour says and draws what it measures."""

import re

import pytest

from tests.conftest import SENTENCES, write_hf_folder
from tools import tour


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour") / "tiny"
    return write_hf_folder(folder, max_position_embeddings=2048)


def test_four_pictures_and_four_paragraphs(model, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "tour.png"
    text.write_text(" ".join(SENTENCES) * 40)
    with pytest.raises(SystemExit) as end:
        tour.main(
            f"--model {model} --device cpu --prompt-file {text} --out {out} "
            "--max-prompt-tokens 700 --max-new-tokens 12 -q".split()
        )
    assert end.value.code == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    best, kept, _ = (int(it) for it in re.findall(r"(\d+)%", said.splitlines()[0]))
    assert 100 >= best >= kept > 0
    assert re.search(r"3\. \d+% of 12 tokens were guessed", said)
    assert "After 700 tokens a token takes" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-prompt-tokens", "300"], "the text has 300 tokens, too few to see anything"),
        (["--out", "nowhere/tour.png"], "is not a .png file in a folder that is there"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(model, flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        tour.main(["--model", str(model), "--device", "cpu", *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
