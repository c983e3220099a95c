"""Whether a peer fits this gateway and its verifiers, and if not, why: in words that name both sides."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import foveate
from foveate.rpc.errors import FailedPrecondition
from gateway.facts import DrafterInfo, DrafterKind, VerifierInfo
from gateway.values import DraftMode

logger = logging.getLogger(__name__)


class Refusals:
    """Says why a peer is not used, once: it is looked at again twice a second, and mostly nothing has changed."""

    def __init__(self) -> None:
        self._said: dict[Hashable, str] = {}

    def say(self, peer: Hashable, why: str) -> None:
        """Logs why `peer` is not used, unless that was the last thing said of it."""
        if self._said.get(peer) != why:
            self._said[peer] = why
            logger.warning("%s", why)

    def forget(self, peer: Hashable) -> None:
        """The peer is used, or gone: whatever comes next is news."""
        self._said.pop(peer, None)


def check_version(peer: str, version: str) -> None:
    """Raises FailedPrecondition when a peer runs another minor version: its messages may mean something else."""
    if _minor(version) != _minor(foveate.__version__):
        raise FailedPrecondition(
            f"the {peer} runs Foveate {version or 'of no version'}, this gateway {foveate.__version__}",
            reason="VERSION_MISMATCH",
        )


def check_one_model(info: VerifierInfo, other: VerifierInfo) -> None:
    """Raises FailedPrecondition when two verifiers would answer with different models."""
    if info.model_fingerprint != other.model_fingerprint:
        raise FailedPrecondition(
            f"it runs {_named(info.model, info.model_fingerprint)}, the others "
            f"{_named(other.model, other.model_fingerprint)}: one gateway serves one model",
            reason="MODEL_MISMATCH",
        )


def fitting_kinds(drafter: DrafterInfo, verifier: VerifierInfo) -> frozenset[DraftMode]:
    """Returns the kinds of drafts that a drafter can make for a verifier; some of them may not fit.

    Raises FailedPrecondition when the drafter is of another version, or none of its kinds fits.
    """
    check_version("drafter", drafter.version)
    misfits = {kind.mode: misfit(kind, verifier) for kind in drafter.kinds}
    fitting = frozenset(mode for mode, why in misfits.items() if why is None)
    if not fitting:
        reasons = dict.fromkeys(why for why in misfits.values() if why is not None)
        raise FailedPrecondition("; ".join(reasons) or "the drafter offers no drafts", reason="MODEL_MISMATCH")
    return fitting


def misfit(kind: DrafterKind, verifier: VerifierInfo) -> str | None:
    """Returns why a kind of drafts does not fit a verifier, or None.

    Token ids must mean the same to both; whoever reads the verifier's KV must run its model, and lay rows out alike.
    """
    if kind.tokenizer_sha256 != verifier.tokenizer_sha256:
        return (
            f"the drafter's {kind.model} has tokenizer {kind.tokenizer_sha256[:12]}, "
            f"the verifier's {verifier.model} {verifier.tokenizer_sha256[:12]}"
        )
    if kind.mode is DraftMode.SMALL:
        return None
    if kind.layout != verifier.layout:
        return f"the drafter's KV is {kind.layout}, the verifier's {verifier.layout}"
    if kind.model_fingerprint != verifier.model_fingerprint:
        ours = _named(kind.model, kind.model_fingerprint)
        return f"the drafter runs {ours}, the verifier {_named(verifier.model, verifier.model_fingerprint)}"
    return None


def _named(model: str, fingerprint: str) -> str:
    return f"{model} ({fingerprint[:12]})"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
