"""The page at `/`: what runs here and where to go next. Static: it asks the other routes itself."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Hardpoint</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem; color: #1b1f24; }
code { background: #f0f2f4; padding: .1rem .3rem; border-radius: .2rem; }
dt { font-weight: 600; } dd { margin: 0 0 .6rem 0; } .bad { color: #b3261e; } .good { color: #1e7b34; }
@media (prefers-color-scheme: dark) { body { background: #15181c; color: #e6e8ea; } code { background: #262b31; } }
</style>
</head>
<body>
<h1>Hardpoint</h1>
<dl>
<dt>Health</dt><dd id="health">asking ...</dd>
<dt>Models</dt><dd id="models">asking ...</dd>
</dl>
<form id="key" hidden>
<label>API key <input type="password" autocomplete="off"></label> <button>Show models</button>
</form>
<p>Talk to it at <code>/v1/chat/completions</code> and <code>/v1/completions</code> with any OpenAI client.</p>
<p><a href="docs">API</a> · <a href="metrics">Metrics</a> · <a href="plugins">Plugins</a> ·
<a href="version">Version</a></p>
<script>
const show = (id, text, kind) => {
  const e = document.getElementById(id); e.textContent = text; e.className = kind || "";
};
const form = document.getElementById("key");
async function health() {
  try {
    const answer = await fetch("health");
    show("health", answer.ok ? "the engine is running" : "the engine has ended", answer.ok ? "good" : "bad");
  } catch { show("health", "no answer", "bad"); }
}
async function models(key) {
  try {
    const answer = await fetch("v1/models", key ? { headers: { Authorization: "Bearer " + key } } : {});
    form.hidden = answer.status !== 401;
    if (answer.status === 401) { show("models", key ? "this key is not accepted" : "need an API key"); return; }
    show("models", (await answer.json()).data.map(m => m.id + " (" + m.max_model_len + " tokens)").join(", "));
  } catch { show("models", "no answer", "bad"); }
}
form.addEventListener("submit", e => { e.preventDefault(); models(form.querySelector("input").value); });
health(); models(); setInterval(health, 5000);
</script>
</body>
</html>
"""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """A small status page; it shows nothing that needs a key until one is typed in."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)
