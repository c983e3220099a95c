"""Every family against transformers: frames, placeholders, prompts and positions, where transformers has them right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from engine.frames import FrameProcessor
from engine.loading import LoadedModel, load_model
from engine.visual_rows import visual_spans
from foveate.rpc.errors import InvalidArgument
from tests.unit.engine.tiny_model import FAMILIES, write_tiny_checkpoint
from verifier_svc.prompt import PromptBuilder, Role, Turn

FPS = 4.0
QUESTION = "What happens?"
HISTORY = (Turn(Role.USER, "What is there?\nSay it."), Turn(Role.ASSISTANT, " A red circle."))


@dataclass(frozen=True)
class Case:
    """A family's tiny model, and what it makes of a clip."""

    loaded: LoadedModel
    frames: FrameProcessor
    prompts: PromptBuilder

    @property
    def name(self) -> str:
        return self.loaded.family.model_type

    def context(self, num_frames: int, height: int, width: int) -> list[int]:
        grid = self.frames.plan(num_frames=num_frames, height=height, width=width).shape
        times = [index / FPS for index in range(num_frames)]
        return self.prompts.context_token_ids(self.loaded.family.video_text(grid, times))

    def theirs(self, clip: np.ndarray, history: tuple[Turn, ...] = ()) -> Any:
        """What transformers' processor makes of a clip and a question, end to end."""
        turns = (*history, Turn(Role.USER, QUESTION))
        messages = [{"role": turn.role.value, "content": [{"type": "text", "text": turn.text}]} for turn in turns]
        messages[0]["content"].insert(0, {"type": "video"})
        processor = self.loaded.processor
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        metadata = VideoMetadata(
            total_num_frames=len(clip), fps=FPS, frames_indices=list(range(len(clip))), width=1, height=1
        )
        return processor(
            text=[text],
            videos=[torch.from_numpy(clip).permute(0, 3, 1, 2)],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_mm_token_type_ids=True,
            return_tensors="pt",
        )


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    loaded = load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", model_type=request.param))
    prompts = PromptBuilder(
        chat_template=loaded.chat_template,
        tokenizer_json=loaded.tokenizer_json,
        special_tokens=loaded.processor.tokenizer.special_tokens_map,
        video_token_id=loaded.family.video_token_id,
    )
    return Case(loaded, loaded.family.frames(loaded.processor.video_processor), prompts)


def clip_of(num_frames: int, height: int = 61, width: int = 97) -> np.ndarray:
    return np.random.default_rng(num_frames).integers(0, 256, (num_frames, height, width, 3), np.uint8)


@pytest.mark.parametrize("history", [(), HISTORY], ids=["first", "later"])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 6, 9])
def test_prompts_are_transformers_own(case: Case, num_frames: int, history: tuple[Turn, ...]) -> None:
    if case.name == "qwen3_vl" and num_frames == 1:
        pytest.skip("transformers' processor of this family takes no single frame; ours repeats it")
    context = case.context(num_frames, 61, 97)
    prompt = [*context, *case.prompts.thread(history, QUESTION).token_ids]
    theirs = case.theirs(clip_of(num_frames), history)["input_ids"][0].tolist()
    assert prompt == (without_outer_markers(case, theirs) if case.name == "qwen3_vl" else theirs)


def without_outer_markers(case: Case, token_ids: list[int]) -> list[int]:
    """The model's release put the steps in place of the template's markers; transformers 5.24 puts them between."""
    start, end = case.loaded.family.marker_token_ids
    first, last = token_ids.index(start), len(token_ids) - 1 - token_ids[::-1].index(end)
    assert token_ids[last - 1] == end
    return token_ids[:first] + token_ids[first + 1 : last] + token_ids[last + 1 :]


@pytest.mark.parametrize("num_frames", range(1, 10))
def test_frames_are_planned_processed_and_encoded_alike(case: Case, num_frames: int) -> None:
    """Placeholders = planned tokens = embeddings, for every number of frames; chunks are the whole."""
    clip, family, step = clip_of(num_frames), case.loaded.family, case.frames.temporal_patch
    plan = case.frames.plan(num_frames=num_frames, height=61, width=97)
    whole, grid = case.frames.process(clip, num_frames_of_video=num_frames)
    chunks = [
        case.frames.process(clip[at : at + step], num_frames_of_video=num_frames)[0]
        for at in range(0, num_frames, step)
    ]
    assert torch.equal(torch.cat(chunks), whole)
    assert plan == grid
    assert plan.num_temporal == -(-num_frames // step)
    assert whole.shape[0] == plan.num_patches
    features = family.join_video(case.loaded.model, [family.encode_video(case.loaded.model, whole, plan.as_tensor())])
    spans = visual_spans(case.context(num_frames, 61, 97), (family.video_token_id,))
    assert features.shape[0] == sum(num for _, num in spans) == family.num_visual_tokens(plan.shape)
    assert len(spans) == (plan.num_temporal if case.name == "qwen3_vl" else 1)


@pytest.mark.parametrize("num_frames", [2, 5])
def test_features_are_those_of_transformers_own_call(case: Case, num_frames: int) -> None:
    family, model = case.loaded.family, case.loaded.model
    inputs = case.theirs(clip_of(num_frames))
    patches, grid = case.frames.process(clip_of(num_frames), num_frames_of_video=num_frames)
    per_step = grid.num_rows * grid.num_columns
    pieces = [
        family.encode_video(model, patches[at * per_step : (at + 1) * per_step], torch.tensor([(1, *grid.shape[1:])]))
        for at in range(grid.num_temporal)
    ]
    ours = family.join_video(model, pieces)
    more = {} if case.name == "llava_onevision" else {"video_grid_thw": inputs["video_grid_thw"]}
    if not more:
        config = model.config
        more = {
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }
    with torch.inference_mode():
        output = model.model.get_video_features(inputs["pixel_values_videos"], return_dict=True, **more)
    features = output.pooler_output
    theirs = features[0] if torch.is_tensor(features) else torch.cat(tuple(features))
    deeper = [one if torch.is_tensor(one) else torch.cat(one) for one in getattr(output, "deepstack_features", [])]
    torch.testing.assert_close(ours, torch.cat([theirs, *deeper], dim=-1), atol=1e-5, rtol=1e-4)


def rope_index(case: Case, inputs: Any) -> torch.Tensor:
    more = {"second_per_grid_ts": torch.tensor([2 / FPS])} if case.name == "qwen2_5_vl" else {}
    positions, _ = case.loaded.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], video_grid_thw=inputs["video_grid_thw"], **more
    )
    return positions[:, 0]


def our_positions(case: Case, inputs: Any) -> torch.Tensor:
    grid = tuple(inputs["video_grid_thw"][0].tolist())
    return case.loaded.family.positions(inputs["input_ids"][0].tolist(), [grid], [2 / FPS]).ids


def test_positions_of_short_videos_are_transformers_own(case: Case) -> None:
    """As long as no temporal id is beyond the frame's sides, the release rule and transformers' agree."""
    if case.name == "llava_onevision":
        pytest.skip("one position a token")
    inputs = case.theirs(clip_of(6, 96, 96))
    assert torch.equal(our_positions(case, inputs), rope_index(case, inputs))


GOLDEN: dict[str, Callable[[int], int]] = {
    # Position of the text behind the video of `num_frames` frames, relative to its start; frames of 4 x 6 tokens.
    "qwen2_vl": lambda num_frames: max(num_frames // 2, 6),
    "qwen2_5_vl": lambda num_frames: max(num_frames // 2, 6),  # half a second a step, two positions a second
    "llava_onevision": lambda num_frames: num_frames * 9 + 1,
}


@pytest.mark.parametrize("num_frames", [6, 40])
def test_text_starts_behind_every_position_of_the_video(case: Case, num_frames: int) -> None:
    family = case.loaded.family
    context = case.context(num_frames, 61, 97)
    grid = case.frames.plan(num_frames=num_frames, height=61, width=97).shape
    spans = visual_spans(context, (family.video_token_id,))
    token_ids = [*context, 20, 21]
    positions = family.positions(token_ids, [grid], [2 / FPS])
    start, end = spans[0][0], sum(spans[-1])
    behind = positions.ids[:, end:]
    assert int(behind[0, 0]) == int(positions.ids[:, :end].max()) + 1
    assert torch.equal(behind, behind[:1].expand_as(behind))
    assert positions.next_position == int(behind[0, -1]) + 1
    if case.name in GOLDEN:
        assert int(behind[0, 0]) == start + GOLDEN[case.name](num_frames)
    if case.name in ("qwen2_vl", "qwen2_5_vl") and num_frames == 40:  # where transformers' own would lie in the video
        inputs = case.theirs(clip_of(num_frames))
        theirs = rope_index(case, inputs)
        assert int(theirs[0, end]) < int(theirs[:, :end].max())


def test_a_step_of_qwen3_says_its_time_in_words(case: Case) -> None:
    if case.name != "qwen3_vl":
        pytest.skip("time is in the positions, or nowhere")
    context = case.context(5, 61, 97)
    text = case.loaded.tokenizer.decode(context, skip_special_tokens=True)
    # Frames at 0, .25, .5, .75, 1 s, the last one twice.
    assert text.endswith("<0.1 seconds><0.6 seconds><1.0 seconds>")


def test_shapes_that_a_model_cannot_look_at(case: Case) -> None:
    with pytest.raises(InvalidArgument, match="cannot look at"):
        case.frames.plan(num_frames=2, height=0, width=10)


def test_a_fifth_family_is_one_class_that_nobody_else_names() -> None:
    named = [
        path.name
        for folder in ("engine", "verifier_svc", "drafter_svc", "gateway", "foveate")
        for path in Path(folder).rglob("*.py")
        if path.parent.name != "families" and "/v1/" not in str(path)
        for word in ("qwen2_vl", "qwen2_5_vl", "llava_onevision", "qwen3_vl")
        if f'"{word}' in path.read_text()
    ]
    assert named == []
