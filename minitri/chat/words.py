"""What a chat can be told and how it answers that, whoever shows it: a terminal, or a page."""

import difflib

COMMANDS = {
    "help": ("", "this list"),
    "show": ("", "the conversation"),
    "regenerate": ("", "answer the last question once more, with the next seed"),
    "continue": ("", "go on with an answer that was cut or stopped"),
    "sampling": (
        "[NAME=VALUE ...]",
        "change temperature (0 is greedy), top_p, top_k, min_p, seed or max_new_tokens; alone, "
        "show them",
    ),
    "temperature": ("T", "the same as /sampling temperature=T"),
    "system": ("[TEXT]", "tell the model how to behave; alone, show what it was told"),
    "documents": ("", "show how much of each document the model has, in tokens"),
    "document": ("FILE", "one more to ask about"),
    "read": (
        "",
        "go on with documents where Ctrl-C stopped; until then questions are about a part",
    ),
    "reset": ("", "forget questions and answers, keep the documents"),
    "stats": ("", "what the last answer took"),
    "save": ("FILE", "write the conversation and its KV cache to it"),
    "load": ("FILE", "go on with the conversation in it"),
    "quit": ("", "leave, as Ctrl-D does; Ctrl-C stops an answer, or clears the line"),
}
"""By name what each takes, in brackets if it may be left out, and what it does."""
ALIASES = {"clear": "reset", "exit": "quit", "retry": "regenerate", "set": "sampling"}
"""Names from other programs."""
HELP = "\n".join(f"/{name} {takes}".ljust(28) + does for name, (takes, does) in COMMANDS.items())
ENDINGS = {
    "length": "cut after {} tokens; /continue goes on, /sampling max_new_tokens=N allows more",
    "interrupted": "stopped after {} tokens; /continue goes on, /regenerate answers once more",
    "full": "the context is full after {} tokens; /continue goes on if older turns can go",
}
"""Why an answer ended, unless the model ended it."""
UNANSWERED = "stopped before the answer began; the question is not kept"
PARTLY_READ = "stopped; until /read goes on, questions are about {} of {} tokens of documents"
FORGOTTEN = "the context is full: the oldest {} of {} questions and their answers are forgotten"
LEAVE = "/quit or Ctrl-D leaves, and so does another Ctrl-C"


def unknown_command(name: str) -> str:
    """What to say about a command that there is not."""
    nearest = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 1)
    advice = f"did you mean /{nearest[0]}?" if nearest else "/help lists what there is"
    return f"there is no /{name}; {advice}"
