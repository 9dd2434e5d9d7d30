"""A random Llama, TriForce, and nothing but the core."""

import torch

from minitri.core.config import ModelConfig
from minitri.core.generation import Generation
from minitri.core.memory import MemoryPool, Models
from minitri.core.model.llama import Llama
from minitri.core.requests import Request, Row
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.shape import MemoryShape

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "context_length": 512}


def random_llama(num_layers: int, seed: int) -> Llama:
    config = ModelConfig(num_layers=num_layers, **SIZES)
    model = Llama(config, dtype=torch.float32, device=torch.device("cpu")).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_triforce_says_what_the_target_says_alone():
    target, draft = random_llama(2, seed=0), random_llama(1, seed=1)
    pool = MemoryPool(Models(target, target, draft))
    sampling, generation = SamplingParams(temperature=0.8), GenerationConfig(40)
    prompt_ids = torch.arange(200).mul(7).remainder(64).tolist()
    request = Request(prompt_ids, seed=3, sampling=sampling, generation=generation)
    texts = {}
    for method in ("autoregressive", "triforce"):
        speculation = SpeculationConfig(method, gamma1=2, gamma2=4, budget=64, coupled=True)
        shape = MemoryShape((len(prompt_ids),), sampling, generation, speculation)
        end = Generation([Row(0, request, prompt_ids)], shape, pool).result()
        texts[method] = end.token_ids
        assert len(end.stats.stages) == (3 if method == "triforce" else 1)
    assert texts["triforce"] == texts["autoregressive"]
    assert len(set(texts["triforce"])) > 10
