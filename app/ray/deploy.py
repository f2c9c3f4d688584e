"""The Serve application of a model: built, deployed, described and deleted."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, HTTPOptions, RequestRouterConfig

from llmbox.engine.config import EngineConfig

from ..config.settings import Settings
from ..errors import CliError, Exit
from .front import Front
from .replica import EngineReplica

T = TypeVar("T")

APPLICATION: Final = "llmbox"
_NO_RAY: Final = "start Ray with ray start --head, or use --address local"
_MOST_AT_REPLICA: Final = 1024
"""Requests that Serve lets into a replica; the engine queues those that do not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Model, settings and replicas of an application."""

    config: EngineConfig
    settings: Settings
    keys_file: Path
    alias: str | None = None
    replicas: int = 1
    most_replicas: int = 1
    """More than `replicas`: Serve scales between the two."""
    target: float = 16.0
    """Open requests of a replica that autoscaling aims at."""
    cpus: float = 1.0
    gpus: float = 0.0
    """CPU cores and GPUs that Ray reserves for a replica."""
    imbalance: int = 8
    router: str = "llmbox.app.ray.router:PrefixRouter"


def build(plan: Deployment) -> Any:
    """Build the application: replicas, and a front with the HTTP API."""
    options: dict[str, Any] = {"num_replicas": plan.replicas}
    if plan.most_replicas > plan.replicas:
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=plan.replicas,
                initial_replicas=plan.replicas,
                max_replicas=plan.most_replicas,
                target_ongoing_requests=plan.target,
                policy=AutoscalingPolicy(policy_function="llmbox.app.ray.scaling:scale_by_load"),
            )
        }
    is_ours = plan.router.startswith("llmbox.")
    engines = serve.deployment(
        EngineReplica,
        name="engines",
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        max_ongoing_requests=_MOST_AT_REPLICA,
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(
            request_router_class=plan.router,
            request_router_kwargs={"imbalance": plan.imbalance} if is_ours else {},
        ),
        **options,
    )
    front = serve.deployment(
        serve.ingress(None)(Front),
        name="front",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MOST_AT_REPLICA * max(plan.most_replicas, plan.replicas),
    )
    handle = engines.bind(plan.config)
    return front.bind(handle, plan.config, plan.settings, plan.keys_file, plan.alias)


def deploy(plan: Deployment, *, name: str = APPLICATION, host: str, port: int, limit: float) -> None:
    """Deploy and wait until it answers. Raises CliError after `limit` seconds."""
    within(limit, "Ray Serve", lambda: serve.start(http_options=HTTPOptions(host=host, port=port)))
    within(
        limit,
        "the deployment",
        lambda: serve.run(build(plan), name=name, route_prefix="/"),
        fix="see llmbox ray status, and the logs of Serve in /tmp/ray/session_latest/logs/serve",
    )


def connect(address: str, limit: float) -> bool:
    """Connect to a cluster, or start a Ray in this process. Returns whether it was started."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is sent to anybody
    if address == "local":
        # Its processes end with the thread that starts them: not within a time limit's.
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="error")
        return True
    within(
        limit,
        f"Ray at {address}",
        lambda: ray.init(address=address, log_to_driver=False, logging_level="error"),
    )
    return False


def describe(limit: float) -> list[dict[str, Any]]:
    """Return each application's deployments with their states and replicas."""
    status = within(limit, "Serve's controller", serve.status)
    return [
        {
            "application": name,
            "status": str(application.status.value),
            "message": application.message,
            "deployments": {
                each: {
                    "status": str(found.status.value),
                    "replicas": {str(state): count for state, count in found.replica_states.items()},
                }
                for each, found in application.deployments.items()
            },
        }
        for name, application in status.applications.items()
    ]


def delete(name: str, limit: float) -> None:
    """Delete an application. Raises CliError (exit 4) where there is none."""
    if name not in {each["application"] for each in describe(limit)}:
        raise CliError(
            f"no application {name} runs", "Serve does not know it", "see llmbox ray status", Exit.NOT_FOUND
        )
    within(limit, "the deletion", lambda: serve.delete(name))


def within(limit: float, what: str, work: Callable[[], T], fix: str = _NO_RAY) -> T:
    """Run Ray's call with a time limit: some of them wait for ever for a cluster that is not there.

    Raises CliError.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    if results:
        return results[0]
    cause = str(errors[0]).strip().splitlines()[-1] if errors and str(errors[0]).strip() else ""
    cause = cause or f"no answer in {limit:.0f} s"
    raise CliError(f"{what} failed", cause, fix, Exit.UNREACHABLE)
