"""The list of models."""


def test_a_model_is_found_by_its_name(server):
    """Also one with slashes."""
    server.service.protocol.names.append("org/tiny")
    try:
        for name in ("tiny", "org/tiny"):
            assert server.openai.models.retrieve(name).id == name
    finally:
        server.service.protocol.names.pop()
    other = server.http.get("/v1/models/org/other")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
