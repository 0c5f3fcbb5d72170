"""The SMG gateway in front of the server: the APIs of OpenAI and Anthropic."""

import json
import re
import sys
import urllib.request
from pathlib import Path

import openai

from harness import PATIENCE, Program, Server, free_port, inference, run_tests

MODEL = "tiny-glm52"
PROMPT = "def read_lines(path):\n"
# The gateway puts it in front of a chat, by the template, but not of a completion.
BOS = "<｜begin▁of▁sentence｜>"
MAX_TOKENS = 48

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["add", "sub"]},
        "is_pure": {"type": "boolean"},
        "n_args": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["name", "is_pure", "n_args"],
    "additionalProperties": False,
}


class Gateway(Program):
    """`smg` on free loopback ports. Inside the `with` block it knows the server's model."""

    def __init__(self, worker):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        listen = ["--host", "127.0.0.1", "--port", port]
        prometheus = ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
        # Refusals are what is tested, so that they are not tried again.
        flags = ["--worker-urls", f"grpc://{worker}", "--disable-retries"]
        smg = Path(sys.executable).parent / "smg"
        super().__init__(smg, "launch", *listen, *prometheus, *flags, HF_HUB_OFFLINE="1")

    def __enter__(self):
        super().__enter__()
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE
        )
        try:
            self.wait_until(self.models, "the server's model at the gateway")
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def models(self):
        """The names of the models that it offers."""
        try:
            return [model.id for model in self.client.models.list()]
        except openai.APIError:
            return []

    def chat(self, content=PROMPT, max_tokens=MAX_TOKENS, **options):
        """A chat completion."""
        messages = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=max_tokens, **options
        )


def own_output(server, **sampling):
    """What the own API makes of the prompt."""
    request = inference.GenerateRequest(
        text=PROMPT,
        stopping=inference.StoppingParams(max_tokens=MAX_TOKENS),
        sampling=inference.SamplingParams(**sampling),
    )
    return server.inference.Generate(request, timeout=PATIENCE).outputs[0]


def check_usage(usage, output):
    """The usage that a client is told is the server's own."""
    assert usage.prompt_tokens == output.usage.prompt_tokens, usage
    assert usage.completion_tokens == output.usage.completion_tokens, usage
    details, drafts = usage.completion_tokens_details, output.speculation
    assert drafts.accepted_tokens > 0
    assert details.accepted_prediction_tokens == drafts.accepted_tokens, usage
    rejected = drafts.draft_tokens - drafts.accepted_tokens
    assert details.rejected_prediction_tokens == rejected, usage


def test_models(_, gateway):
    assert gateway.models() == [MODEL]


def test_chat_is_the_own_completion(server, gateway):
    # Nothing is said of the temperature: the checkpoint asks for greedy decoding.
    answer, own = gateway.chat(), own_output(server)
    assert answer.choices[0].message.content == own.text, answer
    assert answer.choices[0].finish_reason == "length", answer
    check_usage(answer.usage, own)


def test_streamed_chat_is_the_same(server, gateway):
    own = own_output(server)
    chunks = list(gateway.chat(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == own.text, chunks
    # A step's tokens come together, and each step at once.
    assert 1 < sum(map(bool, deltas)) < own.usage.completion_tokens
    check_usage(chunks[-1].usage, own)


def test_sampled_chat_is_the_own_one_of_the_same_seed(server, gateway):
    own = own_output(server, temperature=1.0, seed=7)
    assert own.text != own_output(server).text
    answer = gateway.chat(temperature=1.0, seed=7)
    assert answer.choices[0].message.content == own.text, answer


def test_completions(server, gateway):
    own = own_output(server)
    create, options = gateway.client.completions.create, {"model": MODEL, "max_tokens": MAX_TOKENS}
    answer = create(prompt=BOS + PROMPT, **options)
    assert answer.choices[0].text == own.text, answer
    chunks = list(create(prompt=BOS + PROMPT, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == own.text, chunks


def test_stop_texts_end_a_completion(server, gateway):
    text = own_output(server).text
    stop = text[len(text) // 2 :][:4]
    answer = gateway.chat(stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)], answer
    assert answer.choices[0].finish_reason == "stop", answer


def test_log_probabilities(server, gateway):
    own = own_output(server, logprobs=2)
    answer = gateway.chat(logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs.content
    assert len(told) == len(own.logprobs)
    for ours, theirs in zip(own.logprobs, told):
        assert abs(ours.logprob - theirs.logprob) < 1e-4, answer
        assert len(theirs.top_logprobs) == 2, answer


def test_json_schema(_, gateway):
    schema = {"name": "function", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = gateway.chat(response_format=form, max_tokens=400)
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == set(SCHEMA["required"]), value
    assert value["name"] in ["add", "sub"] and isinstance(value["is_pure"], bool), value
    assert type(value["n_args"]) is int and 1 <= value["n_args"] <= 9, value


def test_responses(server, gateway):
    # Here the gateway asks for a temperature of 1 where its client does not say.
    options = {"max_output_tokens": MAX_TOKENS, "temperature": 0, "store": False}
    answer = gateway.client.responses.create(model=MODEL, input=PROMPT, **options)
    assert answer.output_text == own_output(server).text, answer
    assert answer.usage.output_tokens == MAX_TOKENS, answer


def test_messages_of_anthropic(server, gateway):
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": messages}
    request = urllib.request.Request(
        f"{gateway.url}/v1/messages",
        json.dumps(body).encode(),
        {"content-type": "application/json", "anthropic-version": "2023-06-01"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        answer = json.load(reply)
    assert [part["text"] for part in answer["content"]] == [own_output(server).text], answer
    assert answer["stop_reason"] == "max_tokens", answer


# More tokens than a test has time for: outputs up to the model's length, as many as the gateway
# lets one call have.
ENDLESS = {"n": 10, "max_tokens": 1900, "temperature": 1.0, "extra_body": {"ignore_eos": True}}


def check_freed(server, leave):
    """A client that leaves takes its requests with it."""
    before = server.stats().completion_tokens
    leave()
    server.wait_until_idle()
    n_tokens = server.stats().completion_tokens - before
    assert n_tokens < ENDLESS["n"] * ENDLESS["max_tokens"], "the requests ran to their ends"


def test_a_stream_that_is_closed_is_freed(server, gateway):
    def leave():
        with gateway.chat(stream=True, **ENDLESS) as stream:
            next(iter(stream))
            assert server.stats().running_requests > 0

    check_freed(server, leave)


def test_a_call_that_is_given_up_is_freed(server, gateway):
    def leave():
        try:
            gateway.chat(timeout=1, **ENDLESS)
        except openai.APITimeoutError:
            return
        raise AssertionError("the call ended in time")

    check_freed(server, leave)


def refused(call):
    """The error that a call ends with."""
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("the call was not refused")


def test_a_prompt_that_is_too_long_is_a_bad_request(_, gateway):
    error = refused(lambda: gateway.chat(content="def f(x):\n" * 2000))
    assert error.status_code == 400, error


def test_what_the_server_refuses_is_named(_, gateway):
    error = refused(lambda: gateway.chat(extra_body={"regex": "("}))
    assert error.status_code == 400, error
    assert "sampling_params.regex" in error.message, error


def test_a_full_queue_is_too_many_requests(server, gateway):
    request = inference.GenerateStreamRequest(text=PROMPT)
    request.stopping.ignore_eos = True
    request.sampling.n = 32
    stream = server.inference.GenerateStream(request, timeout=PATIENCE)
    next(stream)
    error = refused(gateway.chat)
    assert error.status_code == 429, error
    stream.cancel()
    server.wait_until_idle()
    assert gateway.chat().choices[0].message.content


if __name__ == "__main__":
    # 32 requests at once; as many drafts in each step of the same request, whatever else runs.
    limits = ["--max-num-seqs", "16", "--max-queued-requests", "16", "--drafting", "fixed"]
    with Server("--model", MODEL, "--smg-port", "0", *limits) as running:
        worker = re.search(r"^SMG's API on (\S+)$", running.log(), re.MULTILINE)[1]
        with Gateway(worker) as smg:
            run_tests(dict(globals()), running, smg)
