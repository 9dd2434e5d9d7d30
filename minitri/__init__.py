"""minitri: fast generation from long-context Llama models that does not change what the model says.

Names are imported when they are first asked for, so that the command line can answer Ctrl-C with
one line even while PyTorch is being imported.
"""

from importlib import import_module

TYPE_CHECKING = False  # `typing` itself takes milliseconds, in which nothing guards Ctrl-C yet
if TYPE_CHECKING:
    from typing import Any

    from minitri.caches.policies import Policy
    from minitri.config import ModelConfig
    from minitri.drafters.plugin import Drafter
    from minitri.engine import Engine
    from minitri.errors import InputError
    from minitri.generation import Generation
    from minitri.loader import load
    from minitri.loading.named_models import MODELS
    from minitri.requests import Completion, End, Event, Idle, PrefillProgress, Request, Token
    from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
    from minitri.stats import RowStats, Stats

__version__ = "0.1.0"

__all__ = ["MODELS", "Completion", "Drafter", "End", "Engine", "Event", "Generation"]
__all__ += ["GenerationConfig", "Idle", "InputError", "ModelConfig", "Policy", "PrefillProgress"]
__all__ += ["Request", "RowStats", "SamplingParams", "SpeculationConfig", "Stats", "Token", "load"]

_LIGHT = ("errors", "settings", "config", "stats", "loading.named_models", "requests")
_HEAVY = ("drafters.plugin", "caches.policies", "generation", "engine", "loader")
"""Where the names are; importing these takes seconds."""


def __getattr__(name: str) -> "Any":
    for home in _LIGHT + _HEAVY if name in __all__ else ():
        module = import_module(f"minitri.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
