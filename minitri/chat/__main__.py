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
    from collections.abc import Callable, Iterator

    from minitri import InputError, ModelConfig, SamplingParams
    from minitri.chat.commands import SAMPLING, Chat, num_kept, tell
    from minitri.chat.conversation import Conversation
    from minitri.chat.words import COMMANDS, LEAVE
    from minitri.cli import arguments
    from minitri.cli.boot import boot
    from minitri.cli.documents import read_document
    from minitri.cli.terminal import LEGEND
    from minitri.fields import between
    from minitri.loading.tokenizer import Tokenizer
    from minitri.log import log


@dataclasses.dataclass(frozen=True)
class ChatFlags:
    """What this program alone is asked for."""

    fit: bool = False
    """Keep of the documents what fits the context, with room for questions and answers."""
    max_prompt_tokens: int | None = between(None, 1)
    """Keep the first N tokens of the documents."""
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
        "--document a.txt b.pdf --fit --system 'Answer in one sentence.' --temperature 0.6",
        description=about + "While it runs: " + ", ".join(f"/{name}" for name in COMMANDS),
    )
    arguments.add_flags(parser, *arguments.MODEL)
    text = "texts, PDF or HTML to ask about; may be given several times"
    parser.add_argument(
        "--document", nargs="+", action="extend", default=[], metavar="FILE", help=text
    )
    arguments.add_fields(parser, ChatFlags)
    arguments.add_flags(parser, "max_new_tokens", *arguments.MEMORY)
    parser.set_defaults(max_new_tokens=512)
    otherwise = f"temperature {SAMPLING.temperature}, top-p {SAMPLING.top_p}"
    arguments.add_open_sampling_flags(parser, otherwise)
    title = "speculation (none of this changes the text's distribution)"
    arguments.add_flags(parser, *arguments.SPECULATION, title=title)
    return parser


def run_command(args: argparse.Namespace) -> None:
    """Chats until /quit or the end of the input."""
    arguments.taken(SamplingParams, args)  # bad values fail before anything is loaded
    arguments.speculation_of(args)
    arguments.warn_of_ignored(args)
    documents = [(file, read_document(file, "--document")) for file in args.document]

    def begin(tokenizer: Tokenizer, config: ModelConfig) -> Conversation:
        talk = Conversation(tokenizer, system=args.system, documents=documents)
        num_kept(talk.opening, config, args)  # fails before weights are read
        return talk

    engine, talk = boot(args, begin)
    if args.color:
        log.info(LEGEND)
    chat = Chat(engine, talk, args)
    for line in typed_lines():
        chat.obey(line)


def typed_lines() -> Iterator[str]:
    """What the user types, up to /quit or Ctrl-D; at a terminal it can be edited. There Ctrl-C
    clears the line, and leaves when it is given twice on an empty one."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    typed: Callable[[], str] = str  # nothing
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline

            typed = readline.get_line_buffer
        log.info("ask, or /help; Ctrl-C stops an answer, Ctrl-D leaves")
    was_told = False
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except UnicodeDecodeError:
            raise InputError("standard input is not UTF-8 text; convert it") from None
        except EOFError:
            return
        except KeyboardInterrupt:
            is_empty = not typed()
            if not is_terminal or (is_empty and was_told):
                return
            tell(f"\n{LEAVE}" if is_empty else "")
            was_told = is_empty
            continue
        was_told = False
        if line in ("/quit", "/exit"):
            return
        if line:
            yield line


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
