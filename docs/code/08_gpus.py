"""Chapter 8: offload, tried without a GPU; and what bytes say about a large model."""

from functools import partial
from typing import Any
from unittest.mock import MagicMock

import torch

from minitri.core.config import ModelConfig
from minitri.core.decoding.autotuner import Autotuner
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from minitri.core.offload.streams import HostMemory
from minitri.core.roofline import CARDS, Workload
from minitri.core.settings import SpeculationConfig
from minitri.files.named_models import MODELS

CPU, LOG = torch.device("cpu"), list[str]()


class Watched(OffloadedFullCache):
    """Writes down in which order layers are copied and computed."""

    def fetch(self, layer: int, ends: dict[int, int]) -> Any:
        if self.buffers[(layer - self.on_chip) % 2].layer != layer:
            LOG.append(f"copy {layer}")
        return super().fetch(layer, ends)

    def update(self, layer: int, block: Any) -> Any:
        cached = super().update(layer, block)
        LOG.append(f"compute {layer}")
        return cached


if __name__ == "__main__":
    config = ModelConfig(5, 32, 48, 4, 2, 8, vocab_size=64, context_length=512)
    model = Llama(config, dtype=torch.float32, device=CPU)
    cache = Watched(model, 1, 256, on_chip=1, host=HostMemory(CPU), stream=MagicMock())
    for tokens in ([*range(60)], [60, 61, 62]):
        read_block(model, [tokens], cache)
        cache.advance([len(tokens)])
    print(", ".join(LOG[-9:]))
    target, draft = (MODELS[name].shape for name in ("llama2-7b-128k", "llama-68m"))
    plans = SpeculationConfig("auto").plans
    for share in (0, 0.5, 1):  # the fastest plan after 122,880 tokens on an A100, by bytes alone
        work = Workload(target, draft, num_tokens=122_880, num_retrieved=4096, hosted_share=share)
        tuner = Autotuner(plans, partial(work.seconds, CARDS[80]), use_clock=False)
        best = max(plans, key=tuner.tokens_per_second)
        alone, ms = (1000 / tuner.tokens_per_second(plan) for plan in (plans[0], best))
        print(f"{share:.0%} in host memory: {alone:.0f} ms/token, {ms:.0f} by {best}")
