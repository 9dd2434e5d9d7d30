"""The server: `minitri serve --model smollm2-135m`, then any client of OpenAI's API.

Reports go to standard error. After Ctrl-C or SIGTERM requests may end first; another stops them."""

import contextlib
import socket
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import minitri
from minitri import End, GenerationConfig, InputError, Request, SamplingParams, SpeculationConfig
from minitri.apps.cli import arguments, boot, exits
from minitri.apps.serve.access import Access
from minitri.apps.serve.lossy_log import LossyHandler
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.core.offload.placement import GIB
from minitri.core.settings import MAX_ROWS
from minitri.core.shape import MemoryShape

DEFAULT_CONTEXT = 8192  # tokens of KV cache per row, which fit next to most models
SHARE = 0.6  # default --memory, as a share of what is free before weights are read


def run_command(args: Namespace) -> None:
    """Starts the server that the flags describe; it answers requests until Ctrl-C."""
    speculation = arguments.taken(SpeculationConfig, args, timed=not args.coupled)
    access = arguments.taken(Access, args)
    if not (access.digests or access.is_for_one):
        log.warning("--host is %s and there is no key: anyone who gets there may ask", args.host)
    exits.import_pytorch(huge_pages=False)  # after all flags are checked
    from minitri.apps.serve.app import Server, Service  # needs minitri[serve]
    from minitri.apps.serve.protocol import Protocol

    problem = f"cannot listen at {shorten(args.host, 60)}, port {args.port}"
    with explain(problem, "choose another --host or --port"):
        listener = socket.create_server((args.host, args.port))
        # Else each answer on a kept connection waits 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    log.handlers = [LossyHandler()]
    with listener:  # clients may connect while the model is loaded
        engine, _ = boot.load_engine(args)
        sampling = arguments.taken(SamplingParams, args, engine.sampling_defaults)
        worker, num_rows, context, gib = open_worker(args, engine, sampling, speculation)
        with engine, contextlib.closing(worker):
            names = [*dict.fromkeys([engine.config.name, Path(args.model).name])]
            protocol = Protocol(engine, names, sampling, context, args.ignore_unknown_fields)
            service = Service(protocol, worker, num_rows + args.max_queue, access)
            server = Server(service, args.grace, args.stall_seconds)
            size = f"{num_rows} requests at a time, of {context} tokens each, in {gib:.1f} GiB"
            where = "{}:{}".format(*listener.getsockname())
            boot.suggest_larger(args)
            log.info("%s at http://%s/v1: %s; Ctrl-C ends", engine.config.name, where, size)
            server.run(sockets=[listener])
    log.info("stopped")


def open_worker(
    args: Namespace,
    engine: "minitri.Engine",
    sampling: SamplingParams,
    speculation: SpeculationConfig,
) -> tuple["minitri.worker.Worker", int, int, float]:
    """Starts a worker whose run has read a first prompt; returns the worker, its number of rows,
    the tokens that a row holds, and GiB of rows and weights. Raises `InputError`."""
    from minitri.worker import Worker

    most = engine.config.context_length
    context = args.context or min(DEFAULT_CONTEXT, most)
    if not 1 < context <= most:
        raise InputError(f"--context is {context}; give from 2 to {most}, what the model holds")
    if args.memory is not None and args.offload and args.on_chip is None:
        raise InputError("--memory with --offload needs --on-chip N, layers that stay on the GPU")
    generation = arguments.taken(GenerationConfig, args, reserve=context)
    rows = (1,) * (args.batch_size or MAX_ROWS)
    shape = MemoryShape(rows, sampling, generation.for_run(context), speculation)
    num_rows, gib = choose_rows(engine, shape, args.memory, fewest=args.batch_size or 1)

    def open_run(_: object = None) -> minitri.Generation:
        return engine.open(
            batch_size=num_rows, sampling=sampling, generation=generation, speculation=speculation
        )

    run = open_run()
    num = min(32, context // 2)
    run.submit(Request([1] * num, seed=0, max_new_tokens=num, ignore_eos=True))
    while not isinstance(next(run), End):
        pass  # so that the first request does not wait for one-time work
    return Worker(open_run, run), num_rows, context, gib


def choose_rows(
    engine: "minitri.Engine", shape: MemoryShape, gib: float | None, *, fewest: int
) -> tuple[int, float]:
    """How many of a shape's rows fit with the weights into `gib` of memory (None: `SHARE` of what
    is free), and the GiB that these take. Raises `InputError` below `fewest` rows."""
    from minitri.core.memory import demand_of, room_for  # with PyTorch

    models = engine.models
    needs = demand_of(models, shape)
    on_device, on_host = room_for(models.target, needs)
    loaded = {models.target, models.retrieval, models.draft}
    # Unlike `Demand`, this counts fewer bytes for quantized weights, and those of a copy.
    uncounted = sum(model.num_bytes for model in loaded if model) - needs.num_weight_bytes
    free = on_device + uncounted
    most = SHARE * free if gib is None else min(gib * GIB, free)
    for num_rows in range(shape.num_rows, fewest - 1, -1):
        sized = replace(needs, shape=replace(shape, prompt_lengths=(1,) * num_rows))
        taken = (sized.on_device(needs.placements[0]) + uncounted) / GIB
        if sized.has_room(most - uncounted, on_host):
            return num_rows, taken
    got = f"{fewest} x {shape.generation.reserve} tokens of {needs.config.name} and the weights"
    got += f" take {taken:.3f} GiB, and there are {most / GIB:.3f} to take"
    raise InputError(got, "lower batch_size=", "lower context=", "give more memory=")


main = exits.program(lambda: arguments.OneLineParser("serve", Access), run_command)
