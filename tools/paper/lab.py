"""Lab of a study: texts, engines and continuations for cells, each made once while it is used.

A model is loaded when a cell asks for it, and is kept until a cell asks for another one; so items
list cells of one model, and of one text, next to each other.
"""

import dataclasses
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from minitri import Engine, Request, load
from minitri.core.errors import InputError, shorten
from minitri.core.log import log
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from tools.bench.compare import compare, summarise
from tools.paper.continuation import Continuation
from tools.paper.item import Json
from tools.paper.scale import Scale
from tools.paper.texts import Text


@dataclass
class Lab:
    """Gives cells what they need."""

    scale: Scale
    texts: list[Text]
    model: str | None = None
    """Instead of the scale's own."""
    _engine: tuple[Json, Engine] | None = None
    _continuation: tuple[Json, Continuation] | None = None
    _ids: dict[int, list[int]] = field(default_factory=dict)
    """The tokens of texts."""

    @cached_property
    def identity(self) -> Json:
        """Facts that every cell depends on: the scale, the model and the texts."""
        content = "\0".join(text.content for text in self.texts)
        texts = hashlib.sha256(content.encode(errors="replace")).hexdigest()
        model = self.model or self.scale.model
        return dataclasses.asdict(self.scale) | {"model": model, "texts": texts}

    @cached_property
    def _tiny(self) -> str:
        from tools.serve_load import write_tiny  # which needs packages that nothing else does

        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder)
        write_tiny(Path(folder), self.scale.trained_context * 2)
        return folder

    def engine(self, num_tokens: int = 0, **options: Any) -> Engine:
        """The model of the scale, with its own drafter, stretched if the text needs that; options
        are those of `minitri.load`."""
        scale = self.scale
        model = self.model or scale.model or self._tiny
        options = {"model": model, "dtype": scale.dtype} | options
        if num_tokens + scale.new_tokens > scale.trained_context:
            options |= scale.stretched
        if self._engine is None or self._engine[0] != options:
            self._engine = self._continuation = None  # one at a time
            log.info("loading %s", options)
            self._engine = options, load(**options)
        return self._engine[1]

    def release(self) -> None:
        """Frees the KV caches of what was measured before."""
        self._continuation = None
        if self._engine is not None:
            self._engine[1].release()

    def prompt(self, number: int, num_tokens: int, engine: Engine) -> list[int]:
        """Tokens of a text; numbers beyond the texts are later parts of them. Raises
        `InputError` where it is too short."""
        part, which = divmod(number, len(self.texts))
        ids = self._tokens(which, engine)
        end = (part + 1) * num_tokens
        if len(ids) < end:
            raise InputError(
                f"the text {shorten(self.texts[which].name, 60)} has {len(ids):,} tokens, but "
                f"{end:,} are needed; give longer --texts, more of them, or a smaller --scale"
            )
        return ids[end - num_tokens : end]

    def other_texts(self, number: int, engine: Engine) -> list[list[int]]:
        """Tokens of all other texts; of a single one what stands around a prompt of the scale's
        context and an output, so that nobody has memorised what is to be guessed."""
        part, which = divmod(number, len(self.texts))
        others = [self._tokens(n, engine) for n in range(len(self.texts)) if n != which]
        if others:
            return others
        ids, start = self._tokens(which, engine), part * self.scale.context
        return [ids[:start] + ids[start + self.scale.context + 2 * self.scale.new_tokens :]]

    def _tokens(self, which: int, engine: Engine) -> list[int]:
        if which not in self._ids:
            self._ids[which] = engine.tokenizer.encode(self.texts[which].content)
        return self._ids[which]

    def speeds(
        self,
        text: int,
        ways: Mapping[str, SpeculationConfig],
        *,
        context: int = 0,
        temperature: float = 0.6,
        engine: Engine | None = None,
        **settings: Any,
    ) -> Json:
        """Decoding after a text of a length, or the scale's, by every way in turns, the first for
        comparison: its `ms_per_token` and `speedup`, each with its median, and `acceptance`. By
        another `engine` if one is given; `settings` are those of a `GenerationConfig`."""
        num_tokens = context or self.scale.context
        engine = engine or self.engine(num_tokens)
        prompt = self.prompt(text, num_tokens, engine)
        self.release()
        generation = GenerationConfig(self.scale.new_tokens, ignore_eos=True, **settings)
        request = Request(prompt, 0, self.sampling(temperature), generation)
        timed = {name: dataclasses.replace(it, timed=True) for name, it in ways.items()}
        return summarise(compare(engine, [request], (0,), timed))

    def sampling(self, temperature: float) -> SamplingParams:
        """The paper's filters at a temperature."""
        return SamplingParams(temperature, top_p=self.scale.top_p if temperature else 1.0)

    def speculation(self, method: str, **settings: Any) -> SpeculationConfig:
        """A method with the gammas and the budget of the scale, unless others are given."""
        scale = self.scale
        usual = {"gamma1": scale.gamma1, "gamma2": scale.gamma2, "budget": scale.budget}
        return SpeculationConfig(method, **usual | settings)

    def continuation(
        self, text: int, num_tokens: int, temperature: float = 0.6, **options: Any
    ) -> Continuation:
        """Continuation of a text by the target, with what guesses are compared with."""
        key = {"text": text, "num_tokens": num_tokens, **options}
        engine = self.engine(num_tokens, **options)
        sampling, num_new = self.sampling(temperature), self.scale.new_tokens
        if self._continuation is None or self._continuation[0] != key:
            self.release()
            prompt = self.prompt(text, num_tokens, engine)
            self._continuation = key, Continuation(engine, prompt, sampling, num_new, seed=text)
        said = self._continuation[1]
        if said.sampling != sampling:
            said.say(sampling, num_new, seed=text)
        return said
