"""Text: tokenizers, chat templates, stop strings, filters, and grammars."""
