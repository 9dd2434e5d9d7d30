"""What the programs share: flags, exit codes, reports."""
