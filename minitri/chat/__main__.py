"""The chat: `minitri chat --document novel.txt`, then questions.

Documents are read once; questions and answers stay in the KV cache. Answers go to standard output,
everything else to standard error. Without a terminal every line of standard input is a question.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import contextlib
    import dataclasses
    import sys
    from collections.abc import Callable, Iterator, Sequence

    from minitri import (
        Engine,
        Generation,
        GenerationConfig,
        InputError,
        ModelConfig,
        SamplingParams,
        Token,
    )
    from minitri.chat.conversation import Conversation
    from minitri.cli import arguments
    from minitri.cli.boot import boot, sampling_of
    from minitri.cli.inputs import read_text
    from minitri.cli.report import outline
    from minitri.cli.terminal import LEGEND, colored, nothing, plain, stream
    from minitri.errors import explain, shorten
    from minitri.loading.prompt_ids import MAX_SEED, check_prompt
    from minitri.loading.tokenizer import Tokenizer
    from minitri.log import log

TALK_TOKENS = 4096
"""Room for questions and answers after the documents, before more memory is taken."""


class Chat:
    """A conversation with an engine; its methods `do_NAME` are what /NAME does."""

    def __init__(self, engine: Engine, talk: Conversation, args: argparse.Namespace) -> None:
        self._engine = engine
        self._talk = talk
        self._args = args
        self._sampling, self._seed = sampling_of(args, engine)
        self._last: Generation | None = None
        if args.color:
            log.info(LEGEND)
        if args.load is not None:
            self.do_load(args.load)
        elif args.document:  # is read at once; Ctrl-C leaves the rest for later
            self._run(talk.beginning, 1, nothing)
            log.info("%d tokens of documents are read", len(talk.beginning))

    def obey(self, line: str) -> None:
        name, _, value = line.partition(" ")
        try:
            if name.startswith("/"):
                getattr(self, f"do_{name[1:]}", self.do_help)(value.strip())
            else:
                self._answer(line)
        except InputError as error:
            log.error("%s", arguments.in_flags(error, self._args.flags))

    def do_help(self, _: str) -> None:
        """this list"""
        log.info("%s\n/quit or Ctrl-D leaves, Ctrl-C stops an answer", "\n".join(commands()))

    def do_stats(self, _: str) -> None:
        """what the last answer took"""
        if self._last is None:
            raise InputError("there is no answer yet; ask something")
        log.info("%s", outline(self._last))

    def do_reset(self, _: str) -> None:
        """forget questions and answers, keep the documents"""
        self._talk.tokens = []
        log.info("questions and answers are forgotten")

    def do_save(self, file: str) -> None:
        """FILE: write the conversation and its KV cache to it"""
        log.info("saved %d tokens to %s", self._engine.save_kv(file, self._talk.as_note()), file)

    def do_load(self, file: str) -> None:
        """FILE: go on with the conversation in it"""
        num_tokens = self._engine.load_kv(file)
        self._talk.restore(self._engine.snapshot_note)
        log.info("loaded %d tokens from %s", num_tokens, file)

    def do_temperature(self, value: str) -> None:
        """T: 0 is greedy, 1 the model's own distribution"""
        with explain(f"temperature is {shorten(repr(value))}", "give a number"):
            temperature = float(value)
        self._sampling = dataclasses.replace(self._sampling, temperature=temperature)
        log.info("temperature %g", temperature)

    def _answer(self, question: str) -> None:
        prompt = self._talk.ask(question)
        room = max(1, self._engine.config.context_length - len(prompt))
        show = colored if self._args.color else plain
        reason, tokens = self._run(prompt, min(self._args.max_new_tokens, room), show)
        print(flush=True)
        self._seed = (self._seed + 1) % (MAX_SEED + 1)
        ids = [token.token_id for token in tokens]
        end = self._engine.tokenizer.token(ids[-1]) if reason == "eos" else ""
        if self._talk.stops:  # the tokens may be those of a stop string, too
            ids = self._engine.tokenizer.encode_marked("".join(token.text for token in tokens))
        self._talk.answered(prompt, ids, end or "")
        if reason in ("interrupted", "length"):
            log.info("(%s after %d tokens)", reason, len(ids))

    def _run(
        self, prompt: list[int], num_new: int, show: Callable[[Token], str]
    ) -> tuple[str, list[Token]]:
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
        with self._last as run:
            return stream(run, show, quiet=self._args.quiet)


def commands() -> list[str]:
    """What may be typed, each with what it does."""
    names = [name for name in vars(Chat) if name.startswith("do_")]
    return [f"/{name.removeprefix('do_')} {getattr(Chat, name).__doc__}" for name in names]


@dataclasses.dataclass(frozen=True)
class ChatFlags:
    """What this program alone is asked for."""

    document: Sequence[str] = ()
    """A UTF-8 text to ask about; may be given several times."""
    system: str | None = None
    """How the model is to behave."""
    load: str | None = None
    """Go on with what /save wrote to this file."""
    color: bool = False
    """Color each token by the stage it came from."""


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    about = "Answers questions, about documents that are read once. "
    parser = arguments.OneLineParser(
        "chat",
        "--document novel.txt",
        "--document a.txt --document b.txt --system 'Answer in one sentence.' --temperature 0.6",
        description=about + "; ".join(commands()),
    )
    arguments.add_flags(parser, *arguments.MODEL)
    arguments.add_fields(parser, ChatFlags)
    arguments.add_flags(parser, "max_new_tokens", *arguments.MEMORY)
    parser.set_defaults(max_new_tokens=512)
    arguments.add_open_sampling_flags(parser)
    title = "speculation (none of this changes the text's distribution)"
    arguments.add_flags(parser, *arguments.SPECULATION, title=title)
    return parser


def run_command(args: argparse.Namespace) -> None:
    """Chats until /quit or the end of the input."""
    arguments.taken(SamplingParams, args)  # bad values fail before anything is loaded
    arguments.speculation_of(args)
    arguments.warn_of_ignored(args)
    documents = [read_text(file, "--document") for file in args.document]

    def begin(tokenizer: Tokenizer, config: ModelConfig) -> Conversation:
        talk = Conversation(tokenizer, system=args.system, documents=documents)
        check_prompt(talk.beginning, config, 1)
        return talk

    chat = Chat(*boot(args, begin), args)
    for line in typed_lines():
        chat.obey(line)


def typed_lines() -> Iterator[str]:
    """What the user types, up to /quit, Ctrl-D or Ctrl-C; at a terminal it can be edited."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        log.info("ask, or /help; Ctrl-C stops an answer, Ctrl-D leaves")
    try:
        while (line := input("> " if is_terminal else "").strip()) != "/quit":
            if line:
                yield line
    except UnicodeDecodeError:
        raise InputError("standard input is not UTF-8 text; convert it") from None
    except (EOFError, KeyboardInterrupt):
        return


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
