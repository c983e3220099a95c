"""What is compared: where drafts come from and what is kept of them, each combination under a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foveate.client import Acceptance, AskOptions, DraftMode, FlyVariant, Policy, Pool, Selection

STD_DRAFTS = 9  # Sparse-to-Dense's paper
LVSPEC_DRAFTS = 10  # LVSpec's paper
PLAIN = "plain"


@dataclass(frozen=True)
class Method:
    """A way to answer. `group` says in which table it stands; `explain` asks for what the policy knew."""

    name: str
    group: str
    draft: DraftMode
    num_draft_tokens: int | None = None
    visual_budget: float | None = None
    selection: Selection | None = None
    acceptance: Acceptance | None = None
    explain: bool = False

    def options(self) -> AskOptions:
        """Returns the client's options."""
        return AskOptions(
            draft=self.draft,
            num_draft_tokens=self.num_draft_tokens,
            visual_budget=self.visual_budget,
            selection=self.selection,
            acceptance=self.acceptance,
            explain=self.explain,
        )


def plain() -> Method:
    """Plain decoding: what everything is measured against."""
    return Method(PLAIN, "policies", DraftMode.OFF)


def drafter_methods() -> Iterator[Method]:
    """Sparse-to-Dense and its rivals: same weights, exact acceptance, same budget."""
    base = Method("", "drafters", DraftMode.SPARSE, STD_DRAFTS)
    yield replace(base, name="StD", selection=Selection.ATTENTION)
    yield replace(base, name="random selection", selection=Selection.RANDOM)
    yield replace(base, name="Streaming", draft=DraftMode.STREAMING)
    yield replace(base, name="LayerSkip", draft=DraftMode.LAYERSKIP)
    yield replace(base, name="n-gram", draft=DraftMode.NGRAM)
    yield replace(base, name="small, two-stage", draft=DraftMode.SMALL, selection=Selection.TWO_STAGE)
    yield replace(base, name="small, uniform", draft=DraftMode.SMALL, selection=Selection.UNIFORM)
    yield replace(base, name="small, whole video", draft=DraftMode.SMALL, visual_budget=1.0)


def loose(name: str, group: str, acceptance: Acceptance | None) -> Method:
    """A policy over the drafts of the small model."""
    return Method(name, group, DraftMode.SMALL, LVSPEC_DRAFTS, acceptance=acceptance)


def headline_methods() -> Iterator[Method]:
    """The four that the headline compares."""
    yield loose("exact", "policies", None)
    yield loose("lvspec", "policies", Acceptance(Policy.LVSPEC))
    yield loose("random", "policies", Acceptance(Policy.RANDOM))
    yield loose("fly", "policies", Acceptance(Policy.FLY))


def other_policies() -> Iterator[Method]:
    """The rest of the policies' table."""
    yield loose("lvspec, no shift", "policies", Acceptance(Policy.LVSPEC, window=0))
    yield loose("random, no shift", "policies", Acceptance(Policy.RANDOM, window=0))
    yield loose("fly, paper's window", "policies", Acceptance(Policy.FLY, variant=FlyVariant.PAPER))
    yield loose("fly gate only", "policies", Acceptance(Policy.FLY_GATE))
    yield Method("lvspec over StD", "policies", DraftMode.SPARSE, LVSPEC_DRAFTS, acceptance=Acceptance(Policy.LVSPEC))
    yield Method("exact over StD", "policies", DraftMode.SPARSE, LVSPEC_DRAFTS)


def ablations() -> Iterator[Method]:
    """LVSpec's parameters, one at a time."""
    for tenths in range(0, 11):
        yield loose(f"lambda {tenths / 10:g}", "lambda", Acceptance(Policy.LVSPEC, lam=tenths / 10))
    for tenths in range(1, 11):
        yield loose(f"random {tenths / 10:g}", "lambda", Acceptance(Policy.RANDOM, lam=tenths / 10))
    for nearest in (1, 10, 100):
        yield loose(f"N {nearest}", "nearest", Acceptance(Policy.LVSPEC, num_nearest=nearest))
    for window in range(6):
        yield loose(f"window {window}", "window", Acceptance(Policy.LVSPEC, window=window))
    for pool in Pool:
        yield loose(f"pool {pool.value}", "pool", Acceptance(Policy.LVSPEC, pool=pool))
    yield loose("guards on", "guards", Acceptance(Policy.LVSPEC))
    yield loose("guards off", "guards", _unguarded(Acceptance(Policy.LVSPEC)))


def theory_methods() -> Iterator[Method]:
    """LVSpec without guards and shifts, where T follows from the mismatch rate; explained, to look at each round."""
    for tenths in range(0, 11):
        asked = _unguarded(Acceptance(Policy.LVSPEC, lam=tenths / 10, window=0))
        yield replace(loose(f"theory {tenths / 10:g}", "theory", asked), explain=True)


def measuring() -> Method:
    """Exact answers with everything measured: for the AUC of relevance."""
    return replace(loose("explained", "measuring", None), explain=True)


def _unguarded(asked: Acceptance) -> Acceptance:
    return replace(asked, guard_special=False, guard_numbers=False, guard_negations=False)
