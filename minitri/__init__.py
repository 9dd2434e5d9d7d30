"""minitri: fast generation from long-context Llama models that does not change what the model says.

A first program:

    import minitri

    with minitri.load("smollm2-135m") as engine:  # or a folder, a GGUF file, a repository ORG/NAME
        for event in engine.generate("The sea was", max_new_tokens=60):
            if isinstance(event, minitri.Token):
                print(event.text, end="", flush=True)

What an engine does; a prompt is a text or a list of token ids:

    engine.generate(prompt)          a run: yields events, PrefillProgress, Token, at last an End
    engine.generate([a, b])          the same for several prompts, which events number by `row`
    engine.chat(messages)            the same for [{"role": "user", "content": "Why?"}, ...]
    run.result(), run.results()      the whole output of a run: a Completion, or one per prompt
    engine.complete(prompt)          a Completion at once: text, tokens, finish_reason, seed
    engine.agenerate(...), achat     `async for event in ...`: many at once share a batch
    engine.stream(requests)          any number of minitri.Request(prompt, temperature=0.7, ...)
    engine.open()                    a run that takes more requests by Generation.submit
    engine.score(text)               log-probabilities of the tokens of a text, a tensor
    engine.tokenizer                 encode(text), decode(ids), encode_chat(messages)
    engine.save_kv(file), load_kv    keep the KV cache of the last text over a restart
    engine.close()                   frees everything; `with` does it

Keywords of generate, chat, complete, agenerate and achat are `seed`, `json_schema`, and the fields
of SamplingParams (temperature, grammar=minitri.Grammar("regex", "[0-9]+"), ...), GenerationConfig
(max_new_tokens, stop, logprobs, ...) and SpeculationConfig (method, coupled, ...), each of which
can also be given whole, as `sampling`, `generation` or `speculation`. Sampling is by default as
the model's files recommend, else at temperature 0.7 and top-p 0.9 (`engine.sampling_defaults`);
temperature=0 is greedy, the default of a Request. Without a seed one is drawn: `Completion.seed`.
Tokens that a prompt shares with the beginning of the last text are not read again: put a document
first and the question last. help(minitri.Engine) has more.

help(minitri.load) says how to choose files and devices; MODELS has the named models. Drafter and
Policy are protocols for objects of your own that guess, or retrieve. Bad input raises InputError.
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
"""Modules where a name is looked up, in this order; from core.drafters on they import PyTorch."""


def __getattr__(name: str) -> object:
    for home in _HOMES.split() if name in __all__ else ():
        if home == "core.drafters.plugin":  # imports PyTorch, as do those after it
            import_module("minitri.devices.cpu.build").let_threads_sleep()
        module = import_module(f"minitri.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
