"""A context's identity changes with everything its keys and values depend on, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foveate.rpc.errors import InvalidArgument
from verifier_svc import identity
from verifier_svc.identity import ModelIdentity, context_name, parse_context_name
from verifier_svc.timeline import FrameSampling

MODEL = ModelIdentity("f" * 32, "float32", False, {"size": {"longest_edge": 9}, "mean": [0.5]}, (1, 2, 3))
SAMPLING = FrameSampling(2.0, 100)


def test_equal_inputs_are_equal() -> None:
    again = replace(MODEL, processor_settings={"mean": [0.5], "size": {"longest_edge": 9}})
    assert MODEL.context_id(media_sha256="a", sampling=SAMPLING) == again.context_id(
        media_sha256="a", sampling=FrameSampling(2.0, 100)
    )


def test_every_input_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        MODEL,
        replace(MODEL, model_fingerprint="e" * 32),
        replace(MODEL, dtype="bfloat16"),
        replace(MODEL, deterministic=True),
        replace(MODEL, processor_settings={"size": {"longest_edge": 10}, "mean": [0.5]}),
        replace(MODEL, prompt_token_ids=(1, 2)),
    ]
    ids = [model.context_id(media_sha256="a", sampling=SAMPLING) for model in models]
    ids.append(MODEL.context_id(media_sha256="b", sampling=SAMPLING))
    ids.append(MODEL.context_id(media_sha256="a", sampling=FrameSampling(1.0, 100)))
    ids.append(MODEL.context_id(media_sha256="a", sampling=FrameSampling(2.0, 99)))
    ids.append(MODEL.context_id(media_sha256="a", sampling=FrameSampling(2.0, 100, 4.0)))
    monkeypatch.setattr(identity, "POSITION_ALGORITHM", "another")
    ids.append(MODEL.context_id(media_sha256="a", sampling=SAMPLING))
    monkeypatch.undo()
    monkeypatch.setattr(identity, "version", lambda library: "another")
    ids.append(MODEL.context_id(media_sha256="a", sampling=SAMPLING))
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 64 for one in ids)


def test_parts_are_framed() -> None:
    # Without lengths, "ab" + "c" and "a" + "bc" would read the same.
    one = replace(MODEL, model_fingerprint="abdtype", dtype="c")
    two = replace(MODEL, model_fingerprint="ab", dtype="dtypec")
    assert one.context_id(media_sha256="m", sampling=SAMPLING) != two.context_id(media_sha256="m", sampling=SAMPLING)


def test_names() -> None:
    assert parse_context_name(context_name("0a" * 32), "name") == "0a" * 32
    for wrong in (
        "",
        "contexts/",
        "contexts/" + "0a" * 31,
        "contexts/" + "0A" * 32,
        "x/contexts/" + "0a" * 32,
        "0a" * 32,
    ):
        with pytest.raises(InvalidArgument):
            parse_context_name(wrong, "name")
    with pytest.raises(InvalidArgument):
        parse_context_name("contexts/" + "0a" * 32 + "\n", "name")
