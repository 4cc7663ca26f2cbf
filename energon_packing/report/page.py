"""One self-contained HTML page: no network, no foreign script, light and dark by the reader's setting. What comes from
data goes through `escaped`, or as JSON through `packed_block`; the page's content security policy lets nothing run but
the script whose digest it names."""

import base64
import gzip
import hashlib
import html
import json
import os
from pathlib import Path
from typing import Any

from energon_packing.errors import UserError

ASSETS = Path(__file__).parent / "assets"


def escaped(value: Any) -> str:
    """Text that is safe inside elements and quoted attributes; characters that HTML cannot carry become signs."""
    text = "".join("\ufffd" if 0xD800 <= ord(char) < 0xE000 or char == "\0" else char for char in str(value))
    return html.escape(text, quote=True)


def packed_block(identifier: str, values: Any) -> str:
    """JSON inside a page as gzip in base64, which nothing in it can end; the page's script unpacks it."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    # Half of a surrogate pair has no UTF-8 encoding; its backslash escape is also its JSON escape.
    packed = base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), mtime=0)).decode()
    return f'<script type="application/gzip" id="{escaped(identifier)}">{packed}</script>'


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole document, with its only script; the body is HTML that was made with `escaped` and `packed_block`."""
    style = (ASSETS / "page.css").read_text(encoding="utf-8") + style
    runs = f"'sha256-{_digest(script)}'" if script else "'none'"
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src {runs}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        f"{f'<script>{script}</script>' if script else ''}\n</body>\n</html>\n"
    )


def write_whole(path: Path, content: str) -> None:
    """Writes a file whole or not at all. Raises `UserError`: it cannot be written, and what was there is as it was."""
    whole = path.is_file() or not path.exists()  # no device or pipe
    target = Path(os.path.realpath(path)) if whole else path  # of a link
    aside = target.with_name(f".{target.name}.{os.getpid()}") if whole else target
    try:
        aside.write_bytes(content.encode())
        aside.replace(target)
    except OSError as error:
        if aside != target:
            aside.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
