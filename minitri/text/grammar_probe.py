"""Program that compiles grammars within limits, which are less than a thread of minitri has.

Some of 40 bytes take llguidance minutes, some of 60 KB more stack than there is, which ends a
process. The input is a list in JSON; the output, too: their errors. Bytes are vocabulary enough.
"""

import json
import re
import sys
from contextlib import suppress

from llguidance import LLMatcher, LLTokenizer

if __name__ == "__main__":
    with suppress(ImportError):  # of Windows
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_STACK)  # with none, threads have 2 MiB
        stack = min(most if most > 0 else 1 << 21, 1 << 23) // 2
        limits = {resource.RLIMIT_CPU: 1, resource.RLIMIT_STACK: stack, resource.RLIMIT_AS: 1 << 30}
        for kind, limit in limits.items():
            with suppress(ValueError):  # the limit is lower already
                resource.setrlimit(kind, (limit, limit))
    lexicon = LLTokenizer("byte")
    errors = []
    for source in json.load(sys.stdin):
        text = re.sub(r"<\[[\d,^* -]*\]>", "<[256]>", source)  # tokens of a model's vocabulary
        matcher = LLMatcher(lexicon, text, log_level=0)
        if not matcher.is_error():
            matcher.compute_logit_bias()
        errors.append(matcher.get_error())
    print(json.dumps(errors))
