"""The self-test: speculation changes neither a text nor its distribution."""
