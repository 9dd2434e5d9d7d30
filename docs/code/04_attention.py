"""Chapter 4: attention over a prefix and a block needs a rule for the block alone."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from minitri.core.model.attention import attend_math
from minitri.devices.cpu.pytorch import attend_cpu

PREFIX, T, H, K, D = 1000, 4, 4, 2, 8
S = PREFIX + T


if __name__ == "__main__":
    torch.manual_seed(0)
    q = torch.randn(1, T, H, D).double()
    keys, values = torch.randn(2, 1, K, S + 10, D).double()
    sees_TS = torch.ones(T, S, dtype=torch.bool).tril(PREFIX)
    prefix_and_block = q.transpose(1, 2), keys[:, :, :S], values[:, :, :S]
    expected = scaled_dot_product_attention(*prefix_and_block, sees_TS, enable_gqa=True)
    keys[:, :, S:] = torch.nan  # what stands after the block changes nothing
    block = attend_math(q, keys, values, [PREFIX])
    print(f"a mask would have {T * S} entries, the rule of the block has {T * T}")
    print("prefix + block equals the mask:", torch.allclose(block, expected.transpose(1, 2)))
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
