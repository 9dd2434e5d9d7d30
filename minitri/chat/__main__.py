"""The chat: `python -m minitri.chat --document novel.txt`, then questions.

Documents are read once; questions and answers stay in the KV cache. Answers go to standard output,
everything else to standard error. Without a terminal every line of standard input is a question.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import logging
    from contextlib import closing

    from minitri.chat.conversation import Conversation
    from minitri.chat.screen import Lines, stoppable
    from minitri.cli import arguments
    from minitri.cli.boot import boot, model_sampling, seed_of
    from minitri.cli.inputs import read_text
    from minitri.cli.report import details, outline
    from minitri.cli.terminal import LEGEND, colored, plain, with_bar
    from minitri.config import ModelConfig
    from minitri.engine import Engine
    from minitri.errors import InputError, shorten
    from minitri.generation import Generation
    from minitri.loading.prompt_ids import check_prompt
    from minitri.loading.tokenizer import Tokenizer
    from minitri.requests import End, Token
    from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

TALK_TOKENS = 4096
"""Room for questions and answers after the documents, before more memory is taken."""
HELP = {
    "/help": "this list",
    "/stats": "what the last answer took",
    "/reset": "forget questions and answers, keep the documents",
    "/save FILE": "write the conversation and its KV cache to FILE",
    "/load FILE": "go on with the conversation in FILE",
    "/color": "color tokens by who guessed them, or stop it",
    "/temperature T": "0 is greedy, 1 the model's own distribution",
    "/quit": "leave",
}


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    parser = arguments.OneLineParser(
        "chat",
        "--document novel.txt",
        "--document a.txt --document b.txt --system 'Answer in one sentence.' --temperature 0.6",
        "--load monday.kv",
        description="Answers questions, about documents that are read once. "
        + "; ".join(f"{command}: {text}" for command, text in HELP.items()).replace("%", "%%")
        + ". Ctrl-C stops an answer, Ctrl-D leaves.",
    )
    arguments.add_model_flags(parser)
    text = "a UTF-8 text to ask about; may be given several times"
    parser.add_argument("--document", action="append", metavar="FILE", default=[], help=text)
    parser.add_argument("--system", metavar="TEXT", help="how the model is to behave")
    parser.add_argument("--load", metavar="FILE", help="go on with what /save wrote")
    arguments.add_fields(parser, GenerationConfig, "max_new_tokens", "prefill_chunk")
    parser.set_defaults(max_new_tokens=512)
    arguments.add_gpu_flags(parser)
    text = "makes a conversation repeatable (default: a new one each time)"
    arguments.add_open_sampling_flags(parser, text)
    arguments.add_speculation_flags(parser, "none of this changes the text's distribution")
    arguments.add_switches(
        parser,
        color="color each token by the stage it came from",
        quiet="no progress, log or statistics on standard error",
    )
    return parser


class Chat:
    """A conversation with an engine, at a terminal."""

    def __init__(
        self,
        engine: Engine,
        args: argparse.Namespace,
        sampling: SamplingParams,
        speculation: SpeculationConfig,
        documents: list[str],
    ) -> None:
        self._engine, self._args = engine, args
        self._sampling = sampling
        self._speculation = speculation
        self._seed = seed_of(args, speculation)
        self._talk = Conversation(engine.tokenizer, system=args.system, documents=documents)
        if not self._talk.has_template:
            log.info("this model has no chat template: plain questions and answers are tried")
        self._last: Generation | None = None
        if args.color:
            log.info(LEGEND)
        if args.load is not None:
            self._load(args.load)
        elif documents:
            self._read_documents()

    def obey(self, line: str) -> bool:
        """Answers a question or follows a command; returns whether to go on."""
        command, _, value = line.partition(" ")
        value = value.strip()
        if command == "/quit":
            return False
        try:
            if not line.startswith("/"):
                self._answer(line)
            elif command == "/temperature":
                self._set_temperature(value)
            elif command in ("/save", "/load") and value:
                self._save(value) if command == "/save" else self._load(value)
            elif command in ("/stats", "/reset", "/color"):
                {"/stats": self._stats, "/reset": self._reset, "/color": self._color}[command]()
            else:
                log.info("%s", "\n".join(f"  {name:16s}{text}" for name, text in HELP.items()))
        except InputError as error:
            log.error("%s", error)
        return True

    def _answer(self, question: str) -> None:
        prompt = self._talk.ask(question)
        room = self._engine.config.context_length - len(prompt)
        if room < 1:
            raise InputError(
                f"the conversation has {len(prompt)} tokens, all that {self._engine.config.name} "
                "holds; /reset forgets questions and answers"
            )
        num_new = min(self._args.max_new_tokens, room)
        show = colored if self._args.color else plain
        ids = list[int]()
        text = ""
        reason = "stopped"
        with stoppable() as stopped, closing(self._start(prompt, num_new)) as run:
            for event in with_bar(run, quiet=self._args.quiet):
                if isinstance(event, End):
                    reason = event.finish_reason
                    break
                ids.append(event.token_id)
                text += event.text
                print(show(event), end="", flush=True)
                if stopped.is_set():
                    break
            print(flush=True)
        self._seed = (self._seed + 1) % (1 << 32)
        self._last = run
        end = self._engine.tokenizer.token(ids[-1]) if reason == "eos" else ""
        self._talk.answered(ids, text, end or "")
        if reason in ("stopped", "length"):
            log.info("(%s after %d tokens)", {"length": "ended"}.get(reason, reason), len(ids))

    def _start(self, prompt: list[int], num_new: int) -> Generation:
        most = self._engine.config.context_length
        reserve = min(most, len(self._talk.beginning) + TALK_TOKENS)
        generation = arguments.taken(
            GenerationConfig,
            self._args,
            max_new_tokens=num_new,
            stop=self._talk.stops,
            reserve=reserve,
        )
        return self._engine.generate(
            prompt,
            sampling=self._sampling,
            generation=generation,
            speculation=self._speculation,
            seed=self._seed,
        )

    def _read_documents(self) -> None:
        """Reads what stands before the first question; Ctrl-C leaves the rest for later."""
        beginning = self._talk.beginning
        with stoppable() as stopped, closing(self._start(beginning, 1)) as run:
            for event in with_bar(run, quiet=self._args.quiet):
                if isinstance(event, Token) or stopped.is_set():
                    break
        log.info(
            "%d tokens of documents, read in %.1f s; room for %d tokens of questions and answers",
            len(beginning),
            run.stats.prefill_seconds,
            self._engine.config.context_length - len(beginning),
        )

    def _stats(self) -> None:
        if self._last is None:
            raise InputError("there is no answer yet; ask something")
        cached = self._last.rows[0].stats.num_cached_tokens
        log.info("%s; %d tokens were in the KV cache", outline(self._engine, self._last), cached)
        log.info("%s", details(self._engine, self._last))

    def _reset(self) -> None:
        self._talk.reset()
        log.info("questions and answers are forgotten")

    def _color(self) -> None:
        self._args.color = not self._args.color
        log.info("%s", LEGEND if self._args.color else "colors are off")

    def _set_temperature(self, value: str) -> None:
        try:
            temperature = float(value)
        except ValueError:
            raise InputError(
                f"temperature is {shorten(repr(value), 40)}; give a number, such as /temperature "
                "0.6"
            ) from None
        self._sampling = dataclasses.replace(self._sampling, temperature=temperature)
        log.info("temperature %g", temperature)

    def _save(self, file: str) -> None:
        log.info("saved %d tokens to %s", self._engine.save_kv(file, self._talk.as_note()), file)

    def _load(self, file: str) -> None:
        self._engine.load_kv(file)
        self._talk.restore(self._engine.snapshot_note)
        log.info("loaded %d tokens from %s", len(self._talk.tokens or self._talk.beginning), file)


def run_command(args: argparse.Namespace) -> None:
    """Chats until /quit or the end of the input."""
    sampling = arguments.taken(SamplingParams, args)
    speculation = arguments.speculation_of(args)
    draft = arguments.draft_of(args)
    arguments.warn_of_ignored(args)
    documents = [read_text(file) for file in args.document]
    lines = Lines([command.split()[0] for command in HELP])

    def check(tokenizer: Tokenizer, config: ModelConfig) -> None:
        talk = Conversation(tokenizer, system=args.system, documents=documents)
        check_prompt(talk.beginning, config, 1)

    engine = boot(args, draft, check)
    sampling = dataclasses.replace(sampling, **model_sampling(args, engine))
    args.temperature = sampling.temperature
    chat = Chat(engine, args, sampling, speculation, documents)
    if lines.is_terminal:
        log.info("ask, or /help; Ctrl-C stops an answer, Ctrl-D leaves")
    while (line := lines.next()) is not None:
        if line and not chat.obey(line):
            break


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.chat`."""
    with program(build_parser, argv) as args:
        run_command(args)


if __name__ == "__main__":
    main()
