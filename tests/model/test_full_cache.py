"""The full cache: lengths move only when asked to, and nothing after them matters."""

import pytest
import torch

from minitri.model.cache import STRIDE
from tests.conftest import new_cache, tiny_config, tiny_model

CONFIG = tiny_config()


def feed(model, cache, tokens, keep=None):
    """One block for every row; keeps the first `keep` tokens of it."""
    block = torch.tensor(tokens)
    positions = torch.tensor(cache.lengths).unsqueeze(1) + torch.arange(block.shape[1])
    before = list(cache.lengths)
    hidden = model(block, positions, cache)
    assert cache.lengths == before
    cache.advance([block.shape[1]] * block.shape[0] if keep is None else keep)
    return hidden


def test_rejected_and_cropped_tokens_leave_no_trace():
    """A block of which only a part is kept, then poisoned after, continues as if the rest had
    never been."""
    model, cache, clean = tiny_model(CONFIG), new_cache(CONFIG, 2), new_cache(CONFIG, 2)
    feed(model, clean, [[1, 2], [4, 5]])
    feed(model, cache, [[1, 2, 9, 9], [4, 5, 8, 7]], keep=[3, 2])
    cache.crop([2, 2])
    cache.keys[:, :, :, 2:] = torch.nan
    cache.values[:, :, :, 2:] = torch.nan
    assert torch.allclose(feed(model, cache, [[3], [6]]), feed(model, clean, [[3], [6]]), atol=1e-6)
    cache.reset(0)
    assert cache.lengths == [0, 3]


def test_a_row_shares_its_memory_and_not_its_length():
    model, cache = tiny_model(CONFIG), new_cache(CONFIG, 2)
    cache.keys.fill_(0)
    row = cache.row(1)
    feed(model, row, [[1, 2, 3]])
    assert (row.lengths, cache.lengths) == ([3], [0, 0])
    assert cache.keys[:, 1, :, :3].abs().min() > 0
    assert cache.keys[:, 0].abs().max() == 0


def test_a_block_that_does_not_fit_is_refused():
    model, cache = tiny_model(CONFIG), new_cache(CONFIG, capacity=4)
    assert cache.capacity == STRIDE
    feed(model, cache, [[1] * (STRIDE - 1)])
    with pytest.raises(IndexError, match=f"{STRIDE - 1} of {STRIDE}"):
        model(torch.tensor([[1, 2]]), torch.tensor([[3, 4]]), cache)
