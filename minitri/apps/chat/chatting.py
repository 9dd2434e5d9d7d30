"""The program `minitri chat`: questions and answers, about documents that are read once.

The conversation stays in the KV cache. Answers go to standard output, all else to standard error.
Where standard input is no terminal, each of its lines is a question.
"""

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import minitri
from minitri import GenerationConfig, InputError, Request
from minitri.apps.chat.conversation import TALK_TOKENS, Conversation, Turn
from minitri.apps.cli import arguments
from minitri.apps.cli.boot import load_weights, open_engine, sampling_of
from minitri.apps.cli.documents import read_document
from minitri.apps.cli.exits import program
from minitri.apps.cli.report import Json, outline
from minitri.apps.cli.terminal import LEGEND, stream
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.core.requests import Row
from minitri.core.stats import num_common
from minitri.text.prompt_ids import as_seeds, next_seed

say = log.warning  # with --quiet, too


class Chat:
    """A conversation with an engine; its methods `do_NAME` are the commands /NAME."""

    def __init__(self, engine: "minitri.Engine", talk: Conversation, args: Namespace) -> None:
        self.talk = talk
        self._engine = engine
        self._args = args
        sampling, seed = sampling_of(args, engine)
        self._settings: Json = {"seed": seed, "max_new_tokens": args.max_new_tokens}
        self._settings |= vars(sampling)
        if args.load is not None:
            self.do_load(args.load)
        else:
            self._read(talk)

    def obey(self, line: str) -> None:
        """Answers a question or obeys a command; logs what is wrong with it."""
        name, _, value = line.removeprefix("/").partition(" ")
        command = COMMANDS.get(name)
        try:
            if not line.startswith("/") and line not in ("quit", "exit", "clear"):
                self._answer(self.talk.turns, Turn(line))
            elif command is None:
                raise InputError(f"there is no /{shorten(name, 40)}; /help lists what there is")
            else:
                command(self, value.strip())
        except InputError as error:
            log.error("%s", error)
        except KeyboardInterrupt:
            say("stopped")

    def do_help(self, _: str) -> None:
        """this list"""
        say("\n".join(f"/{name:12} {command.__doc__}" for name, command in COMMANDS.items()))

    def do_show(self, _: str) -> None:
        """the conversation"""
        for turn in self._turns():
            say(f"> {turn.question}\n{self.talk.tokenizer.decode(turn.token_ids).strip()}")

    def do_regenerate(self, _: str) -> None:
        """answer the last question again, with the next seed"""
        *earlier, last = self._turns()
        self._answer(earlier, Turn(last.question))

    def do_continue(self, _: str) -> None:
        """continue an answer that was cut"""
        *earlier, last = self._turns()
        if not last.is_cut:
            raise InputError("the last answer is complete; ask on, or /regenerate")
        self._answer(earlier, last)

    def do_sampling(self, values: str) -> None:
        """[NAME=VALUE ...] show temperature (0 is greedy), top_p and so on, or change them"""
        settings = {**self._settings}
        for setting in values.split():
            name, _, value = setting.partition("=")
            with explain(f"{name} is {shorten(repr(value), 40)}", "give a number"):
                settings[name] = (float if "." in value else int)(value)
        as_seeds(settings["seed"], 1)
        Request("", **settings)
        self._settings = settings
        shown = (f"{k}={v}" for k, v in settings.items() if isinstance(v, int | float))
        say(", ".join(shown))

    def do_system(self, text: str) -> None:
        """[TEXT] show the system message, which says how the model is to behave, or change it"""
        if text:
            self._read(replace(self.talk, system=text))
        say(f"system: {self.talk.system or 'as the model has it'}")

    def do_documents(self, file: str) -> None:
        """[FILE] add a document; show the tokens of each"""
        if file:
            texts = {file: read_document(file, "/documents")}
            self._read(self.talk.with_documents(texts, self._engine.config, self._args))
        lines = [f"{name}: {len(ids)} of {size} tokens" for name, ids, size in self.talk.documents]
        say("\n".join(lines) or "there are no documents; /documents FILE adds one")

    def do_save(self, file: str) -> None:
        """FILE: write the conversation and its KV cache to it"""
        say(f"saved {self._engine.save_kv(file, self.talk.as_note())} tokens to {file}")

    def do_load(self, file: str) -> None:
        """FILE: continue the conversation in it"""
        num_tokens = self._engine.load_kv(file)
        talk = self.talk.restored(self._engine.snapshot_note)
        talk = replace(talk, documents=[*talk.documents, *self.talk.documents])
        self._read(talk.with_documents({}, self._engine.config, self._args))
        if self.talk.turns:
            self.do_show("")
        say(f"loaded {num_tokens} tokens from {file}")

    def do_reset(self, _: str) -> None:
        """forget questions and answers, keep the documents"""
        self.talk = replace(self.talk, turns=())
        say("questions and answers are forgotten")

    def do_quit(self, _: str) -> None:
        """leave, as Ctrl-D does; Ctrl-C stops an answer, or clears the line"""
        sys.exit()

    do_exit = do_quit
    do_clear = do_reset

    def _turns(self) -> Sequence[Turn]:
        if not self.talk.turns:
            raise InputError("there is no answer yet; ask something")
        return self.talk.turns

    def _read(self, talk: Conversation) -> None:
        """Switches to a conversation and reads its documents before a question comes."""
        self.talk = talk
        ids = talk.beginning
        is_read = num_common(self._engine.held_tokens, ids) >= len(ids) - 1
        if talk.documents and not is_read and self._run(ids, 1).finish_reason is None:
            say("stopped; the next question reads the rest")

    def _answer(self, earlier: Sequence[Turn], turn: Turn) -> None:
        """Writes the answer to a question after earlier turns, or continues its answer."""
        talk = self.talk
        context = self._engine.config.context_length
        most_new = self._settings["max_new_tokens"]
        wanted = min(most_new, (context - len(talk.beginning)) // 2)
        turns = talk.slide([*earlier, turn], context - wanted)
        prompt = talk.ids(turns)
        room = context - len(prompt)
        if room < 1:
            raise InputError(f"{len(prompt)} tokens exceed {context}; ask less, or /reset")
        if (num_gone := 1 + len(earlier) - len(turns)) > 0:
            log.info("the context is full: the oldest %d questions are forgotten", num_gone)
        row = self._run(prompt, min(most_new, room), show=True)
        self._settings["seed"] = next_seed(self._settings["seed"])
        ids = row.token_ids
        if talk.stops:  # the tokens may be those of a stop string, too
            ids = talk.tokenizer.encode_marked(row.text)
        elif row.finish_reason == "eos":  # the template writes its own end of an answer
            ids = ids[:-1]
        is_cut = row.finish_reason in ("length", None)
        if is_cut:
            log.info("(cut after %d tokens; /continue goes on)", len(ids))
        turn = Turn(turn.question, [*turn.token_ids, *ids], is_cut)
        self.talk = replace(talk, turns=[*turns[:-1], turn])

    def _run(self, prompt: list[int], num_new: int, *, show: bool = False) -> Row:
        """Lets the model write `num_new` tokens, and prints them if `show`."""
        reserve = min(self._engine.config.context_length, len(self.talk.beginning) + TALK_TOKENS)
        limits = {"max_new_tokens": num_new, "stop": self.talk.stops, "reserve": reserve}
        run = self._engine.generate(
            prompt,
            generation=arguments.taken(GenerationConfig, self._args),
            speculation=arguments.speculation_of(self._args),
            **self._settings | limits,
        )
        with contextlib.suppress(KeyboardInterrupt), run:  # a second one stops at once
            stream(run, self._args, show=show)
        if show:
            print(flush=True)
        log.debug(outline(run))
        return run.rows[0]


COMMANDS = {name[3:]: method for name, method in vars(Chat).items() if name.startswith("do_")}


def build_parser() -> arguments.OneLineParser:
    """The command-line parser of `minitri chat`."""
    parser = arguments.OneLineParser(
        "chat",
        description="Answers questions, about documents that are read once. While it runs: "
        + ", ".join(f"/{name}" for name in COMMANDS),
    )
    arguments.add_flags(parser, *arguments.MODEL)
    text = "texts, PDF or HTML to ask about; may be given several times"
    parser.add_argument(
        "--document", nargs="+", action="extend", default=[], metavar="FILE", help=text
    )
    arguments.add_flags(parser, "fit", "max_prompt_tokens", "load", "system", "color")
    arguments.add_flags(parser, "max_new_tokens", *arguments.MEMORY)
    parser.set_defaults(max_new_tokens=512)
    arguments.add_decoding_flags(parser)
    return parser


def run_command(args: Namespace) -> None:
    """Chats until /quit or the end of the input. Raises `InputError`."""
    documents = {file: read_document(file, "--document") for file in args.document}
    opened = open_engine(args)
    talk = Conversation(opened.tokenizer, args.system)
    talk = talk.with_documents(documents, opened.config, args)
    minitri.loader.suggest_larger(args.model)
    with load_weights(args, opened) as engine:
        if args.color:
            log.info(LEGEND)
        chat = Chat(engine, talk, args)
        for line in typed_lines():
            chat.obey(line)


def typed_lines() -> Iterator[str]:
    """Lines of standard input; at a terminal those of an editor, in which a paste is one question,
    until Ctrl-D. Raises `InputError`."""
    ask: Callable[[], str] = input
    if sys.stdin.isatty() and sys.stdout.isatty():
        from prompt_toolkit import PromptSession  # takes a moment

        ask = PromptSession("> ").prompt
        log.info("ask, or /help; Ctrl-C stops an answer, Ctrl-D leaves")
    while True:
        try:
            if line := ask().strip():
                yield line
        except UnicodeDecodeError:
            raise InputError("standard input is not UTF-8 text; convert it") from None
        except EOFError:
            return
        except KeyboardInterrupt:
            if ask is input:
                raise
            say("/quit or Ctrl-D leaves")


main = program(build_parser, run_command)
