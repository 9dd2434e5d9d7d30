"""`tools.race`: an animated picture of two runs, as they were measured."""

from PIL import Image, ImageSequence

from minitri import Token
from tools import race


def test_the_same_words_appear_at_the_recorded_times(call, folder, tmp_path):
    words = f"-m {folder} -p Once -n 12 --dtype float32 -q --out".split()
    assert call(race.main, *words, tmp_path / "real.gif").code == 0
    with Image.open(tmp_path / "real.gif") as picture:
        assert picture.is_animated
    token, known = Token(0, 1, " word", "draft"), {"a": (50, 750), "b": (50, 250)}
    lanes = {name: [(ms / 1000, token) for ms in times] for name, times in known.items()}
    race.draw(lanes, "", tmp_path / "known.gif")
    start, firsts = 0, ({}, {})
    with Image.open(tmp_path / "known.gif") as picture:
        for frame in ImageSequence.Iterator(picture):
            for first, left in zip(firsts, race.EDGES, strict=True):
                area = frame.convert("L").crop((left, 50, left + 440, 300))
                first.setdefault(sum(area.histogram()[:200]), start)
            start += frame.info["duration"]
    assert [[*first.values()] for first in firsts] == [[0, 100, 800], [0, 100, 300]]
    assert start == 800 + race.HOLD_MS
