"""Tools in the text of models: declared in prompts, called in replies, answered by results. No torch.

formats       `tool_format`: the `ToolFormat` (format) of a chat template. Open this file first
declaration   `Tool`, `ToolCall` and their limits; values: arguments that are text
stream        `ToolStream`: an answer -> text and calls (pieces), none in code blocks (fences); reader, json_text,
              python_values: the text of a call as it arrives; channels: messages to tools
*_format(s)   how each family writes calls; rules, schema_rules: their grammars
conversation  calls and results in the messages of a prompt

    chat_ids(form.messages(messages, escape), **form.variables(tools, escape))    # escape: `TurnMarks.escape`
    Generate(grammar=form.grammar(tools, "required", tokenizer.grammar_tokens))
    reply_decoder(tokenizer, prompt, tools=form.stream(tools))                    # calls in `ReplyPiece`, `Reply`

Not here: who runs a tool (`chat`), what an API calls it (`server`).
"""
