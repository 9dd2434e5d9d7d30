"""`python -m minitri.serve`: its start, its end, and errors before it starts."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from minitri.serve.__main__ import build_parser, main


def test_a_port_that_is_taken_is_one_line_before_the_model_is_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(SystemExit) as end:
            main(["--port", port, "--model", "no-such-model"])
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert f"cannot listen at 127.0.0.1, port {port}" in line


def test_requests_are_sampled_unless_they_say_otherwise():
    assert build_parser().parse_args([]).temperature == 1.0
    assert "(default: 1.0)" in build_parser().format_help()


def test_ctrl_c_lets_a_running_request_end(folder):
    command = [sys.executable, "-m", "minitri.serve", "--model", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        lines = iter(program.stderr)
        url = next(found[0] for line in lines if (found := re.search(r"http://\S+/v1", line)))
        fields = {"prompt": "She had", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=fields, timeout=60) as response:
            parts = response.iter_lines()
            next(parts)
            program.send_signal(signal.SIGINT)
            assert [line for line in parts if line][-1] == "data: [DONE]"
        assert program.wait(30) == 0
        assert "stopped" in list(lines)[-1]
