"""The gateway's settings; built in `main`, passed in, never changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of one gateway process."""

    verifier: str
    drafter: str | None = None
    address: str = "127.0.0.1:0"
    default_max_tokens: int = 256
    default_num_draft_tokens: int = 5
    default_visual_budget: float = 0.05
    max_tokens_ceiling: int = 4096
    draft_timeout_s: float = 1.0  # a busy machine stalls a process for hundreds of ms; a lost drafter costs this once
    attach_timeout_s: float = 3.0
    health_interval_s: float = 0.5
    health_timeout_s: float = 3.0
    drain_s: float = 2.0

    def __post_init__(self) -> None:
        """Raises ValueError, naming the flag, when a value is out of range."""
        _require(bool(self.verifier), "--verifier must be HOST:PORT")
        _require(self.max_tokens_ceiling >= 1, "--max-tokens-ceiling must be at least 1")
        _require(
            1 <= self.default_max_tokens <= self.max_tokens_ceiling,
            f"--default-max-tokens must be 1 to {self.max_tokens_ceiling} (--max-tokens-ceiling)",
        )
        _require(1 <= self.default_num_draft_tokens <= 16, "--default-num-draft-tokens must be 1 to 16")
        _require(0 <= self.default_visual_budget <= 1, "--default-visual-budget must be 0 to 1")
        _require(self.draft_timeout_s > 0, "--draft-timeout-ms must be above 0")
        _require(self.attach_timeout_s > 0, "--attach-timeout-ms must be above 0")


def _require(is_good: bool, message: str) -> None:
    if not is_good:
        raise ValueError(message)
