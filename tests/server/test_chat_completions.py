"""`/v1/chat/completions` over HTTP, with a scripted engine."""

from __future__ import annotations

import pytest

from tests.support.server.live_server import HELLO, LiveServer


def test_a_reply_is_a_chat_completion(server: LiveServer) -> None:
    answer = server.chat(model="tiny")
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 6


def test_a_stream_has_the_same_text_in_pieces(server: LiveServer) -> None:
    server.say("Grüße, 世界! 🎉", step=1)
    answer = server.chat(stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks)
    assert text == "Grüße, 世界! 🎉"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len("Grüße, 世界! 🎉".encode())
    assert len({each["id"] for each in chunks}) == 1


def test_thoughts_are_reasoning_content(server: LiveServer) -> None:
    server.say("<think>\nHm.\n</think>\n\nYes.")
    message = server.chat().json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    chunks = [each["choices"][0]["delta"] for each in server.chat(stream=True).events[:-1]]
    assert "".join(each.get("reasoning_content", "") for each in chunks) == "Hm."
    assert "".join(each.get("content", "") for each in chunks) == "Yes."


def test_a_stop_string_ends_the_answer(server: LiveServer) -> None:
    server.say("one, two, three")
    body = server.chat(stop=[", three", "zzz"]).json
    assert body["choices"][0]["message"]["content"] == "one, two"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_unknown_models_are_not_found_and_names_of_the_model_are(server: LiveServer) -> None:
    answer = server.chat(model="gpt-4o")
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert "Available: tiny." in answer.json["error"]["message"]
    assert [server.chat(model=name).status for name in ("", "TINY", "alias")] == [200, 200, 200]


def test_a_prompt_beyond_the_context_is_refused_and_never_cut(server: LiveServer) -> None:
    error = server.chat(messages=[{"role": "user", "content": "x" * 5000}]).json["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "5" in error["message"]
    assert "4096" in error["message"]


def test_an_error_of_the_engine_is_a_server_error_and_in_a_stream_an_event(server: LiveServer) -> None:
    server.say("Half a", fails="an unlikely fault")
    answer = server.chat()
    assert answer.status == 500
    assert answer.json["error"]["type"] == "server_error"
    *_, last = server.chat(stream=True).events
    assert "an unlikely fault" in last["error"]["message"]
    server.say()
    assert server.chat().status == 200


def test_the_last_message_of_an_assistant_is_continued(server: LiveServer) -> None:
    server.say(" world")
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Hello"}]
    assert server.chat(messages=messages).json["choices"][0]["message"]["content"] == " world"


@pytest.mark.parametrize("fields", [{"logit_bias": {"5": 1}}, {"presence_penalty": 0.5}])
def test_log_probabilities_are_sent_only_where_they_are_asked_for(
    server: LiveServer, fields: dict[str, object]
) -> None:
    assert server.chat(**fields).json["choices"][0]["logprobs"] is None
    *chunks, _ = server.chat(stream=True, **fields).events
    assert [each["choices"][0]["logprobs"] for each in chunks] == [None] * len(chunks)
