"""The built book in a real browser: what each page asked for elsewhere, which diagrams it drew, which code it cut off.

One headless Chromium loads all pages one after the other in a frame and reports to the server that serves them. No driver
is needed. Each page comes with a content security policy that allows its own server alone: the browser reports whatever
goes beyond it, and does not fetch it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OWN_ONLY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; report-uri /outside"
WIDTH, SECONDS = 1440, 120

# A drawn diagram is a <div class="mermaid"> in the place of the <pre>; what is inside it no script can see, but its height.
VISITOR = """<!doctype html><iframe id="frame" style="width: %dpx; height: 1200px; border: 0"></iframe><script>
const frame = document.getElementById("frame"), pause = ms => new Promise(done => setTimeout(done, ms));
const drawn = page => [...page.querySelectorAll("div.mermaid")].filter(diagram => diagram.clientHeight > 40).length;
async function visit({path, diagrams}) {
  frame.src = path;
  await new Promise(done => frame.onload = done);
  const page = frame.contentDocument;
  for (let turn = 0; turn < 100 && drawn(page) < diagrams; turn++) await pause(50);
  const cut = [...page.querySelectorAll("pre > code")].filter(code => code.scrollWidth > code.clientWidth + 1);
  return {path, diagrams: drawn(page), cut: cut.map(code => code.innerText)};
}
(async () => {
  for (const page of await (await fetch("/pages")).json())
    await fetch("/seen", {method: "POST", body: JSON.stringify(await visit(page))});
  await fetch("/done", {method: "POST"});
})();
</script>"""


@dataclass(slots=True)
class Visit:
    """What the browser said."""

    seen: list[dict[str, Any]] = field(default_factory=list)  # of each page: path, diagrams, the code that is cut off
    outside: list[str] = field(default_factory=list)  # page -> address
    done: threading.Event = field(default_factory=threading.Event)


def visit(site: Path, files: list[Path]) -> Visit:
    """Show these pages of a built site to Chromium."""
    said, pages = Visit(), [_page(site, file) for file in files]
    with _server(site, pages, said) as port, _browser(f"http://127.0.0.1:{port}/visitor"):
        assert said.done.wait(SECONDS), f"after {SECONDS} s the browser was at page {len(said.seen)} of {len(pages)}"
    return said


def _page(site: Path, file: Path) -> dict[str, Any]:
    return {"path": f"/{file.relative_to(site).as_posix()}", "diagrams": num_diagrams(file)}


def num_diagrams(file: Path) -> int:
    """How many diagrams the page has, as built."""
    return file.read_text("utf-8").count('<pre class="mermaid">')


@contextmanager
def _browser(address: str) -> Iterator[None]:
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--window-size={WIDTH + 60},1300",
    )
    process = subprocess.Popen([str(CHROMIUM), *flags, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def _server(site: Path, pages: list[dict[str, Any]], said: Visit) -> Iterator[int]:
    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", OWN_ONLY)
            super().end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def answer(self, text: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if self.path == "/visitor":
                self.answer(VISITOR % WIDTH, "text/html")
            elif self.path == "/pages":
                self.answer(json.dumps(pages), "application/json")
            else:
                super().do_GET()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.path == "/seen":
                said.seen.append(json.loads(body))
            elif self.path == "/outside":
                report = json.loads(body)["csp-report"]
                said.outside.append(f"{report['document-uri']} -> {report['blocked-uri']}")
            else:
                said.done.set()
            self.answer("", "text/plain")

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
