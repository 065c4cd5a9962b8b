"""What the OpenAPI document promises and what clients may get wrong about it: never a 5xx, never a hang."""

from __future__ import annotations

import subprocess
import sys


def test_no_request_the_document_allows_or_forbids_meets_an_error_of_ours(start_server, tmp_path):
    server = start_server(
        "--served-model-name", "m", "--max-model-len", "128", key=None,
        # So that generated names of models reach the engine.
        env={"VLLM_SKIP_MODEL_NAME_VALIDATION": "1"},
    )  # fmt: skip
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--phases", "coverage,fuzzing",
        "--max-examples", "12", "--request-timeout", "60", "--seed", "1", "--generation-deterministic", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert server.http.get("/health").status_code == 200
    assert server.stop() == 0
