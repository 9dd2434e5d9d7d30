"""The program `minitri chat`: questions and answers, about documents that are read once.

The conversation stays in the KV cache. Answers go to standard output, all else to standard error.
Where one of them is no terminal, each line of standard input is a question."""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import minitri
from minitri import GenerationConfig, InputError, Request
from minitri.apps.chat.conversation import TALK_TOKENS, Conversation, Turn, title_of
from minitri.apps.cli import arguments
from minitri.apps.cli.boot import load_weights, open_engine, sampling_of, suggest_larger
from minitri.apps.cli.documents import read_document
from minitri.apps.cli.exits import program
from minitri.apps.cli.report import Json, outline
from minitri.apps.cli.terminal import print_stream, shown
from minitri.core.errors import explain, shorten
from minitri.core.fields import check_names
from minitri.core.log import log
from minitri.core.requests import RequestState
from minitri.core.stats import num_common
from minitri.files.archive import Archive, state_folder
from minitri.text.prompt_ids import as_seeds, next_seed

say = log.warning  # with --quiet, too


class Chat:
    """A conversation with an engine; its methods `do_NAME` are the commands /NAME."""

    def __init__(
        self,
        engine: "minitri.Engine",
        talk: Conversation,
        args: Namespace,
        archive: Archive = Archive(),  # noqa: B008 (of no files)
        output: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        """Begins a chat from `talk`, or the --load file, by flags `args`; `archive` keeps chats.
        `output` makes a context that gives the file for an answer, or None for standard output."""
        self.talk = talk
        self._archive = archive
        self._output = output
        self._speed = self._file = self._saved = ""
        self._engine = engine
        self._args = args
        sampling, seed = sampling_of(args, engine)
        most_new = args.max_new_tokens
        self._settings: Json = {"seed": seed, "max_new_tokens": most_new, **vars(sampling)}
        if args.load is not None:
            self.do_load(args.load)
        else:
            self._read(talk)

    def status(self) -> str:
        """Line with the model, tokens of conversation and context, speed of the last answer."""
        config = self._engine.config
        used = len(self.talk.ids(self.talk.turns))
        return f"{config.name}  {used} of {config.context_length} tokens{self._speed}"

    def obey(self, typed: str) -> str:
        """Answers a question or obeys a /command; returns a failed question, for edits, or ""."""
        line = typed.strip()
        is_question = not line.startswith("/") and line not in ("quit", "exit", "clear")
        name, _, value = line.removeprefix("/").partition(" ")
        command = COMMANDS.get(name)
        try:
            if is_question:
                if text := line.removeprefix('"""').removesuffix('"""').strip():
                    self._answer(self.talk.turns, Turn(text))
            elif not command:
                near = get_close_matches(name, COMMANDS, 1)
                way = f"did you mean /{near[0]}?" if near else "/help lists what there is"
                raise InputError(f"there is no /{shorten(name, 40)}; {way}")
            elif name in ("load", "save") and not value:
                raise InputError(f"/{name} names no file; give /{name} FILE")
            else:
                command(self, os.path.expanduser(value.strip()))  # noqa: PTH111 (may be empty)
        except InputError as error:
            log.error(error)
            return typed if is_question and len(typed) < 4000 else ""  # else too long to edit
        except KeyboardInterrupt:
            say("stopped")
        return ""

    def do_help(self, _: str) -> None:
        """list all commands"""
        lines = [f"/{name:12} {command.__doc__}" for name, command in COMMANDS.items()]
        say("\n".join([*lines, "Alt-Enter, or Enter after a backslash, breaks a line"]))

    def do_show(self, _: str) -> None:
        """show the conversation so far"""
        for question, ids, _is_cut in self._turns():
            say(shown(f"> {question}\n{self.talk.tokenizer.decode(ids).strip()}"))

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
        """[NAME=VALUE ...] show or set temperature (0: greedy), top_p, seed"""
        settings = {**self._settings}
        for setting in values.split():
            name, _, value = setting.partition("=")
            check_names([name], settings)
            try:
                settings[name] = (int if value.isdecimal() else float)(value)
            except ValueError:
                raise InputError(f"{name} is {shorten(repr(value), 40)}; give a number") from None
        as_seeds(settings["seed"], 1)
        Request("", **settings)
        self._settings = settings
        say(", ".join(f"{k}={v}" for k, v in settings.items() if isinstance(v, int | float)))

    def do_system(self, text: str) -> None:
        """[TEXT] show or change the system message, on how to behave"""
        if text:
            self._read(replace(self.talk, system=text, documents=self._wanted))
        say(f"system: {self.talk.system or 'as the model has it'}")

    def do_documents(self, file: str) -> None:
        """[FILE] add a document, or read on; show how many tokens are kept"""
        talk = replace(self.talk, documents=self._wanted)  # whole, if reading was stopped
        if file:
            texts = {file: read_document(file, "/documents")}
            self._file = file
            self._read(talk.with_documents(texts, self._engine.config, self._args))
        elif talk != self.talk:
            self._read(talk)
        else:
            say(self.talk.sizes or "there are no documents; /documents FILE adds one")

    def do_fit(self, _: str) -> None:
        """cut documents to what fits, also the one just refused as too long"""
        self._args.fit = True
        self.do_documents(self._file)

    def do_save(self, file: str) -> None:
        """FILE: write the conversation and its KV cache to it"""
        if file != self._saved and Path(file).is_file():
            raise InputError(f"{file} is there; name another file, or the last of /save or /load")
        self._engine.save_kv(file, self.talk.as_note())
        say(f"saved to {file}; /load goes on there without reading documents again")
        self._saved = file

    def do_load(self, file: str) -> None:
        """FILE: continue the conversation that /save wrote to it"""
        self._engine.load_kv(file)
        talk = self.talk.restored(self._engine.snapshot_note)
        self._archive.begin()
        self._resume(talk)
        self._saved = file
        say(f"loaded {file}")

    def do_resume(self, _: str) -> None:
        """continue the conversation before this one"""
        with explain("there is no earlier conversation to be read", "ask something"):
            while (note := self._archive.read()) == self._as_text():
                pass  # this one, which /load has read
            talk = self.talk.restored(note)
            talk = talk.mapped(talk.tokenizer.encode_marked)
        say(title_of(self._archive.seen[-1]))
        self._resume(talk)

    def do_reset(self, _: str) -> None:
        """forget questions and answers, keep the documents"""
        self._archive.begin()
        self.talk = replace(self.talk, turns=())
        say("questions and answers are forgotten, until /resume")

    def do_quit(self, _: str) -> None:
        """leave, as Ctrl-D does; Ctrl-C stops an answer, or clears the line"""
        sys.exit()

    do_exit = do_quit
    do_clear = do_reset

    def _as_text(self) -> str:
        return self.talk.mapped(self.talk.tokenizer.decode).as_note()

    def _turns(self) -> Sequence[Turn]:
        if not self.talk.turns:
            raise InputError("there is no answer yet; ask something")
        return self.talk.turns

    def _resume(self, talk: Conversation) -> None:
        """Switches to another conversation; adds this one's documents if nothing was asked yet."""
        added = () if self.talk.turns else self.talk.documents
        both = replace(talk, documents=[*talk.documents, *added])
        flags = Namespace(fit=self._args.fit, max_prompt_tokens=None)  # documents are cut already
        try:
            talk = both.with_documents({}, self._engine.config, flags)
        except InputError:
            if not added:
                raise
            say("the new documents are left out, as they do not fit next to those of that chat")
        self.talk = talk
        if talk.turns:
            self.do_show("")
        self._read(talk)

    def _read(self, talk: Conversation) -> None:
        """Switches to a conversation and reads its documents, before a question is asked."""
        self.talk = talk
        self._wanted = talk.documents
        ids = talk.beginning
        if not talk.documents:
            return
        log.info(talk.sizes)
        if num_common(self._engine.held_tokens, ids) >= len(ids) - 1:
            return
        suggest_larger(self._args)
        if not self._run(ids, 1).finish_reason:
            num_read = num_common(self._engine.held_tokens, ids)
            self.talk = talk.cut(num_read)
            say(f"stopped: {num_read} of {len(ids)} tokens are kept; /documents reads on")

    def _answer(self, earlier: Sequence[Turn], turn: Turn) -> None:
        """Prints an answer to `turn`'s question after earlier turns, or goes on with its answer."""
        talk = self.talk
        context = self._engine.config.context_length
        most_new = self._settings["max_new_tokens"]
        wanted = min(most_new, (context - len(talk.beginning)) // 2)
        turns = talk.slide([*earlier, turn], context - wanted)
        prompt = talk.ids(turns)
        room = context - len(prompt)
        if room < 1:
            raise InputError(
                f"question and answer are {1 - room} tokens too long for the context of {context}; "
                "/reset, or Up brings it back, to shorten it; for a file there is /documents FILE"
            )
        if (num_gone := 1 + len(earlier) - len(turns)) > 0:
            log.info(f"the context is full: forgotten questions, the oldest first: {num_gone}")
            self._archive.begin()  # a new file: the current one keeps what is forgotten
        state = self._run(prompt, min(most_new, room), show=True)
        self._settings["seed"] = next_seed(self._settings["seed"])
        ids = state.token_ids
        if talk.stops:  # the tokens may be those of a stop string, too
            ids = talk.tokenizer.encode_marked(state.text)
        elif state.finish_reason == "eos":  # the template writes its own end of an answer
            ids = ids[:-1]
        is_cut = state.finish_reason in ("length", None)
        if is_cut:
            log.info(f"(cut after {len(ids)} tokens; /continue goes on)")
        elif not state.text.strip():
            log.info("(here the model ended its answer)")
        turn = Turn(turn.question, [*turn.token_ids, *ids], is_cut)
        self.talk = replace(talk, turns=[*turns[:-1], turn])
        if self._archive.folder.is_dir():
            self._archive.write(self._as_text())

    def _run(self, prompt: list[int], num_new: int, *, show: bool = False) -> RequestState:
        """Generates at most `num_new` tokens after the ids `prompt`; prints them if `show`."""
        config = self._engine.config
        reserve = min(config.context_length, len(self.talk.beginning) + TALK_TOKENS)
        limits = {"max_new_tokens": num_new, "stop": self.talk.stops, "reserve": reserve}
        num_cached = num_common(self._engine.held_tokens, prompt)  # before the run takes these
        run = self._engine.generate(
            prompt,
            generation=arguments.taken(GenerationConfig, self._args),
            speculation=arguments.speculation_of(self._args, self._settings["temperature"]),
            **self._settings | limits,
        )
        with self._output() as file:
            with contextlib.suppress(KeyboardInterrupt), run:  # of a second Ctrl-C
                print_stream(run, self._args, config, show=show, file=file, num_cached=num_cached)
            if show:
                print(flush=True, file=file)
                self._speed = f"  {run.stats.tokens_per_second or 0:.0f} tokens/s"
        log.debug(outline(run))
        return run.rows[0]


COMMANDS = {name[3:]: method for name, method in vars(Chat).items() if name.startswith("do_")}


def run_command(args: Namespace) -> None:
    """Chats until /quit or the end of the input. Raises `InputError`."""
    documents = {file: read_document(file, "--document") for file in args.document}
    opened = open_engine(args)
    talk = Conversation(opened.tokenizer, args.system)
    talk = talk.with_documents(documents, opened.config, args)
    with load_weights(args, opened) as engine:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            chat = Chat(engine, talk, args)
            try:
                for line in sys.stdin:
                    chat.obey(line)
            except UnicodeDecodeError:
                raise InputError("standard input is not UTF-8 text; convert it") from None
            return
        from minitri.apps.chat import at_terminal

        archive = Archive(state_folder())
        chat = Chat(engine, talk, args, archive, at_terminal.answer_file)
        later = f"; /resume continues {title}" if (title := title_of(archive.earlier)) else ""
        log.info(f"ask, or /help; Ctrl-C stops, Ctrl-D leaves{later}")
        at_terminal.let_keys_wait()
        at_terminal.ask(archive.folder, [f"/{name} " for name in COMMANDS], chat.obey, chat.status)


main = program(lambda: arguments.OneLineParser("chat"), run_command)
