"""The gateway's settings; built in `main`, passed in, never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from foveate.rpc.admission import AdmissionLimits
from foveate.rpc.security import ClientTls
from foveate.rpc.serving import ServingConfig
from foveate.store.client import StoreSettings
from foveate.store.services import check_fleet
from gateway.targets import REDIS, fleet_of
from gateway.values import AcceptancePolicy

_METADATA_KEY = re.compile(r"[a-z0-9_.-]+(?<!-bin)")


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of one gateway process; `verifier` and `drafter`: see gateway/targets.py, several with commas."""

    verifier: str
    drafter: str | None = None
    address: str = "127.0.0.1:0"
    default_max_tokens: int = 256
    default_num_draft_tokens: int = 5
    adapts_draft_length: bool = True
    default_visual_budget: float = 0.05
    default_small_budget: float = 0.1  # of a small model's pruned video
    default_policy: AcceptancePolicy = AcceptancePolicy.EXACT
    allowed_policies: frozenset[AcceptancePolicy] = frozenset(AcceptancePolicy)
    max_lambda: float = 1.0
    max_tokens_ceiling: int = 4096
    draft_timeout_s: float = 1.0  # a busy machine stalls a process for hundreds of ms; a lost drafter costs this once
    attach_timeout_s: float = 3.0
    health_interval_s: float = 0.5
    # A verifier that says nothing for so long is taken for hung, and others go on with its answers. Health is answered
    # beside the device's work: a busy verifier answers in milliseconds.
    health_timeout_s: float = 3.0
    drain_s: float = 2.0
    verifier_wait_s: float = 30.0  # how long a call without a deadline waits while there is no verifier
    failover_wait_s: float = 5.0  # how long an answer that lost its verifier waits for another to come
    redis: StoreSettings | None = None
    conversation_ttl_s: float = 24 * 3600.0
    # Metadata key in which a trusted proxy names the tenant; without it all callers are one tenant.
    tenant_header: str = ""
    serving: ServingConfig = field(default_factory=ServingConfig)
    peer_tls: ClientTls | None = None
    api_keys: Path | None = None
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Addresses of the drafters."""
        return _targets(self.drafter or "")

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Addresses of the verifiers."""
        return _targets(self.verifier)

    def __post_init__(self) -> None:
        """Raises ValueError, naming the flag, when a value is out of range."""
        _require(bool(self.verifiers), "--verifier must be HOST:PORT, or several with commas between")
        for target in (*self.verifiers, *self.drafters):
            _check_target(target, has_redis=self.redis is not None)
        _require(self.max_tokens_ceiling >= 1, "--max-tokens-ceiling must be at least 1")
        _require(
            1 <= self.default_max_tokens <= self.max_tokens_ceiling,
            f"--default-max-tokens must be 1 to {self.max_tokens_ceiling} (--max-tokens-ceiling)",
        )
        _require(1 <= self.default_num_draft_tokens <= 16, "--default-num-draft-tokens must be 1 to 16")
        _require(0 <= self.default_visual_budget <= 1, "--default-visual-budget must be 0 to 1")
        _require(0 <= self.default_small_budget <= 1, "--default-small-budget must be 0 to 1")
        _require(0 <= self.max_lambda <= 1, "--max-lambda must be 0 to 1")
        _require(AcceptancePolicy.EXACT in self.allowed_policies, "--allowed-policies must have exact among them")
        _require(self.default_policy in self.allowed_policies, "--default-policy must be one of --allowed-policies")
        _require(self.draft_timeout_s > 0, "--draft-timeout-ms must be above 0")
        _require(self.attach_timeout_s > 0, "--attach-timeout-ms must be above 0")
        _require(self.verifier_wait_s >= 0, "--verifier-wait-s must be at least 0")
        _require(self.health_timeout_s > 0, "--health-timeout-ms must be above 0")
        _require(self.failover_wait_s >= 0, "--failover-wait-s must be at least 0")
        _require(self.conversation_ttl_s > 0, "--conversation-ttl-s must be above 0")
        _require(
            not self.tenant_header or _METADATA_KEY.fullmatch(self.tenant_header) is not None,
            "--tenant-header must be a metadata key: lower-case letters, digits, - _ .",
        )


def _targets(text: str) -> tuple[str, ...]:
    return tuple(target for part in text.split(",") if (target := part.strip()))


def _check_target(target: str, *, has_redis: bool) -> None:
    if not target.startswith(REDIS):
        return
    _require(has_redis, f"{target} needs --redis")
    try:
        check_fleet(fleet_of(target))
    except ValueError as error:
        raise ValueError(f"{target}: {error}") from None


def _require(is_good: bool, message: str) -> None:
    if not is_good:
        raise ValueError(message)
