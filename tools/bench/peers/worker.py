"""A program that decodes next to minitri, in a process of its own: `PYTHON worker.py PROGRAM`.

Imports nothing of minitri, so that any environment with the program's package can run it. Speaks
JSON lines: it says the version of the package; then it is told the weights, settings and prompt,
and says that it is ready; then every line gets one token. It computes only when it is asked, and
ends with its input. What goes wrong is one last line, {"error": text}.
"""

import json
import os
import sys
from collections.abc import Iterator


class OpenVINO:
    """OpenVINO GenAI's paged attention engine, which its `LLMPipeline` wraps.

    It is stepped here, where `generate` would run ahead of who reads its tokens.
    """

    def __init__(self) -> None:
        import openvino_genai

        self.version = openvino_genai.__version__

    def load(
        self, *, weights: str, prompt: list[int], num_new: int, threads: int, kv: str, lookup: bool
    ) -> Iterator[int]:
        """Loads the weights; the iterator reads the prompt, then decodes."""
        import numpy as np
        import openvino
        import openvino_genai

        scheduler, config = openvino_genai.SchedulerConfig(), openvino_genai.GenerationConfig()
        scheduler.max_num_batched_tokens = 2**31 - 1  # as LLMPipeline: the prompt in one pass
        properties = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": kv}
        config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, num_new
        if lookup:  # as in its own sample
            properties["prompt_lookup"] = True
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        pipeline = openvino_genai.ContinuousBatchingPipeline(weights, scheduler, "CPU", properties)
        tokens = openvino.Tensor(np.array([prompt], np.int64))

        def decode() -> Iterator[int]:
            request = pipeline.add_request(0, tokens, config)
            while pipeline.has_non_finished_requests():
                pipeline.step()
                while request.can_read():
                    for output in request.read().values():
                        yield from output.generated_ids

        return decode()


class LlamaCpp:
    """llama.cpp's own loop, through llama-cpp-python."""

    def __init__(self) -> None:
        import llama_cpp

        self.version = llama_cpp.__version__

    def load(self, *, weights: str, prompt: list[int], num_new: int, threads: int) -> Iterator[int]:
        """Loads the weights; the iterator reads the prompt, then decodes without an end."""
        import llama_cpp

        model = llama_cpp.Llama(
            weights,
            n_ctx=len(prompt) + num_new + 8,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        return model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)


PROGRAMS: dict[str, type[OpenVINO] | type[LlamaCpp]] = {"openvino": OpenVINO, "llama.cpp": LlamaCpp}


def main() -> None:
    """Answers standard input, line by line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    def say(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        program = PROGRAMS[sys.argv[1]]()
        say(program.version)
        tokens = program.load(**json.loads(next(sys.stdin)))
        say("ready")
        for _ in sys.stdin:
            say(next(tokens))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
