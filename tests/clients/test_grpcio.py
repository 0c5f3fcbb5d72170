"""The own API, health and reflection through grpcio."""

import grpc
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from harness import PATIENCE, Server, control, inference, run_tests

SERVICES = ["tandem.inference.v1.InferenceService", "tandem.control.v1.ControlService"]
PROMPT = "def read_lines(path):\n"


def request_of(kind, max_tokens=32, **fields):
    """A request of either kind."""
    stopping = inference.StoppingParams(max_tokens=max_tokens)
    return kind(stopping=stopping, **fields)


def unary(server, **fields):
    """The outputs of Generate."""
    request = request_of(inference.GenerateRequest, **fields)
    return server.inference.Generate(request, timeout=PATIENCE).outputs


def streamed(server, **fields):
    """All deltas of GenerateStream, and its last message."""
    request = request_of(inference.GenerateStreamRequest, **fields)
    *events, last = server.inference.GenerateStream(request, timeout=PATIENCE)
    return [event.delta for event in events], last.finished


def endless(**fields):
    """A request that nothing but its client ends while a test lasts: many long outputs."""
    request = request_of(inference.GenerateStreamRequest, max_tokens=2000, text=PROMPT, **fields)
    request.stopping.ignore_eos = True
    request.sampling.n = 32
    return request


def refused(call):
    """The error that a call ends with, and its google.rpc details by type."""
    try:
        call()
    except grpc.RpcError as error:
        status, details = rpc_status.from_call(error), {}
        for packed in status.details if status else []:
            name = packed.TypeName().removeprefix("google.rpc.")
            details[name] = getattr(error_details_pb2, name)()
            assert packed.Unpack(details[name])
        return error, details
    raise AssertionError("the call was not refused")


def test_health_is_told_for_each_service(server):
    for service in ["", *SERVICES]:
        assert server.health(service) == "SERVING", service
    error, _ = refused(lambda: server.health("no.such.Service"))
    assert error.code() == grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services(server):
    listed = ProtoReflectionDescriptorDatabase(server.channel).get_services()
    assert {*SERVICES, "grpc.health.v1.Health"} <= set(listed), listed


def test_the_server_describes_itself(server):
    model = server.control.GetModelInfo(control.GetModelInfoRequest(), timeout=PATIENCE)
    assert model.served_model_name == "tiny-glm52"
    assert (model.vocab_size, model.num_speculative_tokens) == (4096, 3)
    assert model.has_tokenizer and list(model.eos_token_ids) == [1]
    info = server.control.GetServerInfo(control.GetServerInfoRequest(), timeout=PATIENCE)
    assert info.version and info.total_blocks > 0 and info.max_request_bytes > 0
    assert server.stats().alive


def test_deltas_add_up_to_the_unary_answer(server):
    before = server.stats()
    (whole,) = unary(server, text=PROMPT)
    deltas, finished = streamed(server, text=PROMPT)
    pieces = [piece for delta in deltas for piece in delta.text_pieces]
    assert "".join(pieces) + finished.tail_text == whole.text != ""
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert token_ids == list(whole.token_ids) and len(token_ids) == len(pieces) == 32
    assert finished.finish_reason == inference.FINISH_REASON_MAX_TOKENS == whole.finish_reason
    assert finished.usage.completion_tokens == 32
    assert all(len(delta.token_ids) == delta.n_accepted + 1 for delta in deltas)
    # The bundled model's drafts are good enough that some of 32 tokens come from them.
    assert 0 < finished.speculation.accepted_tokens == sum(delta.n_accepted for delta in deltas)
    after = server.stats()
    assert after.completion_tokens - before.completion_tokens == 64
    assert after.finished_requests - before.finished_requests == 2


def test_ids_in_are_the_same_as_the_text_that_they_came_from(server):
    (first,) = unary(server, text=PROMPT, max_tokens=4)
    ids = inference.TokenIds(ids=first.token_ids)
    (from_ids,) = unary(server, token_ids=ids)
    deltas, _ = streamed(server, token_ids=ids)
    assert [i for delta in deltas for i in delta.token_ids] == list(from_ids.token_ids)
    assert from_ids.usage.prompt_tokens == 4


def test_drafting_changes_no_token(server):
    (drafted,) = unary(server, text=PROMPT)
    none = inference.SpeculationParams(num_speculative_tokens=0)
    (plain,) = unary(server, text=PROMPT, speculation=none)
    assert drafted.token_ids == plain.token_ids and plain.speculation.draft_tokens == 0


def test_characters_of_many_bytes_stay_whole(server):
    only = inference.OutputConstraint(regex="(é✓🦀){4}")
    deltas, finished = streamed(server, text="é✓", constraint=only)
    pieces = [piece for delta in deltas for piece in delta.text_pieces]
    assert "".join(pieces) + finished.tail_text == "é✓🦀" * 4
    # The model's vocabulary has no token for a crab, so bytes of one lie in several.
    assert any(piece == "" for piece in pieces[:-1]) and "\ufffd" not in "".join(pieces)
    # Cut inside a character, the rest of it is one replacement character.
    cuts = []
    for max_tokens in range(1, len(pieces)):
        deltas, finished = streamed(server, text="é✓", constraint=only, max_tokens=max_tokens)
        text = "".join(piece for delta in deltas for piece in delta.text_pieces)
        assert ("é✓🦀" * 4).startswith(text) and finished.tail_text in ("", "\ufffd")
        assert finished.finish_reason == inference.FINISH_REASON_MAX_TOKENS
        cuts.append(finished.tail_text)
    assert set(cuts) == {"", "\ufffd"}, cuts


def test_an_error_names_its_field(server):
    hot = inference.SamplingParams(temperature=-1)
    for field, call in {
        "sampling.temperature": lambda: unary(server, text=PROMPT, sampling=hot),
        "stopping.max_tokens": lambda: streamed(server, text=PROMPT, max_tokens=0),
        "prompt": lambda: unary(server),
    }.items():
        error, details = refused(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        violations = details["BadRequest"].field_violations
        assert [violation.field for violation in violations] == [field], violations
        assert violations[0].description


def test_a_deadline_ends_the_request(server):
    error, _ = refused(lambda: list(server.inference.GenerateStream(endless(), timeout=0.5)))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    server.wait_until_idle()


def test_a_client_that_leaves_frees_its_request(server):
    call = server.inference.GenerateStream(endless(), timeout=PATIENCE)
    next(call)
    assert server.stats().running_requests > 0
    call.cancel()
    server.wait_until_idle()


def test_an_output_can_be_aborted_by_its_id(server):
    call = server.inference.GenerateStream(endless(), timeout=PATIENCE)
    first = next(call)
    abort = inference.AbortRequestRequest(request_id=first.request_id)
    server.inference.AbortRequest(abort, timeout=PATIENCE)
    ends = (message for message in call if message.HasField("finished"))
    end = next(message for message in ends if message.request_id == first.request_id)
    assert end.finished.finish_reason == inference.FINISH_REASON_ABORTED
    call.cancel()
    server.wait_until_idle()
    error, _ = refused(lambda: server.inference.AbortRequest(abort, timeout=PATIENCE))
    assert error.code() == grpc.StatusCode.NOT_FOUND


if __name__ == "__main__":
    with Server() as running:
        run_tests(dict(globals()), running)
