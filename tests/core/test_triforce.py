"""A random Llama, TriForce, and nothing but the core."""

from minitri.core.generation import Generation
from minitri.core.memory import MemoryPool, Models
from minitri.core.requests import Request, Row
from minitri.core.settings import GenerationConfig, SpeculationConfig
from minitri.core.shape import MemoryShape
from tests.core.rigs import WARM, random_prompt, tiny_config, tiny_model

SIZES = {"gamma1": 2, "gamma2": 4, "budget": 64, "num_recent_tokens": 60}


def test_triforce_says_what_the_target_says_alone():
    target, draft = tiny_model(tiny_config()), tiny_model(tiny_config(num_layers=1), seed=1)
    pool, generation = MemoryPool(Models(target, target, draft)), GenerationConfig(40)
    prompt = random_prompt(target.config, 200)
    row = Request(prompt, seed=3, sampling=WARM, generation=generation)
    texts = []
    for method in ("autoregressive", "triforce"):
        speculation = SpeculationConfig(method, coupled=True, **SIZES)
        shape = MemoryShape((len(prompt),), WARM, generation, speculation)
        texts.append(Generation([Row(0, row, prompt)], shape, pool).result().token_ids)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 10
