"""Programs: command line, chat, server, measurements."""
