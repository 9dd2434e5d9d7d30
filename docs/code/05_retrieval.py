"""Chapter 5: which chunks the retrieval cache holds, and how they follow the text."""

import torch

from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.config import ModelConfig
from minitri.core.model.llama import Llama
from minitri.core.settings import SpeculationConfig

CHUNK, BUDGET, D = 8, 64, 16
KEYS_SD = 0.2 * torch.randn(640, D, generator=torch.Generator().manual_seed(0))
TOPICS = {20: torch.eye(D)[0], 41: torch.eye(D)[1]}  # two chunks, and queries that they answer
for number, direction in TOPICS.items():
    KEYS_SD[CHUNK * number : CHUNK * (number + 1)] += direction


if __name__ == "__main__":
    config = ModelConfig(1, D, D, 1, 1, D, 64, 1024)
    model = Llama(config, dtype=torch.float32, device=torch.device("cpu"))
    full = FullCache.allocate(model, 1, 640)
    speculation = SpeculationConfig("retrieval", budget=BUDGET, chunk_size=CHUNK)
    cache = RetrievalCache(full, model, speculation, [BUDGET])
    print("tokens  wants  retrieved  first, latest  best     chunks that are held, of 64")
    for end in range(512, 577, CHUNK):
        topic, keys_SD = 20 if end < 536 else 41, KEYS_SD[:end]
        query_D = 24 * TOPICS[topic]
        full.reset(0)
        full.write(0, 0, keys_SD[None], keys_SD[None])
        full.restore(0, end)
        was_rebuilt = cache.commit(0, query_D.expand(1, CHUNK, 1, D))
        cache.take_committed([True])
        given_S = (keys_SD @ query_D / D**0.5).softmax(0)  # the attention that each token gets
        slots_SD = cache.keys[0, 0, 0, : cache.lengths[0]]
        held_S = (keys_SD[:, None] == slots_SD).all(2).any(1)  # whether a slot has its key
        ends = given_S[:4].sum() + given_S[end - BUDGET + 4 :].sum()
        shares = f"{given_S[held_S].sum():10.2f} {ends:14.2f} {given_S.topk(BUDGET)[0].sum():5.2f}"
        chunks = "".join(".#"[bool(chunk_M.any())] for chunk_M in held_S[:512].split(CHUNK))
        print(f"{end:6} {topic:6} {shares}  {chunks}{' rebuilt' * was_rebuilt}")
