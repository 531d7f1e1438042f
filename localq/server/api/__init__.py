"""The APIs, one file each: its fields to a `ReplyRequest`, its form of events (`form`).

chat, completions   OpenAI's
responses           OpenAI's newer one; response_stream: its events, response_store: responses that are kept
messages            Anthropic's
common, tools       fields that several of them share

The paths without a file here are in `app`.
"""
