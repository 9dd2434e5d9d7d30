"""minitri: fast generation from long-context Llama models that does not change what the model says.

`load` boots an `Engine`; `Engine.generate` gives a stream of events. Bad input raises `InputError`.
"""

from minitri.config import MODELS, ModelConfig
from minitri.engine import Engine, load
from minitri.errors import InputError
from minitri.generation import End, Event, Generation, PrefillProgress, Token
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "MODELS",
    "End",
    "Engine",
    "Event",
    "Generation",
    "GenerationConfig",
    "InputError",
    "ModelConfig",
    "PrefillProgress",
    "SamplingParams",
    "SpeculationConfig",
    "Stats",
    "Token",
    "load",
]
