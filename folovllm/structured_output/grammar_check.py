"""Checks grammars before an engine sees them, in processes beside it: a grammar can be expensive to compile."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import tempfile
from collections.abc import Collection
from concurrent.futures import Executor
from hashlib import sha256
from typing import TYPE_CHECKING

from folovllm.children import import_path, python_command
from folovllm.structured_output.guidance import tokenizer_json
from folovllm.structured_outputs import GrammarLimits, StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 2  # so that a cheap grammar need not wait for a dear one
MOST_KNOWN = 1024  # verdicts that are kept


class GrammarChecker:
    """Checks grammars in processes of their own: one that has read the tokenizer, which waits, and a fork of it for each grammar.

    The first grammar that needs it starts it. A fork that takes more than the limits is ended by the system; one whose client
    leaves, by the end of its connection.
    """

    def __init__(self, limits: GrammarLimits, readers: Executor) -> None:
        """`readers`: whose one thread alone may use the tokenizer."""
        self._limits, self._readers = limits, readers
        self._slots = asyncio.Semaphore(AT_ONCE)
        # By a grammar's digest: what is wrong with it, "" if nothing; the oldest first.
        self._known: dict[bytes, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None  # to the process
        self._setting: tuple[PreTrainedTokenizerBase, int, list[int]]  # set by `use`

    def use(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Collection[int]) -> None:
        """Check grammars for this tokenizer's tokens. Nothing is read before the first of them."""
        self._setting = tokenizer, vocab_size, sorted(end_ids) or [vocab_size - 1]

    async def check(self, asked: StructuredOutputsParams) -> None:
        """Raise ValueError if the grammar cannot be used, or costs too much."""
        if asked.kind == "choice":
            return
        key = sha256(repr(asked).encode()).digest()
        if key not in self._known:
            async with self._slots:
                if key not in self._known:  # another client may have asked meanwhile
                    self._known[key] = await self._ask(asked)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        if error := self._known[key]:
            raise ValueError(error)

    async def _ask(self, asked: StructuredOutputsParams) -> str:
        line = await asyncio.get_running_loop().run_in_executor(self._readers, self._started)
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=here)
        verdict = b""
        try:
            with there:
                socket.send_fds(line, [b"?"], [there.fileno()])
            writer.write(pickle.dumps(asked))
            writer.write_eof()
            verdict = await reader.read()
        except OSError:
            pass  # the process has ended meanwhile
        finally:
            writer.close()
        if verdict:
            return verdict[1:].decode()
        if not self._is_up:
            raise RuntimeError("the process that checks grammars has ended: ask again")
        raise ValueError(  # not kept: the system may have ended it for another reason
            f"structured_outputs is too complex: to check it takes more than {self._limits.seconds:g} s or "
            f"{self._limits.memory} MiB, so take a simpler form (the server's limits are --grammar-seconds, --grammar-memory)"
        )

    @property
    def _is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _started(self) -> socket.socket:
        """The line to the process, which is started if need be. Raises ValueError for a tokenizer that cannot be read."""
        if self._line is not None and self._is_up:
            return self._line
        self.close()
        tokenizer, vocab_size, end_ids = self._setting
        setting_of_all = self._limits, tokenizer_json(tokenizer), vocab_size, end_ids
        line, there = socket.socketpair()
        with there, tempfile.TemporaryFile() as setting:
            pickle.dump(setting_of_all, setting)
            setting.flush()
            fds = (there.fileno(), setting.fileno())
            command = python_command("folovllm.structured_output.grammar_check_process", *map(str, fds))
            environment = dict(os.environ) | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, env=environment, pass_fds=fds, stdin=subprocess.DEVNULL)
        self._line = line
        return line

    def close(self) -> None:
        """End the process; a later check starts another. What is being checked ends with its client."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._line = self._process = None
