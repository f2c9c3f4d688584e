"""Request router of Ray Serve that sends a prompt to the replica with most of its front in the prefix cache.

Ray imports it by its path in every process that has a handle of the deployment.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..engines.prefix_table import PrefixTable
from . import scaling


class PrefixRouter(RequestRouter):
    """Router for `EngineReplica.generate`, whose arguments are (message, block hashes, fingerprint)."""

    # Ray passes over a replica that does not tell its queue length in time, 0.1 s by default. An engine on
    # CPUs takes longer while it computes a prompt, and its prefix would be computed again elsewhere.
    queue_len_response_deadline_s = max(1.0, RequestRouter.queue_len_response_deadline_s)

    def initialize_state(self, imbalance: int = 8) -> None:
        self.table = PrefixTable(imbalance)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        hashes, fingerprint = _arguments(pending_request)
        candidates = {
            each.replica_id.unique_id: each
            for each in candidate_replicas
            if fingerprint in {"", _fingerprint(each)}
        }
        if not candidates:
            return [candidate_replicas]  # a replica refuses what is not of its model, with the reason
        loads = {
            name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in candidates.items()
        }
        chosen = self.table.choose(hashes, loads)
        self.table.record(chosen, hashes)
        others = [each for name, each in candidates.items() if name != chosen]
        return [[candidates[chosen]], others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note where it went: the chosen replica may have been full."""
        del result
        self.table.record(replica_id.unique_id, _arguments(pending_request)[0])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for name in self.table.replicas() - {each.replica_id.unique_id for each in replicas}:
            self.table.forget(name)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.table.forget(replica_id.unique_id)
        self._publish()

    def _publish(self) -> None:
        scaling.RUNNING[str(self._deployment_id)] = {
            key.unique_id: _fingerprint(each) for key, each in self.curr_replicas.items()
        }


def _fingerprint(replica: RunningReplica) -> str:
    return str(replica.replica_metadata.get("fingerprint", ""))


def _arguments(request: PendingRequest | None) -> tuple[list[bytes], str]:
    if request is None or len(request.args) < 3:
        return [], ""
    return request.args[1], request.args[2]
