"""Bad input through the public port: the right status with field violations, and the next request is served."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from foveate.client import Client, Context
from foveate.rpc.errors import FoveateError, InvalidArgument, NotFound, ResourceExhausted, from_rpc_error
from foveate.stack import Stack
from foveate.v1 import contexts_pb2, contexts_pb2_grpc
from tests.e2e.support import FPS


def violated(error: FoveateError) -> set[str]:
    return {violation.field for violation in error.violations}


def assert_still_serving(client: Client, video: Path) -> None:
    context = client.create_context(video, fps=FPS)
    assert client.ask(context, "Describe the video.", max_tokens=2).num_output_tokens == 2


@pytest.mark.parametrize(
    "data",
    [b"\0", b"not a video at all " * 100, os.urandom(50_000), b"\0\0\0\x18ftypisom\0\0\2\0isomiso2avc1mp41"],
    ids=["one byte", "text", "noise", "header only"],
)
def test_what_is_no_video_is_refused(client: Client, video: Path, data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        client.create_context_from_bytes(data, filename="clip.mp4")
    assert_still_serving(client, video)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_a_truncated_file_is_read_as_far_as_it_goes_or_refused(client: Client, video: Path, share: float) -> None:
    data = video.read_bytes()
    with contextlib.suppress(InvalidArgument):
        made = client.create_context_from_bytes(data[: int(len(data) * share)], fps=FPS)
        assert made.video.num_frames > 0
        client.delete_context(made)
    assert_still_serving(client, video)


def test_a_wrong_extension_does_not_matter(client: Client, context: Context, video: Path) -> None:
    made = client.create_context_from_bytes(video.read_bytes(), filename="clip.png", fps=FPS)
    assert made.name == context.name


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"fps": 0.0}, "fps"), ({"fps": -1.0}, "fps"), ({"fps": 61.0}, "fps"), ({"max_frames": 0}, "max_frames")],
)
def test_bad_frame_sampling_is_a_field_violation(
    client: Client, video: Path, sampling: dict[str, float], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.create_context(video, **sampling)  # type: ignore[arg-type]
    assert any(name.endswith(field) for name in violated(caught.value))


def test_paths_stay_inside_the_media_root(client: Client, folder: Path, video: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.mp4"
    outside.write_bytes(video.read_bytes())
    link = folder / "link.mp4"
    link.symlink_to(outside)
    try:
        for path in (f"../{tmp_path.name}/outside.mp4", str(outside), "/etc/passwd", "link.mp4", "a/../../x.mp4", "\0"):
            with pytest.raises(InvalidArgument):
                client.create_context(server_path=path)
    finally:
        link.unlink()
    with pytest.raises(NotFound):
        client.create_context(server_path="nothing.mp4")
    assert_still_serving(client, video)


def test_an_upload_that_claims_4_gb_is_refused_before_it_is_sent(client: Client, stack: Stack, video: Path) -> None:
    spec = contexts_pb2.ContextSpec(upload=contexts_pb2.Upload(filename="big.mp4", total_bytes=4 * 2**30))
    error = _create(stack, [contexts_pb2.CreateContextRequest(spec=spec)])
    assert isinstance(error, ResourceExhausted)
    assert str(4 * 2**30) in f"{error.message} {error.metadata}"
    assert_still_serving(client, video)


def _create(stack: Stack, requests: list[contexts_pb2.CreateContextRequest]) -> FoveateError | None:
    def stream() -> Iterator[contexts_pb2.CreateContextRequest]:
        yield from requests

    with grpc.insecure_channel(stack.addresses.gateway) as channel:
        try:
            for _ in contexts_pb2_grpc.ContextServiceStub(channel).CreateContext(stream(), timeout=20):
                pass
        except grpc.RpcError as error:
            return from_rpc_error(error)
    return None


def test_broken_upload_protocols_are_refused(client: Client, stack: Stack, video: Path) -> None:
    def spec(**upload: int) -> contexts_pb2.CreateContextRequest:
        told = contexts_pb2.Upload(**upload)
        return contexts_pb2.CreateContextRequest(spec=contexts_pb2.ContextSpec(upload=told))

    def chunk(offset: int, data: bytes) -> contexts_pb2.CreateContextRequest:
        return contexts_pb2.CreateContextRequest(chunk=contexts_pb2.MediaChunk(write_offset=offset, data=data))

    nothing = contexts_pb2.CreateContextRequest(spec=contexts_pb2.ContextSpec())
    for requests in (
        [],
        [nothing],
        [spec()],
        [chunk(0, b"abc")],
        [spec(), spec()],
        [spec(), chunk(5, b"abc")],
        [spec(), chunk(0, b"abc"), chunk(2, b"def")],
        [spec(), chunk(0, b"x" * (2**20 + 1))],
        [contexts_pb2.CreateContextRequest()],
    ):
        assert isinstance(_create(stack, requests), InvalidArgument), requests
    assert_still_serving(client, video)


def test_unknown_and_malformed_contexts(client: Client) -> None:
    unknown = f"contexts/{'0' * 64}"
    for call in (client.get_context, client.delete_context, lambda name: client.ask(name, "q")):
        with pytest.raises(NotFound):
            call(unknown)
        with pytest.raises(InvalidArgument):
            call("videos/1")


@pytest.mark.parametrize(
    ("question", "options", "field"),
    [
        ("", {}, "question"),
        ("   ", {}, "question"),
        ("x" * 40_000, {}, "question"),
        ("q", {"max_tokens": -1}, "max_tokens"),
        ("q", {"max_tokens": 0}, "max_tokens"),
        ("q", {"max_tokens": 2**31 - 1}, "max_tokens"),
        ("q", {"temperature": -0.5}, "sampling.temperature"),
        ("q", {"temperature": float("nan")}, "sampling.temperature"),
        ("q", {"top_p": 0.0}, "sampling.top_p"),
        ("q", {"num_draft_tokens": 0}, "drafting.num_draft_tokens"),
        ("q", {"num_draft_tokens": 17}, "drafting.num_draft_tokens"),
        ("q", {"visual_budget": 1.5}, "drafting.visual_budget"),
        ("q", {"stop": [""]}, "stop"),
    ],
)
def test_bad_questions_are_field_violations(
    client: Client, context: Context, question: str, options: dict[str, float], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.ask(context, question, **options)  # type: ignore[arg-type]
    assert any(name.startswith(field) for name in violated(caught.value))


def test_a_question_that_does_not_fit_is_refused(client: Client, context: Context, video: Path) -> None:
    with pytest.raises(ResourceExhausted):
        client.ask(context, "red " * 2000)
    assert_still_serving(client, video)
