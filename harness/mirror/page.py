"""MLflow's own app, which `cohort ui` serves, with a start page that first stores the studies' views in the browser.

MLflow keeps the look of tables and charts in the browser alone, under the experiment's number; a link to a saved view
shows a warning too. A user's changes stay until the study's view changes. The entry point `mlflow.app` names this app.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import flask
from mlflow import MlflowClient
from mlflow.server import app as pages
from mlflow.server.fastapi_app import app  # it serves `pages`
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from .. import extras
from .ui import SECRET
from .view import read_view

_CLOSED = "These pages open at the address that `cohort ui` printed last. MLFLOW_TRACKING_TOKEN is for its token.\n"
# A page of ours leads on, not a redirect: browsers keep a strict cookie from what began on another site.
_COME_IN = "<!DOCTYPE html><script>location.replace(location.pathname + location.hash)</script>"

# Styles: the list of runs is wide enough for its names (a browser keeps no width of it); no button for an assistant.
_HEAD = Path(__file__).with_name("page.html").read_text("utf-8").strip()


def page(index: str, views: list[dict[str, Any]]) -> str:
    """MLflow's start page with the views as data, escaped so that no text in them can run as code."""
    return index.replace("<head>", "<head>" + _HEAD.replace("VIEWS", json.dumps(views).replace("<", "\\u003c")), 1)


def _serve() -> flask.Response:
    experiments = MlflowClient(os.environ["MLFLOW_BACKEND_STORE_URI"]).search_experiments()
    found = [(one, read_view(one.tags)) for one in sorted(experiments, key=lambda one: one.creation_time or 0)]
    views = [{"id": one.experiment_id, "view": view[0], "colors": view[1]} for one, view in found if view is not None]
    served: flask.Response = _mlflow_page()
    served.direct_passthrough = False
    text = page(served.get_data(as_text=True), views)
    return flask.Response(text, mimetype="text/html", headers={"Cache-Control": "no-store"})


_mlflow_page: Any = pages.view_functions["serve"]
pages.view_functions["serve"] = _serve


class OwnUser:
    """Answers who has the secret: in the address, which leaves it to a cookie, or as the token of an MLflow client.

    A page of another site or port has no cookie, or says where it is from. `/health` alone answers everybody.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.secret = app, os.environ.get(SECRET) or secrets.token_urlsafe()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        host, scheme = headers.get(b"host", ""), scope.get("scheme", "").replace("ws", "http")
        cookie = f"cohort-{host.rpartition(':')[2]}={self.secret}"  # for each port: browsers keep one set for all
        is_own = headers.get(b"origin", f"{scheme}://{host}") == f"{scheme}://{host}"
        is_own &= headers.get(b"sec-fetch-site") not in ("cross-site", "same-site")
        may = is_own and _among(cookie, headers.get(b"cookie", "").split(";"))
        may = may or _among(f"Bearer {self.secret}", [headers.get(b"authorization", "")])
        if may or scope["type"] == "lifespan" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        answer: Response = PlainTextResponse(_CLOSED, 403)
        if _among(self.secret, parse_qs(scope["query_string"].decode("latin-1")).get("token", [])):
            answer = HTMLResponse(_COME_IN, headers={"Set-Cookie": f"{cookie}; Path=/; HttpOnly; SameSite=Strict"})
        await answer(scope, receive, send)


def _among(word: str, given: list[str]) -> bool:
    return any(secrets.compare_digest(word.encode(), one.strip().encode()) for one in given)


app.add_middleware(OwnUser)
for one in extras.modules("pages").values():
    app.router.routes[:0] = one.ROUTES  # before MLflow's, which answer everything
