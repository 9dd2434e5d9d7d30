"""A server for one machine: one model at the OpenAI endpoints that clients use."""
