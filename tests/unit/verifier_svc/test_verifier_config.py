"""Flags and variables become one frozen config, and what is wrong with them is told in a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foveate.rpc.serving import ServingConfig
from verifier_svc.config import MIB, VerifierConfig
from verifier_svc.main import parse_config


def test_defaults() -> None:
    config = parse_config(["--model", "m"], {})
    assert replace(config, serving=ServingConfig()) == VerifierConfig(Path("m"))


def test_variables_are_defaults_and_flags_win(tmp_path: Path) -> None:
    environment = {
        "FOVEATE_MODEL": "m",
        "FOVEATE_POOL_MIB": "7",
        "FOVEATE_MAX_FRAMES": "9",
        "FOVEATE_DETERMINISTIC": "true",
        "FOVEATE_MEDIA_ROOT": str(tmp_path),
        "FOVEATE_DEFAULT_FPS": "4",
        "XDG_CACHE_HOME": "/caches",
    }
    config = parse_config(["--pool-mib", "8", "--max-upload-mib", "3", "--max-visual-tokens", "5"], environment)
    assert (config.model_path, config.pool_bytes, config.deterministic) == (Path("m"), 8 * MIB, True)
    assert (config.media_root, config.kernel_cache) == (tmp_path, Path("/caches/foveate"))
    media = config.media
    assert (media.max_frames, media.max_upload_bytes, media.max_visual_tokens, media.default_fps) == (
        9,
        3 * MIB,
        5,
        4.0,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model"),
        (["--model", ".", "--media-root", "no/such/folder"], "no/such/folder"),
        (["--model", ".", "--pool-mib", "0"], "--pool-mib"),
        (["--model", ".", "--default-fps", "99"], "--default-fps"),
        (["--model", ".", "--max-frames", "many"], "--max-frames"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(flags, {})
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
