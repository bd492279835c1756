"""Runs the server as a Ray Serve application: several replicas on one or more machines.

    serve run dlm_serve.ray_serve:build bundles=build/demo max_replicas=4

Each replica opens all bundles and answers all paths of the server. Ray's proxy receives the
requests. For each request, the proxy chooses two random replicas, and sends the request to the
replica that has fewer requests. With ``routing=session``, the proxy sends requests with the same
header ``x-session-id`` to the same replica. If a replica is killed, its requests fail with status
500, and the proxy sends later requests to other replicas. The replicas, not the proxy, check API
keys and limits. The header ``x-replica`` of a response names the replica.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import dlm_runtime
from dlm_serve.app import Server
from dlm_serve.hosting import Models
from dlm_serve.running import read_keys
from dlm_serve.web import Web

SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Settings(BaseModel):
    """The arguments of the application, each as NAME=VALUE.

    - ``bundles``: folders of bundles, or NAME=FOLDER, separated by commas. The paths must be valid
      on each machine that runs a replica.
    - ``min_replicas``, ``max_replicas``: limits on the number of replicas.
    - ``target_requests``: Ray starts and stops replicas so that each replica has about this number
      of running and waiting requests.
    - ``max_running``, ``max_waiting``: limits of each replica and model, as in ``dlm-export serve``.
    - ``threads``: number of threads of each replica. Ray reserves as many processors.
    - ``gpus``: number of GPUs that Ray reserves for each replica. A fraction is possible.
    - ``provider``: the execution provider, as in ``dlm-export serve``.
    - ``api_key_file``: a file with one API key per line.
    - ``share_prompts``: if true, requests with different API keys reuse each other's prompts.
    - ``hosts``: host names that clients may use, separated by commas, as in ``--allow-host``.
    - ``cors_origins``: origins of web pages that may use the server, separated by commas.
    - ``shutdown_s``: maximum number of seconds that a replica waits for running requests before it
      ends.
    - ``routing``: ``load`` sends a request to the replica with fewer requests. ``session`` sends
      all requests with the same header ``x-session-id`` to the same replica, which can then reuse
      their prompts.
    """

    model_config = ConfigDict(extra="forbid")

    bundles: str = Field(min_length=1)
    min_replicas: int = Field(1, ge=1, le=1024)
    max_replicas: int = Field(1, ge=1, le=1024)
    target_requests: float = Field(8, gt=0)
    max_running: int = Field(16, ge=1, le=4096)
    max_waiting: int = Field(256, ge=1, le=1 << 20)
    threads: int = Field(1, ge=1, le=1024)
    gpus: float = Field(0, ge=0)
    provider: str = "cpu"
    api_key_file: str | None = None
    share_prompts: bool = False
    hosts: str = ""
    cors_origins: str = ""
    shutdown_s: float = Field(60, gt=0)
    routing: Literal["load", "session"] = "load"

    def paths(self) -> dict[str, Path]:
        """Return a dict that maps each model's name to the folder of the model's bundle."""
        found: dict[str, Path] = {}
        for part in self.bundles.split(","):
            name, is_pair, folder = part.strip().partition("=")
            path = Path(folder if is_pair else name).resolve()
            name = name if is_pair else path.name
            if name in found:
                raise ValueError(f"bundles: two bundles have the name {name}: write NAME=FOLDER")
            if not (path / "manifest.json").is_file():
                raise ValueError(f"bundles: {path} is not the folder of a bundle")
            found[name] = path
        return found


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class _Named:
    """An ASGI application that adds the header ``x-replica`` to each response."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-replica"] = self._name
            await send(message)

        await self._app(scope, receive, named)


@serve.ingress()
class _Replica:
    """A replica: one instance of the server application."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = Settings(**settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        settings = self._settings
        keys = [] if settings.api_key_file is None else read_keys(Path(settings.api_key_file))

        def opened(path: Path) -> dlm_runtime.Bundle:
            return dlm_runtime.open(path, threads=settings.threads, provider=settings.provider)

        self._models = Models(settings.paths(), opened, settings.max_running, settings.max_waiting)
        name = serve.get_replica_context().replica_id.unique_id
        web = Web(listed(settings.hosts), listed(settings.cors_origins))
        server = Server(self._models, keys, web=web, shares_prompts=settings.share_prompts)
        return _Named(server.app, name)

    def check_health(self) -> None:
        """Called by Ray. If this method raises an error repeatedly, Ray replaces the replica."""
        for model in self._models:
            if model.scheduler.has_ended:
                raise RuntimeError(f"the scheduler of the model {model.name} has ended")


def build(settings: Settings) -> serve.Application:
    """Build the application for ``serve run``, ``serve deploy`` or ``ray.serve.run``.

    Raises ValueError if a bundle is missing, or if a number is out of range.
    """
    if settings.max_replicas < settings.min_replicas:
        raise ValueError("max_replicas must be at least min_replicas")
    absolute = ",".join(f"{name}={path}" for name, path in settings.paths().items())
    settings = settings.model_copy(update={"bundles": absolute})
    if settings.api_key_file is not None:
        read_keys(Path(settings.api_key_file))
        path = str(Path(settings.api_key_file).resolve())
        settings = settings.model_copy(update={"api_key_file": path})
    most = len(settings.paths()) * (settings.max_running + settings.max_waiting)
    is_by_session = settings.routing == "session"
    router: dict[str, Any] = {"request_router_class": SESSION_ROUTER} if is_by_session else {}
    deployment = serve.deployment(
        name="dlm-serve",
        ray_actor_options={"num_cpus": settings.threads, "num_gpus": settings.gpus},
        # Let Ray send a replica more requests than its schedulers accept. The replica then rejects
        # the excess requests with status 429. Beyond this number, Ray's proxy queues requests, and
        # then answers with status 503.
        max_ongoing_requests=2 * most,
        max_queued_requests=most,
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.target_requests,
        },
        graceful_shutdown_timeout_s=settings.shutdown_s,
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(**router),
    )(_Replica)
    application: serve.Application = deployment.bind(settings.model_dump())
    return application
