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

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d1d9e0;--raised:#f4f6f8;
--text:#2f6fb2;--image:#b3561b;--video:#7a4fb5;--trained:#1a7f37;--pad:#c9d1d9;--bad:#b42318;--focus:#0b57d0}
@media(prefers-color-scheme:dark){:root{--paper:#0f1318;--ink:#e6eaee;--soft:#9aa6b2;--line:#333c46;--raised:#181e25;
--text:#6cb0f5;--image:#f0a35e;--video:#bd97f2;--trained:#5bd07a;--pad:#3b4550;--bad:#ff8a7d;--focus:#8ab4f8}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.5rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:0 0 .25rem}
p{margin:.25rem 0 .75rem;max-width:70ch}.soft{color:var(--soft)}
code,.code{font:13px/1.45 ui-monospace,monospace}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
th,td{padding:.25rem .75rem .25rem 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere;white-space:normal}
th{font-weight:600;color:var(--soft)}
tr.best td{background:var(--raised);font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(20rem,1fr));gap:1rem}
.card{background:var(--raised);border:1px solid var(--line);border-radius:8px;padding:.75rem 1rem}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--ink);font:11px system-ui,sans-serif}
svg .soft{fill:var(--soft)}.bar{fill:var(--text)}.error{stroke:var(--ink);stroke-width:1}
:focus-visible{outline:3px solid var(--focus);outline-offset:2px}
"""


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
    style = STYLE + style
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
