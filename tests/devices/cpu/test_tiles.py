"""K and V in tiles: read and written like plain tensors, and multiplied to the same bits."""

import random

import pytest
import torch

from minitri import load
from minitri.core.model.cache import gather_path
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.cpu.tiles import Tiles, tiled_slots
from tests.conftest import write_hf_folder
from tests.core.rigs import CPU

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")


@pytest.mark.parametrize(
    ("dtype", "pair"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)]
)
@pytest.mark.parametrize("which", [0, 1])
def test_tiles_are_read_and_written_like_a_tensor(dtype, pair, which):
    """Ranges that begin and end anywhere, single slots, rows, and paths of a tree."""
    chance, generator = random.Random(1), torch.Generator().manual_seed(1)
    plain = torch.zeros(2, 3, 4, 64, 32, dtype=dtype)
    tiles = tiled_slots(tuple(plain.shape), dtype, pair)[which]
    tiles[...] = plain
    for _ in range(100):
        start = chance.randrange(64)
        end = chance.randrange(start, 65)
        layer, b = chance.randrange(2), chance.randrange(3)
        new = torch.randn(2, 4, end - start, 32, generator=generator).to(dtype)
        for slots in (plain, tiles):
            slots[:, b, :, start:end] = new
            slots[layer][1:, :, :start] = float(start)
            gather_path(slots, b, start // 2, [1, 3, 7])
        places = (torch.arange(4).unsqueeze(1), torch.randint(64, (4, 5), generator=generator))
        assert torch.equal(tiles[..., start:end, :], plain[..., start:end, :])
        for part in ((slice(None), slice(end)), places):
            assert torch.equal(tiles[layer, b][part], plain[layer, b][part])
    assert torch.equal(tiles[...], plain)
    assert (tiles.shape, len(tiles), tiles.nbytes) == (plain.shape, 2, plain.nbytes)


def test_tiles_are_made_where_kernels_can_read_them_only(kernels):
    for shape, is_tiled in [((3, 64, 24), False), ((3, 24, 64), False), ((3, 64, 32), True)]:
        slots = kernels.make_slots(shape, torch.float32, CPU)
        assert all(isinstance(it, Tiles) is is_tiled and it.shape == shape for it in slots)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_over_tiles_says_what_plain_slots_say(tmp_path, monkeypatch, dtype):
    """By all methods, with rebuilds, trees, prefixes that are kept, and snapshots."""
    folder = write_hf_folder(tmp_path / "model", head_dim=32)
    prompt = torch.randint(5, 60, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    small = {"budget": 64, "num_recent_tokens": 16, "rebuild_stride": 8, "coupled": True}
    asked = {"seed": 4, "temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True, **small}
    tree = {"method": "retrieval", "tree": "2x3", "coupled": False}
    texts = []
    for is_tiled in (True, False):
        if not is_tiled:
            monkeypatch.setattr(load_kernels(), "pairs", dict.fromkeys(load_kernels().pairs, 0))
        engine = load(folder, device="cpu", dtype=dtype)
        for method in ("autoregressive", "retrieval", "triforce"):
            texts.append(engine.complete(prompt, method=method, **asked).token_ids)
        engine.save_kv(tmp_path / "kv")
        engine.load_kv(tmp_path / "kv")
        texts.append(engine.complete(prompt[:120], **asked | tree).token_ids)
    assert texts[:4] == texts[4:]
    assert texts[0] == texts[1] == texts[2]
