"""minitri: fast generation from long-context Llama models that does not change what the model says.

A first program:

    import minitri

    with minitri.load("smollm2-135m") as engine:  # or a folder, a GGUF file, a repository ORG/NAME
        for event in engine.generate("The sea was", max_new_tokens=60):
            if isinstance(event, minitri.Token):
                print(event.text, end="", flush=True)

What an engine does; all take the same keywords, and texts or lists of token ids:

    engine.generate(prompt)          events of a run: PrefillProgress, Token, at the end an End;
    engine.generate([a, b])          of several prompts, which events name by `row`
    engine.chat(messages)            the same for [{"role": "user", "content": "Why?"}, ...]
    run.result(), run.results()      the whole output of a run: a Completion, or one per prompt
    engine.complete(prompt)          its Completion at once: text, tokens, finish_reason, seed
    engine.agenerate(...), achat     `async for event in ...`: many at once share a batch
    engine.stream(requests)          any number of minitri.Request(prompt, temperature=0.7, ...)
    engine.open()                    a run that takes more requests as it goes: see Generation
    engine.score(text)               log-probabilities of the tokens of a text, a tensor
    engine.tokenizer                 encode(text), decode(ids), encode_chat(messages)
    engine.save_kv(file), load_kv    keep K and V of the last text over a restart
    engine.close()                   frees everything; `with` does it

Keywords are the fields of SamplingParams (temperature, grammar=minitri.Grammar("regex", "[0-9]+"),
...), of GenerationConfig (max_new_tokens, stop, logprobs, ...) and of SpeculationConfig (method,
coupled, ...), which can be given whole, as `sampling=`, `generation=` and `speculation=`, too, and
json_schema=. Sampling is by default as the model recommends, else temperature 0.7 and top-p 0.9,
as in all programs (`engine.sampling_defaults`); temperature=0 is greedy, as is a Request that does
not say. Without `seed=` one is drawn: `Completion.seed`. What a prompt shares with the beginning of
the last text is not read again: put the document first and the question last. help(minitri.Engine)
has more.

load() takes files and devices, MODELS are the names that it knows. Bad input raises InputError.
Drafter and Policy are protocols for objects of your own.
"""

# Names are imported when they are first asked for, so that the command line can answer Ctrl-C with
# one line even while PyTorch is being imported.
from importlib import import_module

TYPE_CHECKING = False  # `typing` itself takes milliseconds, in which nothing guards Ctrl-C yet
if TYPE_CHECKING:
    from minitri.core.caches.policies import Policy
    from minitri.core.config import ModelConfig
    from minitri.core.drafters.plugin import Drafter
    from minitri.core.errors import InputError
    from minitri.core.generation import Generation
    from minitri.core.requests import Completion, End, Event, Idle, PrefillProgress, Request, Token
    from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
    from minitri.core.stats import RowStats, Stats
    from minitri.engine import Engine
    from minitri.files.named_models import MODELS
    from minitri.loader import load
    from minitri.text.grammar import Grammar

__version__ = "0.1.0"

__all__ = ["MODELS", "Completion", "Drafter", "End", "Engine", "Event", "Generation"]
__all__ += ["GenerationConfig", "Grammar", "Idle", "InputError", "ModelConfig", "Policy"]
__all__ += ["PrefillProgress", "Request", "RowStats", "SamplingParams", "SpeculationConfig"]
__all__ += ["Stats", "Token", "load"]

_HOMES = "core.errors core.settings core.config core.stats text.grammar files.named_models "
_HOMES += "core.requests core.drafters.plugin core.caches.policies core.generation engine loader"
"""Modules of the names; from core.drafters on, importing one takes seconds."""


def __getattr__(name: str) -> object:
    for home in _HOMES.split() if name in __all__ else ():
        if home == "core.drafters.plugin":  # imports PyTorch, as do those after it
            import_module("minitri.devices.cpu.build").let_threads_sleep()
        module = import_module(f"minitri.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
