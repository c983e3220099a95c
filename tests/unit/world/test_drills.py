import random
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from bench.world import Plan, sample_world
from bench.world.draw import visible_cells
from bench.world.families import FAMILIES, WorldFamily
from bench.world.model import MODEL_SIZES, TOKEN_ID
from bench.world.questions import ask_caption, ask_chain, ask_explained, ask_multiple_choice, ask_yes_no, unsaid_word
from bench.world.tokenizer import build_tokenizer
from bench.world.train.branches import IGNORED, BranchPacker
from bench.world.train.drills import DRILLS, drill_batch
from bench.world.train.guidance import TO_LETTER, TO_OPTION, Guide, Link, Links, link_table

TOKENIZER = build_tokenizer()
WORLD = sample_world(5, Plan(8))


def texts(token_ids: Sequence[int]) -> list[str]:
    return [TOKENIZER.decode([token_id]).strip() for token_id in token_ids]


@pytest.mark.parametrize("kind", DRILLS)
def test_a_drill_learns_only_letters_and_yes_or_no(kind: str) -> None:
    batch = drill_batch(random.Random(1), TOKENIZER, Links(TOKENIZER), kind, num_tokens=900)
    said = set()
    for ids, targets in zip(batch.input_ids, batch.targets, strict=True):
        learned = targets != IGNORED
        assert torch.equal(targets[:-1][learned[:-1]], ids[1:][learned[:-1]])
        ends = [-1, *(learned[:-1] & ~learned[1:]).nonzero()[:, 0].tolist(), len(ids) - 1]
        answers = [
            TOKENIZER.decode(targets[one + 1 : end + 1][learned[one + 1 : end + 1]]) for one, end in pairwise(ends)
        ]
        said |= {answer.strip(" .") for answer in answers if answer}
    assert said <= {*"ABCD", "yes", "no", "Yes", "No"}
    assert said >= set("ABCD")


def test_recalled_words_have_the_letters_they_were_listed_with() -> None:
    batch = drill_batch(random.Random(2), TOKENIZER, Links(TOKENIZER), "recall", num_tokens=400)
    for ids in batch.input_ids:
        text = TOKENIZER.decode(ids)
        listed = {word: letter for letter, word in re.findall(r"([A-D])\. (\w+)", text)}
        asked = re.findall(r" (\w+) ([A-D])\b", text.partition("assistant")[2])
        assert len(asked) == 8
        assert all(listed[word] == letter for word, letter in asked)


def test_links_join_words_to_letters_and_answers_to_options() -> None:
    packer = BranchPacker(TOKENIZER, FAMILIES["qwen2_5_vl"])
    rng = random.Random(3)
    askers = (ask_multiple_choice, ask_yes_no, ask_explained, ask_multiple_choice)
    rows = [[packer.branch([ask(rng, WORLD)]) for ask in askers], [packer.branch([ask_multiple_choice(rng, WORLD)])]]
    packed = packer.rows(rows, num_pairs=2, interval=1.0)
    options = claims = 0
    for kind, row, query, key in packed.links.tolist():
        before, looked_at = texts(packed.input_ids[row, [query - 1, key]].tolist())
        if kind == TO_LETTER:
            assert before == "."
            assert looked_at in tuple("ABCD")
        elif (said := texts(packed.targets[row, [query]].tolist())[0]) in ("Yes", "y", "No", "no"):
            claim_ends = texts(packed.input_ids[row, [key, key + 1]].tolist())
            assert claim_ends[1 if said in ("Yes", "y") else 0] == "?"
            claims += 1
        else:
            letter = texts(packed.input_ids[row, [key - 2]].tolist())
            assert texts(packed.targets[row, [query]].tolist()) == letter
            options += 1
        assert packed.mask[row, 0, query, key]
    explains_choice = "Options" in TOKENIZER.decode(rows[0][2].token_ids)
    claimed = [rows[0][1], *[rows[0][2]] * (not explains_choice)]
    about_colour = [bool(re.search(r"Is there an? ", TOKENIZER.decode(branch.token_ids))) for branch in claimed]
    assert options == 3 + explains_choice
    assert claims == about_colour.count(False)


def test_backgrounds_are_said_looking_at_their_things() -> None:
    packer, rng = BranchPacker(TOKENIZER, FAMILIES["qwen2_5_vl"]), random.Random(6)
    rows = [[packer.branch([ask_caption(rng, WORLD)]), packer.branch(ask_chain(rng, WORLD))]]
    packed = packer.rows(rows, num_pairs=WORLD.num_frame_pairs, interval=1.0)
    cells: dict[str, set[int]] = {thing.background: set() for thing in WORLD.things}
    for thing in WORLD.things:
        cells[thing.background].add(int(visible_cells(WORLD, thing).sum()))
    said = [texts(packed.targets[row, [at]].tolist())[0] for row, at in packed.looks.tolist()]
    assert len(said) >= len(WORLD.things)
    for background, shown in zip(said, packed.shown, strict=True):
        assert int(shown.sum()) in cells[background]
        assert set(packed.input_ids[0, shown].tolist()) == {TOKEN_ID["<|video_pad|>"]}


def test_looking_is_the_chance_that_some_head_looks_there() -> None:
    torch.manual_seed(3)
    text = FAMILIES["qwen2_5_vl"].build_model(MODEL_SIZES["drafter"]).model.language_model
    text.set_attn_implementation("eager")
    guide = Guide(text)
    out = text(inputs_embeds=torch.randn(1, 7, text.config.hidden_size), output_attentions=True, use_cache=False)
    shown = torch.tensor([[False, True, True, False, False, False, False]])
    mask = torch.ones(1, 7, 7, dtype=torch.bool).tril()
    elsewhere = (1 - out.attentions[1][0, :, 5, 1:3].sum(-1)).prod()
    loss = guide.looking(torch.tensor([[0, 5]]), shown, mask)
    torch.testing.assert_close(loss, -(1 - elsewhere).log(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_guided_attention_is_the_models_own(family: WorldFamily) -> None:
    """The loss of one link per half is that of the weights that the model itself reports."""
    torch.manual_seed(0)
    model = family.build_model(MODEL_SIZES["drafter"])
    text = model.model.language_model
    text.set_attn_implementation("eager")
    guide = Guide(text)
    embeds = torch.randn(2, 9, text.config.hidden_size)
    positions = family.position_ids(torch.arange(9).expand(3, 2, 9) * 3)
    _, weights = text.layers[0].self_attn(
        text.layers[0].input_layernorm(embeds),
        attention_mask=torch.full((9, 9), float("-inf")).triu(1).expand(2, 1, 9, 9),
        position_embeddings=text.rotary_emb(embeds, positions),
    )
    text(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    table = link_table([[Link(TO_LETTER, 6, 2)], [Link(TO_LETTER, 8, 8)]])
    to_letter, to_option = guide.loss(table)
    expected = torch.stack([weights[0, :, 6, 2].mean(), weights[1, :, 8, 8].mean()]).log().neg().mean()
    torch.testing.assert_close(to_letter, expected, atol=1e-4, rtol=1e-4)
    assert float(to_option) == 0


def test_guidance_teaches_a_fresh_model_where_to_look() -> None:
    torch.manual_seed(1)
    model = FAMILIES["qwen2_5_vl"].build_model(MODEL_SIZES["drafter"])
    text = model.model.language_model
    guide, optimizer = Guide(text), torch.optim.AdamW(text.parameters(), lr=3e-3)
    batch = drill_batch(random.Random(4), TOKENIZER, Links(TOKENIZER), "recall", num_tokens=200)
    losses = []
    for _ in range(30):
        positions = torch.arange(batch.input_ids.shape[1]).expand(3, *batch.input_ids.shape)
        text(inputs_embeds=text.embed_tokens(batch.input_ids), position_ids=positions, use_cache=False)
        to_letter, to_option = guide.loss(batch.links)
        loss = to_letter + to_option
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert {TO_LETTER, TO_OPTION} == set(batch.links[:, 0].tolist())


def test_bare_answers_rest_on_a_fact_that_the_last_layer_is_to_be_told() -> None:
    packer, rng = BranchPacker(TOKENIZER, FAMILIES["qwen2_5_vl"]), random.Random(5)
    for _ in range(40):
        choice, claim = ask_multiple_choice(rng, WORLD), ask_yes_no(rng, WORLD)
        packed = packer.rows(
            [[packer.branch([ask_explained(rng, WORLD)]), packer.branch([choice, claim])]], num_pairs=2, interval=1.0
        )
        words = [unsaid_word(sample) for sample in (choice, claim)]
        thing = WORLD.thing(choice.key[0].color or "")
        assert words[0] in (thing.shape, thing.motion)
        assert f"{choice.answer}. {words[0]}" in choice.question
        if words[1] and claim.answer == "Yes.":
            assert words[1] in claim.question
        if words[1] and claim.answer == "No.":
            assert words[1] not in claim.question
        named = texts(packed.names[:, 2].tolist())
        assert named == [word for word in words if word]
        assert texts(packed.targets[0, packed.names[:, 1]].tolist())[0] == choice.answer


def test_naming_is_the_loss_of_what_enters_the_last_layer() -> None:
    torch.manual_seed(2)
    model = FAMILIES["qwen2_5_vl"].build_model(MODEL_SIZES["drafter"])
    text = model.model.language_model
    guide = Guide(text)
    out = text(inputs_embeds=torch.randn(1, 5, text.config.hidden_size), output_hidden_states=True, use_cache=False)
    entering = out.hidden_states[-2]
    expected = torch.nn.functional.cross_entropy(model.lm_head(text.norm(entering[0, [3]])), torch.tensor([70]))
    torch.testing.assert_close(guide.naming(torch.tensor([[0, 3, 70]])), expected)
