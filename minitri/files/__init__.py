"""From files on disk or on the hub to a model and its tokenizer."""
