"""The server: `python -m minitri.serve --model smollm2-135m`, then any client of OpenAI's API.

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")

Reports go to standard error. After a Ctrl-C running requests end first; a second one stops them.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import contextlib
    import functools
    import logging
    import os
    import socket
    from typing import Any

    from minitri.cli import arguments
    from minitri.cli.boot import boot
    from minitri.engine import MAX_ROWS
    from minitri.errors import InputError
    from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

DEFAULT_CONTEXT = 8192
"""Tokens of KV cache per row, which is taken at the start: what fits next to most models."""
FINISH_SECONDS = 60
"""For running requests to end after a Ctrl-C."""


def build_parser() -> arguments.OneLineParser:
    """All flags of the program."""
    parser = arguments.OneLineParser(
        "serve",
        "--model smollm2-135m",
        "--context 32768 --batch-size 2 --port 8080 --api-key secret --coupled",
        description="Serves a model at the endpoints of OpenAI's API: /v1/models, /v1/completions "
        "and /v1/chat/completions; next to them /health.",
    )
    arguments.add_model_flags(parser)
    group = parser.add_argument_group("server")
    room = (
        "tokens that a prompt and its answer may have, for which each row takes memory (default: "
    )
    room += f"{DEFAULT_CONTEXT}, or the model's context if that is shorter)"
    for name, default, text in (
        ("context", None, room),
        ("batch-size", MAX_ROWS, "requests that run at a time"),
        ("max-queue", 64, "requests that wait for a row; more are answered with 503"),
        ("time-limit", 600, "seconds for a request, waiting included"),
    ):
        options: dict[str, Any] = {"type": arguments.positive, "metavar": "N", "default": default}
        group.add_argument(f"--{name}", help=text, **options)
    group.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all")
    text = "0: any that is free"
    group.add_argument("--port", type=arguments.whole(0, 65535), default=8000, help=text)
    text = "what clients have to send (default: MINITRI_API_KEY, or nothing)"
    group.add_argument("--api-key", metavar="KEY", help=text)
    arguments.add_switches(group, quiet="only errors on standard error")
    arguments.add_fields(group, GenerationConfig, "prefill_chunk")
    arguments.add_gpu_flags(group)
    group = parser.add_argument_group(
        "sampling where a request does not say: as in OpenAI's API at temperature 1, 16 tokens of "
        "a text, a chat to the end of the context, a new seed, which the answer tells (captured "
        "graphs on a GPU know only the kinds of filters that are given here)"
    )
    arguments.add_fields(group, SamplingParams, "temperature", "top_k", "top_p", "min_p")
    parser.set_defaults(temperature=1.0)
    arguments.add_speculation_flags(
        parser,
        "none of this changes the distribution; with --coupled, or at temperature 0, a seed gives "
        "the same text alone and with other requests",
    )
    return parser


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients may connect to while the model is loaded. Raises `InputError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"cannot listen at {host}, port {port}: {error}; choose another --host or --port"
        ) from None


def run_command(args: argparse.Namespace) -> None:
    """Answers requests until Ctrl-C."""
    try:
        import uvicorn

        from minitri.serve.app import Service
        from minitri.serve.protocol import Protocol
        from minitri.serve.worker import Worker
    except ModuleNotFoundError as error:
        raise InputError(f"{error}; install it: pip install 'minitri[serve]'") from None
    sampling = arguments.taken(SamplingParams, args)
    speculation = arguments.taken(SpeculationConfig, args, timed=not args.coupled)
    arguments.warn_of_ignored(args)
    with listen(args.host, args.port) as listener:
        engine = boot(args, arguments.draft_of(args), lambda *_: None)
        context = args.context or min(DEFAULT_CONTEXT, engine.config.context_length)
        names = list(dict.fromkeys([engine.config.name, args.model]))
        protocol = Protocol(engine, names, sampling, context)
        open_run = functools.partial(
            engine.open,
            batch_size=args.batch_size,
            sampling=sampling,
            generation=arguments.taken(GenerationConfig, args, reserve=context),
            speculation=speculation,
        )
        with contextlib.closing(Worker(open_run)) as worker:
            service = Service(
                protocol,
                worker,
                max_open=args.batch_size + args.max_queue,
                seconds=args.time_limit,
                api_key=args.api_key or os.environ.get("MINITRI_API_KEY"),
            )
            config = uvicorn.Config(
                service.app,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=FINISH_SECONDS,
            )
            host, port, *_ = listener.getsockname()
            log.info(
                "%s at http://%s:%d/v1: %d requests at a time, of %d tokens each (%.2g GiB of KV "
                "caches); Ctrl-C ends",
                engine.config.name,
                f"[{host}]" if ":" in host else host,
                port,
                args.batch_size,
                context,
                worker.kv_cache_bytes / (1 << 30),
            )
            with contextlib.suppress(KeyboardInterrupt):
                uvicorn.Server(config).run(sockets=[listener])
    log.info("stopped")


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.serve`."""
    with program(build_parser, argv) as args:
        run_command(args)


if __name__ == "__main__":
    main()
