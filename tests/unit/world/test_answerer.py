from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from bench.world import held_out, iterate_mp4, read_mp4, write_mp4
from bench.world.answerer import Answerer
from bench.world.families import FAMILIES
from bench.world.model import MODEL_SIZES
from bench.world.train.language import save_checkpoint
from foveate.checkpoints import default_checkpoint


def test_the_engine_and_transformers_answer_alike() -> None:
    sample = held_out("caption", 2, num_frame_pairs=12)
    questions = [sample.question, held_out("describe", 2, num_frame_pairs=12).question]
    backends = [Answerer.load(default_checkpoint(), use_engine=use_engine) for use_engine in (True, False)]
    by_engine, by_transformers = (answerer.answer(sample.world, questions) for answerer in backends)
    assert by_engine == by_transformers
    assert all(by_engine)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_onevision"])
def test_a_file_read_in_pieces_is_answered_as_generate_does(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build_model(MODEL_SIZES["drafter"])
    save_checkpoint(model, family.build_processor(), tmp_path)
    sample = held_out("describe", 1, num_frame_pairs=5)
    write_mp4(sample.world, tmp_path / "video.mp4")
    reading = Answerer.load(tmp_path, use_engine=False).begin()
    for frames in iterate_mp4(tmp_path / "video.mp4", num_frames=4):
        reading.see(frames)
    (reply,) = reading.ask([sample.question])

    processor = AutoProcessor.from_pretrained(tmp_path)
    reference = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    frames = read_mp4(tmp_path / "video.mp4")[:: family.frame_stride]
    content = [{"type": "video"}, {"type": "text", "text": sample.question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    metadata = {"fps": 4.0, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
    inputs = processor(
        text=[text],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        videos_kwargs={"video_metadata": [metadata], "do_sample_frames": False},
        return_tensors="pt",
    )
    ids = inputs["input_ids"]
    positions = family.prompt_positions(ids[0], num_steps=5, second_per_step=0.5)
    output = reference.generate(
        **inputs, position_ids=family.position_ids(positions[:, None]), max_new_tokens=12, do_sample=False
    )
    expected = output[0, ids.shape[1] :].tolist()
    assert reply.token_ids[: len(expected)] == expected
