"""Options that several commands share, as typer annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foveate.client import Acceptance, AskOptions, DraftMode, Policy, Pool

_SERVER, _FRAMES, _ANSWER, _DRAFTS, _LOOSE = "Server", "Frames", "Answer", "Drafts", "Loose acceptance"

VideoArgument = Annotated[
    str,
    typer.Argument(
        metavar="VIDEO", help="A video file, a path on the server (--on-server), or an existing contexts/ID."
    ),
]
QuestionArgument = Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="FOVEATE_SERVER",
        metavar="HOST:PORT",
        rich_help_panel=_SERVER,
        help="A running gateway. Without it a local stack is started for this command and stopped after it.",
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        envvar="FOVEATE_MODEL",
        metavar="FOLDER",
        rich_help_panel=_SERVER,
        help="Checkpoint of the local stack; default: the embedded tiny model.",
    ),
]
SmallModelOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=_SERVER,
        help="Local stack: a smaller checkpoint of the family, for --draft small.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option(metavar="cpu|cuda", rich_help_panel=_SERVER, help="Device of the local stack.")
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic", rich_help_panel=_SERVER, help="Local stack: bit-stable kernels even without a C compiler."
    ),
]
NoDrafterOption = Annotated[
    bool, typer.Option("--no-drafter", rich_help_panel=_SERVER, help="Local stack: start no drafter; n-gram drafts.")
]
DeadlineOption = Annotated[
    float | None, typer.Option(min=0.001, metavar="SECONDS", help="Longest time that a call may take.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else there.")]
OnServerOption = Annotated[
    bool, typer.Option("--on-server", rich_help_panel=_FRAMES, help="VIDEO is a path below the server's media root.")
]
FpsOption = Annotated[
    float | None, typer.Option(metavar="N", rich_help_panel=_FRAMES, help="Frames per second of video to look at.")
]
MaxFramesOption = Annotated[
    int | None, typer.Option(metavar="N", rich_help_panel=_FRAMES, help="Look at no more frames than this.")
]
MaxTokensOption = Annotated[
    int | None, typer.Option(metavar="N", rich_help_panel=_ANSWER, help="Longest answer, in tokens.")
]
TemperatureOption = Annotated[
    float | None, typer.Option(metavar="T", rich_help_panel=_ANSWER, help="0 (default) is greedy.")
]
TopKOption = Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_ANSWER, help="Keep the N likeliest.")]
TopPOption = Annotated[
    float | None, typer.Option(metavar="P", rich_help_panel=_ANSWER, help="Keep the likeliest up to this probability.")
]
SeedOption = Annotated[
    int | None, typer.Option(metavar="N", rich_help_panel=_ANSWER, help="Seed of sampling, for equal answers.")
]
StopOption = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", rich_help_panel=_ANSWER, help="End before this text; repeatable.")
]
MinTokensOption = Annotated[
    int | None,
    typer.Option(metavar="N", rich_help_panel=_ANSWER, help="Do not let the answer end before so many tokens."),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(metavar="X", rich_help_panel=_ANSWER, help="Above 1: tokens of prompt and answer less likely."),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option(metavar="X", rich_help_panel=_ANSWER, help="Above 0: tokens that the answer has less likely."),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option(metavar="X", rich_help_panel=_ANSWER, help="Above 0: the less likely, the more often it has them."),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", rich_help_panel=_ANSWER, help="Add to a token's logit, -100 to 100; repeatable."),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option("--ignore-eos", rich_help_panel=_ANSWER, help="Go on to --max-tokens: for measurements."),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=_ANSWER, help="Tell log-probabilities, and those of the N likeliest (0: none)."
    ),
]
NumAnswersOption = Annotated[
    int | None,
    typer.Option("--n", metavar="N", rich_help_panel=_ANSWER, help="So many answers; with --temperature above 0."),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain", rich_help_panel=_DRAFTS, help="Colour tokens by where they came from; tell what looseness did."
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html", rich_help_panel=_DRAFTS, help="With --explain: also write a page."),
]
DraftOption = Annotated[
    DraftMode | None, typer.Option("--draft", rich_help_panel=_DRAFTS, help="Where drafts come from.")
]
NumDraftTokensOption = Annotated[
    int | None, typer.Option(metavar="N", rich_help_panel=_DRAFTS, help="Draft tokens per round.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(metavar="SHARE", rich_help_panel=_DRAFTS, help="Share of visual tokens the drafter keeps."),
]
PolicyOption = Annotated[
    Policy | None,
    typer.Option(
        "--policy", rich_help_panel=_LOOSE, help="Which drafts are kept; all but exact can change the answer."
    ),
]
LambdaOption = Annotated[
    float | None,
    typer.Option(
        "--lambda", metavar="SHARE", rich_help_panel=_LOOSE, help="lvspec, random: share of drafts that need not match."
    ),
]
NearestOption = Annotated[
    int | None,
    typer.Option(
        "--nearest", metavar="N", rich_help_panel=_LOOSE, help="lvspec: visual states that relevance averages."
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(metavar="N", rich_help_panel=_LOOSE, help="lvspec, random: places of a shift; fly: its window."),
]
PoolOption = Annotated[
    Pool | None, typer.Option("--pool", rich_help_panel=_LOOSE, help="lvspec: where the share is counted.")
]
NoGuardsOption = Annotated[
    bool,
    typer.Option(
        "--no-guards", rich_help_panel=_LOOSE, help="Keep mismatches of numbers, negations and markup as any other."
    ),
]


def ask_options(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: list[str] | None,
    min_tokens: int | None,
    repetition_penalty: float | None,
    presence_penalty: float | None,
    frequency_penalty: float | None,
    logit_bias: list[str] | None,
    draft: DraftMode | None,
    num_draft_tokens: int | None,
    budget: float | None,
    explain: bool,
    acceptance: Acceptance | None,
    ignore_eos: bool = False,
    logprobs: int | None = None,
    n: int | None = None,
) -> AskOptions:
    """Returns the client's options of an answer. Raises BadParameter for a bias that is none."""
    return AskOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(map(_bias, logit_bias or ())),
        ignore_eos=ignore_eos,
        logprobs=logprobs is not None,
        top_logprobs=logprobs,
        n=n,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        visual_budget=budget,
        explain=explain,
        acceptance=acceptance,
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not ID=BIAS, such as 151645=-2.5", param_hint="--logit-bias") from None


def acceptance_options(
    *,
    policy: Policy | None,
    lam: float | None,
    nearest: int | None,
    window: int | None,
    pool: Pool | None,
    no_guards: bool,
) -> Acceptance | None:
    """Returns the client's acceptance; None when nothing was said."""
    guard = False if no_guards else None
    asked = Acceptance(
        policy=policy,
        lam=lam,
        num_nearest=nearest,
        window=window,
        pool=pool,
        guard_special=guard,
        guard_numbers=guard,
        guard_negations=guard,
    )
    return None if asked == Acceptance() else asked
