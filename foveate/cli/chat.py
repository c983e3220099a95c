"""`foveate chat`: several turns about one prefilled video."""

from __future__ import annotations

import sys

from foveate.cli import options
from foveate.cli.answer_view import answer_json, print_statistics, show_stream
from foveate.cli.errors import Terminated, reported
from foveate.cli.options import acceptance_options, ask_options
from foveate.cli.output import Output
from foveate.cli.session import Target, Video, connected, prefill, print_context
from foveate.client import AskOptions, Client, Context, Turn
from foveate.rpc.errors import InvalidArgument

_EXITS = {"/exit", "/quit"}


def chat(
    video: options.VideoArgument,
    server: options.ServerOption = None,
    model: options.ModelOption = None,
    small_model: options.SmallModelOption = None,
    device: options.DeviceOption = "cpu",
    deterministic: options.DeterministicOption = False,
    no_drafter: options.NoDrafterOption = False,
    on_server: options.OnServerOption = False,
    fps: options.FpsOption = None,
    max_frames: options.MaxFramesOption = None,
    max_tokens: options.MaxTokensOption = None,
    temperature: options.TemperatureOption = None,
    top_k: options.TopKOption = None,
    top_p: options.TopPOption = None,
    seed: options.SeedOption = None,
    stop: options.StopOption = None,
    min_tokens: options.MinTokensOption = None,
    repetition_penalty: options.RepetitionPenaltyOption = None,
    presence_penalty: options.PresencePenaltyOption = None,
    frequency_penalty: options.FrequencyPenaltyOption = None,
    logit_bias: options.LogitBiasOption = None,
    draft: options.DraftOption = None,
    num_draft_tokens: options.NumDraftTokensOption = None,
    budget: options.BudgetOption = None,
    policy: options.PolicyOption = None,
    lam: options.LambdaOption = None,
    nearest: options.NearestOption = None,
    window: options.WindowOption = None,
    pool: options.PoolOption = None,
    no_guards: options.NoGuardsOption = False,
    explain: options.ExplainOption = False,
    deadline: options.DeadlineOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Talk about VIDEO, one question a line; /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    target = Target(server, model, device, deterministic, not no_drafter, small_model, deadline)
    chosen = ask_options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        budget=budget,
        explain=explain,
        acceptance=acceptance_options(
            policy=policy, lam=lam, nearest=nearest, window=window, pool=pool, no_guards=no_guards
        ),
    )
    output = Output(as_json=as_json)
    with reported(output), connected(target, output) as client:
        context = prefill(client, Video(video, on_server, fps, max_frames), output)
        if not as_json:
            print_context(context, output)
        _converse(client, context, chosen, output)


def _converse(client: Client, context: Context, chosen: AskOptions, output: Output) -> None:
    history: tuple[Turn, ...] = ()
    while (question := _read_question(output)) is not None:
        if question.strip():
            history += _turn(client, context, question, chosen, history, output)


def _turn(
    client: Client, context: Context, question: str, chosen: AskOptions, history: tuple[Turn, ...], output: Output
) -> tuple[Turn, ...]:
    # Returns what the turn adds to the history: nothing when it was stopped or refused.
    try:
        asked: AskOptions = {**chosen, "history": history}
        stream = client.stream(context, question, **asked)
        answer = show_stream(output, stream, explain=chosen.get("explain", False))
    except Terminated:
        raise
    except KeyboardInterrupt:
        output.err.print("\nstopped; /exit or Ctrl-D ends the chat", style="dim")
        return ()
    except InvalidArgument as error:
        output.err.print(f"error: {error}", style="red", markup=False)
        return ()
    if output.as_json:
        output.print_json(answer_json(context, answer))
    else:
        print_statistics(output, answer)
    return answer.turns


def _read_question(output: Output) -> str | None:
    if sys.stdin.isatty():
        output.err.print("[bold]> [/]", end="")
    line = sys.stdin.readline()
    return None if not line or line.strip() in _EXITS else line.rstrip("\n")
