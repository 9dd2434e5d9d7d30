"""Chapter 5: which chunks the retrieval cache holds, and how they follow the text.

One layer, one head. The keys of chunk 20 answer queries of one kind, those of chunk 41 another.
"""

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.config import ModelConfig
from minitri.core.model.llama import Llama
from minitri.core.settings import SpeculationConfig

CHUNK, BUDGET, D = 8, 64, 16
CONFIG = ModelConfig(1, D, D, 1, 1, D, 64, 1024)
GENERATOR = torch.Generator().manual_seed(0)
KEYS = 0.2 * torch.randn(1, 640, D, generator=GENERATOR)
TOPICS = {20: torch.eye(D)[0], 41: torch.eye(D)[1]}
for number, direction in TOPICS.items():
    KEYS[:, CHUNK * number : CHUNK * (number + 1)] += direction


def attention(query_D: Tensor, end: int) -> Tensor:
    """What each of the first `end` tokens gets."""
    return (KEYS[0, :end] @ query_D / D**0.5).softmax(0)


def held_tokens(cache: RetrievalCache, end: int) -> Tensor:
    """Whether each of the first `end` tokens stands in a slot."""
    slots_SD = cache.keys[0, 0, 0, : cache.lengths[0]]
    return (KEYS[0, :end, None] == slots_SD).all(2).any(1)


def main() -> None:
    """Writes 8 tokens a step as the target would, and draws what the cache holds."""
    model = Llama(CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    full = FullCache.allocate(model, 1, 640)
    speculation = SpeculationConfig("retrieval", budget=BUDGET, chunk_size=CHUNK)
    cache = RetrievalCache(full, model, speculation, [BUDGET])
    print("tokens  wants  retrieved  first, latest  best     chunks that are held, of 64")
    for end in range(512, 577, CHUNK):
        topic = 20 if end < 536 else 41
        query_D = 24 * TOPICS[topic]
        full.reset(0)
        full.write(0, 0, KEYS[:, :end], KEYS[:, :end])
        full.restore(0, end)
        was_rebuilt = cache.commit(0, query_D.expand(1, CHUNK, 1, D))
        cache.take_committed([True])
        given, held = attention(query_D, end), held_tokens(cache, end)
        ends = float(given[:4].sum() + given[end - BUDGET + 4 :].sum())
        chunks = "".join(".#"[bool(it.any())] for it in held[:512].split(CHUNK))
        best = float(given.topk(BUDGET).values.sum())
        print(
            f"{end:6} {topic:6} {given[held].sum():10.2f} {ends:14.2f} {best:5.2f}"
            f"  {chunks}{' rebuilt' * was_rebuilt}"
        )


if __name__ == "__main__":
    main()
