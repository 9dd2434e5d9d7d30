"""Many engines on a cluster of Ray: a file of prompts, or the endpoints of a server."""
