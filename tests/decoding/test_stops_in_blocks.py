"""A text ends where it ends, wherever in a block, and whoever guessed its last token."""

from dataclasses import replace

from minitri import GenerationConfig, SamplingParams, SpeculationConfig, Token
from tests.cascades import random_prompt, tiny_engine

SMALL = {"budget": 40, "chunk_size": 4, "num_sink_tokens": 2, "num_recent_tokens": 40}
SMALL |= {"gamma1": 2, "gamma2": 3}
"""Caches that miss a part of the prompt: some guesses are right and some are wrong."""
METHODS = ("naive", "retrieval", "triforce")


def test_end_tokens_end_a_text_at_every_offset_of_a_block(monkeypatch):
    """Each token of the free text in turn is made the end token, for every stack of the cascade."""
    engine, lookup, last_origins = tiny_engine(noise=0.01), tiny_engine(noise=None), set()
    config, prompt = engine.config, random_prompt(engine.config, 50, seed=50)

    def run(sampling, method="autoregressive", engine=engine):
        """The `End` event, and the origins of its tokens. Coupled: every method says the same."""
        how = {"generation": GenerationConfig(16), "sampling": sampling, "seed": 3}
        how["speculation"] = SpeculationConfig(method, coupled=True, **SMALL)
        *tokens, end = engine.generate(prompt, **how)
        return end, [event.origin for event in tokens if isinstance(event, Token)]

    for sampling in (SamplingParams(0.9, 50, 0.95), SamplingParams()):
        monkeypatch.setattr(engine.model, "config", replace(config, eos_token_ids=()))
        free, _ = run(sampling)
        for token in dict.fromkeys(free.token_ids):
            monkeypatch.setattr(engine.model, "config", replace(config, eos_token_ids=(token,)))
            position, alone = free.token_ids.index(token), run(sampling)[0]
            monkeypatch.setattr(lookup.model, "config", engine.model.config)
            for stack in (*((method, engine) for method in METHODS), ("triforce", lookup)):
                end, origins = run(sampling, *stack)
                assert end.token_ids == free.token_ids[: position + 1]
                assert (end.finish_reason, end.text) == ("eos", alone.text)
                last_origins |= {origins[-1]} if position else set()  # the first is in no block
    assert last_origins == {"draft", "retrieval", "recovered", "bonus"}
