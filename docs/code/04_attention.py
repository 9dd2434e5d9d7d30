"""Chapter 4: attention over a prefix and a block needs a rule for the block alone."""

import torch
from torch import Tensor

from minitri.core.model.attention import attend_math
from minitri.devices.cpu.flash_attention import attend_cpu

PREFIX, T, H, K, D = 1000, 4, 4, 2, 8
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    """Normal numbers, float64."""
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def masked(q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, sees_TS: Tensor) -> Tensor:
    """The textbook: all scores, and a mask over prefix and block."""
    keys, values = (it.repeat_interleave(H // K, 1) for it in (keys_BKSD, values_BKSD))
    scores_BHTS = q_BTHD.transpose(1, 2) @ keys.transpose(2, 3) / D**0.5
    probs_BHTS = scores_BHTS.masked_fill(~sees_TS, -torch.inf).softmax(3)
    return (probs_BHTS @ values).transpose(1, 2)


if __name__ == "__main__":
    S = PREFIX + T
    q, keys, values = random(1, T, H, D), random(1, K, S + 10, D), random(1, K, S + 10, D)
    sees_TS = torch.ones(T, S, dtype=torch.bool).tril(PREFIX)
    expected = masked(q, keys[:, :, :S], values[:, :, :S], sees_TS)
    keys[:, :, S:] = torch.nan  # what stands after the block changes nothing
    block = attend_math(q, keys, values, [PREFIX])
    print(f"a mask would have {T * S} entries, the rule of the block has {T * T}")
    print("prefix + block equals the mask:", torch.allclose(block, expected))
    singles = [attend_math(q[:, [i]], keys, values, [PREFIX + i]) for i in range(T)]
    print("a block equals its tokens, one by one:", torch.allclose(block, torch.cat(singles, 1)))
    merged = attend_cpu(q, keys, values, [PREFIX])
    print("both parts, merged by log-sum-exp:", torch.allclose(block, merged))
    # A tree: after token 0 either token 1, or tokens 2 and 3.
    tree_TT = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    tree = attend_math(q, keys, values, [PREFIX], tree_TT)
    path = [*range(PREFIX), PREFIX, PREFIX + 2, PREFIX + 3]
    chain = attend_math(q[:, [0, 2, 3]], keys[:, :, path], values[:, :, path], [PREFIX])
    print("a path of a tree equals a chain:", torch.allclose(tree[:, [0, 2, 3]], chain))
