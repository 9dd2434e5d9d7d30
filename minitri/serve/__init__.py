"""A server for one machine: one model behind the OpenAI endpoints that clients use."""
