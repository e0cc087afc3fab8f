"""A job live in a browser: what `shoal report` shows, drawn anew every second, what `shoal top` knows, and buttons.

The page is for one person at this machine. It answers on loopback, to requests that name it by a loopback name, and
with the key that `shoal web` prints; commands take the key in a header, which no other site can make a browser send.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from shoal import errors
from shoal.control import commands
from shoal.control.rundir import RunDir
from shoal.report import page, read
from shoal.view.state import OVER, line_of, name_of, state_of
from shoal.web.picture import picture

_EVERY_MS = 1000
_NAMES = ("127.0.0.1", "localhost", "[::1]")
_STYLE = """
#bar { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 12px 0; }
#bar button, #bar input { font: inherit; padding: 4px 12px; border-radius: 6px; border: 1px solid var(--grid);
  background: var(--panel); color: var(--ink); }
#bar input { width: 72px; } #bar button { cursor: pointer; } #bar button:disabled { opacity: .5; cursor: default; }
#bar button.danger { color: var(--red); }
#said { min-height: 1.5em; }
"""
_SCRIPT = """
const key = new URLSearchParams(location.search).get("key");
const headers = {"Authorization": "Bearer " + key};
const said = document.getElementById("said");
let silent = false;
function noAnswer(problem) { silent = true; said.textContent = "shoal web does not answer: " + problem.message; }
async function look() {
  try {
    const answer = await fetch("live", {headers});
    if (!answer.ok) throw new Error(await answer.text());
    const told = await answer.json();
    if (silent) { silent = false; said.textContent = ""; }
    const open = [...document.querySelectorAll("#live details")].map(one => one.open);
    document.getElementById("line").textContent = told.line;
    document.getElementById("picture").innerHTML = told.picture;
    document.getElementById("live").innerHTML = told.body;
    document.querySelectorAll("#live details").forEach((one, at) => { one.open = open[at] ?? one.open; });
    document.querySelectorAll("#bar button").forEach(one => { one.disabled = told.over; });
    if (told.over) return;
  } catch (problem) { noAnswer(problem); }
  setTimeout(look, EVERY_MS);
}
async function order(what, body) {
  said.textContent = what + " …";
  const sent = {method: "POST", headers: {...headers, "Content-Type": "application/json"}, body: JSON.stringify(body)};
  try {
    const answer = await fetch("command/" + what, sent);
    said.textContent = await answer.text();
  } catch (problem) { noAnswer(problem); }
}
document.getElementById("scale").onclick =
  () => order("scale", {target: Number(document.getElementById("target").value)});
document.getElementById("checkpoint").onclick = () => order("checkpoint", {});
document.getElementById("stop").onclick =
  () => { if (confirm("Stop the job? Every worker finishes its step and leaves.")) order("stop", {}); };
look();
"""

Handler = Callable[[Request], Awaitable[Response]]


def new_key() -> str:
    return secrets.token_urlsafe(24)


def application(run_dir: RunDir, key: str) -> Starlette:
    """The page of the job in `run_dir`, for whoever has the key."""

    def guarded(handler: Handler) -> Handler:
        async def admit(request: Request) -> Response:
            name = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
            if name not in _NAMES:  # a name of somebody else's that points here
                return PlainTextResponse("this page answers to 127.0.0.1 and localhost only", 403)
            shown = request.headers.get("authorization", "").removeprefix("Bearer ")
            if request.method == "GET" and request.url.path == "/":
                shown = request.query_params.get("key", "")
            if not hmac.compare_digest(shown.encode(), key.encode()):
                return PlainTextResponse("the key is missing or wrong: open the address that shoal web printed", 403)
            answer = await handler(request)
            answer.headers["Cache-Control"] = "no-store"
            answer.headers["Referrer-Policy"] = "no-referrer"
            answer.headers["X-Content-Type-Options"] = "nosniff"
            return answer

        return admit

    async def whole(_: Request) -> Response:
        nonce = secrets.token_urlsafe(12)
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(_html(run_dir, nonce), headers={"Content-Security-Policy": policy})

    async def live(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(_look, run_dir))

    async def command(request: Request) -> Response:
        try:
            body = await request.json()
            return PlainTextResponse(await run_in_threadpool(_obey, run_dir, request.path_params["what"], body))
        except errors.ShoalError as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", 409)
        except (ValueError, KeyError, TypeError):
            return PlainTextResponse("this is no command", 400)

    return Starlette(
        routes=[
            Route("/", guarded(whole)),
            Route("/live", guarded(live)),
            Route("/command/{what}", guarded(command), methods=["POST"]),
        ]
    )


def _look(run_dir: RunDir) -> dict[str, Any]:
    state = state_of(run_dir)
    return {
        "line": line_of(name_of(run_dir), state),
        "picture": picture(state["workers"]),
        "body": page.body(read.read(run_dir, state if state["phase"] not in OVER else {})),
        "over": state["phase"] in OVER,
    }


def _obey(run_dir: RunDir, what: str, body: dict[str, Any]) -> str:
    if what == "scale":
        state = commands.scale(run_dir, int(body["target"]))
        return f"{state['target']} workers wanted"
    if what == "checkpoint":
        commands.checkpoint(run_dir)
        return "a checkpoint is taken at the next step; the events tell when it is on the disk"
    if what == "stop":
        commands.stop(run_dir, "shoal web")
        return "stopping"
    raise KeyError(what)


def _html(run_dir: RunDir, nonce: str) -> str:
    name = escape(name_of(run_dir))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · shoal</title><style>{page.STYLE}{_STYLE}</style></head><body><main>"
        '<p id="line" class="soft"></p>'
        '<div id="bar"><input id="target" type="number" min="1" value="2" aria-label="how many workers">'
        '<button id="scale">scale</button><button id="checkpoint">checkpoint</button>'
        '<button id="stop" class="danger">stop</button><span id="said" class="soft" role="status"></span></div>'
        '<div id="picture"></div><div id="live"></div></main>'
        f'<script nonce="{nonce}">{_SCRIPT.replace("EVERY_MS", str(_EVERY_MS))}</script></body></html>'
    )
