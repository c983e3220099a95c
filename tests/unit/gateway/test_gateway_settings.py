"""Settings: flags over environment over defaults, wrong ones refused with the flag's name; patience with drafters."""

from __future__ import annotations

import time

import pytest

from gateway.main import parse_config
from gateway.patience import Patience


def test_flags_beat_the_environment() -> None:
    environment = {
        "FOVEATE_VERIFIER": "a:1",
        "FOVEATE_DEFAULT_MAX_TOKENS": "7",
        "FOVEATE_DRAFT_TIMEOUT_MS": "100",
        "FOVEATE_ADDRESS": "0.0.0.0:8080",
    }
    config = parse_config(["--verifier", "b:2", "--draft-timeout-ms", "300"], environment)
    assert config.address == "0.0.0.0:8080"
    assert (config.verifier, config.default_max_tokens, config.draft_timeout_s) == ("b:2", 7, 0.3)
    assert config.drafter is None
    assert (config.default_num_draft_tokens, config.default_visual_budget) == (5, 0.05)


@pytest.mark.parametrize(
    "flags",
    [
        ["--verifier", ""],
        ["--default-max-tokens", "0"],
        ["--default-max-tokens", "5000"],
        ["--max-tokens-ceiling", "0"],
        ["--default-num-draft-tokens", "17"],
        ["--default-visual-budget", "1.5"],
        ["--default-small-budget", "-1"],
        ["--default-policy", "careful"],
        ["--allowed-policies", "lvspec"],
        ["--max-lambda", "1.5"],
        ["--draft-timeout-ms", "0"],
        ["--attach-timeout-ms", "-1"],
        ["--redis", "http://a"],
    ],
)
def test_wrong_settings_name_their_flag(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=flags[0]):
        parse_config(["--verifier", "a:1", *flags], {})


def test_patience_never_falls_below_the_floor() -> None:
    patience = Patience(0.25)
    assert patience.timeout_s == 5
    with patience.timing():
        pass
    assert patience.timeout_s == 0.25


def test_patience_grows_with_what_drafts_take() -> None:
    patience = Patience(0.001)
    with patience.timing():
        time.sleep(0.02)
    assert 0.4 <= patience.timeout_s < 2


def test_a_failed_draft_teaches_nothing() -> None:
    patience = Patience(0.25)
    with pytest.raises(RuntimeError), patience.timing():
        raise RuntimeError
    assert patience.timeout_s == 5
