"""Parts that programs share: flags, exit codes, inputs, reports."""
