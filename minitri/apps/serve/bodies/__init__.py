"""Bodies of the endpoints as pydantic models: what may be sent, and its JSON schemas."""
