"""Text: tokenizers, chat templates, stop strings, grammars, and requests made ready for a run."""
