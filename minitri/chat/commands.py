"""A chat at a terminal: an engine, a conversation, and what each line that is typed does to them.

Answers go to standard output; what commands have to say goes to standard error, with --quiet, too.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minitri import GenerationConfig, InputError, ModelConfig, SamplingParams, Token
from minitri.chat import words
from minitri.chat.conversation import Conversation, Opening, Turn
from minitri.cli import arguments
from minitri.cli.boot import sampling_of
from minitri.cli.documents import read_document
from minitri.cli.report import outline
from minitri.cli.terminal import colored, nothing, plain, stream
from minitri.errors import MAX_COUNT, explain, shorten
from minitri.loading.prompt_ids import MAX_SEED, as_seeds, check_prompt
from minitri.log import log

if TYPE_CHECKING:
    from minitri import Engine, Generation

TALK_TOKENS = 4096
"""Room for questions and answers after the documents, before more memory is taken; with --fit it is
kept free of documents, or a quarter of a small context."""
LEAST_TALK = 256
"""Documents that leave less are too long."""
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9)
"""Where the model's files recommend nothing: greedy answers come to repeat themselves."""


def tell(text: str) -> None:
    """The answer to a command."""
    print(text, file=sys.stderr, flush=True)


def num_kept(opening: Opening, config: ModelConfig, args: argparse.Namespace) -> int:
    """How many tokens of the documents the flags keep. Raises `InputError` if they are more than
    the context holds."""
    context = config.context_length
    total = opening.num_tokens
    room = min(TALK_TOKENS, context // 4)
    kept = total if args.max_prompt_tokens is None else min(total, args.max_prompt_tokens)
    if args.fit:
        kept = max(0, min(kept, context - opening.num_first - room))
    elif kept and opening.num_first + kept > context - min(LEAST_TALK, context // 4):
        factor = -(-(opening.num_first + kept + room) // context)
        raise InputError(
            f"the documents have {kept} tokens but {config.name} holds {context}, questions and "
            "answers included; --fit keeps what fits, --max-prompt-tokens N their first N, "
            f"--rope-scaling yarn:{factor} stretches the context"
        )
    check_prompt(opening.token_ids[: opening.num_first + kept], config, 1)
    return kept


class Chat:
    """A conversation with an engine; its methods `do_NAME` are what /NAME does."""

    def __init__(self, engine: "Engine", talk: Conversation, args: argparse.Namespace) -> None:
        self._engine = engine
        self._talk = talk
        self._args = args
        self._sampling, self._seed = sampling_of(args, engine, otherwise=SAMPLING)
        self._max_new_tokens: int = args.max_new_tokens
        self._last: Generation | None = None
        if args.load is not None:
            self.do_load(args.load)
        else:
            self._read(talk.opening)

    def obey(self, line: str) -> None:
        """Does what a line says; what is wrong with it is told."""
        name, _, value = line[1:].partition(" ")
        name = words.ALIASES.get(name, name)
        takes, _ = words.COMMANDS.get(name, ("", ""))
        try:
            if not line.startswith("/"):
                self._complete(self._talk.turns, Turn(line))
            elif name not in words.COMMANDS:
                raise InputError(words.unknown_command(name))
            elif takes.isalpha() and not value:
                raise InputError(f"/{name} needs {takes}")
            else:
                getattr(self, f"do_{name}")(value.strip())
        except InputError as error:
            log.error("%s", arguments.in_flags(error, self._args.flags))
        except KeyboardInterrupt:
            tell("stopped")

    def do_help(self, _: str) -> None:
        tell(words.HELP)

    def do_show(self, _: str) -> None:
        talk = self._talk
        shown = [f"(system: {talk.opening.system})"] if talk.opening.system is not None else []
        shown += [f"({self._documents()})"] if talk.opening.documents else []
        shown += [f"> {turn.question}\n{turn.text.strip()}" for turn in talk.turns]
        tell("\n".join(shown) or "nothing has been said yet")

    def do_regenerate(self, _: str) -> None:
        *earlier, last = self._turns()
        if not self._sampling.temperature and not last.is_cut:
            advice = "/sampling temperature=0.7 changes that"
            raise InputError(f"at temperature 0 the answer would be the same; {advice}")
        self._complete(earlier, Turn(last.question))

    def do_continue(self, _: str) -> None:
        *earlier, last = self._turns()
        if not last.is_cut:
            raise InputError("the last answer is complete; ask on, or /regenerate")
        self._complete(earlier, last)

    def do_sampling(self, settings: str) -> None:
        for setting in settings.split():
            self._set(*setting.partition("=")[::2])
        own = {"seed": self._seed, "max_new_tokens": self._max_new_tokens}
        tell(", ".join(f"{name}={it}" for name, it in {**vars(self._sampling), **own}.items()))

    def do_temperature(self, value: str) -> None:
        self.do_sampling(f"temperature={value}")

    def do_system(self, text: str) -> None:
        if text:
            talk = self._talk
            self._read(talk.opening_of(text, talk.opening.documents), talk.num_kept)
        tell(f"system: {self._talk.opening.system or 'as the model has it'}")

    def do_documents(self, _: str) -> None:
        tell(self._documents())

    def do_document(self, file: str) -> None:
        old = self._talk.opening
        documents = [*old.documents, (file, read_document(file, "/document"))]
        self._read(self._talk.opening_of(old.system, documents))
        tell(self._documents())

    def do_read(self, _: str) -> None:
        self._read(self._talk.opening)
        tell(self._documents())

    def do_reset(self, _: str) -> None:
        self._talk.turns = []
        tell("questions and answers are forgotten")

    def do_stats(self, _: str) -> None:
        if self._last is None:
            raise InputError("there is no answer yet; ask something")
        tell(outline(self._last))

    def do_save(self, file: str) -> None:
        tell(f"saved {self._engine.save_kv(file, self._talk.as_note())} tokens to {file}")

    def do_load(self, file: str) -> None:
        num_tokens = self._engine.load_kv(file)
        self._talk.restore(self._engine.snapshot_note)
        self.do_show("")
        tell(f"loaded {num_tokens} tokens from {file}")

    def _turns(self) -> list[Turn]:
        if not self._talk.turns:
            raise InputError("there is no answer yet; ask something")
        return self._talk.turns

    def _set(self, name: str, value: str) -> None:
        """Changes a number of the sampling. Raises `InputError`."""
        name = name.replace("-", "_")
        names = [*vars(self._sampling), "seed", "max_new_tokens"]
        if name not in names:
            there_are = f"there are {', '.join(names)}, as in /sampling top_p=0.9"
            raise InputError(f"{shorten(name, 40)} is no setting of the sampling; {there_are}")
        with explain(f"{name} is {shorten(repr(value), 40)}", "give a number"):
            number: Any = int(value) if value.lstrip("-").isdecimal() else float(value)
        if name == "seed":
            [self._seed] = as_seeds([number], 1)
        elif name == "max_new_tokens":
            self._max_new_tokens = GenerationConfig(number).max_new_tokens
        else:
            self._sampling = dataclasses.replace(self._sampling, **{name: number})

    def _documents(self) -> str:
        """How much of each document is kept, in lines."""
        opening, left = self._talk.opening, self._talk.num_kept
        lines = []
        for (name, _), size in zip(opening.documents, opening.sizes, strict=True):
            lines.append(f"{name}: {min(left, size):,} of {size:,} tokens")
            left -= min(left, size)
        return "\n".join(lines) or "there are no documents; /document FILE adds one"

    def _read(self, opening: Opening, most: int = MAX_COUNT) -> None:
        """Begins with this opening, and reads of its documents what the flags keep, at most so many
        tokens; Ctrl-C keeps what was read."""
        from minitri.caches.prefixes import num_common  # imports torch

        talk = self._talk
        talk.open(opening, min(most, num_kept(opening, self._engine.config, self._args)))
        if (num_cut := opening.num_tokens - talk.num_kept) > 0:
            log.info("documents: their first %d tokens; %d are cut", talk.num_kept, num_cut)
        if not opening.documents:
            return
        if self._run(talk.beginning, 1, nothing) != "interrupted":
            log.info("%d tokens of documents are read", talk.num_kept)
            return
        num_read = num_common(self._engine.held_tokens, talk.beginning) - opening.num_first
        talk.open(opening, min(num_read, talk.num_kept))
        tell(words.PARTLY_READ.format(talk.num_kept, opening.num_tokens))

    def _complete(self, earlier: Sequence[Turn], turn: Turn) -> None:
        """Answers a question, or goes on with its answer, after these turns."""
        talk = self._talk
        context = self._engine.config.context_length
        wanted = min(self._max_new_tokens, (context - len(talk.beginning)) // 2)
        turns = talk.slide([*earlier, turn], context - wanted)
        prompt = talk.ids(turns)
        room = context - len(prompt)
        if room < 1:
            raise InputError(
                f"documents, question and answer have {len(prompt)} tokens but the context holds "
                f"{context}; ask something shorter, or /reset"
            )
        num_turns = 1 + len(earlier)
        if len(turns) < num_turns:
            log.info(words.FORGOTTEN.format(num_turns - len(turns), num_turns - 1))
        num_new = min(self._max_new_tokens, room)
        reason = self._run(prompt, num_new, colored if self._args.color else plain)
        print(flush=True)
        self._seed = (self._seed + 1) % (MAX_SEED + 1)
        tokenizer = self._engine.tokenizer
        assert self._last is not None
        [row] = self._last.rows
        ids = row.token_ids
        if not ids:
            tell(words.UNANSWERED)
            return
        end = tokenizer.token(ids[-1]) if reason == "eos" else ""
        if talk.stops:  # the tokens may be those of a stop string, too
            ids = tokenizer.encode_marked(row.text)
        if reason == "length" and num_new < self._max_new_tokens:
            reason = "full"
        whole = [*turn.token_ids, *ids], turn.text + row.text
        done = Turn(turn.question, *whole, end or "", is_cut=reason in words.ENDINGS)
        talk.turns = [*turns[:-1], done]
        if done.is_cut:
            log.info("(%s)", words.ENDINGS[reason].format(len(row.token_ids)))

    def _run(self, prompt: list[int], num_new: int, show: Callable[[Token], str]) -> str:
        """Lets the model write, and shows it; returns how it ended."""
        context = self._engine.config.context_length
        reserve = min(context, len(self._talk.beginning) + TALK_TOKENS)
        own = {"max_new_tokens": num_new, "reserve": reserve, "stop": self._talk.stops}
        self._last = self._engine.generate(
            prompt,
            sampling=self._sampling,
            generation=arguments.taken(GenerationConfig, self._args, **own),
            speculation=arguments.speculation_of(self._args),
            seed=self._seed,
        )
        try:
            with self._last as run:
                return stream(run, show, quiet=self._args.quiet)[0]
        except KeyboardInterrupt:  # a second one stops at once
            return "interrupted"
