"""Chats of the server: messages and tools in, the parts of an answer out."""
