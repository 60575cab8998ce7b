"""A server of our own for a benchmark: `folovllm serve` in a process of its own, as users start it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from folovllm.children import import_path, python_command

END = 10.0  # seconds that it has to end


def flags_of(fields: dict[str, Any]) -> list[str]:
    """Fields of an `EngineConfig` as flags of the command."""
    flags: list[str] = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags


@contextmanager
def own_server(fields: dict[str, Any], engine_process: bool | None) -> Iterator[str]:
    """The address of a server with these settings, until the end of the block. Raises ValueError where it does not start."""
    rest = dict(fields)
    model = [rest.pop("model")] if rest.get("model") else []
    command = [*python_command("folovllm", "serve"), *model, "--port", "0", "--served-model-name", "model"]
    command += flags_of(rest | {"engine_process": engine_process})
    with tempfile.TemporaryFile("w+") as log:
        env = dict(os.environ) | {"PYTHONPATH": import_path()}
        # In a session of its own, since a Ctrl-C is ours alone: the server ends when its figures are taken.
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if address := re.search(r"serving .* at (http://\S+)/v1", line):
                    yield address[1]
                    return
            process.wait()
            log.seek(0)
            raise ValueError(f"folovllm serve did not start: {log.read()[-2000:].strip() or process.returncode}")
        finally:
            process.terminate()
            try:
                process.wait(END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
