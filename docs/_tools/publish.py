"""Writes where the project is published into its pages: `python docs/_tools/publish.py`, after the four fields in `pyproject.toml` are filled in.

README's pictures get absolute addresses, for the package's page elsewhere, and its head gets badges. `SECURITY.md` says whom to write to, `CITATION.cff` and the
package's metadata where the source is. The site and the notebooks read the fields when they are built. It may be run any number of times.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = "owner", "repository", "site", "contact"
SECURITY = """# Security

Please report a way to read, change or stop what is not yours to {contact}, and not in a public issue. Say the version and the smallest request that shows it.
"""


def fields(root: Path = ROOT) -> dict[str, str]:
    """The four fields, and the `address` that owner and repository make; empty where they are."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    found = {name: str(project["tool"]["folovllm"]["publish"][name]).rstrip("/") for name in NAMES}
    named = found["owner"] and found["repository"]
    return found | {"address": f"https://github.com/{found['owner']}/{found['repository']}" if named else ""}


def readme(text: str, where: dict[str, str]) -> str:
    """A README with absolute pictures, and with badges below its title."""
    raw = where["address"].replace("https://github.com", "https://raw.githubusercontent.com") + "/main"
    text = re.sub(r"(!\[[^]]*\]\()(?=docs/)", rf"\1{raw}/", text)
    tests = f"{where['address']}/actions/workflows/tests.yml"
    badges = f"[![tests]({tests}/badge.svg)]({tests}) [![book](https://img.shields.io/badge/book-read-blue)]({where['site']})"
    title, _, rest = text.partition("\n")
    return text if badges in text else f"{title}\n\n{badges}\n{rest}"


def publish(root: Path) -> None:
    """Write all of it. Raises ValueError if a field is empty."""
    where = fields(root)
    if empty := [name for name in NAMES if not where[name]]:
        raise ValueError(f"[tool.folovllm.publish] in pyproject.toml has no {', '.join(empty)}")
    for name in ("README.md", "README.zh.md"):
        page = root / name
        page.write_text(readme(page.read_text("utf-8"), where), "utf-8")
    (root / "SECURITY.md").write_text(SECURITY.format(**where), "utf-8")
    citation = root / "CITATION.cff"
    lines = [
        line for line in citation.read_text("utf-8").splitlines() if not line.startswith(("repository-code:", "url:"))
    ]
    citation.write_text(
        "\n".join([*lines, f"repository-code: {where['address']}", f"url: {where['site']}"]) + "\n", "utf-8"
    )
    project = root / "pyproject.toml"
    text = re.sub(r"\[project\.urls\]\n(?:\w.*\n)*\n", "", project.read_text("utf-8"))
    urls = f'[project.urls]\nRepository = "{where["address"]}"\nDocumentation = "{where["site"]}"\n\n'
    project.write_text(text.replace("[project.scripts]\n", f"{urls}[project.scripts]\n", 1), "utf-8")


if __name__ == "__main__":
    try:
        publish(ROOT)
    except ValueError as error:
        sys.exit(str(error))
