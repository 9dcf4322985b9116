"""MLflow's own app, which `cohort ui` serves, with a start page that first stores the studies' views in the browser.

MLflow keeps the look of tables and charts in the browser alone, under the experiment's number; a link to a saved view
shows a warning too. A user's changes stay until the study's view changes. The entry point `mlflow.app` names this app.
"""

import json
import os
from typing import Any

from flask import Response
from mlflow import MlflowClient
from mlflow.server import app as pages
from mlflow.server.fastapi_app import app  # it serves `pages`
from mlflow.server.security_utils import get_allowed_hosts_from_env, is_allowed_host_header

from .. import extras
from .view import read_view

# The list of runs is wide enough for their names (a browser keeps no width of it), and no button opens the assistant.
_HEAD = """<style>
  .react-resizable[style*="0 0 295px"] { min-width: 380px; }
  button[data-assistant-ui], button[data-component-id$=analyze-trace] { display: none !important; }
</style>
<script>
(() => {
  const views = VIEWS;
  const open = (location.hash.match(/^#\\/experiments\\/(\\d+)/) || [])[1];
  try {
    const colors = JSON.parse(localStorage.getItem("experimentRunColors") || "{}");
    for (const one of [...views, ...views.filter(({id}) => id === open)]) Object.assign(colors, one.colors);
    localStorage.setItem("experimentRunColors", JSON.stringify(colors));
    localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');
    for (const shown of ["mlflow.assistant.fab.autoOpenedOnFirstLoad", "mlflow.detectIssues.guidanceShown",
                         "_mlflow_model_registry_promo_modal_dismissed"])  // advertisements that cover the pages
      localStorage.setItem(`${shown}_v1`, "true");
    for (const {id, view} of views) {
      const text = JSON.stringify(view), known = `cohort-view-${id}`;
      if (localStorage.getItem(known) === text) continue;
      localStorage.setItem(`MLflowLocalStorage-1.1-ExperimentPage-["${id}"]-ReactComponentState`, text);
      localStorage.setItem(known, text);
    }
  } catch {}  // a browser that stores nothing shows MLflow's own view
  const newest = views[views.length - 1];
  if (newest && !location.hash) location.hash = `#/experiments/${newest.id}/runs?workflowType=machine_learning`;
})();
</script>"""


def page(index: str, views: list[dict[str, Any]]) -> str:
    """MLflow's start page with the views as data, escaped so that no text in them can run as code."""
    return index.replace("<head>", "<head>" + _HEAD.replace("VIEWS", json.dumps(views).replace("<", "\\u003c")), 1)


def _serve() -> Response:
    experiments = MlflowClient(os.environ["MLFLOW_BACKEND_STORE_URI"]).search_experiments()
    found = [(one, read_view(one.tags)) for one in sorted(experiments, key=lambda one: one.creation_time or 0)]
    views = [{"id": one.experiment_id, "view": view[0], "colors": view[1]} for one, view in found if view is not None]
    served: Response = _mlflow_page()
    served.direct_passthrough = False
    text = page(served.get_data(as_text=True), views)
    return Response(text, mimetype="text/html", headers={"Cache-Control": "no-store"})


_mlflow_page: Any = pages.view_functions["serve"]
pages.view_functions["serve"] = _serve


class OwnHosts:
    """Answers requests that name one of the allowed hosts, and come from a page of one, alone: a foreign name that
    resolves to this machine reads nothing, on no route."""

    def __init__(self, app: Any) -> None:
        self.app, self.hosts = app, get_allowed_hosts_from_env() or []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        scheme, _, page = headers.get(b"origin", "").partition("://")
        page = page if scheme == scope.get("scheme", "").replace("ws", "http") else ""
        named = [headers.get(b"host", ""), *([page] if b"origin" in headers else [])]
        is_part = headers.get(b"sec-fetch-dest") != "document"  # a link may lead here, from anywhere
        is_foreign = is_part and headers.get(b"sec-fetch-site") in ("cross-site", "same-site")
        allowed = not is_foreign and all(is_allowed_host_header(self.hosts, host) for host in named)
        if scope["type"] == "lifespan" or allowed:
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        words = f"These pages are at {' and '.join(self.hosts)} alone; MLFLOW_SERVER_ALLOWED_HOSTS names others.\n"
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": words.encode()})


app.add_middleware(OwnHosts)
for one in extras.modules("pages").values():
    app.router.routes[:0] = one.ROUTES  # before MLflow's, which answer everything
