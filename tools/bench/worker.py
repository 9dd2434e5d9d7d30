"""One engine in a process of its own, for `people.py`: `PYTHON worker.py PROGRAM < JOB`.

Imports nothing of minitri unless it measures that, so any Python that has a program's package can
run it. Prints lines of JSON: the package's version; the seconds that loading took; for each prompt
of the job the seconds to the first token and the milliseconds of each later one; at the end the
most memory that was in use. An error is one last line, {"error": text}. All decode greedily, and
go on after an end-of-sequence token.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

Run = Callable[[list[int], int], tuple[float, float | None]]
"""Reads a prompt and generates some tokens: seconds to the first one, milliseconds of each later
one, if there are any."""
Program = tuple[str, Callable[..., Run]]
"""A version, and what loads the model of a job with options of the program."""


def minitri() -> Program:
    """minitri as its own programs set it up; options are the method and those of `load`."""
    from minitri.apps.cli.exits import import_pytorch

    import_pytorch()
    import minitri

    def load(job: dict[str, Any], method: str = "auto", **options: Any) -> Run:
        engine = minitri.load(job["model"], **options)
        how: dict[str, Any] = {"method": method, "temperature": 0.0, "ignore_eos": True}

        def decode(prompt: list[int], num_new: int) -> Iterator[int]:
            for event in engine.generate(prompt, max_new_tokens=num_new, **how):
                if isinstance(event, minitri.Token):
                    yield event.token_id

        return timed(decode)

    return minitri.__version__, load


def llama_cpp_library() -> Program:
    """llama.cpp's library, by llama-cpp-python; options are those of `Llama`."""
    import llama_cpp

    def load(job: dict[str, Any], **options: Any) -> Run:
        threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
        sizes = {"n_ctx": job["context"], **threads}
        model = llama_cpp.Llama(job["file"], verbose=False, **sizes, **options)
        greedy = {"temp": 0.0, "top_k": 1, "repeat_penalty": 1.0}
        return timed(lambda prompt, _: model.generate(prompt, **greedy))

    return llama_cpp.__version__, load


def llama_cpp_server() -> Program:
    """llama.cpp's server, called by xllamacpp; options are attributes of `CommonParams`."""
    import xllamacpp

    def load(job: dict[str, Any], **options: Any) -> Run:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = job["file"], job["context"], 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
        for name, value in options.items():
            setattr(params, name, value)
        server = xllamacpp.Server(params)
        how = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}

        def run(prompt: list[int], num_new: int) -> tuple[float, float | None]:
            chunks: list[dict[str, Any]] = []  # of text, not one for each token
            body = {"prompt": prompt, "n_predict": num_new, **how}
            server.handle_completions(body, chunks.append)
            took = next(chunk["timings"] for chunk in chunks[::-1] if "timings" in chunk)
            later = took["predicted_ms"] / (num_new - 1) if num_new > 1 else None
            return took["prompt_ms"] / 1e3, later

        return run

    return xllamacpp.__version__, load


def ik_llama_cpp() -> Program:
    """ik_llama.cpp's library; options are those of `IkLlama`, whose own loop samples in Python."""
    import numpy as np
    from ik_llama_cpp import IkLlama, _ctypes_api
    from ik_llama_cpp._internals import make_batch_range

    def load(job: dict[str, Any], **options: Any) -> Run:
        model = IkLlama(job["file"], n_ctx=job["context"], n_threads=job["threads"], **options)

        def read(tokens: list[int], start: int) -> int:
            context = model._context
            for i in range(0, len(tokens), context._n_ubatch):
                part = tokens[i : i + context._n_ubatch]
                batch = make_batch_range(part, pos_start=start + i)
                code = context.decode(batch)
                _ctypes_api.llama_batch_free(batch)
                if code:
                    raise RuntimeError(f"llama_decode returned {code}")
            logits = np.ctypeslib.as_array(context.get_logits(-1), (model._model.n_vocab,))
            return int(logits.argmax())

        def decode(prompt: list[int], num_new: int) -> Iterator[int]:
            model._context.kv_cache_clear()
            token = read(prompt, 0)
            for i in range(num_new):
                yield token
                token = read([token], len(prompt) + i)

        return timed(decode)

    return version("ik-llama-cpp-python"), load


def openvino() -> Program:
    """OpenVINO GenAI's paged attention engine, which its `LLMPipeline` wraps; options are
    properties of its CPU plug-in, such as KV_CACHE_PRECISION."""
    import numpy as np
    import openvino
    import openvino_genai

    def load(job: dict[str, Any], **options: Any) -> Run:
        scheduler, config = openvino_genai.SchedulerConfig(), openvino_genai.GenerationConfig()
        scheduler.max_num_batched_tokens = 2**31 - 1  # as LLMPipeline: the prompt in one pass
        config.do_sample, config.ignore_eos = False, True
        properties = {"INFERENCE_NUM_THREADS": job["threads"], **options}
        settings = (job["file"], scheduler, "CPU", properties)
        pipeline = openvino_genai.ContinuousBatchingPipeline(*settings)

        def decode(prompt: list[int], num_new: int) -> Iterator[int]:
            config.max_new_tokens = num_new
            request = pipeline.add_request(0, openvino.Tensor(np.array([prompt], np.int64)), config)
            while pipeline.has_non_finished_requests():
                pipeline.step()
                while request.can_read():
                    for output in request.read().values():
                        yield from output.generated_ids

        return timed(decode)

    return openvino_genai.__version__, load


def timed(decode: Callable[[list[int], int], Iterator[int]]) -> Run:
    """Measures an iterator over tokens, of which the first follows the prompt."""

    def run(prompt: list[int], num_new: int) -> tuple[float, float | None]:
        times = [time.perf_counter()]
        for _ in islice(decode(prompt, num_new), num_new):
            times.append(time.perf_counter())
        if len(times) <= num_new:
            raise RuntimeError(f"it ended after {len(times) - 1} of {num_new} tokens")
        later = 1e3 * (times[-1] - times[1]) / (num_new - 1) if num_new > 1 else None
        return times[1] - times[0], later

    return run


def peak_bytes() -> int:
    """The most memory that this process had, with the pages of files that it has mapped."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux that counts what the process was forked from, too.
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "minitri": minitri,
    "llama.cpp": llama_cpp_library,
    "xllamacpp": llama_cpp_server,
    "ik_llama.cpp": ik_llama_cpp,
    "openvino": openvino,
}


def main() -> None:
    """Does the job on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    def say(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        number, load = PROGRAMS[sys.argv[1]]()
        say(number)
        job = json.load(sys.stdin)
        started = time.perf_counter()
        run = load(job, **job["options"])
        say(time.perf_counter() - started)
        for prompt, num_new in job["prompts"]:
            say(run(prompt, num_new))
        say(peak_bytes())
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
