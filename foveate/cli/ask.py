"""`foveate ask` and `foveate describe`: one question about one video."""

from __future__ import annotations

from pathlib import Path

from foveate.cli import options
from foveate.cli.answer_view import answer_json, print_statistics, show_stream
from foveate.cli.errors import cancelled_by_signals, reported
from foveate.cli.explain import write_page
from foveate.cli.options import acceptance_options, ask_options
from foveate.cli.output import Output
from foveate.cli.session import Target, Video, connected, prefill, print_context
from foveate.client import AnswerStream, AskOptions, Context
from foveate.explanation import from_json
from foveate.rpc.errors import invalid

DESCRIBE_QUESTION = "Describe the video."


def ask(
    video: options.VideoArgument,
    question: options.QuestionArgument,
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
    ignore_eos: options.IgnoreEosOption = False,
    logprobs: options.LogprobsOption = None,
    n: options.NumAnswersOption = None,
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
    html: options.HtmlOption = None,
    deadline: options.DeadlineOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Ask QUESTION about VIDEO and stream the answer."""
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
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        n=n,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        budget=budget,
        explain=explain or html is not None,
        acceptance=acceptance_options(
            policy=policy, lam=lam, nearest=nearest, window=window, pool=pool, no_guards=no_guards
        ),
    )
    run_ask(target, Video(video, on_server, fps, max_frames), question, chosen, Output(as_json=as_json), html=html)


def describe(
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
    explain: options.ExplainOption = False,
    deadline: options.DeadlineOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Describe VIDEO: `foveate ask VIDEO "Describe the video."`."""
    target = Target(server, model, device, deterministic, not no_drafter, small_model, deadline)
    chosen = AskOptions(max_tokens=max_tokens, explain=explain)
    run_ask(target, Video(video, on_server, fps, max_frames), DESCRIBE_QUESTION, chosen, Output(as_json=as_json))


def run_ask(
    target: Target, video: Video, question: str, chosen: AskOptions, output: Output, *, html: Path | None = None
) -> None:
    """Prefills, asks, and shows the answer."""
    with reported(output), connected(target, output) as client:
        context = prefill(client, video, output)
        if not output.as_json:
            print_context(context, output)
        stream = client.stream(context, question, **chosen)
        if (chosen.get("n") or 1) > 1:
            _show_all(context, stream, output, html)
            return
        answer = show_stream(output, stream, explain=chosen.get("explain", False))
        if output.as_json:
            output.print_json(answer_json(context, answer))
        else:
            print_statistics(output, answer)
        if html is not None:
            write_page(output, from_json(answer_json(context, answer)), html)


def _show_all(context: Context, stream: AnswerStream, output: Output, html: Path | None) -> None:
    # Several answers stream at once; each is shown when all have ended.
    if html is not None:
        raise invalid("html", "shows one answer; leave --n out")
    with stream, cancelled_by_signals(stream.cancel):
        answers = stream.results
    if output.as_json:
        output.print_json({"answers": [answer_json(context, answer) for answer in answers]})
        return
    for number, answer in enumerate(answers, start=1):
        output.write(f"[{number}] {answer.text}\n")
        print_statistics(output, answer)
