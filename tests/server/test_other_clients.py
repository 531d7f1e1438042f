"""Clients that are programs of their own: node, and the command `llm`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server.live_server import LiveServer

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_a_client_in_node(server: LiveServer) -> None:
    server.say("Grüße, 世界! 🎉")
    script = Path(__file__).parents[1] / "support" / "server" / "client.mjs"
    done = subprocess.run([str(NODE), str(script), server.url], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {
        "whole": "Grüße, 世界! 🎉",
        "streamed": "Grüße, 世界! 🎉",
        "last": "[DONE]",
        "status": 400,
        "param": "temperature",
        "models": ["tiny"],
    }


def test_the_command_llm(server: LiveServer, tmp_path: Path) -> None:
    server.say("Hello from here.")
    models = f'[{{"model_id": "local", "model_name": "tiny", "api_base": "{server.url}/v1"}}]'  # JSON is YAML
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    variables = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none", "LLM_LOAD_PLUGINS": ""}
    command = [sys.executable, "-m", "llm", "-m", "local", "Hello", "--no-log"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    assert (done.stdout.strip(), done.returncode) == ("Hello from here.", 0), done.stderr
