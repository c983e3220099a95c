"""Every kind of drafts with the real models: the answer is that of plain decoding, each kind is really used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foveate.checkpoints import small_checkpoint
from foveate.client import Acceptance, Client, Context, DraftMode, Guarantee, Policy, Selection
from foveate.stack import Stack, StackConfig
from tests.e2e.support import FPS, wait_until

KINDS = (DraftMode.SPARSE, DraftMode.STREAMING, DraftMode.LAYERSKIP, DraftMode.SMALL)


@pytest.fixture(scope="module")
def two_models(model: Path) -> Iterator[Stack]:
    with Stack(StackConfig(model=model, small_model=small_checkpoint(), deterministic=True)) as stack:
        yield stack


@pytest.fixture(scope="module")
def asking(two_models: Stack) -> Iterator[Client]:
    with Client(two_models.addresses.gateway, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def clip(asking: Client, video: Path) -> Context:
    return asking.create_context(video, fps=FPS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_changes_the_answer(asking: Client, clip: Context, kind: DraftMode) -> None:
    assert kind in asking.server_info().draft_modes
    for temperature in (0.0, 0.9):
        options = {"max_tokens": 60, "temperature": temperature, "seed": 4}
        plain = asking.ask(clip, "Describe the video.", draft=DraftMode.OFF, **options)  # type: ignore[arg-type]
        drafted = asking.ask(clip, "Describe the video.", draft=kind, num_draft_tokens=9, **options)  # type: ignore[arg-type]
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.draft_mode is kind
        assert drafted.stats.num_accepted_tokens > 0
        assert (drafted.notes, drafted.guarantee) == ((), Guarantee.LOSSLESS)


@pytest.mark.parametrize("method", [Selection.TWO_STAGE, Selection.UNIFORM])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_small_model_reads_as_much_of_the_video_as_asked(
    asking: Client, clip: Context, method: Selection, share: float
) -> None:
    answer = asking.ask(
        clip, "Describe the video.", max_tokens=60, draft=DraftMode.SMALL, visual_budget=share, selection=method
    )
    assert answer.stats.draft_mode is DraftMode.SMALL
    assert answer.notes == ()


def test_loose_answers_from_a_small_model_say_so(asking: Client, clip: Context) -> None:
    answer = asking.ask(
        clip,
        "Describe the video.",
        max_tokens=60,
        draft=DraftMode.SMALL,
        num_draft_tokens=10,
        acceptance=Acceptance(Policy.LVSPEC, lam=0.9),
        explain=True,
    )
    assert (answer.guarantee is Guarantee.LOOSE) == (answer.stats.num_loose_tokens > 0)
    assert wait_until(lambda: asking.is_serving(), 5)


def test_without_patches_a_small_model_is_replaced(client: Client, context: Context) -> None:
    answer = client.ask(context, "Describe the video.", max_tokens=20, draft=DraftMode.SMALL)
    assert answer.stats.draft_mode is DraftMode.NGRAM
    assert len(answer.notes) == 1
