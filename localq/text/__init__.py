"""Text of models: tokenizers, templates, thoughts and channels, grammars, Markdown. No torch.

tokenizer           text <-> ids, chat prompts, stop tokens; tokenizer_files: reading them safely. Open this file first
tokenizer_like      the protocol that prompts and replies use
end_of_turn         the tokens that end a reply
template            chat templates, rendered in a limited child process (template_child)
thinking, harmony   thought and answer of a reply: tags of thoughts (thought_tags), channels of gpt-oss;
                    thinking_levels: those of a template; thought_state: where a reply stands, for a budget
grammar             constraints of answers; gbnf: llama.cpp's notation; schema, schema_objects: JSON schemas;
                    ascii_classes: regular expressions; json_keys: keys that an answer has written
tools/              tools: declared in prompts, called in replies, their grammars
token_windows       windows of token ids for perplexity; markdown/: Markdown split into blocks while it streams

Called by `chat`, `worker`, `bench`, `quantize` and both front ends. Not here: masks of a grammar over the vocabulary
(`worker.token_masks`), the prompt of a conversation (`chat.prompt`).
"""
